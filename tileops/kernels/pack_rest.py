"""y[t] = 0 for the tokens t of a pack that are before the first sequence or behind the last one.

cu_seqlens (M) int32; y (S, W) int32: the rows of a tensor of any dtype, W words each. A CTA takes ROWS tokens, and most find nothing to do.
"""

from typing import Any

import tilelang.language as T

from tileops.kernels import _common as k

PASS_CONFIGS = k.PASS_CONFIGS

THREADS = 128
ROWS = 64


def program() -> Any:
    M, S, W = k.dims("M S W")

    @T.prim_func
    def pack_rest(
        cu_seqlens: T.Tensor((M,), "int32"),
        y: T.Tensor((S, W), "int32"),
    ):
        with k.grid(T.ceildiv(S, ROWS), threads=THREADS) as block:
            t0 = T.alloc_var("int32", init=block * ROWS)
            first = T.alloc_var("int32", init=cu_seqlens[0])
            last = T.alloc_var("int32", init=cu_seqlens[M - 1])
            if t0 < first or t0 + ROWS > last:
                for r in T.serial(ROWS):
                    t = t0 + r
                    if t < S and (t < first or t >= last):
                        for j in T.serial(T.ceildiv(W, THREADS)):
                            for i in k.parallel(THREADS):
                                if j * THREADS + i < W:
                                    y[t, j * THREADS + i] = 0

    return k.complete(pack_rest)
