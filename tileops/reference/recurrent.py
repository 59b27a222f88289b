"""One decode step in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus


def recurrent(
    A: Tensor,
    dt: Tensor,
    x: Tensor,
    B_in: Tensor,
    C_in: Tensor,
    state: Tensor,
    *,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    state_batch_indices: Tensor | None = None,
    out: Tensor | None = None,
    dt_softplus: bool = False,
    out_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Tensors as ``SSDRecurrentFwdOp.forward``, A, dt, D and dt_bias in their full shapes; ``state`` is updated in place."""
    y = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    slots: Tensor | slice = slice(None)
    rows: Tensor | slice = slice(None)
    if state_batch_indices is not None:
        rows = (state_batch_indices >= 0) & (state_batch_indices < state.shape[0])  # the others are pads
        slots = state_batch_indices[rows].long()
    v = dt if dt_bias is None else dt + dt_bias
    v = (softplus(v) if dt_softplus else v)[rows]
    xs = x[rows].float()
    per_group = x.shape[1] // B_in.shape[1]
    v4 = v.unsqueeze(-1)
    # dt = 0 means that no time passes, at any rate: 0 * -inf must not appear.
    decays = torch.exp(torch.where(v4 == 0, torch.zeros_like(v4), v4 * A))
    b = B_in[rows].float().repeat_interleave(per_group, dim=1).unsqueeze(2)  # (batch, n_heads, 1, d_state)
    c = C_in[rows].float().repeat_interleave(per_group, dim=1).unsqueeze(-1)
    new = decays * state[slots].float() + (v * xs).unsqueeze(-1) * b
    state[slots] = new.to(state.dtype)
    result = torch.matmul(new, c).squeeze(-1)
    if D is not None:
        result = result + D * xs
    y[rows] = result if z is None else result * silu(z[rows].float())
    return y.to(out_dtype) if out is None else out.copy_(y)
