"""The output of each chunk from the state before it and its own tokens, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from tileops.reference._common import chunk_blocks, chunked, decay, num_chunks


def chunk_scan(x: Tensor, cb: Tensor, dA_cumsum: Tensor, C: Tensor, prev_states: Tensor, dt: Tensor) -> Tensor:
    """Tensors as ``SSDChunkScanFwdOp.forward``: y (batch, seqlen, n_heads, d_head) float32."""
    batch, seqlen, heads, head_dim = x.shape
    groups, d_state = C.shape[2:]
    chunk_len = cb.shape[-1]
    per_group = heads // groups
    chunks = num_chunks(seqlen, chunk_len)
    y = torch.empty((batch, seqlen, heads, head_dim), dtype=torch.float32, device=x.device)
    causal = torch.ones((chunk_len, chunk_len), dtype=torch.bool, device=x.device).tril()
    diagonal = torch.eye(chunk_len, dtype=torch.bool, device=x.device)
    for first, last in chunk_blocks(chunks, batch * heads * chunk_len * chunk_len):
        n = last - first
        dA = dA_cumsum[:, :, first:last].transpose(1, 2).reshape(batch, n, groups, per_group, chunk_len)
        dts = dt[:, :, first:last].transpose(1, 2).reshape(batch, n, groups, per_group, 1, chunk_len).float()
        weights = decay(dA.unsqueeze(-1), dA.unsqueeze(-2), causal, diagonal)
        weights = weights * dts * cb[:, first:last].float().unsqueeze(3)
        weights = torch.where(causal, weights, 0.0)  # what lies above the diagonal of cb is not read
        x_block = chunked(x, first, last, chunk_len).view(batch, n, chunk_len, groups, per_group, head_dim).permute(0, 1, 3, 4, 2, 5)
        out = torch.matmul(weights, x_block)  # (batch, n, groups, per_group, chunk_len, head_dim)
        c_block = chunked(C, first, last, chunk_len).transpose(2, 3)  # (batch, n, groups, chunk_len, d_state)
        history = prev_states[:, first:last].reshape(batch, n, groups, per_group * head_dim, d_state)
        carried = torch.matmul(c_block, history.transpose(-1, -2)).view(batch, n, groups, chunk_len, per_group, head_dim)
        out = out + torch.exp(dA).unsqueeze(-1) * carried.transpose(3, 4)
        rows = out.permute(0, 1, 4, 2, 3, 5).reshape(batch, n * chunk_len, heads, head_dim)
        stop = min(last * chunk_len, seqlen)
        y[:, first * chunk_len : stop] = rows[:, : stop - first * chunk_len]
    return y
