"""What Mamba2FwdOp does beyond the spec, on CUDA, against the float64 recurrence, whichever kernels serve a call."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import recurrence
import torch
from forward_features import PACKS, alone, gates, indices, pack, states
from ssd_cases import TOLERANCE, Case, close, inputs

from tileops.mamba import Mamba2FwdOp

pytestmark = pytest.mark.gpu

BF16, FP16, F32 = torch.bfloat16, torch.float16, torch.float32
DEVICE = "cuda"
Q = 64
HALVES = pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
#: One element further, and no tensor map can describe x: the stages serve the call on every GPU.
LAYOUTS = pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "unaligned"])


@pytest.fixture(autouse=True)
def free_memory() -> Iterator[None]:
    yield
    torch.cuda.empty_cache()


def call(op: Mamba2FwdOp, *args: Any, **features: Any) -> Any:
    """Calls the op while torch.empty fills what it returns with NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3, device=DEVICE).isnan().all(), "torch.empty is not poisoned"
        return op(*args, **features)
    finally:
        torch.use_deterministic_algorithms(False)


def shifted(t: torch.Tensor) -> torch.Tensor:
    return torch.cat([t.flatten()[:1], t.flatten()])[1:].view(t.shape)


def on_gpu(case: Case, dtype: torch.dtype = BF16, aligned: bool = True) -> Any:
    given = inputs(case, dtype, DEVICE)
    if not aligned:
        given.x = shifted(given.x)
    return given


def kernels(op: Mamba2FwdOp) -> list[list[str]]:
    """Kernels of each of the op's plans."""
    return [[run.__self__.kernel.record.kernel for run, _, of_memory in known.plan._steps if not of_memory] for known in op._plans.values()]


def check(got: Any, expected: Any, tolerance: float) -> None:
    close(got[0], expected[0], tolerance, "y")
    close(got[1], expected[1], tolerance, "final_states")


def rounding(dtype: torch.dtype, y_dtype: torch.dtype) -> float:
    return TOLERANCE[dtype] * (2 if y_dtype != F32 else 1)


@HALVES
@LAYOUTS
@pytest.mark.parametrize("wide_skip", [False, True])
@pytest.mark.parametrize("names", [("D",), ("z",), ("D", "z"), ()], ids=str)
def test_skip_gate_dtype_and_place(names, wide_skip, aligned, dtype):
    case = Case(2, 300, 6, 64, 128, 2, Q)
    given = on_gpu(case, dtype, aligned)
    features = {name: t for name, t in gates(case, dtype, DEVICE, wide_skip=wide_skip).items() if name in names}
    expected = recurrence.mamba2(*given.all, **features)
    op = Mamba2FwdOp(Q)
    exact = call(op, *given.all, **features)
    check(exact, expected, TOLERANCE[dtype])
    wide = torch.full((2, 300, 6, 96), math.nan, dtype=dtype, device=DEVICE)
    others = torch.full((2, 300, 6, 80), math.nan, device=DEVICE)
    for out in (None, torch.empty_like(exact[0]), wide[..., 16:80], wide[..., 3:67], others[..., 8:72], others[..., 1:65]):
        y, final = call(Mamba2FwdOp(Q, out_dtype=dtype) if out is None else op, *given.all, **features, out=out)
        assert (y is out or out is None) and torch.equal(final, exact[1])
        close(y, expected[0], rounding(dtype, y.dtype), "y")
        if y.dtype == F32:
            assert torch.equal(y, exact[0])
    assert others[..., 0].isnan().all() and others[..., 72:].isnan().all() and wide[..., :3].isnan().all()


def test_what_is_not_asked_for_launches_nothing():
    case = Case(2, 300, 6, 64, 128, 2, Q)
    for aligned in (True, False):
        given = on_gpu(case, BF16, aligned)
        plain, limited = Mamba2FwdOp(Q), Mamba2FwdOp(Q, dt_limit=(0.01, 0.1))
        call(plain, *given.all)
        check(call(limited, *given.all), recurrence.mamba2(*given.all, dt_limit=(0.01, 0.1)), TOLERANCE[BF16])
        assert kernels(plain) == kernels(limited)
        assert not {"gate", "seq_passing", "pack_map"} & set(kernels(plain)[0])


def is_alone(whole: Mamba2FwdOp, one: Mamba2FwdOp, a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype, what: str) -> None:
    """The same bits where the same kernels served both."""
    fused = ["fused_main" in names for names in (*kernels(whole), *kernels(one))]
    if all(fused) or not any(fused):
        assert torch.equal(a, b), what
    else:
        close(a, b.double(), 2 * TOLERANCE[dtype], what)


@HALVES
@pytest.mark.parametrize("lengths", [(5000, 70, 9001), (1, 14000), (4096, 4096)], ids=str)
def test_a_pack_of_long_sequences_that_is_cut(lengths, dtype):
    case = Case(1, sum(lengths), 8, 64, 128, 2, Q)
    given = on_gpu(case, dtype, True)
    cu_seqlens, initial = pack(lengths, DEVICE), states(case, len(lengths), DEVICE)
    op = Mamba2FwdOp(Q)
    y, final = call(op, *given.five, given.dt_bias, initial, cu_seqlens=cu_seqlens)
    if torch.cuda.get_device_capability() == (9, 0):
        assert "fused_clear" in kernels(op)[0]
    for n, (first, last) in enumerate(itertools.pairwise(cu_seqlens.tolist())):
        args, keywords = alone(given, first, last, initial[n : n + 1])
        by_itself = Mamba2FwdOp(Q)
        one, one_final = call(by_itself, *args, **keywords)
        is_alone(op, by_itself, y[:, first:last], one, dtype, f"y of sequence {n}")
        is_alone(op, by_itself, final[n : n + 1], one_final, dtype, f"final_states of sequence {n}")


@HALVES
@LAYOUTS
@pytest.mark.parametrize("with_initial", [False, True])
@pytest.mark.parametrize("lengths", PACKS, ids=str)
def test_a_pack(lengths, with_initial, aligned, dtype):
    case = Case(1, sum(lengths) + 9, 6, 64, 128, 2, Q)
    given = on_gpu(case, dtype, aligned)
    cu_seqlens, features = pack(lengths, DEVICE), gates(case, dtype, DEVICE)
    initial = states(case, len(lengths), DEVICE) if with_initial else None
    op = Mamba2FwdOp(Q)
    y, final = call(op, *given.five, given.dt_bias, initial, cu_seqlens=cu_seqlens, **features)
    check((y, final), recurrence.mamba2(*given.five, given.dt_bias, initial, cu_seqlens=cu_seqlens, **features), TOLERANCE[dtype])
    assert (y[:, sum(lengths) :] == 0).all()
    for n, (first, last) in list(enumerate(itertools.pairwise(cu_seqlens.tolist())))[:7]:
        if first == last:
            assert torch.equal(final[n], initial[n] if with_initial else torch.zeros_like(final[n]))
            continue
        args, keywords = alone(given, first, last, None if initial is None else initial[n : n + 1], **features)
        if not aligned:
            args = (shifted(args[0]), *args[1:])
        by_itself = Mamba2FwdOp(Q)
        one, one_final = call(by_itself, *args, **keywords)
        is_alone(op, by_itself, y[:, first:last], one, dtype, f"y of sequence {n}")
        is_alone(op, by_itself, final[n : n + 1], one_final, dtype, f"final_states of sequence {n}")


@LAYOUTS
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_stays_in_its_sequence_of_a_pack(value, aligned):
    case = Case(1, 300, 6, 64, 128, 2, Q)
    given, op = on_gpu(case, BF16, aligned), Mamba2FwdOp(Q)
    cu_seqlens = pack([90, 20, 100, 80], DEVICE)
    before = call(op, *given.five, given.dt_bias, states(case, 4, DEVICE), cu_seqlens=cu_seqlens)
    bad = states(case, 4, DEVICE)
    bad[1] = value
    for t in (given.x, given.dt, given.B, given.C):
        t[:, 90:110], t[:, 290:] = value, value
    after = call(op, *given.five, given.dt_bias, bad, cu_seqlens=cu_seqlens)
    others = torch.ones(300, dtype=torch.bool, device=DEVICE)
    others[90:110] = False
    assert torch.equal(before[0][:, others], after[0][:, others])
    assert torch.equal(before[1][[0, 2, 3]], after[1][[0, 2, 3]]) and not after[1][1].isfinite().all()


@LAYOUTS
def test_infinite_rates_in_a_pack(aligned):
    case = Case(1, 150, 6, 64, 128, 2, Q)
    given = on_gpu(case, BF16, aligned)
    given.A[:2] = -math.inf
    cu_seqlens, initial = pack([30, 120], DEVICE), states(case, 2, DEVICE)
    got = call(Mamba2FwdOp(Q), *given.five, None, initial, cu_seqlens=cu_seqlens)
    check(got, recurrence.mamba2(*given.five, None, initial, cu_seqlens=cu_seqlens), TOLERANCE[BF16])


@LAYOUTS
@pytest.mark.parametrize("with_initial", [False, True])
@pytest.mark.parametrize(("seqlen", "lengths"), [(0, []), (40, []), (0, [0, 0]), (40, [0, 0])])
def test_packs_of_nothing(seqlen, lengths, with_initial, aligned):
    case = Case(1, seqlen, 6, 64, 128, 2, Q)
    given = on_gpu(case, BF16, aligned or seqlen == 0)
    initial = states(case, len(lengths), DEVICE) if with_initial else None
    for out in (None, torch.full((1, seqlen, 6, 80), math.nan, device=DEVICE)[..., 2:66]):
        y, final = call(Mamba2FwdOp(Q), *given.five, None, initial, cu_seqlens=pack(lengths, DEVICE), **gates(case, BF16, DEVICE), out=out)
        assert y.shape == (1, seqlen, 6, 64) and (y == 0).all()
        assert torch.equal(final, torch.zeros((len(lengths), 6, 64, 128), device=DEVICE) if initial is None else initial)


@LAYOUTS
@pytest.mark.parametrize("cu_seqlens", [[0, 50, 20, 40], [0, 500, 900], [-7, 10, 2**31 - 1], [30, 20, 10], [-(2**31), 5]], ids=str)
def test_values_out_of_order_or_range_stay_inside(cu_seqlens, aligned):
    case = Case(1, 60, 6, 64, 128, 2, Q)
    given = on_gpu(case, BF16, aligned)
    ends = torch.tensor(cu_seqlens, dtype=torch.int32, device=DEVICE)
    around = torch.full((3, 60, 6, 64), 7.0, device=DEVICE)
    y, final = call(Mamba2FwdOp(Q), *given.five, cu_seqlens=ends, out=around[1:2])
    torch.cuda.synchronize()
    assert y.isfinite().all() and final.isfinite().all() and (around[0] == 7).all() and (around[2] == 7).all()


def test_more_sequences_than_threads_and_a_thousand_values_out_of_order():
    case = Case(1, 3000, 2, 64, 128, 1, Q)
    given = on_gpu(case, BF16)
    lengths = [n % 3 for n in range(2999)]
    op = Mamba2FwdOp(Q)
    got = call(op, *given.five, given.dt_bias, cu_seqlens=pack(lengths, DEVICE))
    y, final = Mamba2FwdOp(Q, target="reference")(*given.five, given.dt_bias, cu_seqlens=pack(lengths, DEVICE))
    check(got, (y.double(), final.double()), TOLERANCE[BF16])
    mixed = torch.randint(-100, 4000, (3000,), generator=torch.Generator().manual_seed(0), dtype=torch.int32).to(DEVICE)
    y, final = call(op, *given.five, given.dt_bias, cu_seqlens=mixed)
    assert y.isfinite().all() and final.isfinite().all()


@LAYOUTS
def test_a_captured_pack_replays_with_other_sequences(aligned):
    case = Case(1, 500, 6, 64, 128, 2, Q)
    given, features, op = on_gpu(case, BF16, aligned), gates(case, BF16, DEVICE), Mamba2FwdOp(Q)
    cu_seqlens, initial = pack([500, 0, 0], DEVICE), states(case, 3, DEVICE)
    out = torch.empty_like(given.x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = op(*given.five, given.dt_bias, initial, cu_seqlens=cu_seqlens, out=out, **features)
    for lengths in ([500, 0, 0], [100, 300, 100], [1, 2, 3], [0, 0, 490]):
        cu_seqlens.copy_(pack(lengths))
        for t in got:
            t.fill_(math.nan)
        graph.replay()
        other = op(*given.five, given.dt_bias, initial, cu_seqlens=pack(lengths, DEVICE), out=torch.empty_like(out), **features)
        assert all(torch.equal(a, b) for a, b in zip(got, other))
        expected = recurrence.mamba2(*given.five, given.dt_bias, initial, cu_seqlens=cu_seqlens, **features)
        check(got, expected, 2 * TOLERANCE[BF16])


@LAYOUTS
def test_prefill_in_pieces_equals_prefill_at_once(aligned):
    case = Case(1, 400, 6, 64, 128, 2, Q)
    given, op = on_gpu(case, BF16, aligned), Mamba2FwdOp(Q)
    expected = recurrence.mamba2(*given.five, given.dt_bias, cu_seqlens=pack([150, 250], DEVICE))
    order = [*range(100), *range(150, 180), *range(100, 150), *range(180, 400)]
    x, dt, B, C = (t[:, order] for t in (given.x, given.dt, given.B, given.C))
    a, b = slice(0, 130), slice(130, 400)
    y1, state = call(op, x[:, a], dt[:, a], given.A, B[:, a], C[:, a], given.dt_bias, cu_seqlens=pack([100, 30], DEVICE))
    y2, final = call(op, x[:, b], dt[:, b], given.A, B[:, b], C[:, b], given.dt_bias, state, cu_seqlens=pack([50, 220], DEVICE))
    check((torch.cat([y1, y2], 1), final), (expected[0][:, order], expected[1]), TOLERANCE[BF16])


ROWS = [[[300], [64, 236]], [[100, 1, 63, 65, 71], [1, 1, 1, 61, 236]], [[1] * 300, [150] * 2], [[7, 243, 50], [256, 44]]]


@HALVES
@LAYOUTS
@pytest.mark.parametrize("with_initial", [False, True])
@pytest.mark.parametrize("rows", ROWS, ids=str)
def test_seq_idx(rows, with_initial, aligned, dtype):
    case = Case(2, 300, 6, 64, 128, 2, Q)
    given = on_gpu(case, dtype, aligned)
    initial = given.initial_states if with_initial else None
    features = {**gates(case, dtype, DEVICE), "seq_idx": indices(rows, DEVICE)}
    got = call(Mamba2FwdOp(Q), *given.five, given.dt_bias, initial, **features)
    check(got, recurrence.mamba2(*given.five, given.dt_bias, initial, **features), TOLERANCE[dtype])


def test_a_state_that_is_not_finite_passes_to_no_other_sequence():
    given, op = on_gpu(Case(1, 400, 6, 64, 128, 2, Q)), Mamba2FwdOp(Q)
    seq_idx = indices([[70, 130, 200]], DEVICE)
    before = call(op, *given.all[:6], seq_idx=seq_idx)
    given.x[:, 75:80] = math.nan
    after = call(op, *given.all[:6], seq_idx=seq_idx)
    assert torch.equal(before[0][:, :64], after[0][:, :64]) and torch.equal(before[0][:, 256:], after[0][:, 256:])
    assert torch.equal(before[1], after[1])


@pytest.mark.parametrize("kind", ["cu_seqlens", "seq_idx"])
def test_the_same_bits_again_at_the_size_of_a_layer(kind):
    lengths = [n * 37 % 500 + 1 for n in range(32)]
    case = Case(1, sum(lengths), 80, 64, 128, 1, Q)
    given, features, op = on_gpu(case), gates(case, BF16, DEVICE), Mamba2FwdOp(Q, out_dtype=BF16)
    features[kind] = pack(lengths, DEVICE) if kind == "cu_seqlens" else indices([lengths], DEVICE)
    first = call(op, *given.five, given.dt_bias, **features)
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(first, op(*given.five, given.dt_bias, **features)))
    expected = Mamba2FwdOp(Q, target="reference")(*given.five, given.dt_bias, **features)
    check(first, tuple(t.double() for t in expected), 2 * TOLERANCE[BF16])


def test_offsets_beyond_32_bits():
    """2.7e9 elements of x, y, z and out, in one sequence and in two."""
    S, H = 524288, 80
    small = on_gpu(Case(1, 1, H, 64, 128, 1, Q))
    g = torch.Generator(DEVICE).manual_seed(0)
    x = torch.empty((1, S, H, 64), dtype=BF16, device=DEVICE).normal_(generator=g)
    B, C = (torch.empty((1, S, 1, 128), dtype=BF16, device=DEVICE).normal_(generator=g) for _ in range(2))
    dt = torch.empty((1, S, H), device=DEVICE).normal_(generator=g)
    D, half, cut = torch.ones(H, device=DEVICE), S // 2, S - 2 * Q
    op = Mamba2FwdOp(256, out_dtype=BF16)
    y, final = op(x, dt, small.A, B, C, small.dt_bias, D=D, z=x, cu_seqlens=pack([half, half], DEVICE))
    before = op(x[:, half:cut], dt[:, half:cut], small.A, B[:, half:cut], C[:, half:cut], small.dt_bias)[1]
    tail = slice(cut, S)
    given = (x[:, tail], dt[:, tail], small.A, B[:, tail], C[:, tail], small.dt_bias, before)
    expected = recurrence.mamba2(*given, D=D, z=x[:, tail])
    check((y[:, tail], final[1:]), expected, 2 * TOLERANCE[BF16])


def test_preload_covers_the_features():
    given = on_gpu(Case(1, 100, 6, 64, 128, 2, Q))
    op = Mamba2FwdOp(Q)
    assert {name for name, _ in op.kernels()} >= {"gate", "pack_starts", "pack_map", "pack_rows", "pack_tails", "seq_runs", "seq_passing"}
    op.preload(dtype="bfloat16", d_head=64, d_state=128)
    from tileops import stats

    before = stats()["loads"]
    features = gates(Case(1, 100, 6, 64, 128, 2, Q), BF16, DEVICE)
    op(*given.five, cu_seqlens=pack([30, 70], DEVICE), **features)
    op(*given.five, given.dt_bias, seq_idx=indices([[30, 70]], DEVICE), **features, out=torch.empty_like(given.x))
    assert stats()["loads"] == before
