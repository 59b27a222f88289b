"""The state that each chunk alone would end in, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from tileops.reference._common import chunk_blocks, chunked, decay


def chunk_state(x: Tensor, Bmat: Tensor, dt: Tensor, dA_cumsum: Tensor, seq_idx: Tensor | None = None) -> Tensor:
    """Tensors as ``SSDChunkStateFwdOp.forward``: states (batch, num_chunks, n_heads, d_head, d_state) float32."""
    batch, seqlen, heads, head_dim = x.shape
    groups, d_state = Bmat.shape[2:]
    chunks, chunk_len = dt.shape[2:]
    states = torch.empty((batch, chunks, heads, head_dim, d_state), dtype=torch.float32, device=x.device)
    tokens = torch.arange(chunks * chunk_len, device=x.device).view(chunks, chunk_len)
    real = tokens < seqlen
    # The last token of each chunk. Past the end dA_cumsum stays as it is, so its value there is the chunk's last.
    final = tokens == torch.clamp(tokens[:, -1:], max=seqlen - 1)
    for first, last in chunk_blocks(chunks, batch * heads * chunk_len * (head_dim + d_state)):
        # keep: (batch, chunks, chunk_len), the tokens that reach the chunk's end
        keep = real[first:last].expand(batch, -1, -1)
        if seq_idx is not None:
            rows = seq_idx[:, first * chunk_len : last * chunk_len]
            index = torch.full((batch, (last - first) * chunk_len), -1, dtype=seq_idx.dtype, device=x.device)
            index[:, : rows.shape[1]] = rows
            ends = torch.arange(first + 1, last + 1, device=x.device) * chunk_len - 1
            end = seq_idx[:, ends.clamp(max=seqlen - 1)].unsqueeze(-1)  # of the chunk's last token
            keep = keep & (end >= 0) & (index.view(batch, last - first, chunk_len) == end)
        kept = keep.unsqueeze(1)
        weight = decay(dA_cumsum[:, :, first:last, -1:], dA_cumsum[:, :, first:last], kept, final[first:last])
        weight = torch.where(kept, weight * dt[:, :, first:last].float(), 0.0)  # (batch, heads, chunks, chunk_len)
        rows_kept = keep[..., None, None]
        x_block = torch.where(rows_kept, chunked(x, first, last, chunk_len), 0.0)
        b_block = torch.where(rows_kept, chunked(Bmat, first, last, chunk_len), 0.0)
        xw = x_block * weight.permute(0, 2, 3, 1).unsqueeze(-1)
        # One product per group: its heads' rows side by side, (heads per group * d_head, chunk_len) @ (chunk_len, d_state).
        left = xw.view(batch, last - first, chunk_len, groups, heads // groups * head_dim).permute(0, 1, 3, 4, 2)
        right = b_block.permute(0, 1, 3, 2, 4)
        states[:, first:last] = torch.matmul(left, right).view(batch, last - first, heads, head_dim, d_state)
    return states
