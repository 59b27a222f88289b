"""cb[b,c,g,l,s] = sum_n Cm[b, c*Q+l, g, n] * Bm[b, c*Q+s, g, n] for s <= l, else 0.

Cm, Bm (B,S,G,N) dtype, strided -> cb (B,C,G,Q,Q) dtype, or float32 where ``cb_float32``. Rows at or past S count as zero.
A CTA makes one square tile of one chunk; a tile above the diagonal is only zeroed.
"""

from typing import Any

import tilelang.language as T

from tileops.kernels import _common as k

PASS_CONFIGS = k.BY_HAND


def schedule(arch: str, **fields: Any) -> dict[str, int]:
    """``tile`` x ``tile`` of cb a CTA; registers for ``ctas`` CTAs an SM."""
    return {"tile": 64, "ctas": 1}


def candidates(arch: str, **fields: Any) -> list[dict[str, int]]:
    return [{"tile": 128}, {"ctas": 5}]


def program(*, Q: int, N: int, dtype: str, aligned: bool, cb_float32: bool, tile: int, ctas: int) -> Any:
    B, S, G, C = k.dims("B S G C")
    cb_dtype = "float32" if cb_float32 else dtype
    wide = 8 if aligned else 1
    tile = min(Q, tile)
    tiles = Q // tile
    # Loads that are not 16 bytes wide take eight times the registers.
    depth = k.padded(N, 128 if aligned else 32)
    steps = k.ceildiv(N, depth)

    @T.prim_func
    def chunk_coupling(
        Cm: k.strided("Cm", (B, S, G, N), dtype, wide),
        Bm: k.strided("Bm", (B, S, G, N), dtype, wide),
        cb: T.Tensor((B, C, G, Q, Q), cb_dtype),
    ):
        with k.grid(B * C * G * (tiles * tiles), threads=2 * tile) as block:
            if ctas > 1:
                k.at_least(ctas)
            col = T.alloc_var("int32", init=block % tiles)
            row = T.alloc_var("int32", init=block // tiles % tiles)
            bcg = T.alloc_var("int32", init=block // (tiles * tiles))
            g = T.alloc_var("int32", init=T.truncmod(bcg, G))
            bc = T.alloc_var("int32", init=T.truncdiv(bcg, G))
            c = T.alloc_var("int32", init=T.truncmod(bc, C))
            b = T.alloc_var("int32", init=T.truncdiv(bc, C))
            Cs = k.shared((tile, depth), dtype)
            Bs = k.shared((tile, depth), dtype)
            out = k.shared((tile, tile), cb_dtype)
            acc = k.fragment((tile, tile))
            rounded = k.fragment((tile, tile), cb_dtype)
            k.swizzled(out)
            T.clear(acc)
            if col <= row:
                for d in k.rolled(steps):
                    for i, n in k.fetch(tile, depth):
                        Cs[i, n] = T.if_then_else(
                            c * Q + row * tile + i < S and d * depth + n < N, Cm[b, c * Q + row * tile + i, g, d * depth + n], 0
                        )
                    for i, n in k.fetch(tile, depth):
                        Bs[i, n] = T.if_then_else(
                            c * Q + col * tile + i < S and d * depth + n < N, Bm[b, c * Q + col * tile + i, g, d * depth + n], 0
                        )
                    k.commit()
                    k.arrived(0)
                    k.barrier()
                    k.gemm(Cs, (), Bs, (), acc, transpose_B=True)
                    if steps > 1:
                        k.barrier()
            for i, j in k.parallel(tile, tile):
                rounded[i, j] = T.if_then_else(col * tile + j <= row * tile + i, acc[i, j], 0)
            T.copy(rounded, out)
            k.barrier()
            for i, j in k.parallel(tile, tile):
                cb[b, c, g, row * tile + i, col * tile + j] = out[i, j]

    return k.complete(chunk_coupling)
