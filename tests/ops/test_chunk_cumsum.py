"""SSDChunkCumsumFwdOp on the reference target, against the float64 recurrence."""

from __future__ import annotations

import math

import pytest
import recurrence
import torch
from ssd_cases import Case, close, inputs

from tileops.mamba import SSDChunkCumsumFwdOp
from tileops.ops import chunk_cumsum as stage
from tileops.reference import chunk_cumsum as definition


def check(case: Case, dt, A, dt_bias, tolerance: float = 1e-6, **options) -> tuple[torch.Tensor, torch.Tensor]:
    dt_out, dA = SSDChunkCumsumFwdOp(case.Q, **options)(dt, A, dt_bias)
    assert dt_out.dtype == options.pop("out_dtype", torch.float32)
    assert dA.dtype == torch.float32
    expected_dt, expected_dA = recurrence.chunk_cumsum(dt, A, dt_bias, case.Q, **options)
    close(dt_out, expected_dt, {torch.bfloat16: 3e-3, torch.float16: 4e-4}.get(dt_out.dtype, tolerance), "dt_out")
    close(dA, expected_dA, tolerance, "dA_cumsum")
    return dt_out, dA


@pytest.mark.parametrize("heads", [1, 5, 7, 48, 80, 112])
@pytest.mark.parametrize("chunk_len", [16, 64, 100, 256])
def test_report_47_every_head_of_every_width_and_chunk(heads, chunk_len):
    case = Case(2, 300, heads, 1, 1, 1, chunk_len)
    given = inputs(case)
    check(case, given.dt, given.A, given.dt_bias, dt_softplus=True)


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_dA_comes_from_float32_dt_whatever_dt_out_is_stored_in(out_dtype):
    case = Case(2, 130, 8, 1, 1, 1, 64)
    given = inputs(case)
    _, dA = check(case, given.dt, given.A, given.dt_bias, out_dtype=out_dtype, dt_softplus=True)
    assert torch.equal(dA, SSDChunkCumsumFwdOp(64, dt_softplus=True)(given.dt, given.A, given.dt_bias)[1])


@pytest.mark.parametrize("softplus", [False, True])
def test_report_72_bias_and_softplus_have_their_effect(softplus):
    case = Case(2, 100, 8, 1, 1, 1, 64)
    given = inputs(case)
    bias = given.dt_bias + 5
    without, _ = check(case, given.dt, given.A, None, dt_softplus=softplus)
    biased, _ = check(case, given.dt, given.A, bias, dt_softplus=softplus)
    assert not torch.equal(without, biased)


def test_report_6_softplus_keeps_its_digits():
    """log(1 + exp(v)) would be 0 below -17. Relative error at most 1e-6 for v in [-80, 20], and v itself above."""
    v = torch.cat([torch.arange(-80, 20, 0.25), torch.tensor([-25.0, 19.999, 20.0, 20.001, 88.0, 89.0, 200.0, 1e30])])
    dt_out, _ = SSDChunkCumsumFwdOp(1, dt_softplus=True)(v.view(1, -1, 1), torch.tensor([-1.0]))
    got = dt_out.flatten().double()
    expected = torch.logaddexp(v.double(), torch.zeros_like(v, dtype=torch.float64))
    assert torch.isfinite(got).all()
    assert ((got - expected) / expected).abs().max() <= 1e-6
    assert torch.equal(got[v > 20], v[v > 20].double())


def test_report_14_clamp_comes_after_bias_and_softplus():
    dt = torch.tensor([-10.0, 0.07, 10.0]).view(1, 3, 1)
    options = {"dt_min": 0.05, "dt_max": 0.1}
    dt_out, dA = SSDChunkCumsumFwdOp(4, **options)(dt, torch.tensor([-2.0]))
    torch.testing.assert_close(dt_out.flatten(), torch.tensor([0.05, 0.07, 0.1, 0.0]))
    torch.testing.assert_close(dA.flatten(), torch.tensor([-0.1, -0.24, -0.44, -0.44]))
    case, given = Case(1, 50, 4, 1, 1, 1, 16), inputs(Case(1, 50, 4, 1, 1, 1, 16))
    check(case, given.dt, given.A, given.dt_bias, dt_softplus=True, **options)
    # Padding is no token: it is not raised to dt_min.
    assert SSDChunkCumsumFwdOp(64, **options)(given.dt, given.A)[0][..., 50:].eq(0).all()


def test_default_bounds_raise_negative_dt_to_zero():
    dt_out, dA = SSDChunkCumsumFwdOp(2)(torch.tensor([-1.0, 2.0]).view(1, 2, 1), torch.tensor([-3.0]))
    assert dt_out.flatten().tolist() == [0.0, 2.0]
    assert dA.flatten().tolist() == [0.0, -6.0]
    unbounded, _ = SSDChunkCumsumFwdOp(2, dt_min=-math.inf)(torch.tensor([-1.0, 2.0]).view(1, 2, 1), torch.tensor([-3.0]))
    assert unbounded.flatten().tolist() == [-1.0, 2.0]


def test_no_time_at_an_infinite_rate_adds_nothing():
    """0 * -inf is NaN, and so is the difference of two sums of -inf, which is how a decay is made."""
    _, dA = SSDChunkCumsumFwdOp(4)(torch.tensor([0.0, 1.0, 0.0]).view(1, 3, 1), torch.tensor([-math.inf]))
    assert dA.flatten().tolist() == [0.0, *[torch.tensor(-1e30).item()] * 3]


def test_terms_above_the_lowest_are_what_they_are():
    dt = torch.tensor([1e29, 1.0, 2e30]).view(1, 3, 1)
    _, dA = SSDChunkCumsumFwdOp(4)(dt, torch.tensor([-1.0]))
    assert torch.equal(dA.flatten(), torch.tensor([-1e29, -1e29, -1.1e30, -1.1e30]))
    for name in ("LOWEST_TERM", "FADED_TERM"):
        assert getattr(definition, name) == getattr(stage, name)
    assert torch.tensor(stage.FADED_TERM).exp() == 0


@pytest.mark.parametrize(("batch", "seqlen"), [(0, 70), (2, 0)])
def test_report_34_empty(batch, seqlen):
    dt_out, dA = SSDChunkCumsumFwdOp(64, torch.bfloat16)(torch.zeros(batch, seqlen, 4), -torch.ones(4))
    assert dt_out.shape == dA.shape == (batch, 4, -(-seqlen // 64), 64)


def test_strided_dt_gives_the_same_bits():
    given = inputs(Case(2, 100, 6, 1, 1, 1, 64))
    expected = SSDChunkCumsumFwdOp(64)(given.dt, given.A)
    strided = torch.zeros(2, 6, 100, 3)[..., 1].transpose(1, 2).copy_(given.dt)
    assert all(torch.equal(a, b) for a, b in zip(expected, SSDChunkCumsumFwdOp(64)(strided, given.A)))


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"chunk_len": 0}, ValueError, "chunk_len: expected a positive int up to 4096, got 0"),
        ({"chunk_len": 64.0}, TypeError, "chunk_len: expected a positive int, got float"),
        ({"chunk_len": True}, TypeError, "chunk_len: expected a positive int, got bool"),
        # report 73
        ({"chunk_len": 64, "out_dtype": torch.int32}, ValueError, "out_dtype: expected float32 or float16 or bfloat16, got int32"),
        ({"chunk_len": 64, "out_dtype": torch.float64}, ValueError, "out_dtype: .*got float64"),
        ({"chunk_len": 64, "out_dtype": "float32"}, TypeError, "out_dtype: expected a torch.dtype, got str"),
        ({"chunk_len": 64, "dt_min": 0.2, "dt_max": 0.1}, ValueError, "dt_min: expected at most dt_max = 0.1, got 0.2"),
        ({"chunk_len": 64, "dt_max": math.nan}, ValueError, "dt_max: expected a number, got nan"),
        ({"chunk_len": 64, "dt_min": "0"}, TypeError, "dt_min: expected a number, got str"),
        ({"chunk_len": 64, "dt_softplus": 1}, TypeError, "dt_softplus: expected True or False, got int"),
    ],
)
def test_constructor_refuses(arguments, kind, message):
    with pytest.raises(kind, match=f"^{message}"):
        SSDChunkCumsumFwdOp(**arguments)
