"""Inputs of the op tests, drawn at random with realistic spread, and how results are compared."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks import reference

#: Relative error in norm that rounding alone explains. float32: sums of a few hundred terms, and decays from prefix sums of
#: a few tens. The 16-bit ones: the products' operands rounded once to that dtype (2**-9 and 2**-12 at most), on tensor cores.
TOLERANCE = {torch.bfloat16: 3e-3, torch.float16: 4e-4, torch.float32: 3e-6}
#: A float32 prefix sum of 256 to 512 is off by up to 1.5e-5 (half an ulp), and so is each decay made from it.
LONG_SUM_TOLERANCE = 2e-5
#: The full forward's error may be this many times that of rounding the products' operands once, and nothing else.
ROUNDING = 1.2


@dataclass(frozen=True)
class Case:
    """Sizes of a call, with the words of the design: batch, seqlen, heads, head dim, state dim, groups, chunk length."""

    B: int
    S: int
    H: int
    P: int
    N: int
    G: int
    Q: int

    def __str__(self) -> str:
        return f"{self.B}x{self.S}x{self.H}-P{self.P}-N{self.N}-G{self.G}-Q{self.Q}"

    @property
    def C(self) -> int:
        return -(-self.S // self.Q)


@dataclass
class Inputs:
    """The tensors of a full forward."""

    x: Tensor
    dt: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    dt_bias: Tensor
    initial_states: Tensor

    @property
    def five(self) -> tuple[Tensor, ...]:
        return self.x, self.dt, self.A, self.B, self.C

    @property
    def all(self) -> tuple[Tensor, ...]:
        return (*self.five, self.dt_bias, self.initial_states)


def generator(seed: int, device: str = "cpu") -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


def inputs(case: Case, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0) -> Inputs:
    """As a trained Mamba-2 layer sees them: rates from -16 to -1, steps around 1e-3 to 1e-1 spread by the token, unit x, B, C."""
    g = generator(seed, device)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, device=device)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=g, device=device)

    step = torch.exp(uniform(case.H) * 4.6 - 6.9)  # 1e-3 to 1e-1, as dt_bias is initialised
    return Inputs(
        x=normal(case.B, case.S, case.H, case.P).to(dtype),
        dt=normal(case.B, case.S, case.H),
        A=-(1 + 15 * uniform(case.H)),
        B=normal(case.B, case.S, case.G, case.N).to(dtype),
        C=normal(case.B, case.S, case.G, case.N).to(dtype),
        dt_bias=step + torch.log(-torch.expm1(-step)),
        initial_states=normal(case.B, case.H, case.P, case.N),
    )


#: Rate and size of a step at token 5 that forgets everything before it: an infinite rate, or a finite one for very long.
FORGETTING = [(-math.inf, 1.0), (-0.1, 1e7)]


def forgetting(given: Inputs, rate: float, first: float) -> tuple[Tensor, Tensor, Tensor]:
    """x, dt and A with such a step of ``first``. Behind it no time passes; a long one adds nothing itself, or it would be all there is,
    and from token 8 on time passes again."""
    dt = torch.zeros_like(given.dt)
    dt[:, 5] = first
    if first > 1:
        dt[:, 8:] = 1.0
    return torch.where(dt.unsqueeze(-1) > 1, 0.0, given.x), dt, torch.full_like(given.A, rate)


def decays(case: Case, device: str = "cpu", seed: int = 1) -> tuple[Tensor, Tensor]:
    """dt (B,H,C,Q) and dA_cumsum as SSDChunkCumsum makes them, for tests of the later stages: 0 and flat past the end."""
    g = generator(seed, device)
    dt = torch.exp(torch.rand((case.B, case.H, case.C, case.Q), generator=g, device=device) * 4.6 - 6.9)
    rows = torch.arange(case.C * case.Q, device=device).view(case.C, case.Q)
    dt = torch.where(rows < case.S, dt, 0.0)
    rate = -(1 + 15 * torch.rand((case.H, 1, 1), generator=g, device=device))
    return dt, torch.cumsum((dt * rate).double(), -1).float()


def error(got: Tensor, expected: Tensor) -> float:
    """Relative error in norm."""
    return float((got.double() - expected).norm() / expected.norm().clamp(min=1e-300))


def close(got: Tensor, expected: Tensor, tolerance: float, what: str = "result") -> None:
    """Right in norm as a whole, and nowhere wrong: no element is off by more than rounding explains of the largest ones around it.

    The second bound sees what a norm over millions of elements cannot, such as one wrong row. It allows 20 times the first: where a row
    is a small difference of large terms, rounding those terms alone makes 10 times of it in a few of 3e7 elements.
    """
    assert got.shape == expected.shape, f"{what}: shape {tuple(got.shape)}, expected {tuple(expected.shape)}"
    if expected.numel() == 0:
        return
    assert torch.isfinite(got).all(), f"{what}: {int((~torch.isfinite(got)).sum())} of {got.numel()} elements are not finite"
    norm = error(got, expected)
    assert norm <= tolerance, f"{what}: relative error in norm {norm:.2e}, tolerance {tolerance:.0e}"
    worst = (got.double() - expected).abs()
    scale = expected.abs().amax(dim=-1, keepdim=True).clamp(min=max(float(expected.norm()) / expected.numel() ** 0.5, 1e-300))
    ratio = float((worst / scale).max())
    assert ratio <= 20 * tolerance, f"{what}: an element is off by {ratio:.2e} of its row, tolerance {20 * tolerance:.0e}"


def over_rounding(given: Inputs, y: Tensor, final_states: Tensor) -> tuple[float, float]:
    """Errors of a full forward from states of 0 over those of the chunked sum in float64 with nothing but the products' operands rounded
    to x's dtype."""
    v, zero = reference.softplus(given.dt, given.dt_bias), torch.zeros_like(given.initial_states)
    exact, forced = (reference.forward(given.x, v, given.A, given.B, given.C, zero, rounded) for rounded in (None, given.x.dtype))
    y_ratio, state_ratio = (error(got, true) / error(alone, true) for got, alone, true in zip((y, final_states), forced, exact))
    return y_ratio, state_ratio
