"""One token: state = exp(dt * A) * state + dt * x * Bm in place, y = sum_n state * Cm; g = h // (H / G).

A (H,P,N) float32 and dt (B,H,P) float32, strided; if tied, A (H) and dt (B,H). x (B,H,P), Bm, Cm (B,G,N) dtype, strided;
state (B,H,P,N) float32, strided with 16-byte rows -> y (B,H,P) float32. dt of 0 leaves the state as it is even where A is -inf.
A CTA holds 8 rows of one state in registers: each element is read once and written once, and a row is summed within a warp.
"""

from typing import Any

import tilelang.language as T

from tileops.kernels import _common as k

PASS_CONFIGS = k.PASS_CONFIGS

ROWS = 8


def program(*, P: int, N: int, dtype: str, tied: bool) -> Any:
    B, H, G = k.dims("B H G")
    tiles = P // ROWS
    width = k.power_of_two(N, 256)

    @T.prim_func
    def recurrent(
        A: k.strided("A", (H,), "float32", last=True) if tied else k.strided("A", (H, P, N), "float32", 4),
        dt: k.strided("dt", (B, H), "float32", last=True) if tied else k.strided("dt", (B, H, P), "float32", last=True),
        x: k.strided("x", (B, H, P), dtype),
        Bm: k.strided("Bm", (B, G, N), dtype),
        Cm: k.strided("Cm", (B, G, N), dtype),
        state: k.strided("state", (B, H, P, N), "float32", 4),
        y: T.Tensor((B, H, P), "float32"),
    ):
        with k.grid(B * H * tiles, threads=min(2 * width, 128)) as block:
            tile = T.alloc_var("int32", init=block % tiles)
            bh = T.alloc_var("int32", init=block // tiles)
            h = T.alloc_var("int32", init=T.truncmod(bh, H))
            b = T.alloc_var("int32", init=T.truncdiv(bh, H))
            g = T.alloc_var("int32", init=T.truncdiv(h, T.truncdiv(H, G)))
            s = k.fragment((ROWS, width))
            rate = k.fragment((ROWS, width))
            part = k.fragment((ROWS, width))
            total = k.fragment((ROWS,))
            Bs = k.shared((width,), "float32")
            Cs = k.shared((width,), "float32")
            step = k.shared((ROWS,), "float32")
            gain = k.shared((ROWS,), "float32")

            for i, n in k.parallel(ROWS, width):
                s[i, n] = T.if_then_else(n < N, state[b, h, tile * ROWS + i, n], 0.0)
            if not tied:
                for i, n in k.parallel(ROWS, width):
                    rate[i, n] = T.if_then_else(n < N, A[h, tile * ROWS + i, n], 0.0)
            for n in k.parallel(width):
                Bs[n] = T.cast(Bm[b, g, T.min(n, N - 1)], "float32")
                Cs[n] = T.cast(Cm[b, g, T.min(n, N - 1)], "float32")
            for i in k.parallel(ROWS):
                step[i] = dt[b, h] if tied else dt[b, h, tile * ROWS + i]
                gain[i] = step[i] * T.cast(x[b, h, tile * ROWS + i], "float32")
            for i, n in k.parallel(ROWS, width):
                decay = T.if_then_else(step[i] == 0.0, 1.0, T.exp(step[i] * (A[h] if tied else rate[i, n])))
                s[i, n] = decay * s[i, n] + gain[i] * Bs[n]
                part[i, n] = T.if_then_else(n < N, s[i, n] * Cs[n], 0.0)
            for i, n in k.parallel(ROWS, width):
                if n < N:
                    state[b, h, tile * ROWS + i, n] = s[i, n]
            T.reduce_sum(part, total, dim=1)
            for i in k.parallel(ROWS):
                y[b, h, tile * ROWS + i] = total[i]

    return k.complete(recurrent)
