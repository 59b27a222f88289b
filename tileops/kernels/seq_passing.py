"""state_passing where a state does not pass from one sequence to the next.

states (R,C,H,M), dA_chunk (R,H,C), initial_states (B,H,M), optional, all float32, strided
-> prev_states (R,C,H,M), final_states (B,H,M) float32. A thread carries some elements of one chain; there are B chains.
packed: R is 1, chain b is chunks bounds[b] to bounds[b + 1], bounds (B + 1) int32; prev_states of chunks behind the last chain is 0.
Else R is B, chain b is row b, and where bounds (B,C) is above 0 a sequence begins in the chunk: what was before it is dropped, by
selection.
"""

from typing import Any

import tilelang.language as T

from tileops.kernels import _common as k

PASS_CONFIGS = k.PASS_CONFIGS

OPTIONAL = ("initial_states",)

THREADS = 128
#: Elements of a thread, and chunks read ahead of the sums.
PER = 4
AHEAD = 4


def program(*, packed: bool) -> Any:
    B, H, C, M = k.dims("B H C M")
    R = 1 if packed else B

    @T.prim_func
    def seq_passing(
        states: k.strided("states", (R, C, H, M), "float32"),
        dA_chunk: k.strided("dA_chunk", (R, H, C), "float32", last=True),
        initial_states: k.strided("initial_states", (B, H, M), "float32"),
        bounds: T.Tensor((B + 1,) if packed else (B, C), "int32"),
        prev_states: T.Tensor((R, C, H, M), "float32"),
        final_states: T.Tensor((B, H, M), "float32"),
    ):
        tiles = T.ceildiv(M, PER * THREADS)
        with k.grid(B * H * tiles, threads=THREADS) as block:
            m0 = T.alloc_var("int32", init=T.truncmod(block, tiles) * (PER * THREADS))
            bh = T.alloc_var("int32", init=T.truncdiv(block, tiles))
            h = T.alloc_var("int32", init=T.truncmod(bh, H))
            b = T.alloc_var("int32", init=T.truncdiv(bh, H))
            row = T.alloc_var("int32", init=0 if packed else b)
            first = T.alloc_var("int32", init=bounds[b] if packed else 0)
            last = T.alloc_var("int32", init=bounds[b + 1] if packed else C)
            s = T.alloc_local((PER,), "float32")
            added = T.alloc_local((AHEAD, PER), "float32")
            decay = T.alloc_local((AHEAD,), "float32")
            keep = T.alloc_local((AHEAD,), "int32")
            for i in k.parallel(THREADS):
                for e in T.unroll(PER):
                    s[e] = 0.0
                    if T.Not(T.isnullptr(initial_states.data)):
                        if m0 + e * THREADS + i < M:
                            s[e] = initial_states[b, h, m0 + e * THREADS + i]
                for run in T.serial(T.ceildiv(last - first, AHEAD)):
                    for j in T.unroll(AHEAD):
                        c = T.min(first + run * AHEAD + j, last - 1)
                        decay[j] = T.exp(dA_chunk[row, h, c])
                        keep[j] = 1 if packed else T.if_then_else(bounds[row, c] > 0, 0, 1)
                        for e in T.unroll(PER):
                            if m0 + e * THREADS + i < M:
                                added[j, e] = states[row, c, h, m0 + e * THREADS + i]
                    for j in T.unroll(AHEAD):
                        if first + run * AHEAD + j < last:
                            for e in T.unroll(PER):
                                if m0 + e * THREADS + i < M:
                                    prev_states[row, first + run * AHEAD + j, h, m0 + e * THREADS + i] = s[e]
                                    if packed:
                                        s[e] = decay[j] * s[e] + added[j, e]
                                    else:
                                        s[e] = T.if_then_else(keep[j] > 0, decay[j] * s[e] + added[j, e], added[j, e])
                for e in T.unroll(PER):
                    if m0 + e * THREADS + i < M:
                        final_states[b, h, m0 + e * THREADS + i] = s[e]
                        if packed:
                            # The scan reads what is before every chunk, also of those that are not there.
                            for c in T.serial(T.if_then_else(b == B - 1, C - last, 0)):
                                prev_states[0, last + c, h, m0 + e * THREADS + i] = 0.0

    return k.complete(seq_passing)
