"""out[r] = source[tokens[r]], 0 behind the end of a sequence and in a chunk of none.

source (S,A,D,W) of 16-bit elements, strided, tokens (R) int32 as pack_map makes it -> out (R,A,D,W). W is 8 where rows are
16-byte aligned, else 1.
"""

from typing import Any

import tilelang.language as T

from tileops.kernels import _common as k

PASS_CONFIGS = k.PASS_CONFIGS

THREADS = 128


def program(*, aligned: bool) -> Any:
    S, R, A, D = k.dims("S R A D")
    W = 8 if aligned else 1

    @T.prim_func
    def pack_rows(
        source: k.strided("source", (S, A, D, W), "int16", W),
        tokens: T.Tensor((R,), "int32"),
        out: T.Tensor((R, A, D, W), "int16"),
    ):
        with k.grid(R, threads=THREADS) as r:
            t = T.alloc_var("int32", init=tokens[r])
            for i in k.parallel(THREADS):
                for j in T.serial(T.ceildiv(A * D, THREADS)):
                    a = T.alloc_var("int32", init=T.truncdiv(j * THREADS + i, D))
                    d = T.alloc_var("int32", init=T.truncmod(j * THREADS + i, D))
                    if a < A:
                        if t >= 0:
                            for w in T.vectorized(W):
                                out[r, a, d, w] = source[t, a, d, w]
                        else:
                            for w in T.vectorized(W):
                                out[r, a, d, w] = T.cast(0, "int16")

    return k.complete(pack_rows)
