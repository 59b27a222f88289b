"""states[b,c,h,p,n] = sum_l x[b,cQ+l,h,p] * w[l] * Bm[b,cQ+l,g,n],  w[l] = exp(dA_cumsum[Q-1] - dA_cumsum[l]) * dt[l].

x (B,S,H,P), Bm (B,S,G,N) dtype, strided; dt (B,H,C,Q) dt_dtype; dA_cumsum (B,H,C,Q) float32; seq_idx (B,S) int32, strided,
optional -> states (B,C,H,P,N) float32. With seq_idx only tokens of the sequence that the chunk ends in count, none if
that is negative; the others become 0 before the product. Tokens at or past S do not exist: the chunk ends at the last real one.
A CTA makes ``rows`` rows by all of N: several heads of a group where P divides ``rows``, so that they share B, else rows of one
head. Slabs of tokens go through ``stages`` buffers. Only x * w is rounded to dtype; B enters as it is.
"""

from typing import Any

import tilelang.language as T

from tileops.kernels import _common as k

PASS_CONFIGS = k.BY_HAND

OPTIONAL = ("seq_idx",)

#: In place of the weight of a token that seq_idx leaves out, as an integer: a NaN that no arithmetic makes.
OUT = 0x7FC00BAD


def narrow_slab(arch: str, P: int, N: int) -> int:
    """Tokens at a time where loads are narrow: those are all in registers at once, and tiles that do not divide evenly cost more of them.
    Found by compiling: one step more spills."""
    if N & (N - 1) or arch == "sm_100a":
        return 16
    if arch != "sm_90a":  # no wgmma, whose operands are not in registers
        return 32
    uneven = 64 % P != 0 and P % 64 != 0
    return 32 if uneven and (P < 64 or N < 128) else 64


def schedule(arch: str, **fields: Any) -> dict[str, int]:
    """``rows`` x N of a state a CTA, ``slab`` tokens at a time in ``stages`` buffers; registers for ``ctas`` CTAs an SM."""
    slab = 64 if fields["aligned"] else narrow_slab(arch, fields["P"], fields["N"])
    return {"rows": 64, "slab": slab, "stages": 2, "ctas": 1}


def candidates(arch: str, **fields: Any) -> list[dict[str, int]]:
    return [{"stages": 3}, {"slab": 32, "stages": 3}, {"slab": 32, "stages": 4}, {"ctas": 5}, {"rows": 128}, {"rows": 128, "stages": 3}]


def program(
    *,
    Q: int,
    P: int,
    N: int,
    dtype: str,
    dt_dtype: str,
    aligned: bool,
    rows: int,
    slab: int,
    stages: int,
    ctas: int,
) -> Any:
    B, S, H, G, C = k.dims("B S H G C")
    wide = 8 if aligned else 1
    slab = min(Q, slab)
    slabs = Q // slab
    stages = min(stages, slabs)
    heads = rows // P if rows % P == 0 else 1
    width = rows // heads
    tiles = k.ceildiv(P, width)
    # Two warpgroups from here on: each takes half of the columns, and wgmma wants those in multiples of 16.
    depth = N if N <= 128 else k.ceildiv(N, 32) * 32
    threads = 2 * rows if depth <= 128 else 256
    half = dtype == "float16"

    @T.macro
    def fetch(Xs, Bs, x, Bm, last, b, c, g, h, end, p0, s, slot):
        for l, r in k.fetch(slab, rows):
            Xs[slot, l, r] = T.if_then_else(
                s * slab + l <= last and h + r // width < end and p0 * width + r % width < P,
                x[b, c * Q + s * slab + l, h + r // width, p0 * width + r % width],
                0,
            )
        for l, n in k.fetch(slab, depth):
            Bs[slot, l, n] = T.if_then_else(s * slab + l <= last and n < N, Bm[b, c * Q + s * slab + l, g, n], 0)
        k.commit()

    @T.macro
    def products(Xs, Bs, acc, weight, scale, counted, x, Bm, last, b, c, g, h, end, p0):
        for s in k.rolled(slabs):
            slot = T.alloc_var("int32", init=s % stages)
            k.arrived(stages - 1)
            k.barrier()
            for l, r in k.parallel(slab, rows):
                if half:
                    Xs[slot, l, r] = T.cast(Xs[slot, l, r], "float32") * weight[r // width, s * slab + l] * scale[r]
                else:
                    Xs[slot, l, r] = T.cast(Xs[slot, l, r], "float32") * weight[r // width, s * slab + l]
            if counted:
                # Selected, not multiplied by 0: it may be NaN. Other threads may have written these elements: the loops' layouts differ.
                k.barrier()
                for l, r in k.parallel(slab, rows):
                    if T.reinterpret(weight[0, s * slab + l], "int32") == OUT:
                        Xs[slot, l, r] = T.cast(0, dtype)
                for l, n in k.parallel(slab, depth):
                    if T.reinterpret(weight[0, s * slab + l], "int32") == OUT:
                        Bs[slot, l, n] = T.cast(0, dtype)
            k.barrier()
            k.gemm(Xs, (slot,), Bs, (slot,), acc, transpose_A=True)
            if slabs > stages:
                k.barrier()
                if s + stages < slabs:
                    fetch(Xs, Bs, x, Bm, last, b, c, g, h, end, p0, s + stages, slot)
                else:
                    k.commit()
            else:
                k.commit()

    @T.prim_func
    def chunk_state(
        x: k.strided("x", (B, S, H, P), dtype, wide),
        Bm: k.strided("Bm", (B, S, G, N), dtype, wide),
        dt: T.Tensor((B, H, C, Q), dt_dtype),
        dA_cumsum: T.Tensor((B, H, C, Q), "float32"),
        seq_idx: k.strided("seq_idx", (B, S), "int32"),
        states: T.Tensor((B, C, H, P, N), "float32"),
    ):
        parts = T.ceildiv(T.truncdiv(H, G), heads)
        with k.grid(B * C * G * (parts * tiles), threads=threads) as block:
            if ctas > 1:
                k.at_least(ctas)
            p0 = T.alloc_var("int32", init=block % tiles)
            rest = T.alloc_var("int32", init=T.truncdiv(block, tiles))
            part = T.alloc_var("int32", init=T.truncmod(rest, parts))
            bcg = T.alloc_var("int32", init=T.truncdiv(rest, parts))
            g = T.alloc_var("int32", init=T.truncmod(bcg, G))
            bc = T.alloc_var("int32", init=T.truncdiv(bcg, G))
            c = T.alloc_var("int32", init=T.truncmod(bc, C))
            b = T.alloc_var("int32", init=T.truncdiv(bc, C))
            h = T.alloc_var("int32", init=g * T.truncdiv(H, G) + part * heads)
            end = T.alloc_var("int32", init=(g + 1) * T.truncdiv(H, G))
            last = T.alloc_var("int32", init=T.min(Q, S - c * Q) - 1)
            Xs = k.shared((stages, slab, rows), dtype)
            Bs = k.shared((stages, slab, depth), dtype)
            weight = k.shared((heads, Q), "float32")
            acc = k.fragment((rows, depth))

            for s in T.unroll(stages):
                fetch(Xs, Bs, x, Bm, last, b, c, g, h, end, p0, s, s)
            given = T.alloc_var("int32", init=T.if_then_else(T.isnullptr(seq_idx.data), 0, 1))
            for i, l in k.parallel(heads, Q):
                own = T.min(h + i, H - 1)
                # last may be below Q - 1, where the cumsum is flat; testing it by index keeps A = -inf right.
                passed = dA_cumsum[b, own, c, Q - 1] - T.max(dA_cumsum[b, own, c, l], k.LOWEST)
                decay = T.if_then_else(l == last, 1.0, T.exp(T.min(passed, 0.0)))
                # A token that does not exist has no weight, whatever its dt is.
                weight[i, l] = T.if_then_else(l <= last, T.cast(dt[b, own, c, l], "float32") * decay, 0.0)
            if given > 0:
                out = T.alloc_var("int32", init=OUT)
                for i, l in k.parallel(heads, Q):
                    ends = seq_idx[b, c * Q + last]
                    if ends < 0 or seq_idx[b, c * Q + T.min(l, last)] != ends:
                        weight[i, l] = T.reinterpret(out, "float32")

            scale = k.shared((rows,), "float32")
            if half:
                unscale = k.shared((rows,), "float32")
                sized = k.fragment((slab, rows), dtype)
                size = k.fragment((slab, rows))
                top = k.fragment((rows,))
                T.clear(top)
                k.barrier()
                for s in k.rolled(slabs):
                    # Apart from the arithmetic: TileLang moves a load that is cast out from under its condition.
                    for l, r in k.parallel(slab, rows):
                        sized[l, r] = T.if_then_else(
                            s * slab + l <= last and h + r // width < end and p0 * width + r % width < P,
                            x[b, c * Q + s * slab + l, h + r // width, p0 * width + r % width],
                            0,
                        )
                    for l, r in k.parallel(slab, rows):
                        size[l, r] = T.cast(sized[l, r], "float32") * weight[r // width, s * slab + l]
                    if given > 0:
                        for l, r in k.parallel(slab, rows):
                            size[l, r] = T.if_then_else(T.reinterpret(weight[0, s * slab + l], "int32") == OUT, 0.0, size[l, r])
                    T.reduce_absmax(size, top, dim=0, clear=False)
                for r in k.parallel(rows):
                    scale[r], unscale[r] = k.fp16_scale(top[r])

            T.clear(acc)
            # A loop of its own where tokens are left out: a branch inside would cost a tenth, even where it is not taken.
            if given > 0:
                products(Xs, Bs, acc, weight, scale, True, x, Bm, last, b, c, g, h, end, p0)
            else:
                products(Xs, Bs, acc, weight, scale, False, x, Bm, last, b, c, g, h, end, p0)
            for r, n in k.parallel(rows, depth):
                if h + r // width < end and p0 * width + r % width < P and n < N:
                    if half:
                        states[b, c, h + r // width, p0 * width + r % width, n] = acc[r, n] * unscale[r]
                    else:
                        states[b, c, h + r // width, p0 * width + r % width, n] = acc[r, n]

    return k.complete(chunk_state)
