"""The fused forward on CUDA: it agrees with the stages and the float64 recurrence, with the same bits at every call."""

from __future__ import annotations

import pytest
import recurrence
import torch
from ssd_cases import TOLERANCE, Case, Inputs, close, inputs

from tileops.mamba import Mamba2FwdOp
from tileops.ops._fused import cut

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
    (known,) = op._plans.values()
    return [run.__self__.kernel.record.kernel for run, *_ in known.plan._steps]


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("seqlen", [1, 63, 64, 65, 256, 400, 1000])
@pytest.mark.parametrize("sizes", [(64, 128), (80, 128), (80, 64)], ids=str)
def test_it_agrees_with_the_stages_and_the_recurrence(sizes, seqlen, dtype):
    given = inputs(Case(2, seqlen, 8, *sizes, 2, 256), dtype, DEVICE)
    fused, stages = Mamba2FwdOp(256), Mamba2FwdOp(256)
    got = call(fused, *arguments(given))
    other = call(stages, unaligned(given.x), *arguments(given)[1:])
    assert steps(fused)[-1] == "fused_main" and "fused_main" not in steps(stages)
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


@pytest.mark.parametrize("head_dim", [64, 80])
def test_scouts_change_no_bit(head_dim):
    # 24 chains leave most SMs free: scouts run ahead. A batch of eight, 192 chains, has no scouts.
    given = inputs(Case(8, 4096, 24, head_dim, 128, 1, 256), BF16, DEVICE)
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    assert cut(24, 64, sms).scouts and not cut(192, 64, sms).scouts
    y, final = call(Mamba2FwdOp(256), *arguments(given))
    for b in (0, 7):
        one = slice(b, b + 1)
        row = Mamba2FwdOp(256)(given.x[one], given.dt[one], given.A, given.B[one], given.C[one], given.dt_bias, given.initial_states[one])
        assert torch.equal(row[0], y[one]) and torch.equal(row[1], final[one])


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
