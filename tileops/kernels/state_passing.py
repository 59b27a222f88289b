"""prev_states[:, c] = s[c - 1], final_states = s[C - 1],  s[c] = exp(dA_chunk[b,h,c]) * s[c - 1] + states[b,c,h],  s[-1] = initial or 0.

states (B,C,H,M), dA_chunk (B,H,C), initial_states (B,H,M) if has_initial_states, all float32, strided
-> prev_states (B,C,H,M) float32, final_states (B,H,M) float32.
A thread carries one element through the chunks; it reads a run of chunks ahead of the sums, to have loads in flight.
"""

from typing import Any

import tilelang.language as T

from tileops.kernels import _common as k

PASS_CONFIGS = k.PASS_CONFIGS

THREADS = 128
AHEAD = 8
#: CTAs an SM, 40 KB of loads in flight.
CTAS = 10


def program(*, has_initial_states: bool) -> Any:
    B, H, C, M = k.dims("B H C M")

    @T.prim_func
    def state_passing(
        states: k.strided("states", (B, C, H, M), "float32"),
        dA_chunk: k.strided("dA_chunk", (B, H, C), "float32", last=True),
        initial_states: k.strided("initial_states", (B, H, M), "float32"),
        prev_states: T.Tensor((B, C, H, M), "float32"),
        final_states: T.Tensor((B, H, M), "float32"),
    ):
        tiles = T.ceildiv(M, THREADS)
        with k.grid(B * H * tiles, threads=THREADS) as block:
            k.at_least(CTAS)
            m0 = T.alloc_var("int32", init=T.truncmod(block, tiles) * THREADS)
            bh = T.alloc_var("int32", init=T.truncdiv(block, tiles))
            h = T.alloc_var("int32", init=T.truncmod(bh, H))
            b = T.alloc_var("int32", init=T.truncdiv(bh, H))
            ahead = T.alloc_local((AHEAD,), "float32")
            decay = T.alloc_local((AHEAD,), "float32")
            for i in k.parallel(THREADS):
                s = T.alloc_var("float32", init=0.0)
                if m0 + i < M:
                    if has_initial_states:
                        s = initial_states[b, h, m0 + i]
                    for run in T.serial(T.truncdiv(C, AHEAD)):
                        for j in T.unroll(AHEAD):
                            ahead[j] = states[b, run * AHEAD + j, h, m0 + i]
                            decay[j] = dA_chunk[b, h, run * AHEAD + j]
                        for j in T.unroll(AHEAD):
                            prev_states[b, run * AHEAD + j, h, m0 + i] = s
                            s = T.exp(decay[j]) * s + ahead[j]
                    for j in T.serial(T.truncmod(C, AHEAD)):
                        c = T.truncdiv(C, AHEAD) * AHEAD + j
                        prev_states[b, c, h, m0 + i] = s
                        s = T.exp(dA_chunk[b, h, c]) * s + states[b, c, h, m0 + i]
                    final_states[b, h, m0 + i] = s

    return k.complete(state_passing)
