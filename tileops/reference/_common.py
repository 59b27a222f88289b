"""What the reference functions share: chunked views of sequence tensors, and decays."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

#: Elements of the largest float32 intermediate that a function makes at once (64 MiB): long sequences go in blocks of chunks.
BLOCK_ELEMENTS = 1 << 24


def num_chunks(seqlen: int, chunk_len: int) -> int:
    """ceil(seqlen / chunk_len)."""
    return -(-seqlen // chunk_len)


def chunk_blocks(chunks: int, elements_per_chunk: int) -> Iterator[tuple[int, int]]:
    """Ranges [first, last) that cover ``chunks`` chunks, each small enough for BLOCK_ELEMENTS."""
    step = max(1, BLOCK_ELEMENTS // max(1, elements_per_chunk))
    for first in range(0, chunks, step):
        yield first, min(first + step, chunks)


def chunked(t: Tensor, first: int, last: int, chunk_len: int) -> Tensor:
    """Chunks [first, last) of a (batch, seqlen, ...) tensor in float32: (batch, last - first, chunk_len, ...), 0 past the end."""
    batch, seqlen = t.shape[:2]
    rows = t[:, first * chunk_len : min(last * chunk_len, seqlen)]
    out = torch.zeros((batch, (last - first) * chunk_len, *t.shape[2:]), dtype=torch.float32, device=t.device)
    out[:, : rows.shape[1]] = rows
    return out.view(batch, last - first, chunk_len, *t.shape[2:])


def decay(later: Tensor, earlier: Tensor, keep: Tensor, same: Tensor) -> Tensor:
    """exp(min(later - earlier, 0)) of two prefix sums where ``keep``, else 0; selected before exp, so that nothing overflows.

    The clamp: a prefix sum can be off by an ulp against its neighbour, which at 1e9 is far above 0. ``same`` marks where
    both are of one token, so that A = -inf gives 1 there and 0 elsewhere, not exp(-inf - -inf).
    """
    difference = torch.where(later == -torch.inf, later, torch.clamp(later - earlier, max=0.0))
    return torch.exp(torch.where(keep, torch.where(same, 0.0, difference), -torch.inf))
