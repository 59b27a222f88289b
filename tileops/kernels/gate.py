"""out[b,s,h,p] = (y + D * x) * z * sigmoid(z), what was not asked for left out, in x's dtype if half, else float32.

y (B,R,H,P) float32; x, z (B,S,H,P) dtype, out (B,S,H,P), strided; D (H,P) float32, strided; rows (S) int32
parts: the sum of 2 for D, 4 for z, 8 for a pack (B = 1): token s is row rows[s] of y, and where that is negative out is 0.
What is not asked for is not touched. P is split in two, (V,W): W is 8 where rows are 16-byte aligned, else 1. A CTA takes one token.
"""

from typing import Any

import tilelang.language as T

from tileops.kernels import _common as k

PASS_CONFIGS = k.PASS_CONFIGS

#: ``parts`` says which of them a launch has.
OPTIONAL = ("x", "z", "D", "rows")

THREADS = 128
SKIP, GATE, PACK = 2, 4, 8


def program(*, dtype: str, half: bool, aligned: bool) -> Any:
    B, S, R, H, V = k.dims("B S R H V")
    W = 8 if aligned else 1

    @T.prim_func
    def gate(
        y: T.Tensor((B, R, H, V, W), "float32"),
        x: k.strided("x", (B, S, H, V, W), dtype, W),
        z: k.strided("z", (B, S, H, V, W), dtype, W),
        D: k.strided("D", (H, V, W), "float32", last=True),
        rows: T.Tensor((S,), "int32"),
        out: k.strided("out", (B, S, H, V, W), dtype if half else "float32", W),
        parts: T.int32,
    ):
        with k.grid(B * S, threads=THREADS) as block:
            s = T.alloc_var("int32", init=T.truncmod(block, S))
            b = T.alloc_var("int32", init=T.truncdiv(block, S))
            row = T.alloc_var("int32", init=s)
            if parts & PACK > 0:
                row = rows[s]
            acc = T.alloc_local((W,), "float32")
            raw = T.alloc_local((W,), dtype)
            for i in k.parallel(THREADS):
                for j in T.serial(T.ceildiv(H * V, THREADS)):
                    h = T.alloc_var("int32", init=T.truncdiv(j * THREADS + i, V))
                    v = T.alloc_var("int32", init=T.truncmod(j * THREADS + i, V))
                    if h < H:
                        for w in T.vectorized(W):
                            acc[w] = 0.0
                        if row >= 0:
                            for w in T.vectorized(W):
                                acc[w] = y[b, row, h, v, w]
                            if parts & SKIP > 0:
                                for w in T.vectorized(W):
                                    raw[w] = x[b, s, h, v, w]
                                for w in T.unroll(W):
                                    acc[w] = acc[w] + D[h, v, w] * T.cast(raw[w], "float32")
                            if parts & GATE > 0:
                                for w in T.vectorized(W):
                                    raw[w] = z[b, s, h, v, w]
                                for w in T.unroll(W):
                                    u = T.alloc_var("float32", init=T.cast(raw[w], "float32"))
                                    acc[w] = acc[w] * (u / (1.0 + T.exp(-u)))
                        for w in T.vectorized(W):
                            out[b, s, h, v, w] = acc[w]

    return k.complete(gate)
