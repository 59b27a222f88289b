"""starts[n] = chunks of the sequences before n, where sequence n is tokens cu_seqlens[n] to cu_seqlens[n + 1] in whole chunks of Q.

cu_seqlens (M) int32 -> starts (M) int32. Values are clamped: a sequence lies within S tokens, a negative length is 0, and
starts never exceeds C, whatever cu_seqlens holds. One CTA; a thread counts a run of sequences, then adds the runs before it.
"""

from typing import Any

import tilelang.language as T

from tileops.kernels import _common as k

PASS_CONFIGS = k.PASS_CONFIGS

THREADS = 512


def program() -> Any:
    (M,) = k.dims("M")

    @T.prim_func
    def pack_starts(
        cu_seqlens: T.Tensor((M,), "int32"),
        starts: T.Tensor((M,), "int32"),
        S: T.int32,
        Q: T.int32,
        C: T.int32,
    ):
        with k.grid(1, threads=THREADS):
            totals = k.shared((THREADS,), "int32")
            per = T.alloc_var("int32", init=T.ceildiv(M, THREADS))
            for i in k.parallel(THREADS):
                total = T.alloc_var("int32", init=0)
                for j in T.serial(per):
                    n = i * per + j
                    if n < M - 1:
                        begin = T.max(T.min(cu_seqlens[n], S), 0)
                        end = T.max(T.min(cu_seqlens[n + 1], S), 0)  # before the difference, which could wrap
                        tokens = T.max(end - begin, 0)
                        # Held at C, not wrapped.
                        total = total + T.min(T.truncdiv(tokens, Q) + T.min(T.truncmod(tokens, Q), 1), C - total)
                totals[i] = total
            for i in k.parallel(THREADS):
                before = T.alloc_var("int32", init=0)
                for j in T.serial(i):
                    before = before + T.min(totals[j], C - before)
                if i == 0:
                    starts[0] = 0
                for j in T.serial(per):
                    n = i * per + j
                    if n < M - 1:
                        begin = T.max(T.min(cu_seqlens[n], S), 0)
                        end = T.max(T.min(cu_seqlens[n + 1], S), 0)  # before the difference, which could wrap
                        tokens = T.max(end - begin, 0)
                        before = before + T.min(T.truncdiv(tokens, Q) + T.min(T.truncmod(tokens, Q), 1), C - before)
                        starts[n + 1] = before

    return k.complete(pack_starts)
