"""The launches of the full forward on the stages, as planned for CUDA, each kernel's tile program executed on the CPU.

float16 throughout. What alignment and layout do to the GPU code is not seen here; everything that a plan computes is:
which kernels, over which memory, with which sizes and strides.
"""

from __future__ import annotations

import ctypes
import itertools
import math
from typing import Any

import helpers_tile
import pytest
import torch

pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")

import recurrence
from forward_features import PACKS, alone, gates, indices, pack, states
from ssd_cases import FORGETTING, ROUNDING, TOLERANCE, Case, close, error, forgetting, inputs, over_rounding

from tileops import expr
from tileops.mamba import Mamba2FwdOp
from tileops.ops import _planner

FP16, F32 = torch.float16, torch.float32
TIGHT = TOLERANCE[FP16]
Q = 64


class TilePlanner(_planner.Planner):
    """Launches become calls of the tile programs."""

    def has(self, kernel: str) -> bool:
        return False

    def launch(self, kernel: str, values: Any, tensors: Any, dims: Any, floats: Any = None) -> None:
        if 0 in dims.values():
            return
        function, params = helpers_tile.build(kernel, tuple(sorted(values.items())))
        sizes = {**dims, **(floats or {})}
        for name, slot in tensors.items():
            strides = [0] * 6 if slot is None else [s if n > 1 else 0 for n, s in zip(slot.shape, slot.stride)]
            sizes.update((f"{name}.stride{i}", s) for i, s in enumerate(strides))

        def step(memory: Any, stream: Any) -> None:
            arguments = []
            for p in params:
                if p.kind == "pointer":
                    slot = tensors[p.bind]
                    arguments.append(ctypes.c_void_p(0 if slot is None else memory[slot.base].data_ptr() + slot.offset))
                else:
                    value = sizes[p.bind] if p.kind == "float32" else expr.evaluate(p.bind, sizes)
                    arguments.append(helpers_tile.SCALARS[p.kind](value))
            assert function(*arguments) == 0

        step.kernel = kernel  # type: ignore[attr-defined]
        self.steps.append(step)


def forward(op: Mamba2FwdOp, *args: Any, kernels: list[str] | None = None, **features: Any) -> tuple[Any, Any]:
    """op(...) by the plan for CUDA; outputs and workspace are full of NaN before it runs."""
    names = ("D", "z", "seq_idx", "cu_seqlens", "out")
    tensors = [*args, *[None] * (7 - len(args)), *(features.pop(name, None) for name in names)]
    assert not features
    op.check(*tensors)
    op.check_builtin(*tensors)
    planner = TilePlanner(tensors, torch.device("cpu"))
    outputs = op.plan(planner, *planner.slots)
    given = [t for t in tensors if t is not None]
    for base in planner.densify:
        given[base] = given[base].clone(memory_format=torch.contiguous_format)
    results = [torch.full(slot.shape, math.nan, dtype=slot.dtype) for slot in planner.outputs]
    memory = [*given, *results, torch.full((planner.workspace_bytes,), 255, dtype=torch.uint8)]
    for step in planner.steps:
        if isinstance(step, _planner._Step):  # a fill or a copy, by torch
            step.run([memory[slot.base] for slot in step.slots], 0)
        else:
            step(memory, None)
    if kernels is not None:
        kernels += [getattr(step, "kernel", "fill") for step in planner.steps]
    return tuple(memory[slot.base] for slot in outputs)


def check(got: Any, expected: Any, tolerance: float = TIGHT) -> None:
    close(got[0], expected[0], tolerance, "y")
    close(got[1], expected[1], tolerance, "final_states")


STAGES = ["chunk_cumsum", "chunk_coupling", "chunk_state", "state_passing", "chunk_scan"]


def test_what_is_not_asked_for_launches_nothing() -> None:
    given = inputs(Case(2, 150, 4, 16, 32, 2, Q), FP16)
    launched: list[str] = []
    check(
        forward(Mamba2FwdOp(Q, dt_limit=(0.01, 0.05)), *given.all, kernels=launched), recurrence.mamba2(*given.all, dt_limit=(0.01, 0.05))
    )
    assert launched == STAGES


@pytest.mark.parametrize("case", [Case(1, 300, 4, 64, 128, 2, 64), Case(2, 300, 2, 80, 64, 1, 256)], ids=str)
def test_errors_are_those_of_rounding_the_products_operands(case: Case) -> None:
    given = inputs(case, FP16)
    y, state = over_rounding(given, *forward(Mamba2FwdOp(case.Q), *given.five, given.dt_bias))
    assert y <= ROUNDING and state <= ROUNDING


def test_float16_couplings_beyond_its_range() -> None:
    given = inputs(Case(1, 100, 2, 16, 128, 1, Q), FP16)
    given.B *= 40
    given.C.copy_(given.B)
    assert given.C.float().square().sum(-1).max() > 65504
    check(forward(Mamba2FwdOp(Q), *given.all), recurrence.mamba2(*given.all))


@pytest.mark.parametrize("names", [("D",), ("z",), ("D", "z"), ()], ids=str)
def test_skip_gate_dtype_and_place(names: tuple[str, ...]) -> None:
    case = Case(2, 150, 4, 16, 32, 2, Q)
    given = inputs(case, FP16)
    wide = torch.full((2, 150, 4, 25), math.nan, dtype=FP16)
    for skip in (False, True):
        features = {name: t for name, t in gates(case, FP16, wide_skip=skip).items() if name in names}
        expected = recurrence.mamba2(*given.all, **features)
        exact = forward(Mamba2FwdOp(Q), *given.all, **features)
        check(exact, expected)
        for out in (None, torch.full((2, 150, 4, 16), math.nan), wide[..., 8:24], wide[..., 3:19]):
            launched: list[str] = []
            op = Mamba2FwdOp(Q, out_dtype=FP16 if out is None else None)
            y, final = forward(op, *given.all, **features, out=out, kernels=launched)
            assert launched == [*STAGES, "gate"]
            assert out is None or y is out
            assert torch.equal(y, exact[0].to(y.dtype)) and torch.equal(final, exact[1])


def test_views_of_one_projection() -> None:
    case = Case(2, 100, 4, 16, 32, 2, Q)
    given = inputs(case, FP16)
    features = gates(case, FP16)
    memory = torch.full((2, 100, 8, 41), math.nan, dtype=FP16)
    x, z = memory[:, :, :4, 3:19], memory[:, :, 4:, 3:19]
    x.copy_(given.x)
    z.copy_(features["z"])
    D = torch.stack([features["D"], features["D"]], -1)[:, 1]
    got = forward(Mamba2FwdOp(Q), x, *given.all[1:], D=D, z=z)
    check(got, recurrence.mamba2(*given.all, **features))
    strided = torch.stack([features["z"], features["z"]], -1)[..., 1]
    again = forward(Mamba2FwdOp(Q), *given.all, D=features["D"], z=strided)
    assert all(torch.equal(a, b) for a, b in zip(got, again))


@pytest.mark.parametrize("with_initial", [False, True])
@pytest.mark.parametrize("lengths", PACKS, ids=str)
def test_a_pack_is_each_of_its_sequences_alone(lengths: list[int], with_initial: bool) -> None:
    case = Case(1, sum(lengths) + 9, 4, 16, 32, 2, Q)
    given = inputs(case, FP16)
    cu_seqlens, features = pack(lengths), gates(case, FP16)
    initial = states(case, len(lengths)) if with_initial else None
    op = Mamba2FwdOp(Q, dt_limit=(0.01, 0.5))
    y, final = forward(op, *given.five, given.dt_bias, initial, cu_seqlens=cu_seqlens, **features)
    expected = recurrence.mamba2(*given.five, given.dt_bias, initial, cu_seqlens=cu_seqlens, dt_limit=(0.01, 0.5), **features)
    check((y, final), expected)
    assert (y[:, sum(lengths) :] == 0).all()
    for n, (first, last) in list(enumerate(itertools.pairwise(cu_seqlens.tolist())))[:8]:
        args, keywords = alone(given, first, last, None if initial is None else initial[n : n + 1], **features)
        one, one_final = forward(op, *args, **keywords)
        assert torch.equal(y[:, first:last], one) and torch.equal(final[n : n + 1], one_final)


@pytest.mark.parametrize("pitch", [41, 48])
def test_a_pack_in_any_layout(pitch: int) -> None:
    case = Case(1, 150, 4, 16, 32, 2, Q)
    given, cu_seqlens, initial = inputs(case, FP16), pack([70, 0, 75]), states(case, 3)
    features = gates(case, FP16)
    expected = forward(Mamba2FwdOp(Q), *given.five, given.dt_bias, initial, cu_seqlens=cu_seqlens, **features)
    check(expected, recurrence.mamba2(*given.five, given.dt_bias, initial, cu_seqlens=cu_seqlens, **features))

    def wide(t: Any, step: int = 1) -> Any:
        memory = torch.full((*t.shape[:-1], step * (t.shape[-1] + pitch)), math.nan, dtype=t.dtype)
        view = memory[..., 8 : 8 + step * t.shape[-1] : step]
        return view.copy_(t)

    x, B, C, z = (wide(t) for t in (given.x, given.B, given.C, features["z"]))
    small = [wide(t, 2) for t in (given.dt, given.A, given.dt_bias, initial)]
    ends = torch.stack([cu_seqlens, cu_seqlens + 7], -1)[:, 0]
    for dt, A, bias, start in ([given.dt, given.A, given.dt_bias, initial], small):
        got = forward(Mamba2FwdOp(Q), x, dt, A, B, C, bias, start, cu_seqlens=ends, D=wide(features["D"], 2), z=z)
        assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_stays_in_its_sequence_of_a_pack(value: float) -> None:
    case = Case(1, 300, 4, 16, 32, 2, Q)
    given, op = inputs(case, FP16), Mamba2FwdOp(Q)
    cu_seqlens = pack([90, 20, 100, 80])
    before = forward(op, *given.five, given.dt_bias, states(case, 4), cu_seqlens=cu_seqlens)
    bad = states(case, 4)
    bad[1] = value
    for t in (given.x, given.dt, given.B, given.C):
        t[:, 90:110], t[:, 290:] = value, value
    after = forward(op, *given.five, given.dt_bias, bad, cu_seqlens=cu_seqlens)
    others = torch.ones(300, dtype=torch.bool)
    others[90:110] = False
    assert torch.equal(before[0][:, others], after[0][:, others])
    assert torch.equal(before[1][[0, 2, 3]], after[1][[0, 2, 3]]) and not after[1][1].isfinite().all()


def test_infinite_rates_in_a_pack_keep_only_the_token_itself() -> None:
    case = Case(1, 100, 4, 16, 32, 2, Q)
    given = inputs(case, FP16)
    given.A[:2] = -math.inf
    cu_seqlens, initial = pack([30, 70]), states(case, 2)
    check(
        forward(Mamba2FwdOp(Q), *given.five, None, initial, cu_seqlens=cu_seqlens),
        recurrence.mamba2(*given.five, None, initial, cu_seqlens=cu_seqlens),
    )


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("rate", "first"), FORGETTING, ids=str)
def test_what_follows_a_step_that_forgets_everything_decays_as_it_should(rate: float, first: float, packed: bool) -> None:
    case = Case(1, 100, 4, 16, 32, 2, Q)
    given = inputs(case, FP16)
    args = *forgetting(given, rate, first), given.B, given.C, None, states(case, 2 if packed else 1)
    features = {"cu_seqlens": pack([30, 70])} if packed else {}
    check(forward(Mamba2FwdOp(Q, False), *args, **features), recurrence.mamba2(*args, dt_softplus=False, **features))


@pytest.mark.parametrize("with_initial", [False, True])
@pytest.mark.parametrize(("seqlen", "lengths"), [(0, []), (40, []), (0, [0, 0]), (40, [0, 0])])
def test_packs_of_nothing(seqlen: int, lengths: list[int], with_initial: bool) -> None:
    case = Case(1, seqlen, 4, 16, 32, 2, Q)
    given, initial = inputs(case, FP16), states(case, len(lengths)) if with_initial else None
    for out in (None, torch.full((1, seqlen, 4, 20), math.nan)[..., 2:18]):
        y, final = forward(Mamba2FwdOp(Q), *given.five, None, initial, cu_seqlens=pack(lengths), **gates(case, FP16), out=out)
        assert y.shape == (1, seqlen, 4, 16) and (y == 0).all()
        assert torch.equal(final, torch.zeros(len(lengths), 4, 16, 32) if initial is None else initial)


@pytest.mark.parametrize("cu_seqlens", [[0, 50, 20, 40], [0, 500, 900], [-7, 10, 2**31 - 1], [30, 20, 10], [-(2**31), 5]], ids=str)
def test_values_out_of_order_or_range_are_clamped(cu_seqlens: list[int]) -> None:
    given = inputs(Case(1, 60, 4, 16, 32, 2, Q), FP16)
    ends = torch.tensor(cu_seqlens, dtype=torch.int32)
    y, final = forward(Mamba2FwdOp(Q), *given.five, cu_seqlens=ends)
    assert y.isfinite().all() and final.isfinite().all()
    if cu_seqlens != [0, 50, 20, 40]:  # no token is of two sequences
        want = Mamba2FwdOp(Q)(*given.five, cu_seqlens=ends)
        check((y, final), (want[0].double(), want[1].double()))


ROWS = [[[300], [64, 236]], [[100, 1, 63, 65, 71], [1, 1, 1, 61, 236]], [[1] * 300, [150] * 2], [[7, 243, 50], [256, 44]]]


@pytest.mark.parametrize("with_initial", [False, True])
@pytest.mark.parametrize("rows", ROWS, ids=str)
def test_seq_idx(rows: list[list[int]], with_initial: bool) -> None:
    case = Case(2, 300, 4, 16, 32, 2, Q)
    given = inputs(case, FP16)
    initial = given.initial_states if with_initial else None
    features = {**gates(case, FP16), "seq_idx": indices(rows)}
    got = forward(Mamba2FwdOp(Q), *given.five, given.dt_bias, initial, **features)
    check(got, recurrence.mamba2(*given.five, given.dt_bias, initial, **features))
    strided = {**features, "seq_idx": features["seq_idx"].t().contiguous().t()}
    assert torch.equal(got[0], forward(Mamba2FwdOp(Q), *given.five, given.dt_bias, initial, **strided)[0])


def test_what_a_boundary_in_a_chunk_costs() -> None:
    """All tokens but the first are of one sequence: the same sums, with and without having been lowered."""
    case = Case(1, 257, 4, 16, 32, 2, 256)
    given = inputs(case, FP16)
    begun = torch.ones(1, 257, dtype=torch.int32)
    begun[:, 0] = 0
    lowered = forward(Mamba2FwdOp(256), *given.five, given.dt_bias, seq_idx=begun)
    given.dt[:, 0] = -1e3  # a first token on which no time passes
    given.x[:, 0] = 0
    plain = forward(Mamba2FwdOp(256), *given.five, given.dt_bias)
    # Measured: 5.5e-5 and 1.2e-5, with the products' operands that then round to another float16.
    assert error(lowered[0][:, 1:], plain[0][:, 1:].double()) < 1e-4
    assert error(lowered[1], plain[1].double()) < 5e-5


@pytest.mark.parametrize(("batch", "seqlen"), [(0, 30), (2, 0)])
def test_seq_idx_of_nothing(batch: int, seqlen: int) -> None:
    given = inputs(Case(batch, seqlen, 4, 16, 32, 2, Q), FP16)
    y, final = forward(Mamba2FwdOp(Q), *given.all, seq_idx=torch.zeros((batch, seqlen), dtype=torch.int32))
    assert y.shape == given.x.shape and torch.equal(final, given.initial_states)


def test_a_state_that_is_not_finite_passes_to_no_other_sequence() -> None:
    case = Case(1, 300, 4, 16, 32, 2, Q)
    given, op = inputs(case, FP16), Mamba2FwdOp(Q)
    seq_idx = indices([[70, 130, 100]])
    before = forward(op, *given.all[:6], seq_idx=seq_idx)
    given.x[:, 75:80] = math.nan
    after = forward(op, *given.all[:6], seq_idx=seq_idx)
    # Chunks 1 to 3 hold tokens of the sequence, or follow one that does; the others, and the last state, are as before.
    assert torch.equal(before[0][:, :64], after[0][:, :64]) and torch.equal(before[0][:, 256:], after[0][:, 256:])
    assert torch.equal(before[1], after[1])
