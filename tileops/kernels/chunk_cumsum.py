"""dt_out = clamp(softplus?(dt + dt_bias)), dA_cumsum = inclusive sum over each chunk of dt * A, from float32 dt.

dt (B,S,H) float32 strided, A (H) float32, dt_bias (H) float32 if has_bias, dt_min, dt_max float32
-> dt_out (B,H,C,Q) out_dtype, dA_cumsum (B,H,C,Q) float32. Past S dt_out is 0 and dA_cumsum stays as it is.
A CTA takes some heads of one chunk. A thread sums a run of tokens, then adds the sums of the runs before it: a result has at
most run + Q/run roundings, and their order never varies.
"""

from typing import Any

import tilelang.language as T

from tileops.kernels import _common as k

PASS_CONFIGS = k.PASS_CONFIGS


def schedule(arch: str, **fields: Any) -> dict[str, int]:
    """``heads`` of a CTA, ``run`` tokens of a thread; registers for ``ctas`` CTAs an SM."""
    return {"heads": 8, "run": 8 if fields["Q"] >= 64 else 4, "ctas": 1}


def candidates(arch: str, **fields: Any) -> list[dict[str, int]]:
    if fields["Q"] < 64:
        return [{"heads": 16}]
    return [{"ctas": 5}, {"ctas": 6}, {"ctas": 8}, {"run": 16}, {"run": 16, "ctas": 12}, {"heads": 4, "ctas": 12}, {"heads": 4, "ctas": 16}]


def program(*, Q: int, out_dtype: str, softplus: bool, has_bias: bool, heads: int, run: int, ctas: int) -> Any:
    B, S, H, C = k.dims("B S H C")
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
        parts = T.ceildiv(H, heads)
        with k.grid(B * C * parts, threads=max(32, heads * runs)) as block:
            if ctas > 1:
                k.at_least(ctas)
            first = T.alloc_var("int32", init=T.truncmod(block, parts) * heads)
            bc = T.alloc_var("int32", init=T.truncdiv(block, parts))
            c = T.alloc_var("int32", init=T.truncmod(bc, C))
            b = T.alloc_var("int32", init=T.truncdiv(bc, C))
            values = k.shared((heads, width), "float32")
            totals = k.shared((heads, runs), "float32")
            starts = k.shared((heads, runs), "float32")
            part = T.alloc_local((run,), "float32")
            raw = k.fragment((Q, heads))
            # Apart from the arithmetic and without a condition, so that the loads are in flight together.
            for l, h in k.parallel(Q, heads):
                raw[l, h] = dt[b, T.min(c * Q + l, S - 1), T.min(first + h, H - 1)]
            for l, h in k.parallel(Q, heads):
                values[h, l // run * 4 + l] = raw[l, h]
            for h, j in k.parallel(heads, runs):
                rate = T.alloc_var("float32", init=A[T.min(first + h, H - 1)])
                bias = T.alloc_var("float32", init=0.0)
                if has_bias:
                    bias = dt_bias[T.min(first + h, H - 1)]
                total = T.alloc_var("float32", init=0.0)
                for i in T.unroll(run // 4):
                    for e in T.vectorized(4):
                        part[i * 4 + e] = values[h, j * (run + 4) + i * 4 + e]
                for i in T.unroll(run):
                    v = T.alloc_var("float32", init=part[i] + bias)
                    if softplus:
                        # A statement of its own, or the choice would be a branch around it.
                        soft = T.alloc_var("float32", init=k.log1p(T.exp(v)))
                        v = T.Select(v > 20.0, v, soft)
                    # Comparisons, not min and max: those would turn NaN into a number.
                    v = T.Select(v < dt_min, dt_min, v)
                    v = T.Select(v > dt_max, dt_max, v)
                    part[i] = T.Select(c * Q + j * run + i < S, v, 0.0)
                if first + h < H:
                    for i in T.unroll(run // 4):
                        for e in T.vectorized(4):
                            dt_out[b, first + h, c, j * run + i * 4 + e] = part[i * 4 + e]
                for i in T.unroll(run):
                    # dt of 0 adds nothing even where A is -inf.
                    total = total + T.Select(part[i] == 0.0, 0.0, part[i] * rate)
                    part[i] = total
                for i in T.unroll(run // 4):
                    for e in T.vectorized(4):
                        values[h, j * (run + 4) + i * 4 + e] = part[i * 4 + e]
                totals[h, j] = total
            for h, j in k.parallel(heads, runs):
                before = T.alloc_var("float32", init=0.0)
                for i in T.unroll(runs):
                    before = before + T.Select(i < j, totals[h, i], 0.0)
                starts[h, j] = before
            for h, l in k.parallel(heads, Q):
                if first + h < H:
                    dA_cumsum[b, first + h, c, l] = starts[h, l // run] + values[h, l // run * 4 + l]

    return k.complete(chunk_cumsum)
