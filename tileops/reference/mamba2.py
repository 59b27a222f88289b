"""The full Mamba-2 forward in plain PyTorch: the five stages in their order, nothing rounded between them, for each sequence."""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

from tileops.reference.chunk_coupling import chunk_coupling
from tileops.reference.chunk_cumsum import FADED_TERM, chunk_cumsum
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
    D: Tensor | None = None,
    z: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    out: Tensor | None = None,
    chunk_size: int = 256,
    dt_softplus: bool = True,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Tensors as ``Mamba2FwdOp.forward``: y (batch, seqlen, n_heads, d_head), final_states (batch, n_heads, d_head, d_state).

    Sequences of one row are taken apart and run one by one. cu_seqlens and seq_idx are read on the host.
    """
    batch, seqlen = x.shape[:2]

    def run(rows: slice, tokens: slice, initial: Tensor | None) -> tuple[Tensor, Tensor]:
        """One stretch of tokens of some rows."""
        at = rows, tokens
        return _sequences(x[at], dt[at], A, B[at], C[at], dt_bias, initial, chunk_size, dt_softplus, dt_limit)

    every = slice(None)
    outside = None
    if cu_seqlens is not None:
        y = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        final = torch.zeros((cu_seqlens.shape[0] - 1, *x.shape[2:], B.shape[-1]), dtype=torch.float32, device=x.device)
        outside = torch.ones((1, seqlen, 1, 1), dtype=torch.bool, device=x.device)
        ends = cu_seqlens.tolist()
        for n, (first, last) in enumerate(itertools.pairwise(ends)):
            first = min(max(first, 0), seqlen)
            tokens = slice(first, max(min(last, seqlen), first))
            y[:, tokens], final[n : n + 1] = run(every, tokens, None if initial_states is None else initial_states[n : n + 1])
            outside[:, tokens] = False
    elif seq_idx is not None and seqlen > 0:
        y = torch.empty(x.shape, dtype=torch.float32, device=x.device)
        final = torch.empty((batch, *x.shape[2:], B.shape[-1]), dtype=torch.float32, device=x.device)
        for b in range(batch):
            row = slice(b, b + 1)
            begins = [0, *(1 + torch.nonzero(seq_idx[b, 1:] != seq_idx[b, :-1]).flatten()).tolist(), seqlen]
            for first, last in itertools.pairwise(begins):
                initial = initial_states[row] if initial_states is not None and first == 0 else None
                y[row, first:last], final[row] = run(row, slice(first, last), initial)
    else:
        y, final = run(every, every, initial_states)
    if D is not None:
        y = y + (D if D.dim() == 2 else D.unsqueeze(-1)) * x.float()
    if z is not None:
        y = y * (z.float() * torch.sigmoid(z.float()))
    if outside is not None:
        y = torch.where(outside, 0.0, y)
    if out is not None:
        return out.copy_(y), final
    return y.to(out_dtype or torch.float32), final


def _sequences(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    dt_bias: Tensor | None,
    initial_states: Tensor | None,
    chunk_size: int,
    dt_softplus: bool,
    dt_limit: tuple[float, float],
) -> tuple[Tensor, Tensor]:
    """Rows of one sequence each."""
    low, high = dt_limit
    dt_out, dA_cumsum = chunk_cumsum(
        dt, A, dt_bias, chunk_len=chunk_size, dt_softplus=dt_softplus, dt_min=low, dt_max=high, lowest=FADED_TERM
    )
    cb = chunk_coupling(C, B, chunk_len=chunk_size, out_dtype=torch.float32)
    states = chunk_state(x, B, dt_out, dA_cumsum)
    initial = None if initial_states is None else initial_states.flatten(-2)
    prev_states, final_states = state_passing(states.flatten(-2), dA_cumsum[..., -1], initial)
    y = chunk_scan(x, cb, dA_cumsum, C, prev_states.view(states.shape), dt_out)
    return y, final_states.view(x.shape[0], *x.shape[2:], B.shape[-1])
