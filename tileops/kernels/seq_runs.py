"""runs[b,t] = sequences that begin after token 0 of the row, from the chunk's first token up to t; they begin where seq_idx changes.

seq_idx (B,S) int32, strided -> runs (B,S) int32, cuts (B,C) int32: how many begin in each chunk; and dA_cumsum (B,H,C,Q)
float32 is lowered by FAR, in place, at tokens that the state before the chunk must not reach: exp of it is 0 there, and
differences within a sequence stay. A CTA takes one chunk.
"""

from typing import Any

import tilelang.language as T

from tileops.kernels import _common as k

PASS_CONFIGS = k.PASS_CONFIGS

#: exp(-128) is 0 in float32. A sum below -128 costs differences up to 1.5e-5: no more than a sum of 128 does by itself.
FAR = 128.0


def program(*, Q: int) -> Any:
    B, S, H, C = k.dims("B S H C")

    @T.prim_func
    def seq_runs(
        seq_idx: k.strided("seq_idx", (B, S), "int32", last=True),
        dA_cumsum: T.Tensor((B, H, C, Q), "float32"),
        runs: T.Tensor((B, S), "int32"),
        cuts: T.Tensor((B, C), "int32"),
    ):
        with k.grid(B * C, threads=max(32, min(Q, 128))) as block:
            c = T.alloc_var("int32", init=T.truncmod(block, C))
            b = T.alloc_var("int32", init=T.truncdiv(block, C))
            begins = k.shared((Q,), "int32")
            count = k.shared((Q,), "int32")
            for l in k.parallel(Q):
                t = c * Q + l
                begins[l] = T.if_then_else(t > 0 and t < S, T.if_then_else(seq_idx[b, t] != seq_idx[b, t - 1], 1, 0), 0)
            for l in k.parallel(Q):
                total = T.alloc_var("int32", init=0)
                for j in T.serial(l + 1):
                    total = total + begins[j]
                count[l] = total
            for l in k.parallel(Q):
                if c * Q + l < S:
                    runs[b, c * Q + l] = count[l]
                if l == 0:
                    cuts[b, c] = count[Q - 1]
            if count[Q - 1] > 0:
                for h in T.serial(H):
                    for l in k.parallel(Q):
                        if count[l] > 0:
                            dA_cumsum[b, h, c, l] = dA_cumsum[b, h, c, l] - FAR

    return k.complete(seq_runs)
