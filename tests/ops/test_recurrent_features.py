"""SSDRecurrentFwdOp beyond the spec's call, on the reference target: D, z, dt_bias, softplus, values per head, slots, states, out."""

from __future__ import annotations

import pytest
import recurrence
import torch
from decode_cases import FEATURES, STORED, Decode, decode, features
from ssd_cases import TOLERANCE, close

from tileops import targets
from tileops.errors import TargetError
from tileops.mamba import SSDRecurrentFwdOp

F32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
TIGHT = TOLERANCE[F32]


def run(case: Decode, softplus: bool = False, op: SSDRecurrentFwdOp | None = None):
    """y of a call; the case's state is updated."""
    op = op or SSDRecurrentFwdOp(dt_softplus=softplus)
    return op(*case.six, **case.keywords)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("names", FEATURES, ids="+".join)
def test_each_feature_and_combinations(names, tied):
    case = features(decode(tied=tied), names)
    softplus = "softplus" in names
    expected_y, expected_state = recurrence.decode(*case.six, **case.keywords, dt_softplus=softplus)
    before = [t.clone() for t in case.inputs]
    y = run(case, softplus)
    assert y.dtype == F32
    close(y, expected_y, TIGHT, "y")
    close(case.state, expected_state, TIGHT, "state")
    assert all(torch.equal(a, b) for a, b in zip(before, case.inputs)), "an input was written"


@pytest.mark.parametrize("name", ["D", "z", "dt_bias", "softplus"])
def test_report_72_every_feature_has_an_effect(name):
    plain, with_it = decode(), features(decode(), (name,))
    y = run(plain)
    other = run(with_it, name == "softplus")
    assert y.shape == other.shape and not torch.equal(y, other)
    assert torch.equal(plain.state, with_it.state) == (name in ("D", "z"))


@pytest.mark.parametrize("names", [("D",), ("dt_bias",), ("D", "z", "dt_bias", "softplus")], ids="+".join)
def test_values_per_head_are_those_expanded(names):
    short, long = features(decode(tied=True), names), features(decode(tied=True), names)
    heads, head_dim = short.x.shape[1:]
    short = short.changed(A=short.A[:, 0, 0], dt=short.dt[..., 0])
    for name in ("D", "dt_bias"):
        if name in names:
            per_head = short.keywords[name][:, 0].contiguous()
            short.keywords[name] = per_head
            long.keywords[name] = per_head.unsqueeze(-1).expand(heads, head_dim).contiguous()
    softplus = "softplus" in names
    assert torch.equal(run(short, softplus), run(long, softplus))
    assert torch.equal(short.state, long.state)


def test_report_6_softplus_over_its_range():
    steps = torch.arange(-30, 30, 0.5).view(1, -1)
    case = decode(batch=1, heads=steps.shape[1], groups=1, tied=True)
    case = case.changed(dt=steps, A=torch.zeros(steps.shape[1]), state=torch.zeros_like(case.state))
    y = run(case, softplus=True)
    expected_y, expected_state = recurrence.decode(*case.changed(state=torch.zeros_like(case.state)).six, dt_softplus=True)
    for h in range(steps.shape[1]):
        close(y[:, h], expected_y[:, h], 1e-6, f"y at {steps[0, h]}")
        close(case.state[:, h], expected_state[:, h], 1e-6, f"state at {steps[0, h]}")


# --- slots -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("pads", [(), (0,), (1, 3), (0, 1, 2, 3, 4)], ids=str)
def test_slots_of_a_pool_and_pads(pads, dtype):
    case = decode(batch=5)
    slots = torch.tensor([7, 2, 9, 0, 4], dtype=dtype)
    pool = torch.randn(11, *case.state.shape[1:])
    pool[slots.long()] = case.state
    untouched = pool.clone()
    for b, slot in zip(pads, (-1, -7, 11, 2**31 - 1, -(2**31))):
        slots[b] = slot
    live = [b for b in range(5) if b not in pads]
    y = SSDRecurrentFwdOp()(*case.six[:5], pool, state_batch_indices=slots)
    expected = run(case)
    assert torch.equal(y[live], expected[live]) and y[list(pads)].count_nonzero() == 0
    untouched[slots[live].long()] = case.state[live]
    assert torch.equal(pool, untouched)


def test_slots_beyond_32_bits_are_pads():
    case = decode(batch=2)
    slots = torch.tensor([2**32, -(2**32) + 1])  # 0 and 1 if their upper half were lost
    before = case.state.clone()
    assert SSDRecurrentFwdOp()(*case.six, state_batch_indices=slots).count_nonzero() == 0
    assert torch.equal(case.state, before)


def test_a_pads_inputs_have_no_effect_and_its_row_is_zero_with_every_feature():
    case = features(decode(batch=3), ("D", "z", "dt_bias"))
    case.x[1], case.keywords["z"][1], case.dt[1] = torch.nan, torch.inf, torch.nan
    case.keywords["state_batch_indices"] = torch.tensor([2, -1, 0], dtype=torch.int32)
    y = run(case)
    assert y[1].count_nonzero() == 0 and y.isfinite().all() and case.state.isfinite().all()


def test_a_pool_without_slots_has_pads_only():
    case = decode(batch=3)
    y = SSDRecurrentFwdOp()(*case.six[:5], case.state[:0], state_batch_indices=torch.tensor([0, 1, -1]))
    assert y.shape == case.x.shape and y.count_nonzero() == 0


def test_slots_strided_and_in_any_order_are_a_permutation():
    case, other = decode(batch=4), decode(batch=4)
    order = torch.tensor([[3, 0], [1, 0], [0, 0], [2, 0]], dtype=torch.int32)[:, 0]
    other = other.changed(state=other.state[torch.tensor([2, 1, 3, 0])].clone())
    y = SSDRecurrentFwdOp()(*other.six, state_batch_indices=order)
    assert torch.equal(y, run(case))
    assert torch.equal(other.state[order.long()], case.state)


# --- states of 16 bits -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state_dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("dtype", [F32, BF16, FP16], ids=str)
def test_16_bit_states_are_rounded_once_when_stored_and_y_comes_before(dtype, state_dtype):
    case = decode(dtype=dtype)
    rounded = case.state.to(state_dtype)
    case = case.changed(state=rounded.clone())
    exact = case.changed(state=rounded.float())
    assert torch.equal(run(case), run(exact))
    assert torch.equal(case.state, exact.state.to(state_dtype))


@pytest.mark.parametrize("state_dtype", [BF16, FP16], ids=str)
def test_report_66_states_of_16_bits_drift_and_float32_does_not(state_dtype):
    errors = {}
    for kept in (F32, state_dtype):
        case = decode(batch=1, heads=2, groups=1, tied=True)
        case.state.zero_()
        exact = case.state.double()
        case = case.changed(A=torch.full((2,), -0.01), state=case.state.to(kept))
        op = SSDRecurrentFwdOp()
        for t in range(512):
            step = decode(batch=1, heads=2, groups=1, tied=True, seed=t)
            case = case.changed(dt=step.dt * 0.1, x=step.x, B_in=step.B_in, C_in=step.C_in)
            _, exact = recurrence.decode(*case.six[:5], exact)
            run(case, op=op)
        errors[kept] = float((case.state.double() - exact).norm() / exact.norm())
    assert errors[F32] < 1e-5
    assert errors[F32] < errors[state_dtype] < 10 * STORED[state_dtype]


@pytest.mark.parametrize("state_dtype", [BF16, FP16], ids=str)
def test_a_16_bit_pool_keeps_its_neighbours(state_dtype):
    case = decode(batch=2)
    pool = torch.randn(6, *case.state.shape[1:]).to(state_dtype)
    before = pool.clone()
    SSDRecurrentFwdOp()(*case.six[:5], pool[::3])
    assert torch.equal(pool[[1, 2, 4, 5]], before[[1, 2, 4, 5]])
    assert not torch.equal(pool[0], before[0]) and not torch.equal(pool[3], before[3])


# --- out ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_out_is_written_and_returned_and_its_neighbours_are_not(dtype):
    plain, case = decode(), decode()
    expected = run(plain)
    memory = torch.full((3, 3, 8, 20), 7.0, dtype=dtype)
    out = memory[:, 1, :, 2:18]
    case.keywords["out"] = out
    assert run(case) is out
    assert torch.equal(out, expected.to(dtype)) and torch.equal(case.state, plain.state)
    out.fill_(7.0)
    assert (memory == 7.0).all()


def test_out_of_any_strides():
    expected = run(decode())
    for make in (lambda: torch.empty(16, 8, 3).permute(2, 1, 0), lambda: torch.empty(3, 8, 32)[..., ::2]):
        case = decode()
        case.keywords["out"] = make()
        run(case)
        assert torch.equal(case.keywords["out"], expected)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_out_dtype_is_that_of_y_where_no_out_is_given(dtype):
    case, plain = decode(dtype=dtype), decode(dtype=dtype)
    y = run(case, op=SSDRecurrentFwdOp(out_dtype=dtype))
    assert y.dtype == dtype and torch.equal(y, run(plain).to(dtype)) and torch.equal(case.state, plain.state)
    other = FP16 if dtype == BF16 else BF16
    with pytest.raises(ValueError, match=r"^out_dtype: expected float32 or \w+ \(float32, or that of x\), got \w+\."):
        run(case, op=SSDRecurrentFwdOp(out_dtype=other))
    case.keywords["out"] = torch.empty(case.x.shape)
    assert run(case, op=SSDRecurrentFwdOp(out_dtype=other)).dtype == F32  # out decides


def test_constructor_values_are_checked():
    with pytest.raises(TypeError, match=r"^dt_softplus: expected True or False, got int"):
        SSDRecurrentFwdOp(dt_softplus=1)
    with pytest.raises(ValueError, match=r"^out_dtype: expected float32 or float16 or bfloat16, got int32"):
        SSDRecurrentFwdOp(out_dtype=torch.int32)
    assert repr(SSDRecurrentFwdOp(dt_softplus=True)) == "SSDRecurrentFwdOp(dt_softplus=True)"
    with pytest.raises(TypeError):
        SSDRecurrentFwdOp()(*decode().six, torch.zeros(8))  # keywords are keywords


@pytest.mark.parametrize(
    ("out", "why"),
    [
        (lambda c: torch.zeros(8, 16).expand(3, 8, 16), r"^out: cannot be written: .*\(its elements share memory\)"),
        (lambda c: c.x, r"^out: shares memory with x; expected a tensor of its own"),
        (lambda c: c.keywords["z"], r"^out: shares memory with z"),
        (lambda c: c.state.view(-1)[5 : 5 + 384].view(3, 8, 16), r"^out: shares memory with state"),
    ],
    ids=["expanded", "x", "z", "in the state"],
)
def test_an_out_that_cannot_be_written_is_refused_before_anything_is(out, why):
    case = features(decode(dtype=F32), ("z",))
    case.keywords["out"] = out(case)
    before = case.state.clone()
    with pytest.raises(ValueError, match=why):
        run(case)
    assert torch.equal(case.state, before)


def test_out_may_interleave_with_an_input_in_one_buffer():
    buffer = torch.zeros(3, 8, 32)
    case, plain = decode(dtype=F32), decode(dtype=F32)
    case = case.changed(x=buffer[..., :16].copy_(case.x))
    case.keywords["out"] = buffer[..., 16:]
    assert torch.equal(run(case), run(plain))


# --- targets -----------------------------------------------------------------------------------------------------------


class Third:
    """A third party's target from before the features: the spec's six tensors."""

    name = "third"

    def __init__(self, function):
        self.function = function

    def implementation(self, op_name):
        return self.function


@pytest.fixture
def third(monkeypatch):
    def register(function):
        monkeypatch.setitem(targets._loaded, "third", Third(function))

    return register


def test_a_target_without_the_features_serves_calls_without_them_and_is_named_where_one_is_used(third):
    seen = []
    third(lambda A, dt, x, B_in, C_in, state: seen.append((A.shape, dt.shape)))
    case = decode(tied=True)
    run(case, op=SSDRecurrentFwdOp(target="third"))
    run(case.changed(A=case.A[:, 0, 0], dt=case.dt[..., 0]), op=SSDRecurrentFwdOp(target="third"))
    assert seen == [((8, 16, 32), (3, 8, 16))] * 2
    with pytest.raises(TargetError, match=r"^target 'third' serves SSDRecurrentFwdOp without D, z; leave that out, or use another"):
        run(features(case, ("D", "z")), op=SSDRecurrentFwdOp(target="third"))
    with pytest.raises(TargetError, match=r"^target 'third' serves SSDRecurrentFwdOp without dt_softplus; "):
        run(case, op=SSDRecurrentFwdOp(target="third", dt_softplus=True))


def test_a_target_gets_the_keywords_that_a_call_uses(third):
    seen = []
    third(lambda *tensors, **keywords: seen.append((len(tensors), sorted(keywords))))
    op = SSDRecurrentFwdOp(target="third", dt_softplus=True, out_dtype=BF16)
    run(features(decode(), ("D", "state_batch_indices")), op=op)
    assert seen == [(6, ["D", "dt_softplus", "out_dtype", "state_batch_indices"])]
