"""The ops in float64, in plain torch, for tensors on any device. Imports no implementation: every process judges by it.

``recurrence`` goes token by token and defines what is right. ``forward`` is the same sum taken a chunk at a time, since a GPU
would need minutes for 131072 tokens one by one; ``selfcheck`` compares the two. The stages are their formulas.
"""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.shapes import Spec

_CHUNK = 64


def error(out: Tensor, ref: Tensor) -> float:
    """Relative error in norm; NaN or infinity in ``out`` gives NaN."""
    return ((out.double() - ref).norm() / ref.norm()).item()


def poison(nbytes: int = 1 << 30) -> None:
    """Writes NaN over memory that the allocator will hand out next."""
    torch.cuda.empty_cache()
    block = torch.full((nbytes // 4 + 1,), float("nan"), device="cuda")
    del block


def softplus(dt: Tensor, bias: Tensor) -> Tensor:
    """dt after bias and softplus, in float64."""
    v = dt.double() + bias.double()
    return torch.where(v > 20, v, torch.log1p(torch.exp(v)))


def recurrence(x: Tensor, v: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """y and the final state, token by token. v is dt after bias and softplus."""
    ratio = x.shape[2] // B.shape[2]
    x, v, A, state = x.double(), v.double(), A.double(), state.double().clone()
    B, C = (t.double().repeat_interleave(ratio, 2) for t in (B, C))
    y = torch.empty_like(x)
    for t in range(x.shape[1]):
        state = state * torch.exp(v[:, t] * A)[..., None, None] + (v[:, t, :, None] * x[:, t])[..., None] * B[:, t, :, None, :]
        y[:, t] = (state * C[:, t, :, None, :]).sum(-1)
    return y, state


def forward(
    x: Tensor, v: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor, rounded: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """As ``recurrence``, 64 tokens at a time. With ``rounded``, every operand of a matrix product is rounded to that dtype, and
    nothing else: the error that tensor cores force on the chunked sum."""

    def operand(t: Tensor) -> Tensor:
        return t if rounded is None else t.to(rounded).double()

    ratio, A, state = x.shape[2] // B.shape[2], A.double(), state.double()
    y = torch.empty(x.shape, dtype=torch.float64, device=x.device)
    for start in range(0, x.shape[1], _CHUNK):
        xs, vs, Bs, Cs = (t[:, start : start + _CHUNK].double() for t in (x, v, B, C))
        cum = (vs * A).cumsum(1)  # batch, token, head
        turned = cum.transpose(1, 2)
        decay = torch.exp((turned[..., :, None] - turned[..., None, :]).clamp(max=0)).tril() * vs.transpose(1, 2)[..., None, :]
        own = torch.einsum("blgn,bsgn->bgls", Cs, Bs).repeat_interleave(ratio, 1) * decay
        Bh, Ch = Bs.repeat_interleave(ratio, 2), Cs.repeat_interleave(ratio, 2)
        y[:, start : start + _CHUNK] = torch.einsum("bhls,bshp->blhp", operand(own), xs)
        y[:, start : start + _CHUNK] += torch.einsum("blhn,bhpn->blhp", Ch, operand(state)) * torch.exp(cum)[..., None]
        kept = operand(xs * (vs * torch.exp(cum[:, -1:] - cum))[..., None])
        state = state * torch.exp(cum[:, -1])[..., None, None] + torch.einsum("blhp,blhn->bhpn", kept, Bh)
    return y, state


def chunked(t: Tensor, length: int) -> Tensor:
    """(batch, seqlen, ...) padded with zeros and cut: (batch, chunks, length, ...)."""
    batch, seqlen = t.shape[:2]
    chunks = -(-seqlen // length)
    padded = t.new_zeros(batch, chunks * length, *t.shape[2:])
    padded[:, :seqlen] = t
    return padded.view(batch, chunks, length, *t.shape[2:])


def chunk_cumsum(v: Tensor, A: Tensor, chunk_len: int) -> tuple[Tensor, Tensor]:
    """dt_out and dA_cumsum (batch, heads, chunks, chunk_len) of a v that is already processed."""
    v = chunked(v.double(), chunk_len).permute(0, 3, 1, 2)
    return v, (v * A.double()[None, :, None, None]).cumsum(-1)


def chunk_coupling(C: Tensor, B: Tensor, chunk_len: int) -> Tensor:
    """cb (batch, chunks, groups, chunk_len, chunk_len)."""
    C, B = (chunked(t.double(), chunk_len) for t in (C, B))
    return torch.einsum("bclgn,bcsgn->bcgls", C, B).tril()


def chunk_state(x: Tensor, B: Tensor, dt: Tensor, dA_cumsum: Tensor) -> Tensor:
    """states (batch, chunks, heads, d_head, d_state)."""
    heads, chunk_len = x.shape[2], dt.shape[-1]
    x, B = chunked(x, chunk_len), chunked(B, chunk_len)
    states = []
    for c in range(dt.shape[2]):  # one at a time, to bound the memory
        cum = dA_cumsum[:, :, c].double()
        weight = torch.exp(cum[..., -1:] - cum) * dt[:, :, c].double()
        Bh = B[:, c].double().repeat_interleave(heads // B.shape[3], 2)
        states.append(torch.einsum("blhp,blhn->bhpn", x[:, c].double() * weight.transpose(1, 2)[..., None], Bh))
    return torch.stack(states, 1)


def state_passing(states: Tensor, dA_chunk_cumsum: Tensor, initial_states: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """prev_states (batch, chunks, heads, m) and final_states (batch, heads, m)."""
    running = torch.zeros_like(states[:, 0], dtype=torch.float64) if initial_states is None else initial_states.double()
    before = []
    for c in range(states.shape[1]):
        before.append(running)
        running = torch.exp(dA_chunk_cumsum[:, :, c].double())[..., None] * running + states[:, c].double()
    return torch.stack(before, 1), running


def chunk_scan(x: Tensor, cb: Tensor, dA_cumsum: Tensor, C: Tensor, prev_states: Tensor, dt: Tensor) -> Tensor:
    """y (batch, seqlen, heads, d_head)."""
    seqlen, heads = x.shape[1:3]
    ratio, chunk_len = heads // C.shape[2], dt.shape[-1]
    x, C = chunked(x, chunk_len), chunked(C, chunk_len)
    y = torch.empty(x.shape, dtype=torch.float64, device=x.device)
    for c in range(dt.shape[2]):
        cum = dA_cumsum[:, :, c].double()
        decay = torch.exp((cum[..., :, None] - cum[..., None, :]).clamp(max=0)).tril() * dt[:, :, c, None].double()
        own = cb[:, c].double().repeat_interleave(ratio, 1) * decay
        y[:, c] = torch.einsum("bhls,bshp->blhp", own, x[:, c].double())
        Ch = C[:, c].double().repeat_interleave(ratio, 2)
        y[:, c] += torch.einsum("blhn,bhpn->blhp", Ch, prev_states[:, c].double()) * torch.exp(cum).transpose(1, 2)[..., None]
    return y.flatten(1, 2)[:, :seqlen]


def evaluate(spec: Spec, t: dict[str, Tensor], rounded: torch.dtype | None = None) -> dict[str, Tensor]:
    """The outputs of a row by name; the first is the one that the row's ``error`` is of. ``rounded``: see ``forward``."""
    if spec.op == "Mamba2FwdOp":
        state = torch.zeros(spec.batch, spec.n_heads, spec.d_head, spec.d_state, dtype=torch.float64, device=t["x"].device)
        y, state = forward(t["x"], softplus(t["dt"], t["dt_bias"]), t["A"], t["B"], t["C"], state, rounded)
        return {"y": y, "state": state}
    if spec.op == "SSDRecurrentFwdOp":
        ratio = spec.n_heads // spec.n_groups
        B, C = (t[name].double().repeat_interleave(ratio, 1)[:, :, None] for name in ("B", "C"))
        dt = t["dt"].double()[..., None]
        state = t["state"].double() * torch.exp(dt * t["A"].double()) + dt * t["x"].double()[..., None] * B
        return {"y": (state * C).sum(-1), "state": state}
    if spec.op == "SSDChunkCumsumFwdOp":
        dt_out, dA_cumsum = chunk_cumsum(softplus(t["dt"], t["dt_bias"]), t["A"], spec.chunk_size)
        return {"dA_cumsum": dA_cumsum, "dt": dt_out}
    if spec.op == "SSDChunkCouplingFwdOp":
        return {"cb": chunk_coupling(t["C"], t["B"], spec.chunk_size)}
    if spec.op == "SSDChunkStateFwdOp":
        return {"states": chunk_state(t["x"], t["B"], t["dt"], t["dA_cumsum"])}
    if spec.op == "SSDStatePassingFwdOp":
        prev_states, final_states = state_passing(t["states"], t["dA_chunk_cumsum"])
        return {"prev_states": prev_states, "final_states": final_states}
    if spec.op == "SSDChunkScanFwdOp":
        return {"y": chunk_scan(t["x"], t["cb"], t["dA_cumsum"], t["C"], t["prev_states"], t["dt"])}
    raise ValueError(f"no reference for {spec.op!r}")


def selfcheck(device: str) -> float:
    """The larger relative error of ``forward`` against ``recurrence`` (y, state) on a small case: rounding of float64."""
    generator = torch.Generator(device).manual_seed(0)
    x, B, C, dt, bias, state = (
        torch.randn(*shape, device=device, generator=generator)
        for shape in [(2, 150, 4, 16), (2, 150, 2, 32), (2, 150, 2, 32), (2, 150, 4), (4,), (2, 4, 16, 32)]
    )
    A = -torch.rand(4, device=device, generator=generator) * 15 - 1
    v = softplus(dt - 2, bias / 2)
    return max(error(out, ref) for out, ref in zip(forward(x, v, A, B, C, state), recurrence(x, v, A, B, C, state)))
