"""prev_states[:, c] = s[c - 1], final_states = s[C - 1],  s[c] = exp(dA_chunk[b,h,c]) * s[c - 1] + states[b,c,h],  s[-1] = initial or 0.

states (B,C,H,M), dA_chunk (B,H,C), initial_states (B,H,M) if has_initial_states, all float32, strided
-> prev_states (B,C,H,M) float32, final_states (B,H,M) float32.
A thread carries one element through the chunks; it reads a run of chunks ahead of the sums, to have loads in flight.
"""

from typing import Any

import tilelang.language as T

from tileops.kernels import _common as k

PASS_CONFIGS = k.PASS_CONFIGS


def schedule(arch: str, **fields: Any) -> dict[str, int]:
    """``per`` elements of a thread, loads ``ahead`` chunks ahead of the sums; registers for ``ctas`` CTAs an SM."""
    return {"threads": 256, "per": 4, "ahead": 2, "ctas": 5}


def candidates(arch: str, **fields: Any) -> list[dict[str, int]]:
    return [{"threads": 128, "ctas": 10}, {"per": 2, "ahead": 4}, {"threads": 512, "ctas": 2}, {"threads": 128, "ahead": 4, "ctas": 8}]


def program(*, has_initial_states: bool, threads: int, per: int, ahead: int, ctas: int) -> Any:
    B, H, C, M = k.dims("B H C M")

    @T.prim_func
    def state_passing(
        states: k.strided("states", (B, C, H, M), "float32"),
        dA_chunk: k.strided("dA_chunk", (B, H, C), "float32", last=True),
        initial_states: k.strided("initial_states", (B, H, M), "float32"),
        prev_states: T.Tensor((B, C, H, M), "float32"),
        final_states: T.Tensor((B, H, M), "float32"),
    ):
        tiles = T.ceildiv(M, per * threads)
        with k.grid(B * H * tiles, threads=threads) as block:
            k.at_least(ctas)
            m0 = T.alloc_var("int32", init=T.truncmod(block, tiles) * (per * threads))
            bh = T.alloc_var("int32", init=T.truncdiv(block, tiles))
            h = T.alloc_var("int32", init=T.truncmod(bh, H))
            b = T.alloc_var("int32", init=T.truncdiv(bh, H))
            added = T.alloc_local((ahead, per), "float32")
            decay = T.alloc_local((ahead,), "float32")
            s = T.alloc_local((per,), "float32")
            for i in k.parallel(threads):
                for e in T.unroll(per):
                    s[e] = 0.0
                    if has_initial_states:
                        if m0 + e * threads + i < M:
                            s[e] = initial_states[b, h, m0 + e * threads + i]
                for run in T.serial(T.truncdiv(C, ahead)):
                    for j in T.unroll(ahead):
                        decay[j] = dA_chunk[b, h, run * ahead + j]
                        for e in T.unroll(per):
                            if m0 + e * threads + i < M:
                                added[j, e] = states[b, run * ahead + j, h, m0 + e * threads + i]
                    for j in T.unroll(ahead):
                        decay[j] = T.exp(decay[j])
                        for e in T.unroll(per):
                            if m0 + e * threads + i < M:
                                prev_states[b, run * ahead + j, h, m0 + e * threads + i] = s[e]
                            s[e] = decay[j] * s[e] + added[j, e]
                for j in T.serial(T.truncmod(C, ahead)):
                    c = T.truncdiv(C, ahead) * ahead + j
                    for e in T.unroll(per):
                        if m0 + e * threads + i < M:
                            prev_states[b, c, h, m0 + e * threads + i] = s[e]
                            s[e] = T.exp(dA_chunk[b, h, c]) * s[e] + states[b, c, h, m0 + e * threads + i]
                for e in T.unroll(per):
                    if m0 + e * threads + i < M:
                        final_states[b, h, m0 + e * threads + i] = s[e]

    return k.complete(state_passing)
