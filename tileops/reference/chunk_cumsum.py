"""dt -> processed dt and the chunk-local prefix sum of dt * A, in plain PyTorch."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tileops.reference._common import num_chunks

#: Above this, softplus(v) = v to float32 precision; log1p(exp(v)) would overflow at 89.
SOFTPLUS_BYPASS = 20.0

#: A term dt * A below this counts as this, so that every sum is finite: what comes after a term of -inf is still seen in differences.
LOWEST_TERM = -1e30

#: The same in the full forward: exp of it is 0 in float32, so a larger magnitude changes no decay, but would cost the sums behind it
#: their digits.
FADED_TERM = -110.9


def softplus(v: Tensor) -> Tensor:
    """log1p(exp(v)), v itself above 20; relative error below 1e-6 for v in [-80, 20] (log(1 + exp(v)) is 0 below -17)."""
    return torch.where(v > SOFTPLUS_BYPASS, v, torch.log1p(torch.exp(v)))


def chunk_cumsum(
    dt: Tensor,
    A: Tensor,
    dt_bias: Tensor | None = None,
    *,
    chunk_len: int,
    out_dtype: torch.dtype = torch.float32,
    dt_softplus: bool = False,
    dt_min: float = 0.0,
    dt_max: float = math.inf,
    lowest: float = LOWEST_TERM,
) -> tuple[Tensor, Tensor]:
    """Tensors as ``SSDChunkCumsumFwdOp.forward``: dt_out (batch, n_heads, num_chunks, chunk_len), dA_cumsum likewise in float32."""
    batch, seqlen, heads = dt.shape
    chunks = num_chunks(seqlen, chunk_len)
    v = dt if dt_bias is None else dt + dt_bias
    if dt_softplus:
        v = softplus(v)
    v = torch.clamp(v, dt_min, dt_max)
    # dt = 0 means that no time passes, at any rate: 0 * -inf must not appear.
    dA = torch.where(v == 0, torch.zeros_like(v), torch.clamp(v * A, min=lowest))
    padded = torch.zeros((2, batch, chunks * chunk_len, heads), dtype=torch.float32, device=dt.device)
    padded[0, :, :seqlen], padded[1, :, :seqlen] = v, dA
    by_head = padded.view(2, batch, chunks, chunk_len, heads).permute(0, 1, 4, 2, 3)
    return by_head[0].to(out_dtype).contiguous(), torch.cumsum(by_head[1], dim=-1).contiguous()
