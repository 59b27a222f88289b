"""What Mamba2FwdOp does beyond the spec, on the reference target, against the float64 recurrence."""

from __future__ import annotations

import itertools
import math

import pytest
import recurrence
import torch
from forward_features import PACKS, alone, gates, indices, pack, states
from ssd_cases import TOLERANCE, Case, close, inputs

from tileops.mamba import Mamba2FwdOp
from tileops.ops._sequences import most_chunks

TIGHT = TOLERANCE[torch.float32]
BF16, FP16, F32 = torch.bfloat16, torch.float16, torch.float32


def check(got, expected, tolerance=TIGHT):
    close(got[0], expected[0], tolerance, "y")
    close(got[1], expected[1], tolerance, "final_states")


# --- skip, gate, limits, y's dtype and place -----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("wide_skip", [False, True])
@pytest.mark.parametrize("names", [("D",), ("z",), ("D", "z")], ids=str)
def test_skip_and_gate(names, wide_skip, dtype):
    case = Case(2, 150, 4, 16, 32, 2, 64)
    given = inputs(case, dtype)
    features = {name: t for name, t in gates(case, dtype, wide_skip=wide_skip).items() if name in names}
    check(Mamba2FwdOp(64)(*given.all, **features), recurrence.mamba2(*given.all, **features))


def test_a_gate_far_below_zero_closes():
    case = Case(1, 20, 2, 16, 16, 1, 16)
    given = inputs(case)
    y, _ = Mamba2FwdOp(16)(*given.all, z=torch.full((1, 20, 2, 16), -200.0))
    assert (y == 0).all()


@pytest.mark.parametrize("softplus", [True, False])
@pytest.mark.parametrize("limit", [(0.0, math.inf), (0.001, 0.1), (0.05, 0.05), (0, 1)])
def test_limits_come_after_bias_and_softplus(limit, softplus):
    given = inputs(Case(2, 100, 4, 16, 32, 2, 64))
    op = Mamba2FwdOp(64, softplus, dt_limit=limit)
    check(op(*given.all), recurrence.mamba2(*given.all, dt_softplus=softplus, dt_limit=limit))
    shown = f", dt_limit=({float(limit[0])}, {float(limit[1])})" if limit != (0.0, math.inf) else ""
    assert repr(op) == f"Mamba2FwdOp(chunk_size=64, dt_softplus={softplus}{shown})"


@pytest.mark.parametrize("value", [1e300, 10**400], ids=["float", "int"])
def test_a_limit_beyond_float32_is_infinite(value):
    assert Mamba2FwdOp(dt_limit=(0.0, value)).dt_limit == (0.0, math.inf)


@pytest.mark.parametrize(
    ("limit", "error", "words"),
    [
        ((0.1, 0.01), ValueError, r"expected 0 <= lowest <= highest .*, got \(0.1, 0.01\)"),
        ((-1.0, 1.0), ValueError, "time does not run backwards"),
        ((0.0, math.nan), ValueError, "got nan"),
        ((math.inf, math.inf), ValueError, "expected a finite lowest step"),
        ((0.0,), TypeError, "expected a pair"),
        (0.1, TypeError, "expected a pair"),
        (("0", 1), TypeError, "got str"),
        (None, TypeError, "expected a pair"),
    ],
)
def test_limits_that_are_refused(limit, error, words):
    with pytest.raises(error, match=f"^dt_limit: .*{words}"):
        Mamba2FwdOp(dt_limit=limit)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_y_in_the_dtype_of_x_is_rounded_once(dtype):
    case = Case(2, 100, 4, 16, 32, 2, 64)
    given = inputs(case, dtype)
    features = gates(case, dtype)
    exact, final = Mamba2FwdOp(64)(*given.all, **features)
    y, same_final = Mamba2FwdOp(64, out_dtype=dtype)(*given.all, **features)
    assert y.dtype == dtype and torch.equal(y, exact.to(dtype)) and torch.equal(final, same_final)
    assert Mamba2FwdOp(64, out_dtype=F32)(*given.all)[0].dtype == F32


def test_y_is_written_where_asked():
    case = Case(2, 100, 4, 16, 32, 2, 64)
    given = inputs(case, BF16)
    op = Mamba2FwdOp(64)
    expected, final = op(*given.all)
    wide = torch.full((2, 100, 4, 24), math.nan)
    for out in (
        torch.empty_like(expected),
        torch.empty(expected.shape, dtype=BF16),
        wide[..., 4:20],
        torch.empty(100, 2, 4, 16).transpose(0, 1),
    ):
        y, other = op(*given.all, out=out)
        assert y is out and torch.equal(y, expected.to(out.dtype)) and torch.equal(final, other)
    assert wide[..., :4].isnan().all() and wide[..., 20:].isnan().all()


def test_memory_that_y_cannot_be_written_to_is_refused():
    case = Case(2, 100, 4, 16, 32, 2, 64)
    given = inputs(case, F32)
    z = gates(case, F32)["z"]
    op = Mamba2FwdOp(64)
    for out, name in ((given.x, "x"), (given.x.view(2, 100, 4, 16), "x")):
        with pytest.raises(ValueError, match=rf"^out: shares memory with {name}; expected a tensor of its own\.$"):
            op(*given.all, out=out)
    both = torch.zeros(3, 100, 4, 16)
    with pytest.raises(ValueError, match=r"^out: shares memory with z"):
        op(*given.all, z=both[:2].copy_(z), out=both[1:])
    op(*given.all, z=both[:1].expand(2, -1, -1, -1), out=both[1:])
    for out, words in (
        (torch.zeros(1, 100, 4, 16).expand(2, -1, -1, -1), "share memory"),
        (torch.zeros(2, 100, 4, 32)[..., ::2], "last dimension"),
    ):
        with pytest.raises(ValueError, match=f"^out: cannot be written: .*{words}"):
            op(*given.all, out=out)
    with torch.inference_mode():
        out = torch.zeros(2, 100, 4, 16)
    with pytest.raises(ValueError, match=r"^out: cannot be written: it was made under"):
        op(*given.all, out=out)


# --- packs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_initial", [False, True])
@pytest.mark.parametrize("lengths", PACKS, ids=str)
def test_a_pack(lengths, with_initial):
    case = Case(1, sum(lengths) + 9, 4, 16, 32, 2, 64)
    given = inputs(case)
    cu_seqlens, features = pack(lengths), gates(case, F32)
    initial = states(case, len(lengths)) if with_initial else None
    op = Mamba2FwdOp(64)
    y, final = op(*given.five, given.dt_bias, initial, cu_seqlens=cu_seqlens, **features)
    check((y, final), recurrence.mamba2(*given.five, given.dt_bias, initial, cu_seqlens=cu_seqlens, **features))
    assert (y[:, sum(lengths) :] == 0).all()
    for n, (first, last) in enumerate(itertools.pairwise(cu_seqlens.tolist())):
        args, keywords = alone(given, first, last, None if initial is None else initial[n : n + 1], **features)
        one, one_final = op(*args, **keywords)
        assert torch.equal(y[:, first:last], one) and torch.equal(final[n : n + 1], one_final)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_stays_in_its_sequence_of_a_pack(value):
    case = Case(1, 300, 4, 16, 32, 2, 64)
    given = inputs(case)
    cu_seqlens = pack([90, 20, 100, 80])
    op = Mamba2FwdOp(64)
    before = op(*given.five, given.dt_bias, states(case, 4), cu_seqlens=cu_seqlens)
    bad = states(case, 4)
    bad[1] = value
    for t in (given.x, given.dt, given.B, given.C):
        t[:, 95:110], t[:, 290:] = value, value
    after = op(*given.five, given.dt_bias, bad, cu_seqlens=cu_seqlens)
    others = torch.ones(300, dtype=torch.bool)
    others[90:110] = False
    assert torch.equal(before[0][:, others], after[0][:, others])
    assert torch.equal(before[1][[0, 2, 3]], after[1][[0, 2, 3]]) and not after[1][1].isfinite().all()


@pytest.mark.parametrize("with_initial", [False, True])
@pytest.mark.parametrize(("seqlen", "lengths"), [(0, []), (40, []), (0, [0, 0]), (40, [0, 0])])
def test_packs_of_nothing(seqlen, lengths, with_initial):
    case = Case(1, seqlen, 4, 16, 32, 2, 64)
    given, initial = inputs(case), states(case, len(lengths)) if with_initial else None
    y, final = Mamba2FwdOp(64)(*given.five, None, initial, cu_seqlens=pack(lengths), **gates(case, F32))
    assert y.shape == (1, seqlen, 4, 16) and (y == 0).all()
    assert torch.equal(final, torch.zeros(len(lengths), 4, 16, 32) if initial is None else initial)


def test_prefill_in_pieces_equals_prefill_at_once():
    case = Case(1, 400, 4, 16, 32, 2, 64)
    given = inputs(case)
    op = Mamba2FwdOp(64)
    expected = op(*given.five, given.dt_bias, cu_seqlens=pack([150, 250]))
    # First 100 and 30 tokens of the two, then the rest of both.
    order = [*range(100), *range(150, 180), *range(100, 150), *range(180, 400)]
    x, dt, B, C = (t[:, order] for t in (given.x, given.dt, given.B, given.C))
    first, second = slice(0, 130), slice(130, 400)
    y1, state = op(x[:, first], dt[:, first], given.A, B[:, first], C[:, first], given.dt_bias, cu_seqlens=pack([100, 30]))
    y2, final = op(x[:, second], dt[:, second], given.A, B[:, second], C[:, second], given.dt_bias, state, cu_seqlens=pack([50, 220]))
    close(torch.cat([y1, y2], 1), expected[0][:, order].double(), 1e-5, "y in pieces")
    close(final, expected[1].double(), 1e-5, "final_states in pieces")


@pytest.mark.parametrize("cu_seqlens", [[0, 50, 20, 40], [0, 500, 900], [-7, 10, 2**31 - 1], [30, 20, 10], [-(2**31), 5]], ids=str)
def test_values_out_of_order_or_range_are_clamped(cu_seqlens):
    given = inputs(Case(1, 60, 2, 16, 16, 1, 16))
    y, final = Mamba2FwdOp(16)(*given.five, cu_seqlens=torch.tensor(cu_seqlens, dtype=torch.int32))
    assert y.isfinite().all() and final.shape[0] == len(cu_seqlens) - 1 and final.isfinite().all()


def test_chunks_of_a_pack_are_never_more_than_reckoned():
    for chunk_len, lengths in itertools.product((16, 64), ([1] * 50, [17, 16, 15, 0, 1], [0, 0, 0], [65, 65], [64] * 5, [1, 128], [])):
        needed = sum(-(-n // chunk_len) for n in lengths)
        for rest in (0, 5):
            most = most_chunks(sum(lengths) + rest, len(lengths), chunk_len)
            assert needed <= most and (not lengths or most * chunk_len >= sum(lengths) + rest)


# --- seq_idx ---------------------------------------------------------------------------------------------------------

ROWS = [[[300], [64, 236]], [[100, 1, 63, 65, 71], [1, 1, 1, 61, 236]], [[1] * 300, [150] * 2], [[7, 243, 50], [256, 44]]]


@pytest.mark.parametrize("with_initial", [False, True])
@pytest.mark.parametrize("rows", ROWS, ids=str)
def test_seq_idx(rows, with_initial):
    case = Case(2, 300, 4, 16, 32, 2, 64)
    given = inputs(case)
    initial = given.initial_states if with_initial else None
    features = {**gates(case, F32), "seq_idx": indices(rows)}
    check(
        Mamba2FwdOp(64)(*given.five, given.dt_bias, initial, **features),
        recurrence.mamba2(*given.five, given.dt_bias, initial, **features),
    )


def test_seq_idx_is_compared_with_the_token_before_only():
    given = inputs(Case(2, 300, 4, 16, 32, 2, 64))
    plain, op = Mamba2FwdOp(64)(*given.all), Mamba2FwdOp(64)
    for value in (0, 5, -1):
        got = op(*given.all, seq_idx=torch.full((2, 300), value, dtype=torch.int32))
        close(got[0], plain[0].double(), TIGHT, "y of one sequence")
        close(got[1], plain[1].double(), TIGHT, "final_states of one sequence")


@pytest.mark.parametrize(("batch", "seqlen"), [(0, 30), (2, 0)])
def test_seq_idx_of_nothing(batch, seqlen):
    given = inputs(Case(batch, seqlen, 4, 16, 32, 2, 64))
    y, final = Mamba2FwdOp(64)(*given.all, seq_idx=torch.zeros((batch, seqlen), dtype=torch.int32))
    assert y.shape == given.x.shape and torch.equal(final, given.initial_states)


def test_nothing_is_written_but_out():
    case = Case(1, 200, 4, 16, 32, 2, 64)
    given = inputs(case)
    for more in ({"cu_seqlens": pack([50, 150])}, {"seq_idx": indices([[60, 140]])}):
        args = [*given.five, given.dt_bias]
        features = {**gates(case, F32), **more}
        before = [t._version for t in (*args, *features.values())]
        Mamba2FwdOp(64)(*args, **features, out=torch.empty_like(given.x))
        assert before == [t._version for t in (*args, *features.values())]
