"""SSDChunkCouplingFwdOp on the reference target, against the float64 definition."""

from __future__ import annotations

import pytest
import recurrence
import torch
from ssd_cases import TOLERANCE, Case, close, inputs

from tileops.mamba import SSDChunkCouplingFwdOp


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", [Case(2, 300, 8, 1, 128, 8, 64), Case(1, 256, 1, 1, 16, 1, 256), Case(1, 70, 1, 1, 9, 3, 10)], ids=str)
def test_against_the_definition(case, dtype):
    given = inputs(case, dtype)
    cb = SSDChunkCouplingFwdOp(case.Q)(given.C, given.B)
    assert cb.dtype == dtype
    close(cb, recurrence.chunk_coupling(given.C, given.B, case.Q), TOLERANCE[dtype], "cb")


def test_above_the_diagonal_is_zero_even_where_the_product_is_not_a_number():
    given = inputs(Case(1, 64, 1, 1, 16, 1, 64))
    given.B[:, 40] = torch.nan
    cb = SSDChunkCouplingFwdOp(64)(given.C, given.B)[0, 0, 0]
    above = torch.ones(64, 64, dtype=torch.bool).triu(1)
    assert cb[above].eq(0).all()
    assert cb[40:, 40].isnan().all()


@pytest.mark.parametrize(("batch", "seqlen"), [(0, 70), (2, 0)])
def test_report_34_empty(batch, seqlen):
    empty = torch.zeros(batch, seqlen, 2, 32, dtype=torch.bfloat16)
    assert SSDChunkCouplingFwdOp(64)(empty, empty).shape == (batch, -(-seqlen // 64), 2, 64, 64)
