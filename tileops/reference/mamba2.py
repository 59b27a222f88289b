"""The full Mamba-2 forward in plain PyTorch: the five stages in their order, nothing rounded between them."""

from __future__ import annotations

import torch
from torch import Tensor

from tileops.reference.chunk_coupling import chunk_coupling
from tileops.reference.chunk_cumsum import chunk_cumsum
from tileops.reference.chunk_scan import chunk_scan
from tileops.reference.chunk_state import chunk_state
from tileops.reference.state_passing import state_passing


def mamba2(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    *,
    chunk_size: int = 256,
    dt_softplus: bool = True,
) -> tuple[Tensor, Tensor]:
    """Tensors as ``Mamba2FwdOp.forward``: y (batch, seqlen, n_heads, d_head), final_states (batch, n_heads, d_head, d_state)."""
    heads, head_dim = x.shape[2:]
    d_state = B.shape[-1]
    dt_out, dA_cumsum = chunk_cumsum(dt, A, dt_bias, chunk_len=chunk_size, dt_softplus=dt_softplus)
    cb = chunk_coupling(C, B, chunk_len=chunk_size, out_dtype=torch.float32)
    states = chunk_state(x, B, dt_out, dA_cumsum)
    initial = None if initial_states is None else initial_states.flatten(-2)
    prev_states, final_states = state_passing(states.flatten(-2), dA_cumsum[..., -1], initial)
    y = chunk_scan(x, cb, dA_cumsum, C, prev_states.view(states.shape), dt_out)
    return y, final_states.view(x.shape[0], heads, head_dim, d_state)
