"""y[l,p] = exp(dA[l]) * sum_n C[l,n] * prev[p,n] + sum_{s<=l} cb[l,s] * exp(dA[l] - dA[s]) * dt[s] * x[s,p], per chunk and head.

x (B,S,H,P), Cm (B,S,G,N) dtype, strided; cb (B,C,G,Q,Q) dtype; dA_cumsum (B,H,C,Q) float32; prev_states (B,C,H,P,N) float32;
dt (B,H,C,Q) dt_dtype -> y (B,S,H,P) float32. Tokens at or past S are neither read nor written.
A CTA makes up to 128 rows (tokens) by up to 64 columns (of P). C and x enter the products as they are; prev_states and
cb * decay * dt are rounded to dtype, for float16 after scaling by a power of two, since neither need fit in it.
"""

from typing import Any

import tilelang.language as T

from tileops.kernels import _common as k

PASS_CONFIGS = k.PASS_CONFIGS

#: The running float16 scale stays within 2**-LIMIT to 2**LIMIT: what is already summed is rescaled along with it.
LIMIT = 60


def program(*, Q: int, P: int, N: int, dtype: str, dt_dtype: str, aligned: bool) -> Any:
    B, S, H, G, C = k.dims("B S H G C")
    wide = 8 if aligned else 1
    rows = min(Q, 128)
    row_tiles = Q // rows
    cols = min(Q, 32)
    width = k.padded(P, 64)
    width_tiles = k.ceildiv(P, width)
    depth = k.power_of_two(N, min(rows, 64))
    half = dtype == "float16"

    @T.prim_func
    def chunk_scan(
        x: k.strided("x", (B, S, H, P), dtype, wide),
        Cm: k.strided("Cm", (B, S, G, N), dtype, wide),
        cb: T.Tensor((B, C, G, Q, Q), dtype),
        dA_cumsum: T.Tensor((B, H, C, Q), "float32"),
        prev_states: T.Tensor((B, C, H, P, N), "float32"),
        dt: T.Tensor((B, H, C, Q), dt_dtype),
        y: T.Tensor((B, S, H, P), "float32"),
    ):
        with k.grid(B * C * H * (width_tiles * row_tiles), threads=2 * rows) as block:
            if aligned and rows >= 64:  # narrow loads and small CTAs take more registers
                k.at_least(256 // rows)
            row = T.alloc_var("int32", init=block % row_tiles)
            p0 = T.alloc_var("int32", init=block // row_tiles % width_tiles)
            bch = T.alloc_var("int32", init=block // (row_tiles * width_tiles))
            h = T.alloc_var("int32", init=T.truncmod(bch, H))
            bc = T.alloc_var("int32", init=T.truncdiv(bch, H))
            c = T.alloc_var("int32", init=T.truncmod(bc, C))
            b = T.alloc_var("int32", init=T.truncdiv(bc, C))
            g = T.alloc_var("int32", init=T.truncdiv(h, T.truncdiv(H, G)))
            sums = k.shared((Q,), "float32")
            earlier = k.shared((Q,), "float32")
            steps = k.shared((Q,), "float32")
            state_scale = k.shared((width,), "float32")
            state_unscale = k.shared((width,), "float32")
            scale = k.shared((rows,), "float32")
            unscale = k.shared((rows,), "float32")
            change = k.shared((rows,), "float32")
            Cs = k.shared((rows, depth), dtype)
            Ss = k.shared((width, depth), dtype)
            Ms = k.shared((rows, cols), dtype)
            Xs = k.shared((cols, width), dtype)
            state = k.fragment((width, depth))
            size = k.fragment((width, depth))
            state_top = k.fragment((width,))
            raw = k.fragment((rows, cols), dtype)
            mixed = k.fragment((rows, cols))
            top = k.fragment((rows,))
            acc = k.fragment((rows, width))

            for l in k.parallel(Q):
                sums[l] = dA_cumsum[b, h, c, l]
                # Kept above -inf, so that the difference of two sums never is -inf - -inf.
                earlier[l] = T.max(sums[l], k.LOWEST)
                steps[l] = T.cast(dt[b, h, c, l], "float32")

            # What came before the chunk: C . prev_states.
            if half:
                T.clear(state_top)
                for d in k.rolled(k.ceildiv(N, depth)):
                    for p, n in k.parallel(width, depth):
                        size[p, n] = T.if_then_else(
                            p0 * width + p < P and d * depth + n < N, prev_states[b, c, h, p0 * width + p, d * depth + n], 0.0
                        )
                    T.reduce_absmax(size, state_top, dim=1, clear=False)
                for p in k.parallel(width):
                    state_scale[p], state_unscale[p] = k.fp16_scale(state_top[p])
            T.clear(acc)
            for d in k.rolled(k.ceildiv(N, depth)):
                for i, n in k.parallel(rows, depth):
                    Cs[i, n] = T.if_then_else(
                        c * Q + row * rows + i < S and d * depth + n < N, Cm[b, c * Q + row * rows + i, g, d * depth + n], 0
                    )
                # Loaded apart from the rounding: TileLang moves a load that is cast out from under its condition.
                for p, n in k.parallel(width, depth):
                    state[p, n] = T.if_then_else(
                        p0 * width + p < P and d * depth + n < N, prev_states[b, c, h, p0 * width + p, d * depth + n], 0.0
                    )
                for p, n in k.parallel(width, depth):
                    Ss[p, n] = state[p, n] * state_scale[p] if half else state[p, n]
                T.gemm(Cs, Ss, acc, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
            for i, p in k.parallel(rows, width):
                acc[i, p] *= T.exp(sums[row * rows + i])
            if half:
                for i, p in k.parallel(rows, width):
                    acc[i, p] *= state_unscale[p]
                for i in k.parallel(rows):
                    unscale[i] = 1.0
                T.clear(top)

            # The chunk itself: tiles up to the diagonal.
            for t in k.rolled((row + 1) * (rows // cols)):
                ahead = T.alloc_var("int32", init=row * rows - t * cols)
                for i, j in k.parallel(rows, cols):
                    raw[i, j] = cb[b, c, g, row * rows + i, t * cols + j]
                for i, j in k.parallel(rows, cols):
                    # A token sees itself undecayed even where A is -inf.
                    passed = T.if_then_else(j - i == ahead, 0.0, sums[row * rows + i] - earlier[t * cols + j])
                    weight = T.exp2(T.min(passed, 0.0) * k.LOG2E) * steps[t * cols + j]
                    part = T.if_then_else(j - i <= ahead, T.cast(raw[i, j], "float32") * weight, 0.0)
                    if half:
                        mixed[i, j] = part
                    else:
                        raw[i, j] = part
                if half:
                    T.reduce_absmax(mixed, top, dim=1, clear=False)
                    for i in k.parallel(rows):
                        to_fp16, back = k.fp16_scale(top[i], -LIMIT, LIMIT)
                        change[i] = to_fp16 * unscale[i]
                        scale[i] = to_fp16
                        unscale[i] = back
                    for i, p in k.parallel(rows, width):
                        acc[i, p] *= change[i]
                    for i, j in k.parallel(rows, cols):
                        raw[i, j] = mixed[i, j] * scale[i]
                for i, j in k.parallel(rows, cols):
                    Ms[i, j] = raw[i, j]
                for j, p in k.parallel(cols, width):
                    Xs[j, p] = T.if_then_else(
                        c * Q + t * cols + j < S and p0 * width + p < P, x[b, c * Q + t * cols + j, h, p0 * width + p], 0
                    )
                T.gemm(Ms, Xs, acc, policy=T.GemmWarpPolicy.FullRow)
            for i, p in k.parallel(rows, width):
                if c * Q + row * rows + i < S and p0 * width + p < P:
                    y[b, c * Q + row * rows + i, h, p0 * width + p] = acc[i, p] * unscale[i] if half else acc[i, p]

    return k.complete(chunk_scan)
