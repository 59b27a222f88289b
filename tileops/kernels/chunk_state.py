"""states[b,c,h,p,n] = sum_l x[b,cQ+l,h,p] * w[l] * Bm[b,cQ+l,g,n],  w[l] = exp(dA_cumsum[Q-1] - dA_cumsum[l]) * dt[l].

x (B,S,H,P), Bm (B,S,G,N) dtype, strided; dt (B,H,C,Q) dt_dtype; dA_cumsum (B,H,C,Q) float32; seq_idx (B,S) int32, strided,
if has_seq_idx -> states (B,C,H,P,N) float32. With seq_idx only tokens of the sequence that the chunk ends in count, none if
that is negative; the others are not even read. Tokens at or past S do not exist: the chunk ends at the last real one.
A CTA makes 64 rows of P by all of N. Only x * w is rounded to dtype; B enters as it is.
"""

from typing import Any

import tilelang.language as T

from tileops.kernels import _common as k

PASS_CONFIGS = k.PASS_CONFIGS

ROWS = 64


def program(*, Q: int, P: int, N: int, dtype: str, dt_dtype: str, has_seq_idx: bool, aligned: bool) -> Any:
    B, S, H, G, C = k.dims("B S H G C")
    wide = 8 if aligned else 1
    tiles = k.ceildiv(P, ROWS)
    slab = min(Q, 64)
    # Two warpgroups from here on: each takes half of the columns, and wgmma wants those in multiples of 16.
    width = N if N <= 128 else k.ceildiv(N, 32) * 32

    @T.macro
    def load_x(raw, x, counts, b, token, h, p0, l0):
        # Apart from the arithmetic: TileLang moves a load that is cast out from under its condition.
        for l, p in k.parallel(slab, ROWS):
            raw[l, p] = T.if_then_else(counts[l0 + l] > 0 and p0 * ROWS + p < P, x[b, token + l, h, p0 * ROWS + p], 0)

    @T.prim_func
    def chunk_state(
        x: k.strided("x", (B, S, H, P), dtype, wide),
        Bm: k.strided("Bm", (B, S, G, N), dtype, wide),
        dt: T.Tensor((B, H, C, Q), dt_dtype),
        dA_cumsum: T.Tensor((B, H, C, Q), "float32"),
        seq_idx: k.strided("seq_idx", (B, S), "int32"),
        states: T.Tensor((B, C, H, P, N), "float32"),
    ):
        with k.grid(B * C * H * tiles, threads=128 if width <= 128 else 256) as block:
            p0 = T.alloc_var("int32", init=block % tiles)
            bch = T.alloc_var("int32", init=block // tiles)
            h = T.alloc_var("int32", init=T.truncmod(bch, H))
            bc = T.alloc_var("int32", init=T.truncdiv(bch, H))
            c = T.alloc_var("int32", init=T.truncmod(bc, C))
            b = T.alloc_var("int32", init=T.truncdiv(bc, C))
            g = T.alloc_var("int32", init=T.truncdiv(h, T.truncdiv(H, G)))
            last = T.alloc_var("int32", init=T.min(Q, S - c * Q) - 1)
            Xs = k.shared((slab, ROWS), dtype)
            Bs = k.shared((slab, width), dtype)
            weight = k.shared((Q,), "float32")
            counts = k.shared((Q,), "int32")
            raw = k.fragment((slab, ROWS), dtype)
            acc = k.fragment((ROWS, width))

            for l in k.parallel(Q):
                # last may be below Q - 1, where the cumsum is flat; testing it by index keeps A = -inf right.
                passed = dA_cumsum[b, h, c, Q - 1] - T.max(dA_cumsum[b, h, c, l], k.LOWEST)
                decay = T.if_then_else(l == last, 1.0, T.exp(T.min(passed, 0.0)))
                if has_seq_idx:
                    end = seq_idx[b, c * Q + last]
                    counts[l] = T.if_then_else(l <= last, T.if_then_else(end >= 0 and seq_idx[b, c * Q + T.min(l, last)] == end, 1, 0), 0)
                else:
                    counts[l] = T.if_then_else(l <= last, 1, 0)
                weight[l] = T.if_then_else(counts[l] > 0, T.cast(dt[b, h, c, l], "float32") * decay, 0.0)

            if dtype == "float16":
                scale = k.shared((ROWS,), "float32")
                unscale = k.shared((ROWS,), "float32")
                sized = k.fragment((slab, ROWS), dtype)
                size = k.fragment((slab, ROWS))
                top = k.fragment((ROWS,))
                T.clear(top)
                for s in k.rolled(Q // slab):
                    load_x(sized, x, counts, b, c * Q + s * slab, h, p0, s * slab)
                    for l, p in k.parallel(slab, ROWS):
                        size[l, p] = T.cast(sized[l, p], "float32") * weight[s * slab + l]
                    T.reduce_absmax(size, top, dim=0, clear=False)
                for p in k.parallel(ROWS):
                    scale[p], unscale[p] = k.fp16_scale(top[p])

            T.clear(acc)
            for s in k.rolled(Q // slab):
                load_x(raw, x, counts, b, c * Q + s * slab, h, p0, s * slab)
                for l, p in k.parallel(slab, ROWS):
                    if dtype == "float16":
                        Xs[l, p] = T.cast(raw[l, p], "float32") * weight[s * slab + l] * scale[p]
                    else:
                        Xs[l, p] = T.cast(raw[l, p], "float32") * weight[s * slab + l]
                for l, n in k.parallel(slab, width):
                    Bs[l, n] = T.if_then_else(counts[s * slab + l] > 0 and n < N, Bm[b, c * Q + s * slab + l, g, n], 0)
                T.gemm(Xs, Bs, acc, transpose_A=True)
            for p, n in k.parallel(ROWS, width):
                if p0 * ROWS + p < P and n < N:
                    if dtype == "float16":
                        states[b, c, h, p0 * ROWS + p, n] = acc[p, n] * unscale[p]
                    else:
                        states[b, c, h, p0 * ROWS + p, n] = acc[p, n]

    return k.complete(chunk_state)
