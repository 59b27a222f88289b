"""Calls of the full forward with its keyword features, for the CPU and the GPU tests."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from ssd_cases import Case, Inputs, generator
from torch import Tensor


def gates(case: Case, dtype: torch.dtype, device: str = "cpu", *, wide_skip: bool = False) -> dict[str, Tensor]:
    """D (per head, or per head and column) and z."""
    g = generator(7, device)
    z = torch.randn((case.B, case.S, case.H, case.P), generator=g, device=device).to(dtype)
    shape = (case.H, case.P) if wide_skip else (case.H,)
    return {"D": torch.randn(shape, generator=g, device=device), "z": z}


def pack(lengths: list[int], device: str = "cpu") -> Tensor:
    """cu_seqlens of sequences of these lengths."""
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)


def states(case: Case, n_seqs: int, device: str = "cpu") -> Tensor:
    """Initial states of a pack."""
    return torch.randn((n_seqs, case.H, case.P, case.N), generator=generator(8, device), device=device)


def indices(rows: list[list[int]], device: str = "cpu") -> Tensor:
    """seq_idx of rows that hold sequences of these lengths, numbered so that neighbours differ and numbers come back."""
    return torch.tensor([[n % 3 for n, length in enumerate(row) for _ in range(length)] for row in rows], dtype=torch.int32, device=device)


def alone(given: Inputs, first: int, last: int, initial: Tensor | None, **features: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of one sequence of a row or a pack, by itself."""
    cut = slice(first, last)
    if "z" in features:
        features = {**features, "z": features["z"][:, cut]}
    args = (given.x[:, cut], given.dt[:, cut], given.A, given.B[:, cut], given.C[:, cut], given.dt_bias, initial)
    return args, features


#: Lengths of packed sequences against a chunk of 64: whole chunks, less, more, one token, none, many in a chunk.
PACKS = [[300], [64, 128], [100, 1, 0, 63, 65, 0], [0, 0, 200], [1] * 70, [7, 0, 250, 64, 3, 192, 33]]
