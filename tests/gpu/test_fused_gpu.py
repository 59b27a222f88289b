"""The fused forward on CUDA: it agrees with the stages and the float64 recurrence, with the same bits at every call."""

from __future__ import annotations

import itertools
import math

import pytest
import recurrence
import torch
from ssd_cases import TOLERANCE, Case, Inputs, close, inputs

from tileops.mamba import Mamba2FwdOp
from tileops.ops._fused import Extras, cut, plan_fused
from tileops.ops._planner import Plan, Planner

pytestmark = pytest.mark.gpu

BF16, FP16 = torch.bfloat16, torch.float16
DEVICE = "cuda"


@pytest.fixture(autouse=True)
def a_gpu_that_has_it():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the fused forward exists for compute capability 9.0 only; the stages serve this GPU")


def call(op: Mamba2FwdOp, *args):
    """Calls the op while torch.empty fills outputs and workspace with NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        return op(*args)
    finally:
        torch.use_deterministic_algorithms(False)


def arguments(given: Inputs, *, bias: bool = True, initial: bool = True) -> list[torch.Tensor | None]:
    return [*given.five, given.dt_bias if bias else None, given.initial_states if initial else None]


def unaligned(t: torch.Tensor) -> torch.Tensor:
    """The same values one element further: no tensor map can describe it, so the stages serve the call."""
    return torch.cat([t.flatten()[:1], t.flatten()])[1:].view(t.shape)


def steps(op: Mamba2FwdOp) -> list[str]:
    """Kernels of the op's only plan."""
    (plan,) = op._plans.values()
    return [step._fire.__self__.kernel.record.kernel for step in plan._steps]


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("seqlen", [1, 63, 64, 65, 256, 400, 1000])
def test_it_agrees_with_the_stages_and_the_recurrence(seqlen, dtype):
    given = inputs(Case(2, seqlen, 8, 64, 128, 2, 256), dtype, DEVICE)
    fused, stages = Mamba2FwdOp(256), Mamba2FwdOp(256)
    got = call(fused, *arguments(given))
    other = call(stages, unaligned(given.x), *arguments(given)[1:])
    assert steps(fused) == ["fused_main"] and "fused_main" not in steps(stages)
    expected = recurrence.mamba2(*given.all)
    for one, two, true, what in zip(got, other, expected, ("y", "final_states")):
        close(one, true, TOLERANCE[dtype], what)
        close(one, two.double(), 2 * TOLERANCE[dtype], f"{what} against the stages")


@pytest.mark.parametrize("softplus", [True, False])
@pytest.mark.parametrize("initial", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_every_variant(bias, initial, softplus):
    given = inputs(Case(2, 200, 6, 64, 128, 1, 256), BF16, DEVICE)
    args = arguments(given, bias=bias, initial=initial)
    if not softplus:
        args[1] = 0.1 * args[1]  # some below 0: clamped
    op = Mamba2FwdOp(256, softplus)
    got, other = call(op, *args), call(Mamba2FwdOp(256, softplus), unaligned(args[0]), *args[1:])
    assert steps(op) == ["fused_main"]
    for one, two, what in zip(got, other, ("y", "final_states")):
        close(one, two.double(), 2 * TOLERANCE[BF16], f"{what} against the stages")


def test_segments_change_no_bit():
    # Whole: one sequence of 80 heads is one wave. All four: 320 chains on 132 SMs are cut in two.
    given = inputs(Case(4, 2048, 80, 64, 128, 1, 256), BF16, DEVICE)
    op = Mamba2FwdOp(256)
    y, final = call(op, *arguments(given))
    assert cut(320, 32, torch.cuda.get_device_properties(0).multi_processor_count).segs > 1
    assert steps(op) == ["fused_clear", "fused_main"]
    for b in range(4):
        one = slice(b, b + 1)
        row = Mamba2FwdOp(256)(given.x[one], given.dt[one], given.A, given.B[one], given.C[one], given.dt_bias, given.initial_states[one])
        assert torch.equal(row[0], y[one]) and torch.equal(row[1], final[one])


@pytest.mark.parametrize("case", [Case(2, 500, 8, 64, 128, 2, 256), Case(4, 2048, 80, 64, 128, 1, 256)], ids=str)
def test_a_hundred_calls_give_the_same_bits(case):
    given = inputs(case, BF16, DEVICE)
    op = Mamba2FwdOp(256)
    y, final = op(*arguments(given))
    different = torch.zeros((), dtype=torch.int64, device=DEVICE)
    kept = []
    for number in range(100):
        other = op(*arguments(given))
        different += (other[0] != y).sum() + (other[1] != final).sum()
        kept = [*kept[-2:], other] if number % 3 else []  # outputs at other addresses than before
    assert int(different) == 0


def test_a_captured_call_replays():
    given = inputs(Case(4, 2048, 80, 64, 128, 1, 256), BF16, DEVICE)
    op = Mamba2FwdOp(256)
    expected = op(*arguments(given))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = op(*arguments(given))
    for _ in range(3):
        for t in got:
            t.fill_(float("nan"))
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(got, expected))


def test_scouts_change_no_bit():
    # Alone, a sequence of 12 heads is cut and scouted; 12 of them are 144 chains, which are not.
    given = inputs(Case(12, 2048, 12, 64, 128, 1, 256), BF16, DEVICE)
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    assert cut(12, 32, sms).scouts and not cut(144, 32, sms).scouts
    y, final = call(Mamba2FwdOp(256), *arguments(given))
    for b in (0, 11):
        one = slice(b, b + 1)
        op = Mamba2FwdOp(256)
        row = call(op, given.x[one], given.dt[one], given.A, given.B[one], given.C[one], given.dt_bias, given.initial_states[one])
        assert steps(op) == ["fused_clear", "fused_main"]
        assert torch.equal(row[0], y[one]) and torch.equal(row[1], final[one])


def planned(*five_and_options, D=None, z=None, cu_seqlens=None, y_dtype=torch.float32):
    """x, dt, A, B, C, dt_bias, initial_states and what no op passes on yet; outputs are filled with NaN first."""
    tensors = [*five_and_options, D, z, cu_seqlens]
    p = Planner(tensors, tensors[0].device)
    extras = Extras(D=p.slots[7], z=p.slots[8], cu_seqlens=p.slots[9], y_dtype=y_dtype)
    plan = Plan(p, plan_fused(p, *p.slots[:7], extras, dt_softplus=True, dt_min=0.0, dt_max=math.inf))

    def run(*given):
        return plan.run(given)

    return call(run, *tensors)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize(("P", "N"), [(64, 128), (80, 64), (128, 256)])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("columns", [0, 1, 2])
def test_skip_and_gate(columns, gated, P, N, dtype):
    given = inputs(Case(2, 200, 4, P, N, 2, 256), dtype, DEVICE)
    D = None if columns == 0 else torch.randn((4, P)[:columns], device=DEVICE)
    z = torch.randn(given.x.shape, device=DEVICE).to(dtype) if gated else None
    y, final = planned(*arguments(given), D=D, z=z)
    true_y, true_final = recurrence.mamba2(*given.all)
    if D is not None:
        true_y = true_y + (D if columns == 2 else D[:, None]).double() * given.x.double()
    if z is not None:
        true_y = true_y * torch.nn.functional.silu(z.double())
    close(y, true_y, TOLERANCE[dtype], "y")
    close(final, true_final, TOLERANCE[dtype], "final_states")


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_y_in_the_dtype_of_x_is_the_rounded_y(dtype):
    given = inputs(Case(2, 200, 4, 64, 128, 2, 256), dtype, DEVICE)
    y, final = planned(*arguments(given))
    half, same = planned(*arguments(given), y_dtype=dtype)
    assert half.dtype == dtype and torch.equal(half, y.to(dtype)) and torch.equal(same, final)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize(("P", "N"), [(64, 128), (48, 64), (128, 256)])
def test_packed_sequences_are_those_alone_whatever_is_beside_them(P, N, dtype):
    ends = [0, 1, 70, 70, 200, 328, 400]
    given = inputs(Case(1, 400, 4, P, N, 2, 256), dtype, DEVICE)
    initial = torch.randn(6, 4, P, N, device=DEVICE)
    cu_seqlens = torch.tensor(ends, dtype=torch.int32, device=DEVICE)
    x, dt, A, B, C = given.five
    y, final = planned(x, dt, A, B, C, given.dt_bias, initial, cu_seqlens=cu_seqlens)
    assert not torch.isnan(y).any()
    for number, (start, end) in enumerate(itertools.pairwise(ends)):
        if start == end:
            assert torch.equal(final[number], initial[number])
            continue
        own = slice(start, end)
        alone = planned(x[:, own], dt[:, own], A, B[:, own], C[:, own], given.dt_bias, initial[number : number + 1])
        beside = [torch.full_like(t, math.nan) for t in (x, dt, B, C)]
        for t, source in zip(beside, (x, dt, B, C)):
            t[:, own] = source[:, own]
        among = planned(*beside[:2], A, *beside[2:], given.dt_bias, initial, cu_seqlens=cu_seqlens)
        for got in ((y, final), among):
            assert torch.equal(got[0][:, own], alone[0]) and torch.equal(got[1][number], alone[1][0])
