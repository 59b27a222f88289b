"""Rows behind a sequence's end, in place, after chunk_cumsum: dt_out = 0, and dA_cumsum stays as it is at the chunk's last token.

tokens (R) int32, as pack_map makes it; dt_out, dA_cumsum (H,R) float32, R rows of chunks of Q. A sum of -inf in row l becomes a
finite one, (l + 1) FASTEST: from row to row it decays to 0 all the same, and to the rows behind by 1, where -inf - -inf is NaN.
"""

from typing import Any

import tilelang.language as T

from tileops.kernels import _common as k

PASS_CONFIGS = k.PASS_CONFIGS

THREADS = 128
FASTEST = -1e30


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
                    # The row whose sum this one has, in its chunk: itself, or the last that holds a token.
                    l = T.alloc_var("int32", init=T.truncmod(r, Q))
                    first = T.alloc_var("int32", init=r - l)
                    if t < -1:
                        l = -2 - t
                        dt_out[h, r] = 0.0
                    if t != -1:
                        total = T.alloc_var("float32", init=dA_cumsum[h, first + l])
                        if total < k.LOWEST:
                            total = T.cast(l + 1, "float32") * FASTEST
                        dA_cumsum[h, r] = total

    return k.complete(pack_tails)
