"""Rows behind a sequence's end, in place, after chunk_cumsum: dt_out = 0, and dA_cumsum stays as it is at the chunk's last token.

tokens (R) int32, as pack_map makes it; dt_out, dA_cumsum (H,R) float32, R rows of chunks of Q.
"""

from typing import Any

import tilelang.language as T

from tileops.kernels import _common as k

PASS_CONFIGS = k.PASS_CONFIGS

THREADS = 128


def program() -> Any:
    H, R = k.dims("H R")

    @T.prim_func
    def pack_tails(
        tokens: T.Tensor((R,), "int32"),
        dt_out: T.Tensor((H, R), "float32"),
        dA_cumsum: T.Tensor((H, R), "float32"),
        Q: T.int32,
    ):
        tiles = T.ceildiv(R, THREADS)
        with k.grid(H * tiles, threads=THREADS) as block:
            r0 = T.alloc_var("int32", init=T.truncmod(block, tiles) * THREADS)
            h = T.alloc_var("int32", init=T.truncdiv(block, tiles))
            for i in k.parallel(THREADS):
                r = T.alloc_var("int32", init=r0 + i)
                if r < R:
                    t = T.alloc_var("int32", init=tokens[r])
                    if t < -1:
                        dt_out[h, r] = 0.0
                        # -2 - t: the row of the chunk that holds the last token.
                        dA_cumsum[h, r] = dA_cumsum[h, r - T.truncmod(r, Q) + (-2 - t)]

    return k.complete(pack_tails)
