"""out[r] = clamp(softplus?(dt[tokens[r]] + dt_bias)), 0 where tokens[r] is negative; rates = A, finite.

dt (S,H) float32 strided, tokens (R) int32, A (H), dt_bias (H) float32 if has_bias, dt_min, dt_max float32
-> out (R,H) float32, rates (H) float32. The values are chunk_cumsum's. A rate of -inf becomes a finite one that decays to 0 all
the same: rows behind a sequence's end must see its prefix sum stay as it is, and -inf - -inf is not 0.
"""

from typing import Any

import tilelang.language as T

from tileops.kernels import _common as k

PASS_CONFIGS = k.PASS_CONFIGS

THREADS = 128
#: Sums of it over a chunk of 256 stay finite for steps up to 1e4.
FASTEST = -1e32


def program(*, softplus: bool, has_bias: bool) -> Any:
    S, R, H = k.dims("S R H")

    @T.prim_func
    def pack_steps(
        dt: k.strided("dt", (S, H), "float32"),
        tokens: T.Tensor((R,), "int32"),
        A: T.Tensor((H,), "float32"),
        dt_bias: T.Tensor((H,), "float32"),
        dt_min: T.float32,
        dt_max: T.float32,
        out: T.Tensor((R, H), "float32"),
        rates: T.Tensor((H,), "float32"),
    ):
        with k.grid(R, threads=THREADS) as r:
            t = T.alloc_var("int32", init=tokens[r])
            for i in k.parallel(THREADS):
                for j in T.serial(T.ceildiv(H, THREADS)):
                    h = T.alloc_var("int32", init=j * THREADS + i)
                    if h < H:
                        if r == 0:
                            rates[h] = T.if_then_else(A[h] < FASTEST, FASTEST, A[h])
                        v = T.alloc_var("float32", init=0.0)
                        if t >= 0:
                            v = dt[t, h]
                            if has_bias:
                                v = v + dt_bias[h]
                            if softplus:
                                v = T.if_then_else(v > 20.0, v, T.call_extern("float32", "log1pf", T.exp(v)))
                            # Comparisons, not min and max: those would turn NaN into a number.
                            v = T.if_then_else(v < dt_min, dt_min, v)
                            v = T.if_then_else(v > dt_max, dt_max, v)
                        out[r, h] = v

    return k.complete(pack_steps)
