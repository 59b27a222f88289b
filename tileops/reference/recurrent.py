"""One decode step in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor


def recurrent(A: Tensor, dt: Tensor, x: Tensor, B_in: Tensor, C_in: Tensor, state: Tensor) -> Tensor:
    """Tensors as ``SSDRecurrentFwdOp.forward``: y_out (batch, n_heads, d_head) float32; ``state`` is updated in place."""
    per_group = x.shape[1] // B_in.shape[1]
    dt4 = dt.unsqueeze(-1)
    # dt = 0 means that no time passes, at any rate: 0 * -inf must not appear.
    decays = torch.exp(torch.where(dt4 == 0, torch.zeros_like(dt4), dt4 * A))
    b = B_in.float().repeat_interleave(per_group, dim=1).unsqueeze(2)  # (batch, n_heads, 1, d_state)
    c = C_in.float().repeat_interleave(per_group, dim=1).unsqueeze(-1)
    new = decays * state + (dt * x.float()).unsqueeze(-1) * b
    state.copy_(new)
    return torch.matmul(new, c).squeeze(-1)
