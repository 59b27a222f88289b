"""y[l,p] = exp(dA[l]) * sum_n C[l,n] * prev[p,n] + sum_{s<=l} cb[l,s] * exp(dA[l] - dA[s]) * dt[s] * x[s,p], per chunk and head.

x (B,S,H,P), Cm (B,S,G,N) dtype, strided; cb (B,C,G,Q,Q) dtype, or float32 where ``cb_float32``; dA_cumsum (B,H,C,Q),
prev_states (B,C,H,P,N) float32; dt (B,H,C,Q) dt_dtype -> y (B,S,H,P) float32. Tokens at or past S are neither read nor written.
A CTA makes up to 128 rows (tokens) by up to 64 columns (of P). C and x enter the products as they are; prev_states and
cb * decay * dt are rounded to dtype, for float16 after scaling by a power of two, since neither need fit in it.
"""

from typing import Any

import tilelang.language as T

from tileops.kernels import _common as k

PASS_CONFIGS = k.BY_HAND

#: The running float16 scale stays within 2**-LIMIT to 2**LIMIT: what is already summed is rescaled along with it.
LIMIT = 60


def schedule(arch: str, **fields: Any) -> dict[str, int]:
    """rows x cols tiles of cb; ``depth`` of N at a time; ``heads`` (1 or 2) of a CTA share cb and C; ``stages`` tiles on their way;
    ``per`` row tiles of a CTA share the state (where depth covers N, else it is read again); registers for ``ctas`` CTAs an SM."""
    # Narrow loads are all in registers at once; without wgmma, whose operands are not, that is too much at a depth of 64. With it, only
    # where a large state meets short chunks.
    small = arch == "sm_90a" and (fields["N"] < 256 or fields["Q"] > 64)
    depth = 64 if fields["aligned"] or small else 32
    return {"rows": 64, "cols": 32, "depth": depth, "heads": 1, "stages": 2, "per": 1, "ctas": 1}


def candidates(arch: str, **fields: Any) -> list[dict[str, int]]:
    one = [{"ctas": 4}, {"ctas": 5}, {"cols": 64, "ctas": 4}, {"rows": 128, "cols": 64, "ctas": 2}]
    two = [{"heads": 2}, {"heads": 2, "ctas": 3}, {"rows": 128, "heads": 2, "ctas": 2}, {"rows": 128, "heads": 2, "depth": 128, "ctas": 2}]
    return [*one, *two]


def in_twos(tile: Any) -> Any:
    """A statement: 16-byte pieces of a float32 tile's rows are permuted two by two, since a warp reads 32 bytes of each row at once."""
    pieces = int(tile.shape[2]) // 4
    layout = T.Layout(tile.shape, lambda s, i, j: [s, i, (j // 4 ^ i % 4 * 2 % pieces) * 4 + j % 4])
    return None if k._cpu else T.annotate_layout({tile: layout})


def program(
    *,
    Q: int,
    P: int,
    N: int,
    dtype: str,
    dt_dtype: str,
    aligned: bool,
    cb_float32: bool,
    rows: int,
    cols: int,
    depth: int,
    heads: int,
    stages: int,
    per: int,
    ctas: int,
) -> Any:
    B, S, H, G, C = k.dims("B S H G C")
    wide = 8 if aligned else 1
    cb_dtype = "float32" if cb_float32 else dtype
    rows, cols = min(Q, rows), min(Q, cols)
    row_tiles = Q // rows
    # The buffers go round without a gap from one row tile to the next only where each takes a whole number of rounds.
    per = min(per, row_tiles) if rows // cols % stages == 0 else 1
    width = k.padded(P, 64)
    width_tiles = k.ceildiv(P, width)
    depth = k.power_of_two(N, depth if rows >= 64 else min(rows, depth))
    steps = k.ceildiv(N, depth)
    half = dtype == "float16"
    # Groups that may be on their way when a row tile needs its C, fetched with the first refill of the tile before.
    behind = stages if rows // cols > stages else 0

    @T.macro
    def fetch(Ms, Xs, cb, x, b, c, g, h, end, p0, row, t, slot):
        for i, j in k.fetch(rows, cols):
            Ms[slot, i, j] = cb[b, c, g, row * rows + i, t * cols + j]
        for i, j, p in k.fetch(heads, cols, width):
            Xs[slot, i, j, p] = T.if_then_else(
                c * Q + t * cols + j < S and h + i < end and p0 * width + p < P, x[b, c * Q + t * cols + j, h + i, p0 * width + p], 0
            )

    @T.macro
    def fetch_C(Cs, Cm, b, c, g, row):
        for d, l, n in k.fetch(steps, rows, depth):
            Cs[d, l, n] = T.if_then_else(
                c * Q + row * rows + l < S and d * depth + n < N, Cm[b, c * Q + row * rows + l, g, d * depth + n], 0
            )

    @T.macro
    def load_state(state, prev_states, b, c, h, end, p0, d, i):
        # Apart from the rounding: TileLang moves a load that is cast out from under its condition.
        for p, n in k.parallel(width, depth):
            state[p, n] = T.if_then_else(
                h + i < end and p0 * width + p < P and d * depth + n < N, prev_states[b, c, h + i, p0 * width + p, d * depth + n], 0.0
            )

    @T.macro
    def keep_state(Ss, state, state_scale, i):
        for p, n in k.parallel(width, depth):
            Ss[i, p, n] = state[p, n] * state_scale[i, p] if half else state[p, n]

    @T.macro
    def scale_state(state_scale, state_unscale, size, state_top, prev_states, b, c, h, end, p0, i):
        T.clear(state_top)
        for d in k.rolled(steps):
            for p, n in k.parallel(width, depth):
                size[p, n] = T.if_then_else(
                    h + i < end and p0 * width + p < P and d * depth + n < N, prev_states[b, c, h + i, p0 * width + p, d * depth + n], 0.0
                )
            T.reduce_absmax(size, state_top, dim=1, clear=False)
        for p in k.parallel(width):
            state_scale[i, p], state_unscale[i, p] = k.fp16_scale(state_top[p])

    @T.macro
    def grown(acc, own, state_unscale, i):
        """What came before the chunk, as each row of it sees it."""
        for l, p in k.parallel(rows, width):
            acc[l, p] *= T.exp(own[l])
        if half:
            for l, p in k.parallel(rows, width):
                acc[l, p] *= state_unscale[i, p]

    @T.macro
    def weigh(sized, raw, own, earlier, dts, t, i):
        # Loops that TileLang can vectorise: it does not where there is a selection or this exp.
        for l, j in k.parallel(rows, cols):
            sized[l, j] = T.min(own[l] - earlier[i, t * cols + j], 0.0)
        for l, j in k.parallel(rows, cols):
            sized[l, j] = k.ex2(sized[l, j] * k.LOG2E)
        for l, j in k.parallel(rows, cols):
            sized[l, j] = T.cast(raw[l, j], "float32") * sized[l, j] * dts[i, t * cols + j]

    @T.macro
    def round_up(mixed, sized):
        if not half:
            for l, j in k.parallel(rows, cols):
                mixed[l, j] = sized[l, j]

    @T.macro
    def own_tokens(acc, raw, mixed, sized, top, scale, unscale, change, own, earlier, dts, Xs, endless, slot, row, t, i):
        ahead = row * rows - t * cols
        if ahead >= cols:
            weigh(sized, raw, own, earlier, dts, t, i)
            round_up(mixed, sized)
        else:
            if endless:
                for l, j in k.parallel(rows, cols):
                    # A token sees itself undecayed even where A is -inf.
                    passed = T.if_then_else(j - l == ahead, 0.0, own[l] - earlier[i, t * cols + j])
                    weight = k.ex2(T.min(passed, 0.0) * k.LOG2E) * dts[i, t * cols + j]
                    sized[l, j] = T.if_then_else(j - l <= ahead, T.cast(raw[l, j], "float32") * weight, 0.0)
                round_up(mixed, sized)
            else:
                weigh(sized, raw, own, earlier, dts, t, i)
                for l, j in k.parallel(rows, cols):
                    sized[l, j] = T.if_then_else(j - l <= ahead, sized[l, j], 0.0)
                round_up(mixed, sized)
        if half:
            T.reduce_absmax(sized, top, dim=1, clear=False)
            for l in k.parallel(rows):
                to_fp16, back = k.fp16_scale(top[l], -LIMIT, LIMIT)
                change[l] = to_fp16 * unscale[l]
                scale[l] = to_fp16
                unscale[l] = back
            for l, p in k.parallel(rows, width):
                acc[l, p] *= change[l]
            for l, j in k.parallel(rows, cols):
                mixed[l, j] = sized[l, j] * scale[l]
        k.gemm(mixed, (), Xs, (slot, i), acc)

    @T.macro
    def put(y, acc, unscale, b, c, h, end, p0, row, i):
        for l, p in k.parallel(rows, width):
            if c * Q + row * rows + l < S and h + i < end and p0 * width + p < P:
                y[b, c * Q + row * rows + l, h + i, p0 * width + p] = acc[l, p] * unscale[l] if half else acc[l, p]

    @T.prim_func
    def chunk_scan(
        x: k.strided("x", (B, S, H, P), dtype, wide),
        Cm: k.strided("Cm", (B, S, G, N), dtype, wide),
        cb: T.Tensor((B, C, G, Q, Q), cb_dtype),
        dA_cumsum: T.Tensor((B, H, C, Q), "float32"),
        prev_states: T.Tensor((B, C, H, P, N), "float32"),
        dt: T.Tensor((B, H, C, Q), dt_dtype),
        y: T.Tensor((B, S, H, P), "float32"),
    ):
        parts = T.ceildiv(T.truncdiv(H, G), heads)
        with k.grid(B * C * G * (parts * (width_tiles * (row_tiles // per))), threads=2 * rows) as block:
            k.ex2_source()
            if ctas > 1:
                k.at_least(ctas)
            first = T.alloc_var("int32", init=block % (row_tiles // per) * per)
            p0 = T.alloc_var("int32", init=block // (row_tiles // per) % width_tiles)
            rest = T.alloc_var("int32", init=block // ((row_tiles // per) * width_tiles))
            part = T.alloc_var("int32", init=T.truncmod(rest, parts))
            bcg = T.alloc_var("int32", init=T.truncdiv(rest, parts))
            g = T.alloc_var("int32", init=T.truncmod(bcg, G))
            bc = T.alloc_var("int32", init=T.truncdiv(bcg, G))
            c = T.alloc_var("int32", init=T.truncmod(bc, C))
            b = T.alloc_var("int32", init=T.truncdiv(bc, C))
            h = T.alloc_var("int32", init=g * T.truncdiv(H, G) + part * heads)
            end = T.alloc_var("int32", init=(g + 1) * T.truncdiv(H, G))
            earlier = k.shared((heads, Q), "float32")
            dts = k.shared((heads, Q), "float32")
            state_scale = k.shared((heads, width), "float32")
            state_unscale = k.shared((heads, width), "float32")
            Cs = k.shared((steps, rows, depth), dtype)
            Ss = k.shared((heads, width, depth), dtype)
            Ms = k.shared((stages, rows, cols), cb_dtype)
            Xs = k.shared((stages, heads, cols, width), dtype)
            in_twos(Ms) if cb_float32 else k.swizzled(Ms)
            state0 = k.fragment((width, depth))
            state1 = k.fragment((width, depth))
            size = k.fragment((width, depth))
            state_top = k.fragment((width,))
            raw = k.fragment((rows, cols), cb_dtype)
            mixed = k.fragment((rows, cols), dtype)
            sized = k.fragment((rows, cols))
            scale = k.fragment((rows,))
            change = k.fragment((rows,))
            own0 = k.fragment((rows,))
            top0 = k.fragment((rows,))
            unscale0 = k.fragment((rows,))
            acc0 = k.fragment((rows, width))
            own1 = k.fragment((rows,))
            top1 = k.fragment((rows,))
            unscale1 = k.fragment((rows,))
            acc1 = k.fragment((rows, width))

            # Whether A is -inf: only then does the cumsum reach it, and stays there.
            endless0 = T.alloc_var("bool", init=dA_cumsum[b, h, c, Q - 1] < k.LOWEST)
            endless1 = T.alloc_var("bool", init=dA_cumsum[b, T.min(h + heads, H) - 1, c, Q - 1] < k.LOWEST)
            fetch_C(Cs, Cm, b, c, g, first)
            k.commit()
            for s in T.unroll(stages):
                if s < (first + 1) * (rows // cols):
                    fetch(Ms, Xs, cb, x, b, c, g, h, end, p0, first, s, s)
                k.commit()
            if half:
                scale_state(state_scale, state_unscale, size, state_top, prev_states, b, c, h, end, p0, 0)
                if heads == 2:
                    scale_state(state_scale, state_unscale, size, state_top, prev_states, b, c, h, end, p0, 1)
                k.barrier()
            load_state(state0, prev_states, b, c, h, end, p0, 0, 0)
            if heads == 2:
                load_state(state1, prev_states, b, c, h, end, p0, 0, 1)
            for i, l in k.parallel(heads, Q):
                # Kept above -inf, so that the difference of two sums never is -inf - -inf.
                earlier[i, l] = T.max(dA_cumsum[b, T.min(h + i, H - 1), c, l], k.LOWEST)
                dts[i, l] = T.cast(dt[b, T.min(h + i, H - 1), c, l], "float32")
            if steps == 1:
                keep_state(Ss, state0, state_scale, 0)
                if heads == 2:
                    keep_state(Ss, state1, state_scale, 1)

            for r in k.rolled(per):
                row = T.alloc_var("int32", init=first + r)
                tiles = T.alloc_var("int32", init=(row + 1) * (rows // cols))
                # What came before the chunk: C . prev_states.
                T.clear(acc0)
                if heads == 2:
                    T.clear(acc1)
                k.arrived(behind)
                for d in k.rolled(steps):
                    if steps > 1:
                        keep_state(Ss, state0, state_scale, 0)
                        if heads == 2:
                            keep_state(Ss, state1, state_scale, 1)
                        # What the next product needs, of this row tile or of the next, is on its way during this one.
                        if d + 1 < steps or r + 1 < per:
                            load_state(state0, prev_states, b, c, h, end, p0, (d + 1) % steps, 0)
                            if heads == 2:
                                load_state(state1, prev_states, b, c, h, end, p0, (d + 1) % steps, 1)
                    k.barrier()
                    k.gemm(Cs, (d,), Ss, (0,), acc0, transpose_B=True)
                    if heads == 2:
                        k.gemm(Cs, (d,), Ss, (1,), acc1, transpose_B=True)
                    if steps > 1:
                        k.barrier()
                for l in k.parallel(rows):
                    own0[l] = T.if_then_else(earlier[0, row * rows + l] > k.LOWEST, earlier[0, row * rows + l], -T.infinity("float32"))
                grown(acc0, own0, state_unscale, 0)
                if heads == 2:
                    for l in k.parallel(rows):
                        own1[l] = T.if_then_else(earlier[1, row * rows + l] > k.LOWEST, earlier[1, row * rows + l], -T.infinity("float32"))
                    grown(acc1, own1, state_unscale, 1)
                if half:
                    T.fill(unscale0, 1.0)
                    T.clear(top0)
                    if heads == 2:
                        T.fill(unscale1, 1.0)
                        T.clear(top1)

                # The chunk itself: tiles up to the diagonal.
                for t in k.rolled(tiles):
                    slot = T.alloc_var("int32", init=t % stages)
                    k.arrived(stages - 1)
                    k.barrier()
                    T.copy(Ms[t % stages, :, :], raw)
                    own_tokens(acc0, raw, mixed, sized, top0, scale, unscale0, change, own0, earlier, dts, Xs, endless0, slot, row, t, 0)
                    if heads == 2:
                        own_tokens(
                            acc1, raw, mixed, sized, top1, scale, unscale1, change, own1, earlier, dts, Xs, endless1, slot, row, t, 1
                        )
                    k.barrier()
                    if t + stages < tiles:
                        fetch(Ms, Xs, cb, x, b, c, g, h, end, p0, row, t + stages, slot)
                    else:
                        if r + 1 < per:
                            fetch(Ms, Xs, cb, x, b, c, g, h, end, p0, row + 1, t + stages - tiles, slot)
                    if t == 0 and r + 1 < per:
                        fetch_C(Cs, Cm, b, c, g, row + 1)
                    k.commit()
                put(y, acc0, unscale0, b, c, h, end, p0, row, 0)
                if heads == 2:
                    put(y, acc1, unscale1, b, c, h, end, p0, row, 1)

    return k.complete(chunk_scan)
