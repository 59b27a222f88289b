"""The seven ops on CUDA, with the packaged kernels, against the float64 recurrence. «report N» is a user's report on another library.

Every call runs with outputs and workspace full of NaN (``call``): what a kernel does not write, or reads before it is
written, shows. A kernel that is missing fails its test. First calls inside graph capture, streams, threads, fork and a
second device are in test_processes_gpu.py.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

import pytest
import recurrence
import torch
from ssd_cases import (
    FORGETTING,
    LONG_SUM_TOLERANCE,
    ROUNDING,
    TOLERANCE,
    Case,
    Inputs,
    close,
    decays,
    forgetting,
    generator,
    inputs,
    over_rounding,
)

from tileops.mamba import (
    Mamba2FwdOp,
    SSDChunkCouplingFwdOp,
    SSDChunkCumsumFwdOp,
    SSDChunkScanFwdOp,
    SSDChunkStateFwdOp,
    SSDRecurrentFwdOp,
    SSDStatePassingFwdOp,
)

pytestmark = pytest.mark.gpu

BF16, FP16, F32 = torch.bfloat16, torch.float16, torch.float32
DEVICE = "cuda"
TIGHT = TOLERANCE[F32]
HALVES = pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)


#: The full forward as the GPU serves it (one kernel on sm_90a), and by its five stages.
BOTH_PATHS = pytest.mark.parametrize("path", ["as served", "stages"], indirect=True)


@pytest.fixture
def path(request, monkeypatch):
    if request.param == "stages":
        monkeypatch.setattr("tileops.ops.mamba2.serves", lambda *_: False)
    return request.param


@pytest.fixture(autouse=True)
def free_memory() -> Iterator[None]:
    yield
    torch.cuda.empty_cache()


def call(op, *args, **kwargs):
    """Calls the op while torch.empty fills what it returns: floats with NaN, bytes with 0xFF, which are NaN as floats too."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3, device=DEVICE).isnan().all(), "torch.empty is not poisoned"
        return op(*args, **kwargs)
    finally:
        torch.use_deterministic_algorithms(False)


def on_gpu(case: Case, dtype: torch.dtype = BF16, seed: int = 0) -> Inputs:
    return inputs(case, dtype, DEVICE, seed)


@functools.lru_cache(maxsize=2)
def solved(case: Case, dtype: torch.dtype) -> tuple[Inputs, torch.Tensor, torch.Tensor]:
    """A case's inputs, initial states included, and what the recurrence says."""
    given = on_gpu(case, dtype)
    return given, *recurrence.mamba2(*given.all)


def check(case: Case, got, expected, tolerance: float) -> None:
    y, final = got
    assert y.dtype == final.dtype == F32
    assert y.is_contiguous() and final.is_contiguous()
    close(y, expected[0], tolerance, f"{case} y")
    close(final, expected[1], tolerance, f"{case} final_states")


# --- the full forward ---------------------------------------------------------------------------------------------

MODELS = [
    Case(1, 4096, 48, 64, 128, 1, 256),
    Case(2, 2048, 128, 64, 128, 8, 128),
    Case(1, 1000, 24, 64, 128, 1, 256),
    Case(2, 1000, 112, 64, 128, 8, 64),  # report 41: fourteen heads a group
    Case(3, 77, 5, 64, 128, 5, 128),
]
OTHER_SIZES = [Case(2, 300, 6, 16, 16, 2, 16), Case(1, 520, 128, 80, 128, 8, 128), Case(2, 700, 24, 128, 256, 1, 256)]


@BOTH_PATHS
@pytest.mark.parametrize(
    ("case", "dtype"), [(c, d) for c in MODELS for d in (BF16, FP16)] + [(c, BF16) for c in OTHER_SIZES], ids=lambda v: str(v)
)
def test_full_forward(path, case, dtype):  # report 45: d_head = d_state = 16 is among the sizes
    given, *expected = solved(case, dtype)
    before = [t.clone() for t in given.all]
    check(case, call(Mamba2FwdOp(case.Q), *given.all), expected, TOLERANCE[dtype])
    assert all(torch.equal(a, b) for a, b in zip(before, given.all)), "an input was written"


@BOTH_PATHS
@HALVES
@pytest.mark.parametrize("case", [Case(2, 1000, 24, 64, 128, 2, 256), Case(1, 1000, 32, 80, 128, 8, 128)], ids=str)
def test_errors_are_those_of_rounding_the_products_operands(path, case, dtype):
    given = on_gpu(case, dtype)
    y, state = over_rounding(given, *call(Mamba2FwdOp(case.Q), *given.five, given.dt_bias))
    assert y <= ROUNDING and state <= ROUNDING, (y, state)


@BOTH_PATHS
@pytest.mark.parametrize("chunk_size", [64, 128, 256])
@pytest.mark.parametrize("seqlen", [1, 2, 63, 64, 65, 127, 255, 256, 257, 511, 513])
def test_report_27_any_length(path, seqlen, chunk_size):
    case = Case(2, seqlen, 4, 64, 128, 2, chunk_size)
    given = on_gpu(case)
    check(case, call(Mamba2FwdOp(chunk_size), *given.all), recurrence.mamba2(*given.all), TOLERANCE[BF16])


@pytest.mark.parametrize("with_initial", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("softplus", [False, True])
def test_reports_67_and_72_optional_arguments_and_softplus(softplus, with_bias, with_initial):
    case = Case(2, 300, 8, 64, 128, 2, 128)
    given = on_gpu(case)
    optional = 0.5 + given.dt_bias.abs() if with_bias else None, given.initial_states if with_initial else None
    got = call(Mamba2FwdOp(128, softplus), *given.five, *optional)
    check(case, got, recurrence.mamba2(*given.five, *optional, dt_softplus=softplus), TOLERANCE[BF16])


@BOTH_PATHS
@HALVES
@pytest.mark.parametrize(("rate", "step"), [(-1e4, 10.0), (-1e6, 10.0), (-16.0, 5.0), (-3.0, 1.0), (0.0, 0.01), (-math.inf, 0.5)])
@pytest.mark.parametrize("seqlen", [256, 300])
def test_reports_1_2_4_and_12_extreme_decays(path, seqlen, rate, step, dtype):
    case = Case(1, seqlen, 4, 64, 128, 1, 256)
    given = on_gpu(case, dtype)
    A, dt = torch.full_like(given.A, rate), torch.full_like(given.dt, step)
    got = call(Mamba2FwdOp(256, False), given.x, dt, A, given.B, given.C, None, given.initial_states)
    expected = recurrence.mamba2(given.x, dt, A, given.B, given.C, None, given.initial_states, dt_softplus=False)
    check(case, got, expected, TOLERANCE[dtype])


@BOTH_PATHS
@pytest.mark.parametrize(("rate", "first"), FORGETTING, ids=str)
def test_what_follows_a_step_that_forgets_everything_decays_as_it_should(path, rate, first):
    case = Case(1, 300, 4, 64, 128, 1, 64)
    given = on_gpu(case, FP16)
    args = *forgetting(given, rate, first), given.B, given.C, None, given.initial_states
    check(case, call(Mamba2FwdOp(64, False), *args), recurrence.mamba2(*args, dt_softplus=False), TOLERANCE[FP16])


def test_report_12_no_time_keeps_the_state_and_adds_nothing():
    case = Case(1, 300, 4, 64, 128, 1, 128)
    given = on_gpu(case)
    zero = torch.zeros_like(given.dt)
    _, final = call(Mamba2FwdOp(128, False), given.x, zero, given.A, given.B, given.C, None, given.initial_states)
    assert torch.equal(final, given.initial_states)


def test_report_5_float16_inputs_whose_state_exceeds_float16():
    case = Case(1, 256, 2, 64, 128, 1, 256)
    x = torch.full((1, 256, 2, 64), 200.0, dtype=FP16, device=DEVICE)
    BC = torch.full((1, 256, 1, 128), 10.0, dtype=FP16, device=DEVICE)
    dt, A = torch.full((1, 256, 2), 10.0, device=DEVICE), torch.full((2,), -1e-3, device=DEVICE)
    expected = recurrence.mamba2(x, dt, A, BC, BC)
    assert expected[1].abs().max() > 65504
    check(case, call(Mamba2FwdOp(256), x, dt, A, BC, BC), expected, TOLERANCE[FP16])


def test_report_28_initial_state_decays_from_its_own_end():
    case = Case(1, 300, 4, 64, 128, 1, 128)
    given = on_gpu(case)
    x, dt, ones = torch.zeros_like(given.x), given.dt.abs() * 0.01, torch.ones_like(given.initial_states)
    y, _ = call(Mamba2FwdOp(128, False), x, dt, given.A, given.B, given.C, None, ones)
    expected = torch.exp(torch.cumsum((dt * given.A).double(), 1)) * given.C.double().sum(-1)
    close(y, expected.unsqueeze(-1).expand(y.shape), TOLERANCE[BF16], "y")


def test_report_29_chunks_of_very_different_steps():
    case = Case(1, 256, 4, 64, 128, 1, 128)
    given = on_gpu(case)
    dt = torch.full_like(given.dt, 1e-3)
    dt[:, 128:] = 3.0
    for steps in (dt, dt.flip(1)):
        got = call(Mamba2FwdOp(128, False), given.x, steps, given.A, given.B, given.C)
        check(case, got, recurrence.mamba2(given.x, steps, given.A, given.B, given.C, dt_softplus=False), TOLERANCE[BF16])


@pytest.mark.parametrize("groups", [1, 8])
def test_reports_31_and_36_one_call_equals_two_equals_a_thousand_steps(groups):
    case = Case(2, 1000, 8, 64, 128, groups, 256)
    given, *expected = solved(case, BF16)
    x, dt, A, B, C = given.five
    op, step = Mamba2FwdOp(case.Q), SSDRecurrentFwdOp()
    y1, state = call(op, x[:, :300], dt[:, :300], A, B[:, :300], C[:, :300], given.dt_bias, given.initial_states)
    y2, final = call(op, x[:, 300:], dt[:, 300:], A, B[:, 300:], C[:, 300:], given.dt_bias, state)
    check(case, (torch.cat([y1, y2], 1), final), expected, TOLERANCE[BF16])
    steps = torch.nn.functional.softplus(dt + given.dt_bias).unsqueeze(-1).expand(-1, -1, -1, case.P)
    rates = A.view(-1, 1, 1).expand(-1, case.P, case.N)
    state = given.initial_states.clone()
    tokens = [step(rates, steps[:, t], x[:, t], B[:, t], C[:, t], state) for t in range(case.S)]
    close(torch.stack(tokens, 1), expected[0], LONG_SUM_TOLERANCE, "y of decode steps")
    close(state, expected[1], LONG_SUM_TOLERANCE, "state after decode steps")


def test_report_32_initial_states_have_an_effect_and_none_is_zeros():
    given = on_gpu(Case(2, 300, 8, 64, 128, 1, 128))
    op = Mamba2FwdOp(128)
    none, zeros = call(op, *given.all[:6]), call(op, *given.all[:6], torch.zeros_like(given.initial_states))
    assert all(torch.equal(a, b) for a, b in zip(none, zeros))
    other = call(op, *given.all)
    assert not torch.equal(none[0], other[0]) and not torch.equal(none[1], other[1])


@pytest.mark.parametrize("with_initial", [False, True])
@pytest.mark.parametrize(("batch", "seqlen"), [(0, 256), (2, 0), (0, 0)])
def test_report_34_empty_batches_and_sequences(batch, seqlen, with_initial):
    given = on_gpu(Case(batch, seqlen, 4, 64, 128, 2, 64))
    initial = given.initial_states if with_initial else None
    y, final = call(Mamba2FwdOp(64), *given.five, given.dt_bias, initial)
    assert y.shape == (batch, seqlen, 4, 64)
    assert torch.equal(final, given.initial_states if with_initial else torch.zeros_like(given.initial_states))
    assert batch == 0 or final.data_ptr() != given.initial_states.data_ptr()


@pytest.mark.parametrize("groups", [2, 4, 8])
def test_report_40_head_h_reads_group_h_over_heads_per_group(groups):
    heads = 16
    x = torch.ones((1, 3, heads, 64), dtype=BF16, device=DEVICE)
    dt, A = torch.ones((1, 3, heads), device=DEVICE), torch.full((heads,), -math.inf, device=DEVICE)
    B = torch.arange(groups, device=DEVICE).view(1, 1, groups, 1).expand(1, 3, groups, 128).to(BF16)
    y, _ = call(Mamba2FwdOp(64, False), x, dt, A, B, torch.ones_like(B))
    assert y[0, 1, :, 0].tolist() == [128.0 * (h // (heads // groups)) for h in range(heads)]


@HALVES
def test_reports_7_and_64_same_bits_again_and_whatever_the_rest_of_the_batch_or_the_memory(dtype):
    given = on_gpu(Case(4, 1000, 8, 64, 128, 2, 256), dtype)
    op = Mamba2FwdOp(256)
    first = call(op, *given.all)
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(first, op(*given.all)))
    x, dt, A, B, C, dt_bias, initial = given.all
    for b in range(4):
        row = slice(b, b + 1)
        alone = call(op, x[row], dt[row], A, B[row], C[row], dt_bias, initial[row])
        assert all(torch.equal(whole[row], one) for whole, one in zip(first, alone))


def projection(given: Inputs, case: Case, *, extra: int = 0, offset: int = 0) -> tuple[torch.Tensor, ...]:
    """x, B, C as views of one projection with row pitch H*P + 2*G*N + extra, ``offset`` elements into its memory."""
    sizes = [case.H * case.P, case.G * case.N, case.G * case.N]
    pitch = sum(sizes) + extra
    memory = torch.full((case.B * case.S * pitch + offset,), math.nan, dtype=given.x.dtype, device=DEVICE)
    x, B, C, _ = memory[offset:].view(case.B, case.S, pitch).split([*sizes, extra], -1)
    views = x.unflatten(-1, (case.H, case.P)), B.unflatten(-1, (case.G, case.N)), C.unflatten(-1, (case.G, case.N))
    for view, source in zip(views, (given.x, given.B, given.C)):
        view.copy_(source)
    return views


@HALVES
@pytest.mark.parametrize("seqlen", [300, 256])
@pytest.mark.parametrize(
    "layout", ["projection", "wide pitch", "odd pitch", "offset 1", "odd pitch and offset", "heads first", "last dim strided", "expanded"]
)
def test_report_38_layouts(layout, seqlen, dtype):
    case = Case(2, seqlen, 8, 64, 128, 2, 128)
    given, *expected = solved(case, dtype)
    x, dt, A, B, C, dt_bias, initial = given.all
    if layout == "heads first":
        x, B, C, dt = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (x, B, C, dt))
    elif layout == "last dim strided":
        x, B, C, dt, dt_bias, A, initial = (torch.stack([t, t], -1)[..., 1] for t in (x, B, C, dt, dt_bias, A, initial))
    elif layout == "expanded":
        x, dt, B, C, initial = (t[:1].expand_as(t) for t in (x, dt, B, C, initial))
        expected = [t[:1].expand_as(t) for t in expected]
    else:
        extra = {"wide pitch": 264, "odd pitch": 1, "odd pitch and offset": 5}.get(layout, 0)
        x, B, C = projection(given, case, extra=extra, offset=int("offset" in layout))
        wide = torch.full((case.B, case.S, case.H + 3), math.nan, device=DEVICE)[..., 1 : case.H + 1]
        dt = wide.copy_(dt)
    if layout == "offset 1":
        dt_bias, A, initial = (torch.cat([t.flatten()[:1], t.flatten()])[1:].view(t.shape) for t in (dt_bias, A, initial))
    got = call(Mamba2FwdOp(128), x, dt, A, B, C, dt_bias, initial)
    check(case, got, expected, TOLERANCE[dtype])


def test_another_target_on_the_same_tensors():
    given, *expected = solved(Case(1, 1000, 24, 64, 128, 1, 256), BF16)
    got = Mamba2FwdOp(256, target="reference")(*given.all)
    close(got[0], expected[0], LONG_SUM_TOLERANCE, "y")
    close(got[1], expected[1], LONG_SUM_TOLERANCE, "final_states")


# --- sizes beyond 32 bits and beyond grid limits --------------------------------------------------------------------


def big(case: Case, pitch: int = 0) -> Inputs:
    """As on_gpu, in bfloat16 without float32 intermediates; with ``pitch``, x is a view with that row pitch."""
    g = generator(0, DEVICE)
    small = on_gpu(Case(case.B, 1, case.H, case.P, case.N, case.G, case.Q))
    width = case.H * case.P
    x = torch.empty((case.B, case.S, pitch or width), dtype=BF16, device=DEVICE)[..., :width].normal_(generator=g)
    B, C = (torch.empty((case.B, case.S, case.G, case.N), dtype=BF16, device=DEVICE).normal_(generator=g) for _ in range(2))
    dt = torch.empty((case.B, case.S, case.H), device=DEVICE).normal_(generator=g)
    return Inputs(x.unflatten(-1, (case.H, case.P)), dt, small.A, B, C, small.dt_bias, small.initial_states)


@BOTH_PATHS
@pytest.mark.parametrize(
    ("case", "pitch"),
    [
        (Case(1, 65536, 128, 64, 128, 8, 256), 35072),  # report 16: 2.3e9 elements from the first row to the last
        (Case(1, 524288, 80, 64, 128, 1, 256), 0),  # report 17: 2.7e9 elements of x and y
        (Case(1, 262144, 32, 64, 128, 1, 256), 0),  # report 18
        (Case(1, 1 << 20, 8, 64, 128, 1, 256), 0),  # a million tokens
    ],
    ids=str,
)
def test_reports_16_17_and_18_offsets_beyond_32_bits_along_the_sequence(path, case, pitch):
    given = big(case, pitch)
    x, dt, A, B, C, dt_bias, _ = given.all
    op = Mamba2FwdOp(case.Q)
    y, final = op(x, dt, A, B, C, dt_bias)
    cut = case.S - 2 * case.Q
    _, before = op(x[:, :cut].clone(), dt[:, :cut], A, B[:, :cut], C[:, :cut], dt_bias)
    expected = recurrence.mamba2(x[:, cut:], dt[:, cut:], A, B[:, cut:], C[:, cut:], dt_bias, before)
    check(case, (y[:, cut:].contiguous(), final), expected, TOLERANCE[BF16])
    head = recurrence.mamba2(x[:, : case.Q], dt[:, : case.Q], A, B[:, : case.Q], C[:, : case.Q], dt_bias)
    close(y[:, : case.Q], head[0], TOLERANCE[BF16], "y of the first chunk")


@BOTH_PATHS
@pytest.mark.parametrize(
    "case",
    [
        Case(8, 16384, 128, 64, 128, 8, 64),  # report 19: 2**31 elements of states
        Case(256, 16640, 2, 64, 128, 1, 64),  # reports 24 and 25: batch * chunks = 66560
    ],
    ids=str,
)
def test_reports_19_24_and_25_many_states_and_many_chunks(path, case):
    given = big(case)
    x, dt, A, B, C, dt_bias, initial = given.all
    op = Mamba2FwdOp(case.Q)
    y, final = call(op, *given.all)
    for b in (0, case.B - 1):
        row = slice(b, b + 1)
        alone = call(op, x[row], dt[row], A, B[row], C[row], dt_bias, initial[row])
        assert torch.equal(y[row], alone[0]) and torch.equal(final[row], alone[1])
    assert torch.isfinite(y[-1, -case.Q :]).all()


def test_report_24_decode_of_70000_rows():
    args = decode(70000, 1, 16, 16, 1, BF16, tied=True)
    expected = recurrence.step(args[-1].double(), *args[:-1])
    close(call(SSDRecurrentFwdOp(), *args), expected[0], TIGHT, "y")
    close(args[-1], expected[1], TIGHT, "state")


# --- the stages ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [1, 5, 7, 48, 80, 112])
@pytest.mark.parametrize("chunk_len", [16, 64, 128, 256])
def test_cumsum_report_47_every_head_of_every_width(heads, chunk_len):
    given = on_gpu(Case(2, 300, heads, 1, 1, 1, chunk_len))
    dt_out, dA = call(SSDChunkCumsumFwdOp(chunk_len, dt_softplus=True), given.dt, given.A, given.dt_bias)
    expected = recurrence.chunk_cumsum(given.dt, given.A, given.dt_bias, chunk_len, True)
    close(dt_out, expected[0], 1e-6, "dt_out")
    close(dA, expected[1], 1e-6, "dA_cumsum")
    assert dA.flatten(2)[..., 299:].eq(dA.flatten(2)[..., 299:300]).all(), "not flat behind the last token"


@pytest.mark.parametrize("out_dtype", [F32, BF16, FP16], ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("softplus", [False, True])
def test_cumsum_options(softplus, with_bias, out_dtype):
    """Reports 14 and 72, and dA_cumsum from float32 dt whatever dt_out is stored in."""
    given = on_gpu(Case(2, 130, 9, 1, 1, 1, 64))
    bias = given.dt_bias if with_bias else None
    for bounds in ((0.0, math.inf), (0.05, 0.1), (-math.inf, math.inf)):
        dt_out, dA = call(SSDChunkCumsumFwdOp(64, out_dtype, softplus, *bounds), given.dt, given.A, bias)
        expected = recurrence.chunk_cumsum(given.dt, given.A, bias, 64, softplus, *bounds)
        assert dt_out.dtype == out_dtype and dA.dtype == F32
        close(dt_out, expected[0], {BF16: 3e-3, FP16: 4e-4, F32: 1e-6}[out_dtype], "dt_out")
        close(dA, expected[1], 1e-6, "dA_cumsum")


def test_cumsum_report_6_softplus_keeps_its_digits():
    v = torch.cat([torch.arange(-80, 20, 0.25), torch.tensor([-25.0, 19.999, 20.0, 20.001, 88.0, 89.0, 200.0, 1e30])]).to(DEVICE)
    dt_out, _ = call(SSDChunkCumsumFwdOp(64, dt_softplus=True), v.view(1, -1, 1), torch.tensor([-1.0], device=DEVICE))
    got = dt_out.flatten()[: len(v)].double()
    expected = torch.logaddexp(v.double(), torch.zeros_like(v, dtype=torch.float64))
    assert torch.isfinite(got).all()
    assert ((got - expected) / expected).abs().max() <= 1e-6
    assert torch.equal(got[v > 20], v[v > 20].double())


@HALVES
@pytest.mark.parametrize("chunk_len", [64, 128, 256])
@pytest.mark.parametrize("odd", [False, True])
def test_coupling(chunk_len, dtype, odd):
    case = Case(2, 300, 8, 64, 128, 8, chunk_len)
    given = on_gpu(case, dtype)
    B, C = projection(given, case, extra=1, offset=1)[1:] if odd else (given.B, given.C)
    cb = call(SSDChunkCouplingFwdOp(chunk_len), C, B)
    assert cb.dtype == dtype
    close(cb, recurrence.chunk_coupling(C, B, chunk_len), TOLERANCE[dtype], "cb")
    assert cb.triu(1).count_nonzero() == 0


@pytest.mark.parametrize("own_dt", [False, True], ids=["dt float32", "dt as x"])
@HALVES
@pytest.mark.parametrize("chunk_len", [64, 128, 256])
def test_state(chunk_len, dtype, own_dt):
    case = Case(2, 300, 8, 64, 128, 2, chunk_len)
    given = on_gpu(case, dtype)
    dt, dA = decays(case, DEVICE)
    dt = dt.to(dtype) if own_dt else dt
    states = call(SSDChunkStateFwdOp(), given.x, given.B, dt, dA)
    assert states.dtype == F32
    close(states, recurrence.chunk_state(given.x, given.B, dt, dA), TOLERANCE[dtype], "states")


@pytest.mark.parametrize("changes", [[0], [63], [64], [32], [1, 2, 3], [70, 127, 128, 190], []], ids=str)
@pytest.mark.parametrize("seqlen", [64, 200])
def test_state_report_35_sequence_changes_at_the_end_start_and_middle_of_chunks(changes, seqlen):
    case = Case(2, seqlen, 4, 64, 128, 2, 64)
    given = on_gpu(case)
    dt, dA = decays(case, DEVICE)
    index = torch.zeros(seqlen, dtype=torch.int32, device=DEVICE)
    for position in changes:
        index[position:] += 1
    index = index.expand(2, seqlen)
    states = call(SSDChunkStateFwdOp(), given.x, given.B, dt, dA, index)
    close(states, recurrence.chunk_state(given.x, given.B, dt, dA, index), TOLERANCE[BF16], "states")


def test_state_report_9_a_chunk_that_ends_in_padding_is_zero_and_foreign_nan_is_not_read():
    case = Case(1, 128, 2, 64, 128, 1, 64)
    given = on_gpu(case)
    dt, dA = decays(case, DEVICE)
    index = torch.full((1, 128), -1, dtype=torch.int32, device=DEVICE)
    index[:, 100:] = 3
    clean = given.x.clone(), given.B.clone()
    given.x[:, :100] = math.nan
    given.B[:, :100] = math.inf
    states = call(SSDChunkStateFwdOp(), given.x, given.B, dt, dA, index)
    assert states[:, 0].count_nonzero() == 0
    close(states[:, 1], recurrence.chunk_state(*clean, dt, dA, index)[:, 1], TOLERANCE[BF16], "states")


@pytest.mark.parametrize("with_initial", [False, True])
@pytest.mark.parametrize(("chunks", "d_state"), [(1, 8192), (17, 8192), (5, 48), (3, 1), (9, 1000)])
def test_passing(chunks, d_state, with_initial):
    g = generator(0, DEVICE)
    states = torch.randn(2, chunks, 3, d_state, generator=g, device=DEVICE)
    dA = -3 * torch.rand(2, 3, chunks, 64, generator=g, device=DEVICE)
    initial = torch.randn(2, 3, d_state, generator=g, device=DEVICE) if with_initial else None
    views = [
        (states, dA[..., -1], initial),
        (states, dA[..., -1].contiguous(), initial),
        (
            states.transpose(1, 2).contiguous().transpose(1, 2),
            dA[..., -1],
            None if initial is None else torch.stack([initial, initial], -1)[..., 0],
        ),
    ]
    expected = recurrence.state_passing(*views[0])
    for view in views:
        prev, final = call(SSDStatePassingFwdOp(), *view)
        close(prev, expected[0], 1e-6, "prev_states")
        close(final, expected[1], 1e-6, "final_states")


@pytest.mark.parametrize("with_initial", [False, True])
@pytest.mark.parametrize(("batch", "chunks"), [(0, 5), (2, 0)])
def test_passing_report_34_empty(batch, chunks, with_initial):
    initial = torch.randn(batch, 3, 64, device=DEVICE)
    states, dA = torch.randn(batch, chunks, 3, 64, device=DEVICE), -torch.rand(batch, 3, chunks, device=DEVICE)
    prev, final = call(SSDStatePassingFwdOp(), states, dA, initial if with_initial else None)
    assert prev.shape == states.shape
    assert torch.equal(final, initial if with_initial else torch.zeros_like(initial))


def scan_arguments(case: Case, dtype: torch.dtype, own_dt: bool = False) -> list[torch.Tensor]:
    """x, cb, dA_cumsum, C, prev_states, dt."""
    given = on_gpu(case, dtype)
    dt, dA = decays(case, DEVICE)
    cb = SSDChunkCouplingFwdOp(case.Q, target="reference")(given.C, given.B)
    prev = torch.randn(case.B, case.C, case.H, case.P, case.N, generator=generator(2, DEVICE), device=DEVICE)
    return [given.x, cb, dA, given.C, prev, dt.to(dtype) if own_dt else dt]


@pytest.mark.parametrize("own_dt", [False, True], ids=["dt float32", "dt as x"])
@HALVES
@pytest.mark.parametrize("chunk_len", [64, 128, 256])
def test_scan(chunk_len, dtype, own_dt):
    args = scan_arguments(Case(2, 300, 8, 64, 128, 2, chunk_len), dtype, own_dt)
    y = call(SSDChunkScanFwdOp(), *args)
    assert y.dtype == F32
    close(y, recurrence.chunk_scan(*args), TOLERANCE[dtype], "y")


def test_scan_other_layouts_are_read_or_copied():
    args = scan_arguments(Case(2, 300, 8, 64, 128, 2, 128), BF16)
    expected = recurrence.chunk_scan(*args)
    moved = [torch.cat([t.flatten()[:1], t.flatten()])[1:].view(t.shape) for t in args]  # not 16-byte aligned
    strided = [torch.stack([t, t], -1)[..., 0] for t in args]
    for given in (moved, strided):
        close(call(SSDChunkScanFwdOp(), *given), expected, TOLERANCE[BF16], "y")


def test_scan_cb_above_the_diagonal_has_no_effect():
    args = scan_arguments(Case(1, 100, 4, 64, 128, 2, 64), BF16)
    expected = call(SSDChunkScanFwdOp(), *args)
    args[1] = torch.where(torch.ones(64, 64, dtype=torch.bool, device=DEVICE).triu(1), math.nan, args[1])
    assert torch.equal(expected, call(SSDChunkScanFwdOp(), *args))


@pytest.mark.parametrize(("batch", "seqlen"), [(0, 70), (2, 0)])
def test_stages_report_34_empty(batch, seqlen):
    case = Case(batch, seqlen, 4, 64, 128, 2, 64)
    given = on_gpu(case)
    dt_out, dA = call(SSDChunkCumsumFwdOp(64), given.dt, given.A)
    assert dt_out.shape == (batch, 4, case.C, 64)
    cb = call(SSDChunkCouplingFwdOp(64), given.C, given.B)
    states = call(SSDChunkStateFwdOp(), given.x, given.B, dt_out, dA)
    y = call(SSDChunkScanFwdOp(), given.x, cb, dA, given.C, states, dt_out)
    assert (cb.shape, states.shape, y.shape) == ((batch, case.C, 2, 64, 64), (batch, case.C, 4, 64, 128), given.x.shape)


# --- decode ------------------------------------------------------------------------------------------------------------


def decode(batch: int, heads: int, head_dim: int, d_state: int, groups: int, dtype: torch.dtype, tied: bool) -> list[torch.Tensor]:
    """A, dt, x, B_in, C_in, state."""
    g = generator(0, DEVICE)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g, device=DEVICE)

    if tied:
        A = (-normal(heads).abs()).view(-1, 1, 1).expand(heads, head_dim, d_state)
        dt = normal(batch, heads).abs().unsqueeze(-1).expand(batch, heads, head_dim)
    else:
        A, dt = -normal(heads, head_dim, d_state).abs(), normal(batch, heads, head_dim).abs()
    x, B, C = normal(batch, heads, head_dim), normal(batch, groups, d_state), normal(batch, groups, d_state)
    return [A, dt, x.to(dtype), B.to(dtype), C.to(dtype), normal(batch, heads, head_dim, d_state)]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [((b, h, 64, 128, g), d) for b, h, g in [(1, 80, 1), (8, 128, 8), (33, 5, 5)] for d in (BF16, FP16)]
    + [((3, 6, 16, 16, 2), BF16), ((3, 128, 80, 128, 8), BF16), ((3, 24, 128, 256, 1), BF16)],
    ids=str,
)
def test_decode(sizes, dtype, tied):
    *args, state = decode(*sizes, dtype, tied)
    before = [t.clone() for t in args]
    expected = recurrence.step(state.double(), *args)
    y = call(SSDRecurrentFwdOp(), *args, state)
    assert y.dtype == F32
    close(y, expected[0], TIGHT, "y")
    close(state, expected[1], TIGHT, "state")
    assert all(torch.equal(a, b) for a, b in zip(before, args)), "an input was written"


def test_decode_report_37_an_expanded_rate_gives_the_bits_of_a_full_one():
    A, dt, x, B, C, state = decode(4, 8, 64, 128, 2, BF16, tied=True)
    other, third = state.clone(), state.clone()
    y = call(SSDRecurrentFwdOp(), A, dt, x, B, C, state)
    assert torch.equal(y, call(SSDRecurrentFwdOp(), A.contiguous(), dt.contiguous(), x, B, C, other))
    assert torch.equal(y, call(SSDRecurrentFwdOp(), A, dt.contiguous(), x, B, C, third))
    assert torch.equal(state, other) and torch.equal(state, third)


@pytest.mark.parametrize("batch", [15, 16, 17])
def test_decode_report_64_a_row_of_a_full_A_has_the_same_bits_alone(batch):
    # From 16 rows on, a CTA takes two of them; 17 leaves one over.
    A, dt, x, B, C, state = decode(batch, 8, 64, 128, 2, BF16, tied=False)
    rows = [state[b : b + 1].clone() for b in range(batch)]
    y = call(SSDRecurrentFwdOp(), A, dt, x, B, C, state)
    for b, row in enumerate(rows):
        one = slice(b, b + 1)
        assert torch.equal(call(SSDRecurrentFwdOp(), A, dt[one], x[one], B[one], C[one], row), y[one])
        assert torch.equal(row, state[one])


def test_decode_report_12_infinite_rate_forgets_and_no_time_keeps():
    for tied in (False, True):
        A, dt, x, B, C, state = decode(4, 8, 64, 128, 2, BF16, tied)
        A = torch.full((8,), -math.inf, device=DEVICE).view(-1, 1, 1).expand(A.shape) if tied else torch.full_like(A, -math.inf)
        dt = (dt[..., :1] * torch.tensor([1.0, 0.0, 1.0, 1.0], device=DEVICE).view(-1, 1, 1)).expand(dt.shape)
        dt = dt if tied else dt.contiguous()
        kept = state[1].clone()
        expected = recurrence.step(state.double(), A, dt, x, B, C)
        close(call(SSDRecurrentFwdOp(), A, dt, x, B, C, state), expected[0], TIGHT, "y")
        close(state, expected[1], TIGHT, "state")
        assert torch.equal(state[1], kept)


@pytest.mark.parametrize("layout", ["strided", "offset 1", "projection"])
@pytest.mark.parametrize("tied", [False, True])
def test_decode_input_layouts(layout, tied):
    A, dt, x, B, C, state = decode(4, 8, 64, 128, 2, BF16, tied)
    expected = recurrence.step(state.double(), A, dt, x, B, C)
    if layout == "strided":
        A, dt, x, B, C = (torch.stack([t, t], -1)[..., 0] for t in (A, dt, x, B, C))
    elif layout == "offset 1":
        A, dt, x, B, C = (torch.cat([t.flatten()[:1], t.flatten()])[1:].view(t.shape) for t in (A, dt, x, B, C))
    else:
        row = torch.cat([x.flatten(1), B.flatten(1), C.flatten(1), x[:, 0, :3]], 1)
        x, B, C = row[:, :512].unflatten(1, (8, 64)), row[:, 512:768].unflatten(1, (2, 128)), row[:, 768:1024].unflatten(1, (2, 128))
    close(call(SSDRecurrentFwdOp(), A, dt, x, B, C, state), expected[0], TIGHT, "y")
    close(state, expected[1], TIGHT, "state")


@pytest.mark.parametrize("pick", [slice(2, 6), slice(0, 8, 2)], ids=str)
def test_decode_report_69_a_view_of_a_pool_is_updated_in_place_and_its_neighbours_are_not(pick):
    *args, state = decode(4, 8, 64, 128, 2, BF16, tied=True)
    pool = torch.randn(8, 3, 8, 64, 128, device=DEVICE)
    pool[pick, 1] = state
    before = pool.clone()
    op = SSDRecurrentFwdOp()
    for _ in range(3):
        y = call(op, *args, pool[pick, 1])
        assert torch.equal(y, call(op, *args, state))
    before[pick, 1] = state
    assert torch.equal(pool, before)


@pytest.mark.parametrize(
    "view",
    [
        lambda s: s.transpose(2, 3).contiguous().transpose(2, 3),
        lambda s: s[:1].expand_as(s),
        lambda s: torch.cat([s.flatten()[:1], s.flatten()])[1:].view(s.shape),
        lambda s: torch.nn.functional.pad(s, (0, 1))[..., :-1],
    ],
    ids=["transposed", "expanded", "offset 1", "odd pitch"],
)
def test_decode_report_69_a_state_that_cannot_be_updated_in_place_is_refused(view):
    *args, state = decode(4, 8, 64, 128, 2, BF16, tied=True)
    given = view(state)
    before = given.clone()
    with pytest.raises(ValueError, match=r"^state: cannot be updated in place: "):
        SSDRecurrentFwdOp()(*args, given)
    assert torch.equal(given, before)


def test_decode_report_64_a_row_has_the_same_bits_alone():
    A, dt, x, B, C, state = decode(5, 8, 64, 128, 2, BF16, tied=True)
    rows = [state[b : b + 1].clone() for b in range(5)]
    y = call(SSDRecurrentFwdOp(), A, dt, x, B, C, state)
    for b, row in enumerate(rows):
        one = slice(b, b + 1)
        assert torch.equal(call(SSDRecurrentFwdOp(), A, dt[one], x[one], B[one], C[one], row), y[one])
        assert torch.equal(row, state[one])


def test_decode_report_34_empty_batch():
    assert call(SSDRecurrentFwdOp(), *decode(0, 8, 64, 128, 2, BF16, tied=False)).shape == (0, 8, 64)


def test_decode_report_11_4096_steps_agree_with_a_prefill():
    case = Case(1, 4096, 4, 64, 128, 1, 256)
    given = on_gpu(case)
    y, final = call(Mamba2FwdOp(256), *given.five, given.dt_bias)
    steps = torch.nn.functional.softplus(given.dt + given.dt_bias).unsqueeze(-1).expand(-1, -1, -1, 64)
    rates = given.A.view(-1, 1, 1).expand(-1, 64, 128)
    state = torch.zeros_like(given.initial_states)
    op = SSDRecurrentFwdOp()
    tokens = [op(rates, steps[:, t], given.x[:, t], given.B[:, t], given.C[:, t], state) for t in range(case.S)]
    close(y, torch.stack(tokens, 1).double(), TOLERANCE[BF16], "y of the prefill against decode")
    close(final, state.double(), TOLERANCE[BF16], "state of the prefill against decode")


# --- what is refused ---------------------------------------------------------------------------------------------------


def test_report_42_sizes_without_kernels_are_refused_by_name():
    for case, message in [
        (Case(1, 64, 2, 20, 128, 1, 64), r"^d_head: the in-tree CUDA kernels support 16, 32 \.\.\. 256, got 20"),
        (Case(1, 64, 2, 64, 512, 1, 64), r"^d_state: the in-tree CUDA kernels support 16, 32 \.\.\. 256, got 512"),
        (Case(1, 64, 2, 64, 128, 1, 100), r"^chunk_size: the in-tree CUDA kernels support 16, 32, 64, 128, 256, got 100"),
    ]:
        with pytest.raises(ValueError, match=message):
            Mamba2FwdOp(case.Q)(*on_gpu(case).five)
    with pytest.raises(ValueError, match=r"^x: the in-tree CUDA kernels take bfloat16 or float16, got float32"):
        Mamba2FwdOp(64)(*on_gpu(Case(1, 64, 2, 64, 128, 1, 64), F32).five)


def test_tensors_on_two_devices_are_refused():
    given = on_gpu(Case(1, 64, 2, 64, 128, 1, 64))
    with pytest.raises(ValueError, match=r"^B: expected device cuda:0 \(where x is\), got cpu"):
        Mamba2FwdOp(64)(given.x, given.dt, given.A, given.B.cpu(), given.C)


def test_report_75_requires_grad_is_refused_also_after_a_call_with_the_same_shapes():
    given = on_gpu(Case(1, 64, 2, 64, 128, 1, 64))
    op = Mamba2FwdOp(64)
    expected = op(*given.five)[0]
    with pytest.raises(ValueError, match=r"^x: requires grad"):
        op(given.x.clone().requires_grad_(), *given.five[1:])
    with torch.no_grad():
        y, _ = op(given.x.clone().requires_grad_(), *given.five[1:])
    assert torch.equal(y, expected) and not y.requires_grad
