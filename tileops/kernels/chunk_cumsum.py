"""dt_out = clamp(softplus?(dt + dt_bias)), dA_cumsum = inclusive sum over each chunk of dt * A, from float32 dt.

dt (B,S,H) float32 strided, A (H) float32, dt_bias (H) float32 if has_bias, dt_min, dt_max float32
-> dt_out (B,H,C,Q) out_dtype, dA_cumsum (B,H,C,Q) float32. Past S dt_out is 0 and dA_cumsum stays as it is.
A CTA takes 8 heads of one chunk. A thread sums a run of tokens, then adds the sums of the runs before it: a result has at
most run + Q/run roundings, and their order never varies.
"""

from typing import Any

import tilelang.language as T

from tileops.kernels import _common as k

PASS_CONFIGS = k.PASS_CONFIGS

HEADS = 8


def program(*, Q: int, out_dtype: str, softplus: bool, has_bias: bool) -> Any:
    B, S, H, C = k.dims("B S H C")
    run = 16 if Q >= 64 else 4
    runs = Q // run
    # Four floats of padding after each run and each head: free of bank conflicts both along heads and along runs.
    width = runs * (run + 4) + 4

    @T.prim_func
    def chunk_cumsum(
        dt: k.strided("dt", (B, S, H), "float32"),
        A: T.Tensor((H,), "float32"),
        dt_bias: T.Tensor((H,), "float32"),
        dt_min: T.float32,
        dt_max: T.float32,
        dt_out: T.Tensor((B, H, C, Q), out_dtype),
        dA_cumsum: T.Tensor((B, H, C, Q), "float32"),
    ):
        heads = T.ceildiv(H, HEADS)
        with k.grid(B * C * heads, threads=128) as block:
            first = T.alloc_var("int32", init=T.truncmod(block, heads) * HEADS)
            bc = T.alloc_var("int32", init=T.truncdiv(block, heads))
            c = T.alloc_var("int32", init=T.truncmod(bc, C))
            b = T.alloc_var("int32", init=T.truncdiv(bc, C))
            values = k.shared((HEADS, width), "float32")
            sums = k.shared((HEADS, width), "float32")
            totals = k.shared((HEADS, runs), "float32")
            part = T.alloc_local((4,), "float32")
            for l, h in k.parallel(Q, HEADS):
                inside = c * Q + l < S and first + h < H
                v = T.alloc_var("float32", init=T.if_then_else(inside, dt[b, c * Q + l, first + h], 0.0))
                if has_bias:
                    v = v + dt_bias[T.min(first + h, H - 1)]
                if softplus:
                    v = T.if_then_else(v > 20.0, v, T.call_extern("float32", "log1pf", T.exp(v)))
                # Comparisons, not min and max: those would turn NaN into a number.
                v = T.if_then_else(v < dt_min, dt_min, v)
                v = T.if_then_else(v > dt_max, dt_max, v)
                values[h, l // run * 4 + l] = T.if_then_else(inside, v, 0.0)
            for h, j in k.parallel(HEADS, runs):
                rate = T.alloc_var("float32", init=A[T.min(first + h, H - 1)])
                total = T.alloc_var("float32", init=0.0)
                for i in T.unroll(run // 4):
                    for e in T.vectorized(4):
                        part[e] = values[h, j * (run + 4) + i * 4 + e]
                    for e in T.unroll(4):
                        # dt of 0 adds nothing even where A is -inf.
                        total = total + T.if_then_else(part[e] == 0.0, 0.0, part[e] * rate)
                        part[e] = total
                    for e in T.vectorized(4):
                        sums[h, j * (run + 4) + i * 4 + e] = part[e]
                totals[h, j] = total
            for h, j in k.parallel(HEADS, runs):
                before = T.alloc_var("float32", init=0.0)
                for i in T.serial(j):
                    before = before + totals[h, i]
                for i in T.unroll(run // 4):
                    for e in T.vectorized(4):
                        sums[h, j * (run + 4) + i * 4 + e] = before + sums[h, j * (run + 4) + i * 4 + e]
            for h, l in k.parallel(HEADS, Q):
                if first + h < H:
                    dt_out[b, first + h, c, l] = values[h, l // run * 4 + l]
                    dA_cumsum[b, first + h, c, l] = sums[h, l // run * 4 + l]

    return k.complete(chunk_cumsum)
