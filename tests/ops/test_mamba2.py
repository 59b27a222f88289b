"""Mamba2FwdOp on the reference target, against the float64 recurrence. «report N» is a user's report on another library."""

from __future__ import annotations

import pytest
import recurrence
import torch
from ssd_cases import FORGETTING, LONG_SUM_TOLERANCE, TOLERANCE, Case, close, error, forgetting, inputs

from tileops.mamba import Mamba2FwdOp, SSDRecurrentFwdOp

TIGHT = TOLERANCE[torch.float32]

SHAPES = [
    Case(1, 1, 1, 16, 16, 1, 16),
    Case(2, 300, 4, 32, 64, 2, 64),
    Case(1, 512, 24, 64, 128, 1, 256),
    Case(1, 257, 12, 64, 128, 2, 256),  # six heads a group
    Case(1, 200, 112, 16, 16, 8, 64),  # report 41: fourteen heads a group
    Case(2, 130, 5, 48, 32, 5, 128),  # as many groups as heads
    Case(1, 100, 3, 7, 9, 1, 10),  # sizes that only the reference takes
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", SHAPES, ids=str)
def test_against_the_recurrence(case, dtype):
    given = inputs(case, dtype)
    y, final = Mamba2FwdOp(case.Q)(*given.all)
    expected_y, expected_final = recurrence.mamba2(*given.all)
    assert y.dtype == final.dtype == torch.float32
    close(y, expected_y, TIGHT, "y")
    close(final, expected_final, TIGHT, "final_states")


def test_long_sequence_in_bfloat16_stays_below_input_rounding():
    """Report 66: the error against float64 is far below what rounding y to bfloat16 would cost (1.4e-3)."""
    given = inputs(Case(1, 4096, 2, 64, 128, 1, 256), torch.bfloat16)
    y, final = Mamba2FwdOp()(*given.five, given.dt_bias)
    expected_y, expected_final = recurrence.mamba2(*given.five, given.dt_bias)
    assert error(y, expected_y) < 1e-5
    assert error(final, expected_final) < 1e-5


@pytest.mark.parametrize("seqlen", [1, 2, 63, 64, 65, 127, 255, 256, 257, 511, 513])
def test_report_27_final_state_is_after_the_last_token(seqlen):
    case = Case(2, seqlen, 4, 16, 32, 2, 256)
    given = inputs(case)
    op = Mamba2FwdOp(case.Q, dt_softplus=False)
    dt = given.dt.abs() * 0.1
    y, final = op(given.x, dt, *given.five[2:])
    expected_y, expected_final = recurrence.mamba2(given.x, dt, *given.five[2:], dt_softplus=False)
    close(y, expected_y, LONG_SUM_TOLERANCE, "y")
    close(final, expected_final, LONG_SUM_TOLERANCE, "final_states")
    # The same tokens followed by padding on which no time passes: what is in x there has no effect.
    padded = inputs(Case(2, seqlen + 40, 4, 16, 32, 2, 256), seed=9)
    for name in ("x", "B", "C"):
        getattr(padded, name)[:, :seqlen] = getattr(given, name)
    padded_dt = torch.zeros_like(padded.dt)
    padded_dt[:, :seqlen] = dt
    padded_y, padded_final = op(padded.x, padded_dt, given.A, padded.B, padded.C)
    close(padded_final, expected_final, LONG_SUM_TOLERANCE, "final_states with padding")
    close(padded_y[:, :seqlen], expected_y, LONG_SUM_TOLERANCE, "y with padding")


@pytest.mark.parametrize("rate", [-1e4, -1e6])
def test_report_1_huge_decay_is_finite_and_right(rate):
    given = inputs(Case(1, 256, 4, 64, 128, 1, 256), torch.bfloat16)
    A, dt = torch.full((4,), rate), torch.full_like(given.dt, 10.0)
    y, final = Mamba2FwdOp(256)(given.x, dt, A, given.B, given.C)
    expected_y, expected_final = recurrence.mamba2(given.x, dt, A, given.B, given.C)
    close(y, expected_y, TIGHT, "y")
    close(final, expected_final, TIGHT, "final_states")


@pytest.mark.parametrize("seqlen", [257, 300, 1000])
def test_report_2_masked_half_does_not_overflow(seqlen):
    """Above the diagonal the decay would be exp(+20480)."""
    given = inputs(Case(1, seqlen, 4, 32, 64, 1, 256), torch.bfloat16)
    A, dt = torch.full((4,), -16.0), torch.full_like(given.dt, 5.0)
    y, final = Mamba2FwdOp(256)(given.x, dt, A, given.B, given.C)
    expected_y, expected_final = recurrence.mamba2(given.x, dt, A, given.B, given.C)
    close(y, expected_y, TIGHT, "y")
    close(final, expected_final, TIGHT, "final_states")


def test_report_4_decays_across_a_wide_span():
    """-3 a token: 64 tokens span 192, whose exponential overflows float32."""
    given = inputs(Case(1, 512, 4, 32, 64, 1, 256))
    A, dt = torch.full((4,), -3.0), torch.ones_like(given.dt)
    got = Mamba2FwdOp(256, dt_softplus=False)(given.x, dt, A, given.B, given.C)
    expected = recurrence.mamba2(given.x, dt, A, given.B, given.C, dt_softplus=False)
    close(got[0], expected[0], TIGHT, "y")
    close(got[1], expected[1], TIGHT, "final_states")


def test_report_5_float16_inputs_whose_state_exceeds_float16():
    case = Case(1, 64, 2, 16, 128, 1, 64)
    x = torch.full((1, 64, 2, 16), 200.0, dtype=torch.float16)
    BC = torch.full((1, 64, 1, 128), 10.0, dtype=torch.float16)
    dt, A = torch.full((1, 64, 2), 10.0), torch.full((2,), -1e-3)
    y, final = Mamba2FwdOp(case.Q)(x, dt, A, BC, BC)
    expected_y, expected_final = recurrence.mamba2(x, dt, A, BC, BC)
    assert expected_final.abs().max() > 65504
    close(y, expected_y, TIGHT, "y")
    close(final, expected_final, TIGHT, "final_states")


def test_report_10_bfloat16_rates_are_refused():
    given = inputs(Case(1, 8, 2, 16, 16, 1, 16))
    with pytest.raises(ValueError, match=r"^A: expected dtype float32, got bfloat16\. Keep rates in float32"):
        Mamba2FwdOp(16)(given.x, given.dt, given.A.bfloat16(), given.B, given.C)


@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_report_12_rate_zero_is_causal_linear_attention(zero):
    given = inputs(Case(1, 100, 2, 16, 16, 1, 64))
    A = torch.full((2,), zero)
    y, _ = Mamba2FwdOp(64, dt_softplus=False)(given.x, given.dt.abs(), A, given.B, given.C)
    scores = torch.einsum("tn,sn->ts", given.C[0, :, 0].double(), given.B[0, :, 0].double()).tril()
    expected = torch.einsum("ts,shp->thp", scores, (given.dt.abs().unsqueeze(-1) * given.x)[0].double())
    close(y[0], expected, TIGHT, "y")


@pytest.mark.parametrize("seqlen", [64, 100])
def test_report_12_infinite_rate_keeps_only_the_token_itself(seqlen):
    given = inputs(Case(1, seqlen, 2, 16, 16, 1, 64))
    A = torch.tensor([-torch.inf, -1.0])
    y, final = Mamba2FwdOp(64)(given.x, given.dt, A, given.B, given.C, initial_states=given.initial_states)
    expected_y, expected_final = recurrence.mamba2(given.x, given.dt, A, given.B, given.C, initial_states=given.initial_states)
    close(y, expected_y, TIGHT, "y")
    close(final, expected_final, TIGHT, "final_states")


@pytest.mark.parametrize(("rate", "first"), [*FORGETTING, (-1e3, 1.0)], ids=str)
def test_what_follows_a_step_that_forgets_everything_decays_as_it_should(rate, first):
    """Behind it no time passes, then little: not at all at a rate of -inf."""
    given = inputs(Case(1, 100, 2, 16, 16, 1, 64))
    x, dt, A = forgetting(given, rate, first)
    y, final = Mamba2FwdOp(64, dt_softplus=False)(x, dt, A, given.B, given.C, None, given.initial_states)
    expected_y, expected_final = recurrence.mamba2(x, dt, A, given.B, given.C, None, given.initial_states, dt_softplus=False)
    close(y, expected_y, 2e-5, "y")
    close(final, expected_final, 2e-5, "final_states")


@pytest.mark.parametrize("softplus", [False, True])
def test_report_14_the_only_limit_is_that_time_does_not_run_backwards(softplus):
    """Raw dt of -10 and 10: neither 0.001 nor 0.1 bounds what is used; without softplus a negative dt counts as 0.

    Prefix sums reach -2560, where half an ulp is 1.2e-4.
    """
    given = inputs(Case(1, 40, 2, 16, 16, 1, 16))
    dt = torch.where(given.dt > 0, 10.0, -10.0)
    got = Mamba2FwdOp(16, softplus)(given.x, dt, given.A, given.B, given.C)
    expected = recurrence.mamba2(given.x, dt, given.A, given.B, given.C, dt_softplus=softplus)
    close(got[0], expected[0], 1e-4, "y")
    close(got[1], expected[1], 1e-4, "final_states")


def test_report_28_initial_state_decays_from_its_own_end():
    """x = 0 and a state of ones: y[l] = exp(sum of dt * A up to l) * sum of C[l]."""
    given = inputs(Case(1, 150, 2, 16, 32, 1, 64))
    dt = given.dt.abs() * 0.01
    initial = torch.ones((1, 2, 16, 32))
    y, _ = Mamba2FwdOp(64, dt_softplus=False)(torch.zeros_like(given.x), dt, given.A, given.B, given.C, None, initial)
    decay = torch.exp(torch.cumsum((dt * given.A).double(), 1))
    expected = decay * given.C.double().sum(-1)
    close(y, expected.unsqueeze(-1).expand(y.shape), 1e-5, "y")


def test_report_29_chunks_of_very_different_steps():
    given = inputs(Case(1, 128, 2, 16, 32, 1, 64))
    dt = torch.full_like(given.dt, 1e-3)
    dt[:, 64:] = 3.0
    for steps in (dt, dt.flip(1)):
        got = Mamba2FwdOp(64, dt_softplus=False)(given.x, steps, given.A, given.B, given.C)
        expected = recurrence.mamba2(given.x, steps, given.A, given.B, given.C, dt_softplus=False)
        close(got[0], expected[0], TIGHT, "y")
        close(got[1], expected[1], TIGHT, "final_states")


@pytest.mark.parametrize("groups", [1, 8])
def test_reports_31_and_36_one_call_equals_two_equals_a_thousand_steps(groups):
    case = Case(2, 1000, 8, 16, 32, groups, 256)
    given = inputs(case, torch.bfloat16)
    x, dt, A, B, C = given.five
    op, step = Mamba2FwdOp(case.Q), SSDRecurrentFwdOp()
    y, final = op(*given.all)
    y1, state = op(x[:, :300], dt[:, :300], A, B[:, :300], C[:, :300], given.dt_bias, given.initial_states)
    y2, split_final = op(x[:, 300:], dt[:, 300:], A, B[:, 300:], C[:, 300:], given.dt_bias, state)
    close(torch.cat([y1, y2], 1), y.double(), 1e-5, "y in two calls")
    close(split_final, final.double(), 1e-5, "final_states of two calls")
    steps = torch.nn.functional.softplus(dt + given.dt_bias).unsqueeze(-1).expand(-1, -1, -1, case.P)
    rates = A.view(-1, 1, 1).expand(-1, case.P, case.N)
    state = given.initial_states.clone()
    tokens = [step(rates, steps[:, t], x[:, t], B[:, t], C[:, t], state) for t in range(case.S)]
    close(torch.stack(tokens, 1), y.double(), 1e-5, "y in decode steps")
    close(state, final.double(), 1e-5, "state after decode steps")


def test_report_32_initial_states_have_an_effect_and_none_is_zeros():
    given = inputs(Case(2, 100, 4, 16, 32, 1, 64))
    op = Mamba2FwdOp(64)
    none, zeros = op(*given.five, given.dt_bias), op(*given.five, given.dt_bias, torch.zeros_like(given.initial_states))
    assert all(torch.equal(a, b) for a, b in zip(none, zeros))
    other = op(*given.all)
    assert not torch.equal(none[0], other[0])
    assert not torch.equal(none[1], other[1])


@pytest.mark.parametrize("with_initial", [False, True])
@pytest.mark.parametrize(("batch", "seqlen"), [(0, 256), (2, 0), (0, 0)])
def test_report_34_empty_batches_and_sequences(batch, seqlen, with_initial):
    given = inputs(Case(batch, seqlen, 4, 16, 32, 2, 64), torch.bfloat16)
    initial = given.initial_states if with_initial else None
    y, final = Mamba2FwdOp(64)(*given.five, given.dt_bias, initial)
    assert y.shape == (batch, seqlen, 4, 16)
    assert y.dtype == torch.float32
    assert torch.equal(final, given.initial_states if with_initial else torch.zeros(batch, 4, 16, 32))
    assert batch == 0 or final.data_ptr() != given.initial_states.data_ptr()


@pytest.mark.parametrize("groups", [2, 4, 8])
def test_report_40_head_h_reads_group_h_over_heads_per_group(groups):
    heads = 16
    x = torch.ones((1, 3, heads, 16))
    dt, A = torch.ones((1, 3, heads)), torch.full((heads,), -torch.inf)
    B = torch.arange(groups).view(1, 1, groups, 1).expand(1, 3, groups, 16).float()
    y, _ = Mamba2FwdOp(16, False)(x, dt, A, B, torch.ones_like(B))
    assert y[0, 1, :, 0].tolist() == [16.0 * (h // (heads // groups)) for h in range(heads)]


def test_report_64_same_bits_again_and_whatever_the_rest_of_the_batch():
    given = inputs(Case(4, 300, 8, 32, 64, 2, 128), torch.bfloat16)
    op = Mamba2FwdOp(128)
    first = op(*given.all)
    assert all(torch.equal(a, b) for a, b in zip(first, op(*given.all)))
    x, dt, A, B, C, dt_bias, initial = given.all
    for b in range(4):
        row = slice(b, b + 1)
        alone = op(x[row], dt[row], A, B[row], C[row], dt_bias, initial[row])
        assert all(torch.equal(whole[row], one) for whole, one in zip(first, alone))


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("with_initial", [False, True])
def test_reports_67_and_72_optional_arguments_given_or_not(with_bias, with_initial):
    given = inputs(Case(2, 100, 4, 16, 32, 2, 64))
    optional = 0.5 + given.dt_bias.abs() if with_bias else None, given.initial_states if with_initial else None
    for softplus in (False, True):
        got = Mamba2FwdOp(64, softplus)(*given.five, *optional)
        expected = recurrence.mamba2(*given.five, *optional, dt_softplus=softplus)
        close(got[0], expected[0], TIGHT, "y")
        close(got[1], expected[1], TIGHT, "final_states")


def test_report_75_inputs_that_require_grad_are_refused_unless_grad_is_off():
    given = inputs(Case(1, 20, 2, 16, 16, 1, 16))
    op = Mamba2FwdOp(16)
    expected = op(*given.five)
    with pytest.raises(ValueError, match=r"^dt: requires grad, .*no backward.*dt\.detach\(\)"):
        op(given.x, given.dt.clone().requires_grad_(), *given.five[2:])
    with torch.no_grad():
        y, _ = op(given.x.clone().requires_grad_(), *given.five[1:])
    assert not y.requires_grad
    assert torch.equal(y, expected[0])


def test_inputs_are_never_written():
    given = inputs(Case(2, 100, 4, 16, 32, 2, 64))
    before = [t.clone() for t in given.all]
    versions = [t._version for t in given.all]
    Mamba2FwdOp(64)(*given.all)
    assert all(torch.equal(a, b) for a, b in zip(before, given.all))
    assert versions == [t._version for t in given.all]


def test_layouts_give_the_same_bits():
    """Report 38: views of one projection, an odd pitch and offset, transposed heads, a strided last dimension."""
    case = Case(2, 100, 4, 16, 32, 2, 64)
    given = inputs(case, torch.bfloat16)
    op = Mamba2FwdOp(64)
    expected = op(*given.all)
    sizes = [case.H * case.P, case.G * case.N, case.G * case.N]
    packed = torch.zeros(case.B * case.S * (sum(sizes) + 5) + 1, dtype=torch.bfloat16)[1:].view(case.B, case.S, -1)
    x, B, C, _ = packed.split([*sizes, 5], -1)
    x, B, C = x.unflatten(-1, (case.H, case.P)), B.unflatten(-1, (case.G, case.N)), C.unflatten(-1, (case.G, case.N))
    for view, source in ((x, given.x), (B, given.B), (C, given.C)):
        view.copy_(source)
    assert all(torch.equal(a, b) for a, b in zip(expected, op(x, given.dt, given.A, B, C, given.dt_bias, given.initial_states)))
    x = given.x.transpose(1, 2).contiguous().transpose(1, 2)
    dt = given.dt.transpose(1, 2).contiguous().transpose(1, 2)
    B = torch.stack([given.B, given.B], -1)[..., 1]
    initial = given.initial_states.transpose(2, 3).contiguous().transpose(2, 3)
    assert all(torch.equal(a, b) for a, b in zip(expected, op(x, dt, given.A, B, given.C, given.dt_bias, initial)))


def test_blocks_of_chunks_do_not_change_the_result(monkeypatch):
    """Long sequences are worked through a block of chunks at a time, so that memory stays bounded."""
    from tileops.reference import _common

    given = inputs(Case(2, 300, 4, 16, 32, 2, 32))
    expected = Mamba2FwdOp(32)(*given.all)
    monkeypatch.setattr(_common, "BLOCK_ELEMENTS", 1)
    assert [first for first, _ in _common.chunk_blocks(3, 10)] == [0, 1, 2]
    got = Mamba2FwdOp(32)(*given.all)
    close(got[0], expected[0].double(), TIGHT, "y")
    close(got[1], expected[1].double(), TIGHT, "final_states")
