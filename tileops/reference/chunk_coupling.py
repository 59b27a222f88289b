"""cb[l, s] = C[l] . B[s] within each chunk, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from tileops.reference._common import chunk_blocks, chunked, num_chunks


def chunk_coupling(C_mat: Tensor, B_mat: Tensor, *, chunk_len: int, out_dtype: torch.dtype | None = None) -> Tensor:
    """Tensors as ``SSDChunkCouplingFwdOp.forward``: cb (batch, num_chunks, n_groups, chunk_len, chunk_len), 0 for s > l.

    ``out_dtype`` (default: C_mat's) lets the full forward keep float32.
    """
    batch, seqlen, groups, _ = C_mat.shape
    chunks = num_chunks(seqlen, chunk_len)
    out = torch.empty((batch, chunks, groups, chunk_len, chunk_len), dtype=out_dtype or C_mat.dtype, device=C_mat.device)
    for first, last in chunk_blocks(chunks, batch * groups * chunk_len * chunk_len):
        c = chunked(C_mat, first, last, chunk_len).transpose(2, 3)
        b = chunked(B_mat, first, last, chunk_len).permute(0, 1, 3, 4, 2)
        out[:, first:last] = torch.matmul(c, b).tril()
    return out
