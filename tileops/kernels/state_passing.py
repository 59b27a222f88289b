"""prev_states[:, c] = s[c - 1], final_states = s[C - 1],  s[c] = exp(dA_chunk[b,h,c]) * s[c - 1] + states[b,c,h],  s[-1] = initial or 0.

states (B,C,H,M), dA_chunk (B,H,C), initial_states (B,H,M), optional, all float32, strided -> prev_states (B,C,H,M) float32,
final_states (B,H,M) float32. Where ``aligned``, M is a multiple of 4 and every row is 16-byte aligned.
A thread carries some elements through the chunks; it reads a run of chunks ahead of the sums, to have loads in flight.
"""

from typing import Any

import tilelang.language as T

from tileops.kernels import _common as k

PASS_CONFIGS = k.PASS_CONFIGS

OPTIONAL = ("initial_states",)


def schedule(arch: str, **fields: Any) -> dict[str, int]:
    """``per`` pieces of a thread, of 16 bytes where aligned, else 4; loads ``ahead`` chunks ahead of the sums; registers for ``ctas``
    CTAs an SM."""
    if fields["aligned"]:
        # 1 is no limit: sm_90a's compiler takes 96 registers then, which is five CTAs. The other archs, never run, keep four for sure.
        return {"threads": 128, "per": 2, "ahead": 4, "ctas": 1 if arch == "sm_90a" else 4}
    return {"threads": 256, "per": 4, "ahead": 2, "ctas": 5}


def candidates(arch: str, **fields: Any) -> list[dict[str, int]]:
    if fields["aligned"]:
        return [{"per": 1, "ctas": 10}, {"per": 1, "ahead": 8, "ctas": 8}, {"threads": 64, "per": 1, "ctas": 20}]
    return [{"threads": 128, "ctas": 10}, {"per": 2, "ahead": 4}, {"threads": 512, "ctas": 2}, {"threads": 128, "ahead": 4, "ctas": 8}]


def program(*, aligned: bool, threads: int, per: int, ahead: int, ctas: int) -> Any:
    B, H, C, M = k.dims("B H C M")
    width = 4 if aligned else 1

    @T.prim_func
    def state_passing(
        states: k.strided("states", (B, C, H, M), "float32", width),
        dA_chunk: k.strided("dA_chunk", (B, H, C), "float32", last=True),
        initial_states: k.strided("initial_states", (B, H, M), "float32", width),
        prev_states: k.strided("prev_states", (B, C, H, M), "float32", width),
        final_states: k.strided("final_states", (B, H, M), "float32", width),
    ):
        tiles = T.ceildiv(M, per * threads * width)
        with k.grid(B * H * tiles, threads=threads) as block:
            k.at_least(ctas)
            m0 = T.alloc_var("int32", init=T.truncmod(block, tiles) * (per * threads))
            bh = T.alloc_var("int32", init=T.truncdiv(block, tiles))
            h = T.alloc_var("int32", init=T.truncmod(bh, H))
            b = T.alloc_var("int32", init=T.truncdiv(bh, H))
            added = T.alloc_local((ahead, per, width), "float32")
            decay = T.alloc_local((ahead,), "float32")
            s = T.alloc_local((per, width), "float32")
            for i in k.parallel(threads):
                for e in T.unroll(per):
                    for w in T.unroll(width):
                        s[e, w] = 0.0
                    if T.Not(T.isnullptr(initial_states.data)):
                        if (m0 + e * threads + i) * width < M:
                            for w in T.vectorized(width):
                                s[e, w] = initial_states[b, h, (m0 + e * threads + i) * width + w]
                for run in T.serial(T.truncdiv(C, ahead)):
                    for j in T.unroll(ahead):
                        decay[j] = dA_chunk[b, h, run * ahead + j]
                        for e in T.unroll(per):
                            if (m0 + e * threads + i) * width < M:
                                for w in T.vectorized(width):
                                    added[j, e, w] = states[b, run * ahead + j, h, (m0 + e * threads + i) * width + w]
                    # Reads of a CTA's warps, then writes of all: alternating costs DRAM time.
                    k.barrier()
                    for j in T.unroll(ahead):
                        decay[j] = T.exp(decay[j])
                        for e in T.unroll(per):
                            if (m0 + e * threads + i) * width < M:
                                for w in T.vectorized(width):
                                    prev_states[b, run * ahead + j, h, (m0 + e * threads + i) * width + w] = s[e, w]
                            for w in T.unroll(width):
                                s[e, w] = decay[j] * s[e, w] + added[j, e, w]
                for j in T.serial(T.truncmod(C, ahead)):
                    c = T.truncdiv(C, ahead) * ahead + j
                    for e in T.unroll(per):
                        if (m0 + e * threads + i) * width < M:
                            for w in T.vectorized(width):
                                prev_states[b, c, h, (m0 + e * threads + i) * width + w] = s[e, w]
                            for w in T.vectorized(width):
                                added[0, e, w] = states[b, c, h, (m0 + e * threads + i) * width + w]
                            for w in T.unroll(width):
                                s[e, w] = T.exp(dA_chunk[b, h, c]) * s[e, w] + added[0, e, w]
                for e in T.unroll(per):
                    if (m0 + e * threads + i) * width < M:
                        for w in T.vectorized(width):
                            final_states[b, h, (m0 + e * threads + i) * width + w] = s[e, w]

    return k.complete(state_passing)
