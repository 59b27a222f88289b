"""The recurrence over chunk states, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor


def state_passing(states: Tensor, dA_chunk_cumsum: Tensor, initial_states: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Tensors as ``SSDStatePassingFwdOp.forward``: prev_states (batch, num_chunks, n_heads, d_state), final_states, float32."""
    batch, chunks, heads, d_state = states.shape
    prev_states = torch.empty((batch, chunks, heads, d_state), dtype=torch.float32, device=states.device)
    if initial_states is None:
        state = torch.zeros((batch, heads, d_state), dtype=torch.float32, device=states.device)
    else:
        state = initial_states.clone(memory_format=torch.contiguous_format)  # final_states must not be the caller's tensor
    decays = torch.exp(dA_chunk_cumsum)
    for c in range(chunks):
        prev_states[:, c] = state
        state = decays[:, :, c, None] * state + states[:, c]
    return prev_states, state
