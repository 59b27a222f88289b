"""SSDChunkScanFwdOp on the reference target, against its formula in float64, a token at a time."""

from __future__ import annotations

import pytest
import recurrence
import torch
from ssd_cases import TOLERANCE, Case, close, decays, generator, inputs

from tileops.mamba import SSDChunkScanFwdOp

TIGHT = TOLERANCE[torch.float32]
CASES = [Case(2, 300, 8, 32, 64, 2, 64), Case(1, 256, 24, 64, 128, 1, 256), Case(1, 70, 6, 7, 9, 3, 10)]


def arguments(case: Case, dtype: torch.dtype = torch.float32, dt_dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    given = inputs(case, dtype)
    dt, dA = decays(case)
    g = generator(2)
    return {
        "x": given.x,
        "cb": torch.randn(case.B, case.C, case.G, case.Q, case.Q, generator=g).tril().to(dtype),
        "dA_cumsum": dA,
        "C": given.C,
        "prev_states": torch.randn(case.B, case.C, case.H, case.P, case.N, generator=g),
        "dt": dt.to(dt_dtype),
    }


@pytest.mark.parametrize("dt_dtype", [torch.float32, None], ids=["dt float32", "dt as x"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_the_formula(case, dtype, dt_dtype):
    given = arguments(case, dtype, dt_dtype or dtype)
    y = SSDChunkScanFwdOp()(**given)
    assert y.dtype == torch.float32
    close(y, recurrence.chunk_scan(**given), TIGHT, "y")


def test_cb_above_the_diagonal_has_no_effect():
    case = Case(1, 100, 4, 16, 32, 2, 64)
    given = arguments(case)
    expected = SSDChunkScanFwdOp()(**given)
    above = torch.ones(64, 64, dtype=torch.bool).triu(1)
    given["cb"] = torch.where(above, torch.nan, given["cb"])
    assert torch.equal(expected, SSDChunkScanFwdOp()(**given))


def test_report_1_prefix_sums_that_rise_by_rounding():
    case = Case(1, 64, 2, 16, 16, 1, 64)
    given = arguments(case)
    given["dA_cumsum"] = -2.6e9 + 256 * (torch.arange(64) % 2).expand(1, 2, 1, 64)
    assert torch.isfinite(SSDChunkScanFwdOp()(**given)).all()


def test_report_46_cb_per_head_is_refused():
    case = Case(2, 100, 8, 16, 32, 2, 64)
    given = arguments(case)
    given["cb"] = given["cb"].repeat_interleave(4, 2)
    with pytest.raises(ValueError, match=r"^cb: expected shape \(2, num_chunks, 2, chunk_len, chunk_len\), got \(2, 2, 8, 64, 64\)\.$"):
        SSDChunkScanFwdOp()(**given)


@pytest.mark.parametrize(("batch", "seqlen"), [(0, 70), (2, 0)])
def test_report_34_empty(batch, seqlen):
    y = SSDChunkScanFwdOp()(**arguments(Case(batch, seqlen, 4, 16, 32, 2, 64), torch.bfloat16))
    assert y.shape == (batch, seqlen, 4, 16)
