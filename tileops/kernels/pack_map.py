"""Where each token of a pack lies in whole chunks, and which token each row of those chunks holds.

cu_seqlens (M), starts (M) int32, as pack_starts makes it
-> rows (S) int32: the row of a token, -1 for a token of no sequence;
   tokens (R) int32, R = C * Q: the token of a row; in a chunk of no sequence -1; behind the end of a sequence -2 - l, where l
   is the chunk's last row that holds a token.
Every value is in range, whatever cu_seqlens holds. R >= S; a thread takes one row and one token.
"""

from typing import Any

import tilelang.language as T

from tileops.kernels import _common as k

PASS_CONFIGS = k.PASS_CONFIGS

THREADS = 128


def program() -> Any:
    M, S, R = k.dims("M S R")

    @T.prim_func
    def pack_map(
        cu_seqlens: T.Tensor((M,), "int32"),
        starts: T.Tensor((M,), "int32"),
        rows: T.Tensor((S,), "int32"),
        tokens: T.Tensor((R,), "int32"),
        Q: T.int32,
    ):
        with k.grid(T.ceildiv(R, THREADS), threads=THREADS) as block:
            for i in k.parallel(THREADS):
                r = T.alloc_var("int32", init=block * THREADS + i)
                c = T.alloc_var("int32", init=T.truncdiv(r, Q))
                # The last sequence that starts at or before the token, and at or before the chunk.
                of_token = T.alloc_var("int32", init=0)
                of_chunk = T.alloc_var("int32", init=0)
                step = T.alloc_var("int32", init=1 << 30)
                for _ in T.serial(31):
                    if of_token < M - 1 - step:
                        if cu_seqlens[of_token + step] <= r:
                            of_token = of_token + step
                    if of_chunk < M - 1 - step:
                        if starts[of_chunk + step] <= c:
                            of_chunk = of_chunk + step
                    step = step >> 1
                if r < S:
                    begin = T.alloc_var("int32", init=T.max(T.min(cu_seqlens[of_token], S), 0))
                    row = T.alloc_var("int32", init=starts[of_token] * Q + r - begin)
                    inside = begin <= r and r < cu_seqlens[of_token + 1] and row < starts[of_token + 1] * Q
                    rows[r] = T.if_then_else(inside, row, -1)
                if r < R:
                    first = T.alloc_var("int32", init=T.max(T.min(cu_seqlens[of_chunk], S), 0))
                    token = T.alloc_var("int32", init=first + (r - starts[of_chunk] * Q))
                    last = T.alloc_var("int32", init=T.max(T.min(cu_seqlens[of_chunk + 1], S), 0) - 1)
                    behind = -2 - T.max(last - token + T.truncmod(r, Q), 0)
                    tokens[r] = T.if_then_else(c < starts[of_chunk + 1], T.if_then_else(token <= last, token, behind), -1)

    return k.complete(pack_map)
