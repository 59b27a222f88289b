"""SSDRecurrentFwdOp on the reference target, against the float64 recurrence."""

from __future__ import annotations

import pytest
import recurrence
import torch
from ssd_cases import TOLERANCE, Case, close, generator, inputs

from tileops.mamba import Mamba2FwdOp, SSDRecurrentFwdOp

TIGHT = TOLERANCE[torch.float32]


def arguments(batch=3, heads=8, head_dim=16, d_state=32, groups=2, dtype=torch.bfloat16, tied=False) -> list[torch.Tensor]:
    """A, dt, x, B_in, C_in, state."""
    g = generator(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g)

    if tied:
        A = (-normal(heads).abs()).view(-1, 1, 1).expand(heads, head_dim, d_state)
        dt = normal(batch, heads).abs().unsqueeze(-1).expand(batch, heads, head_dim)
    else:
        A, dt = -normal(heads, head_dim, d_state).abs(), normal(batch, heads, head_dim).abs()
    x, B, C = normal(batch, heads, head_dim), normal(batch, groups, d_state), normal(batch, groups, d_state)
    return [A, dt, x.to(dtype), B.to(dtype), C.to(dtype), normal(batch, heads, head_dim, d_state)]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("groups", [1, 2, 8])
def test_against_the_recurrence(groups, dtype, tied):
    A, dt, x, B, C, state = arguments(groups=groups, dtype=dtype, tied=tied)
    expected_y, expected_state = recurrence.step(state.double(), A, dt, x, B, C)
    before = [t.clone() for t in (A, dt, x, B, C)]
    y = SSDRecurrentFwdOp()(A, dt, x, B, C, state)
    assert y.dtype == torch.float32
    close(y, expected_y, TIGHT, "y")
    close(state, expected_state, TIGHT, "state")
    assert all(torch.equal(a, b) for a, b in zip(before, (A, dt, x, B, C)))


def test_report_37_an_expanded_rate_gives_the_bits_of_a_full_one():
    A, dt, x, B, C, state = arguments(tied=True)
    other = state.clone()
    y = SSDRecurrentFwdOp()(A, dt, x, B, C, state)
    assert torch.equal(y, SSDRecurrentFwdOp()(A.contiguous(), dt.contiguous(), x, B, C, other))
    assert torch.equal(state, other)


def test_report_12_infinite_rate_forgets_and_no_time_keeps():
    A, dt, x, B, C, state = arguments(tied=True)
    A, dt = torch.full_like(A, -torch.inf), dt.clone()
    dt[1] = 0
    expected_y, expected_state = recurrence.step(state.double(), A, dt, x, B, C)
    kept = state[1].clone()
    close(SSDRecurrentFwdOp()(A, dt, x, B, C, state), expected_y, TIGHT, "y")
    close(state, expected_state, TIGHT, "state")
    assert torch.equal(state[1], kept)


@pytest.mark.parametrize("pick", [slice(2, 6), slice(0, 8, 2)], ids=str)
def test_report_69_a_view_of_a_pool_is_updated_in_place_and_its_neighbours_are_not(pick):
    A, dt, x, B, C, state = arguments(batch=4)
    pool = torch.randn(8, 2, 8, 16, 32)
    view = pool[pick, 1]
    view.copy_(state)
    before = pool.clone()
    y = SSDRecurrentFwdOp()(A, dt, x, B, C, view)
    expected = state.clone()
    assert torch.equal(y, SSDRecurrentFwdOp()(A, dt, x, B, C, expected))
    assert torch.equal(pool[pick, 1], expected)
    before[pick, 1] = expected
    assert torch.equal(pool, before)


@pytest.mark.parametrize(
    ("view", "why"),
    [
        (lambda s: s.transpose(2, 3).contiguous().transpose(2, 3), "its last dimension is not contiguous"),
        (lambda s: torch.stack([s, s], -1)[..., 0], "its last dimension is not contiguous"),
        (lambda s: s[:1].expand_as(s), "its elements share memory"),
        (lambda s: s[:, :1].expand_as(s), "its elements share memory"),
        (lambda s: torch.zeros(4096).as_strided(s.shape, (512, 64, 4, 1)), "its elements share memory"),
    ],
    ids=["transposed", "every other", "one row for all", "one head for all", "overlapping windows"],
)
def test_report_69_a_state_that_cannot_be_updated_in_place_is_refused(view, why):
    A, dt, x, B, C, state = arguments()
    given = view(state)
    before = given.clone()
    with pytest.raises(ValueError, match=rf"^state: cannot be updated in place: .*\({why}\)"):
        SSDRecurrentFwdOp()(A, dt, x, B, C, given)
    assert torch.equal(given, before)


@pytest.mark.parametrize("name", ["A", "dt", "x", "B_in", "C_in"])
def test_a_state_that_is_an_inputs_memory_is_refused(name):
    given = dict(zip(("A", "dt", "x", "B_in", "C_in", "state"), arguments()))
    memory = given["state"].view(given[name].dtype).flatten()
    size = given[name].numel()
    for start in (0, memory.numel() - size):
        shared = {**given, name: memory[start : start + size].view(given[name].shape)}
        before = given["state"].clone()
        with pytest.raises(ValueError, match=rf"^state: shares memory with {name}; expected a tensor of its own\.$"):
            SSDRecurrentFwdOp()(*shared.values())
        assert torch.equal(given["state"], before)


def test_report_11_4096_steps_agree_with_a_prefill():
    case = Case(1, 4096, 2, 16, 16, 1, 256)
    given = inputs(case, torch.bfloat16)
    y, final = Mamba2FwdOp(case.Q)(*given.five, given.dt_bias)
    step = SSDRecurrentFwdOp()
    rates = given.A.view(-1, 1, 1).expand(2, 16, 16)
    steps = torch.nn.functional.softplus(given.dt + given.dt_bias).unsqueeze(-1).expand(1, 4096, 2, 16)
    state = torch.zeros(1, 2, 16, 16)
    tokens = [step(rates, steps[:, t], given.x[:, t], given.B[:, t], given.C[:, t], state) for t in range(case.S)]
    close(torch.stack(tokens, 1), y.double(), 1e-5, "y")
    close(state, final.double(), 1e-5, "state")


def test_report_34_empty_batch():
    y = SSDRecurrentFwdOp()(*arguments(batch=0))
    assert y.shape == (0, 8, 16)


def test_report_64_a_row_has_the_same_bits_alone():
    A, dt, x, B, C, state = arguments()
    rows = [state[b : b + 1].clone() for b in range(3)]
    y = SSDRecurrentFwdOp()(A, dt, x, B, C, state)
    for b, row in enumerate(rows):
        one = slice(b, b + 1)
        assert torch.equal(SSDRecurrentFwdOp()(A, dt[one], x[one], B[one], C[one], row), y[one])
        assert torch.equal(row, state[one])
