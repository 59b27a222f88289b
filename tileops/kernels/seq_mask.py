"""cb[b,c,g,l,s] = 0, in place, where tokens l and s of chunk c are of different sequences.

cb (B,C,G,Q,Q) of 32-bit elements, runs (B,S) int32 and cuts (B,C) int32 as seq_runs makes them. A CTA takes one square; where no
sequence begins in the chunk it does nothing.
"""

from typing import Any

import tilelang.language as T

from tileops.kernels import _common as k

PASS_CONFIGS = k.PASS_CONFIGS

ROWS = 16


def program(*, Q: int) -> Any:
    B, S, G, C = k.dims("B S G C")

    @T.prim_func
    def seq_mask(
        cb: T.Tensor((B, C, G, Q, Q), "int32"),
        runs: T.Tensor((B, S), "int32"),
        cuts: T.Tensor((B, C), "int32"),
    ):
        with k.grid(B * C * G, threads=max(32, min(Q, 128))) as block:
            g = T.alloc_var("int32", init=T.truncmod(block, G))
            bc = T.alloc_var("int32", init=T.truncdiv(block, G))
            c = T.alloc_var("int32", init=T.truncmod(bc, C))
            b = T.alloc_var("int32", init=T.truncdiv(bc, C))
            run = k.shared((Q,), "int32")
            if cuts[b, c] > 0:
                for l in k.parallel(Q):
                    run[l] = runs[b, T.min(c * Q + l, S - 1)]
                for r in k.rolled(Q // ROWS):
                    for l, s in k.parallel(ROWS, Q):
                        if run[r * ROWS + l] != run[s]:
                            cb[b, c, g, r * ROWS + l, s] = 0

    return k.complete(seq_mask)
