"""What every op means, token by token in float64. All op tests compare with this; nothing here is chunked or parallel in time.

A chunked copy would share the ops' mistakes. Where a definition itself speaks of chunks (a stage op), the sum over a chunk
is still made one token after the other. Works on any device; results are float64.
"""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor


def processed_dt(dt: Tensor, dt_bias: Tensor | None, softplus: bool, dt_min: float = 0.0, dt_max: float = math.inf) -> Tensor:
    """clamp(softplus?(dt + dt_bias), dt_min, dt_max)."""
    v = dt.double()
    if dt_bias is not None:
        v = v + dt_bias.double()
    if softplus:
        v = torch.logaddexp(v, torch.zeros((), dtype=v.dtype, device=v.device))
    return v.clamp(dt_min, dt_max)


def per_head(t: Tensor, heads: int) -> Tensor:
    """(batch, n_groups, d_state) -> (batch, n_heads, d_state) float64: head h reads group h // (heads // groups)."""
    index = torch.arange(heads, device=t.device) // (heads // t.shape[1])
    return t.double()[:, index]


def step(state: Tensor, A: Tensor, dt: Tensor, x: Tensor, B: Tensor, C: Tensor) -> tuple[Tensor, Tensor]:
    """One token. state (B,H,P,N) float64, A broadcasts to (H,P,N), dt to (B,H,P), x (B,H,P), B and C (B,G,N) -> y, new state."""
    heads = x.shape[1]
    dt4 = dt.double().unsqueeze(-1)
    decay = torch.where(dt4 == 0, 1.0, torch.exp(dt4 * A.double()))  # dt = 0: no time passes, whatever the rate
    state = decay * state + (dt4.squeeze(-1) * x.double()).unsqueeze(-1) * per_head(B, heads).unsqueeze(2)
    return (state * per_head(C, heads).unsqueeze(2)).sum(-1), state


def decode(
    A: Tensor,
    dt: Tensor,
    x: Tensor,
    B: Tensor,
    C: Tensor,
    state: Tensor,
    *,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    state_batch_indices: Tensor | None = None,
    dt_softplus: bool = False,
) -> tuple[Tensor, Tensor]:
    """The decode op, row by row: y (B,H,P), and what becomes of state, (slots,H,P,N). Values per head may lack their last dimensions."""
    batch, heads, head_dim = x.shape
    A = A.view(heads, 1, 1) if A.dim() == 1 else A
    dt, D, dt_bias = (t.unsqueeze(-1) if t is not None and t.dim() == rank else t for t, rank in ((dt, 2), (D, 1), (dt_bias, 1)))
    v = processed_dt(dt, dt_bias, dt_softplus, dt_min=-math.inf).expand(batch, heads, head_dim)
    new, y = state.double().clone(), torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for b in range(batch):
        slot = b if state_batch_indices is None else int(state_batch_indices[b])
        if not 0 <= slot < len(state):
            continue
        row = slice(b, b + 1)
        y[row], new[slot : slot + 1] = step(new[slot : slot + 1], A, v[row], x[row], B[row], C[row])
        if D is not None:
            y[b] += D.double() * x[b].double()
        if z is not None:
            y[b] *= z[b].double() / (1 + torch.exp(-z[b].double()))
    return y, new


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
    dt_softplus: bool = True,
    dt_limit: tuple[float, float] = (0.0, math.inf),
) -> tuple[Tensor, Tensor]:
    """The full forward: y (B,S,H,P), final_states (B,H,P,N), or (n_seqs,H,P,N) with cu_seqlens."""
    batch, seqlen, heads, head_dim = x.shape
    v = processed_dt(dt, dt_bias, dt_softplus, *dt_limit).unsqueeze(-1)
    rate = A.view(heads, 1, 1)
    chains = batch if cu_seqlens is None else cu_seqlens.numel() - 1
    final = torch.zeros((chains, heads, head_dim, B.shape[-1]), dtype=torch.float64, device=x.device)
    if initial_states is not None:
        final += initial_states.double()
    y = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    # Which tokens follow one another: (row, first token, last token + 1, row of the states).
    if cu_seqlens is None:
        spans = [(slice(None), 0, seqlen, slice(None))]
    else:
        ends = cu_seqlens.tolist()
        spans = [(slice(None), first, last, slice(n, n + 1)) for n, (first, last) in enumerate(itertools.pairwise(ends))]
    for row, first, last, chain in spans:
        state = final[chain]
        for t in range(first, last):
            if seq_idx is not None and t > 0:
                state = torch.where((seq_idx[:, t] == seq_idx[:, t - 1]).view(-1, 1, 1, 1), state, 0.0)
            y[row, t], state = step(state, rate, v[row, t], x[row, t], B[row, t], C[row, t])
            if D is not None:
                y[row, t] += (D if D.dim() == 2 else D.unsqueeze(-1)).double() * x[row, t].double()
            if z is not None:
                y[row, t] *= torch.nn.functional.silu(z[row, t].double())
        final[chain] = state
    return y, final


def chunk_cumsum(
    dt: Tensor,
    A: Tensor,
    dt_bias: Tensor | None,
    chunk_len: int,
    dt_softplus: bool = False,
    dt_min: float = 0.0,
    dt_max: float = math.inf,
) -> tuple[Tensor, Tensor]:
    """dt_out, dA_cumsum (B,H,C,Q): past the sequence's end dt_out is 0 and dA_cumsum stays as it is."""
    batch, seqlen, heads = dt.shape
    chunks = -(-seqlen // chunk_len)
    v = processed_dt(dt, dt_bias, dt_softplus, dt_min, dt_max)
    dt_out = torch.zeros((batch, heads, chunks, chunk_len), dtype=torch.float64, device=dt.device)
    dA_cumsum = torch.zeros_like(dt_out)
    for t in range(chunks * chunk_len):
        c, row = divmod(t, chunk_len)
        if row == 0:
            total = torch.zeros((batch, heads), dtype=torch.float64, device=dt.device)
        if t < seqlen:
            dt_out[:, :, c, row] = v[:, t]
            total = total + torch.where(v[:, t] == 0, 0.0, v[:, t] * A.double())
        dA_cumsum[:, :, c, row] = total
    return dt_out, dA_cumsum


def chunk_coupling(C_mat: Tensor, B_mat: Tensor, chunk_len: int) -> Tensor:
    """cb (B,C,G,Q,Q), a row at a time."""
    batch, seqlen, groups, _ = C_mat.shape
    cb = torch.zeros((batch, -(-seqlen // chunk_len), groups, chunk_len, chunk_len), dtype=torch.float64, device=C_mat.device)
    for t in range(seqlen):
        c, row = divmod(t, chunk_len)
        earlier = B_mat[:, t - row : t + 1].double()
        cb[:, c, :, row, : row + 1] = (C_mat[:, t, None].double() * earlier).sum(-1).transpose(1, 2)
    return cb


def chunk_state(x: Tensor, Bmat: Tensor, dt: Tensor, dA_cumsum: Tensor, seq_idx: Tensor | None = None) -> Tensor:
    """states (B,C,H,P,N): within each chunk, the recurrence from a zero state. Past the end there are no tokens."""
    batch, seqlen, heads, head_dim = x.shape
    chunks, chunk_len = dt.shape[2:]
    states = torch.zeros((batch, chunks, heads, head_dim, Bmat.shape[-1]), dtype=torch.float64, device=x.device)
    for c in range(chunks):
        last = min((c + 1) * chunk_len, seqlen) - 1
        state = states[:, c].clone()
        for t in range(c * chunk_len, last + 1):
            row = t - c * chunk_len
            if row > 0:
                state = state * torch.exp(dA_cumsum[:, :, c, row].double() - dA_cumsum[:, :, c, row - 1].double())[..., None, None]
            gain = dt[:, :, c, row].double()[..., None, None]
            new = gain * x[:, t].double().unsqueeze(-1) * per_head(Bmat[:, t], heads).unsqueeze(2)
            if seq_idx is not None:
                counts = (seq_idx[:, last] >= 0) & (seq_idx[:, t] == seq_idx[:, last])
                new = torch.where(counts.view(-1, 1, 1, 1), new, 0.0)
            state = state + new
        states[:, c] = state
    return states


def state_passing(states: Tensor, dA_chunk_cumsum: Tensor, initial_states: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """prev_states (B,C,H,M), final_states (B,H,M)."""
    state = torch.zeros_like(states[:, :1].sum(1), dtype=torch.float64) if initial_states is None else initial_states.double()
    prev_states = torch.empty(states.shape, dtype=torch.float64, device=states.device)
    for c in range(states.shape[1]):
        prev_states[:, c] = state
        state = torch.exp(dA_chunk_cumsum[:, :, c].double()).unsqueeze(-1) * state + states[:, c].double()
    return prev_states, state


def chunk_scan(x: Tensor, cb: Tensor, dA_cumsum: Tensor, C: Tensor, prev_states: Tensor, dt: Tensor) -> Tensor:
    """y (B,S,H,P), a token at a time, by the op's formula."""
    heads = x.shape[2]
    chunk_len = cb.shape[-1]
    group = torch.arange(heads, device=x.device) // (heads // C.shape[2])
    y = torch.empty(x.shape, dtype=torch.float64, device=x.device)
    for t in range(x.shape[1]):
        c, row = divmod(t, chunk_len)
        dA = dA_cumsum[:, :, c, : row + 1].double()  # (B, H, row + 1)
        history = (prev_states[:, c].double() * per_head(C[:, t], heads).unsqueeze(2)).sum(-1)
        weights = cb[:, c, group, row, : row + 1].double() * torch.exp(dA[..., -1:] - dA) * dt[:, :, c, : row + 1].double()
        own = torch.einsum("bhs,bshp->bhp", weights, x[:, t - row : t + 1].double())
        y[:, t] = torch.exp(dA[..., -1]).unsqueeze(-1) * history + own
    return y
