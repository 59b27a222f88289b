"""Each op with the arguments of one small call, for torch.compile and opcheck on any device."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from ssd_cases import Case, inputs
from torch import Tensor

from tileops.mamba import (
    Mamba2FwdOp,
    SSDChunkCouplingFwdOp,
    SSDChunkCumsumFwdOp,
    SSDChunkScanFwdOp,
    SSDChunkStateFwdOp,
    SSDRecurrentFwdOp,
    SSDStatePassingFwdOp,
)

CASE = Case(2, 40, 4, 16, 16, 2, 16)


def calls(device: str, case: Case = CASE) -> dict[str, tuple[Any, tuple[Tensor | None, ...]]]:
    """op name -> (op, arguments); stages get what the stages before them made."""
    given = inputs(case, torch.bfloat16, device=device)
    cumsum, coupling = SSDChunkCumsumFwdOp(case.Q, dt_softplus=True), SSDChunkCouplingFwdOp(case.Q)
    state, passing, scan = SSDChunkStateFwdOp(), SSDStatePassingFwdOp(), SSDChunkScanFwdOp()
    dt, dA = cumsum(given.dt, given.A, given.dt_bias)
    cb = coupling(given.C, given.B)
    states = state(given.x, given.B, dt, dA)
    flat = states.flatten(3)
    prev, _ = passing(flat, dA[..., -1].contiguous())
    rates = given.A.view(-1, 1, 1).expand(case.H, case.P, case.N)
    step = given.dt[:, 0].abs().unsqueeze(-1).expand(case.B, case.H, case.P)
    return {
        "Mamba2FwdOp": (Mamba2FwdOp(case.Q), given.all),
        "SSDChunkCumsumFwdOp": (cumsum, (given.dt, given.A, given.dt_bias)),
        "SSDChunkCouplingFwdOp": (coupling, (given.C, given.B)),
        "SSDChunkStateFwdOp": (state, (given.x, given.B, dt, dA, None)),
        "SSDStatePassingFwdOp": (passing, (flat, dA[..., -1].contiguous(), None)),
        "SSDChunkScanFwdOp": (scan, (given.x, cb, dA, given.C, prev.view_as(states), dt)),
        "SSDRecurrentFwdOp": (SSDRecurrentFwdOp(), (rates, step, given.x[:, 0], given.B[:, 0], given.C[:, 0], given.initial_states)),
    }


NAMES = sorted(calls("cpu"))


def copies(arguments: tuple[Tensor | None, ...]) -> list[Tensor | None]:
    return [None if a is None else a.clone() for a in arguments]


def flat(result: Tensor | tuple[Tensor, ...]) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


def options(op: Any) -> dict[str, Any]:
    """Every argument of the op's constructor."""
    return {name: getattr(op, name) for name in inspect.signature(type(op).__init__).parameters if name != "self"}


def opcheck(op: Any, arguments: tuple[Tensor | None, ...]) -> None:
    torch.library.opcheck(getattr(torch.ops.tileops, op.library_name).default, copies(arguments), options(op))


def compiled_equals_eager(op: Any, arguments: tuple[Tensor | None, ...], backend: str) -> None:
    """The same results, and the same content of every argument afterwards (a decode state is written in place)."""
    torch._dynamo.reset()
    eager, traced = copies(arguments), copies(arguments)
    expected = flat(op(*eager))
    got = flat(torch.compile(op.forward, fullgraph=True, dynamic=True, backend=backend)(*traced))
    for a, b in zip([*expected, *eager], [*got, *traced]):
        assert (a is None and b is None) or torch.equal(a, b)


def compiles_after_the_first_length(device: str, backend: str) -> int:
    """How many more graphs a function around the forward needs for five more sequence lengths."""
    torch._dynamo.reset()
    op = Mamba2FwdOp(16)
    graphs = 0

    def count(graph: Any, example: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return torch._dynamo.lookup_backend(backend)(graph, example)

    traced = torch.compile(lambda *args: op(*args)[0] * 2, fullgraph=True, dynamic=True, backend=count)
    first = 0
    for seqlen in (40, 5, 17, 33, 128, 300):
        given = inputs(Case(2, seqlen, 4, 16, 16, 2, 16), torch.bfloat16, device=device)
        assert torch.equal(traced(*given.all), op(*given.all)[0] * 2)
        first = first or graphs
    assert first
    return graphs - first
