"""Inputs of the decode step and its features, for the CPU and the GPU tests."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from ssd_cases import generator
from torch import Tensor

#: Relative error in norm of one rounding to nearest.
STORED = {torch.float32: 1e-7, torch.bfloat16: 2**-8, torch.float16: 2**-11}

#: Features used together; "softplus" is the constructor's.
FEATURES = [
    ("D",),
    ("z",),
    ("dt_bias",),
    ("softplus",),
    ("state_batch_indices",),
    ("D", "z"),
    ("dt_bias", "softplus"),
    ("D", "z", "dt_bias", "softplus", "state_batch_indices"),
]


@dataclass
class Decode:
    """The tensors of one call."""

    A: Tensor
    dt: Tensor
    x: Tensor
    B_in: Tensor
    C_in: Tensor
    state: Tensor
    keywords: dict[str, Tensor] = field(default_factory=dict)

    @property
    def six(self) -> tuple[Tensor, ...]:
        return self.A, self.dt, self.x, self.B_in, self.C_in, self.state

    @property
    def inputs(self) -> list[Tensor]:
        """What no call may write."""
        return [*self.six[:5], *(t for name, t in self.keywords.items() if name != "out")]

    def changed(self, **tensors: Tensor) -> Decode:
        return replace(self, **tensors, keywords=dict(self.keywords))


def decode(
    batch: int = 3,
    heads: int = 8,
    head_dim: int = 16,
    d_state: int = 32,
    groups: int = 2,
    dtype: torch.dtype = torch.bfloat16,
    tied: bool = False,
    device: str = "cpu",
    seed: int = 0,
) -> Decode:
    """The spec's six tensors; ``tied``: A and dt are one value a head, expanded."""
    g = generator(seed, device)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, device=device)

    if tied:
        A = -normal(heads).abs().view(-1, 1, 1).expand(heads, head_dim, d_state)
        dt = normal(batch, heads).abs().unsqueeze(-1).expand(batch, heads, head_dim)
    else:
        A, dt = -normal(heads, head_dim, d_state).abs(), normal(batch, heads, head_dim).abs()
    x, B, C = normal(batch, heads, head_dim), normal(batch, groups, d_state), normal(batch, groups, d_state)
    return Decode(A, dt, x.to(dtype), B.to(dtype), C.to(dtype), normal(batch, heads, head_dim, d_state))


def features(case: Decode, names: tuple[str, ...]) -> Decode:
    """The case with these features: D and dt_bias as its A, full or one value a head; slots in reverse in a pool of twice the size."""
    batch, heads, head_dim = case.x.shape
    device = case.x.device
    g = generator(1, str(device))
    made: dict[str, Any] = {"z": torch.randn(case.x.shape, generator=g, device=device).to(case.x.dtype)}
    for name in ("D", "dt_bias"):
        full = torch.randn(heads, head_dim, generator=g, device=device)
        made[name] = full[:, :1].expand(heads, head_dim) if case.A.stride()[1:] == (0, 0) else full
    made["state_batch_indices"] = 2 * torch.arange(batch, device=device, dtype=torch.int32).flip(0)
    state = case.state
    if "state_batch_indices" in names:
        state = torch.randn(2 * batch, *case.state.shape[1:], generator=g, device=device).to(state.dtype)
        state[made["state_batch_indices"].long()] = case.state
    return replace(case, state=state, keywords={**case.keywords, **{name: made[name] for name in names if name in made}})
