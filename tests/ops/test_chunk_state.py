"""SSDChunkStateFwdOp on the reference target, against the float64 recurrence within each chunk."""

from __future__ import annotations

import pytest
import recurrence
import torch
from ssd_cases import TOLERANCE, Case, close, decays, inputs

from tileops.mamba import SSDChunkStateFwdOp

TIGHT = TOLERANCE[torch.float32]
CASES = [Case(2, 300, 8, 32, 64, 2, 64), Case(1, 256, 24, 64, 128, 1, 256), Case(1, 70, 6, 7, 9, 3, 10)]


@pytest.mark.parametrize("dt_dtype", [torch.float32, None], ids=["dt float32", "dt as x"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_the_recurrence(case, dtype, dt_dtype):
    given = inputs(case, dtype)
    dt, dA = decays(case)
    dt = dt.to(dt_dtype or dtype)
    states = SSDChunkStateFwdOp()(given.x, given.B, dt, dA)
    assert states.dtype == torch.float32
    close(states, recurrence.chunk_state(given.x, given.B, dt, dA), TIGHT, "states")


def packed(case: Case, changes: list[int]) -> torch.Tensor:
    """seq_idx that counts up at each position of ``changes``, the same in every row."""
    index = torch.zeros(case.S, dtype=torch.int32)
    for position in changes:
        index[position:] += 1
    return index.expand(case.B, case.S)


@pytest.mark.parametrize("changes", [[0], [63], [64], [32], [1, 2, 3], [70, 127, 128, 190], []], ids=str)
@pytest.mark.parametrize("seqlen", [64, 200])
def test_report_35_sequence_changes_at_the_end_start_and_middle_of_chunks(changes, seqlen):
    case = Case(2, seqlen, 4, 16, 32, 2, 64)
    given = inputs(case, torch.bfloat16)
    dt, dA = decays(case)
    index = packed(case, [p for p in changes if p < seqlen])
    close(SSDChunkStateFwdOp()(given.x, given.B, dt, dA, index), recurrence.chunk_state(given.x, given.B, dt, dA, index), TIGHT, "states")


def test_report_9_a_chunk_that_ends_in_padding_is_zero_and_foreign_nan_is_not_read():
    case = Case(1, 128, 2, 16, 16, 1, 64)
    given = inputs(case)
    dt, dA = decays(case)
    index = torch.full((1, 128), -1, dtype=torch.int32)
    index[:, 100:] = 3
    given.x[:, :100] = torch.nan
    given.B[:, :100] = torch.inf
    states = SSDChunkStateFwdOp()(given.x, given.B, dt, dA, index)
    assert states[:, 0].eq(0).all()
    clean = torch.where(index.view(1, 128, 1, 1) == 3, given.x, 0.0), torch.where(index.view(1, 128, 1, 1) == 3, given.B, 0.0)
    close(states[:, 1], recurrence.chunk_state(*clean, dt, dA, index)[:, 1], TIGHT, "states")


def test_what_stands_past_the_end_of_dt_is_not_read():
    case = Case(1, 100, 2, 16, 16, 1, 64)
    given = inputs(case)
    dt, dA = decays(case)
    expected = SSDChunkStateFwdOp()(given.x, given.B, dt, dA)
    dt[:, :, 1, 36:] = torch.nan
    assert torch.equal(expected, SSDChunkStateFwdOp()(given.x, given.B, dt, dA))


def test_rounding_of_prefix_sums_cannot_make_a_decay_grow():
    """Report 1: sums near -2.6e9 that rise by an ulp would otherwise give exp(+256)."""
    case = Case(1, 64, 1, 16, 16, 1, 64)
    given = inputs(case)
    dt, _ = decays(case)
    dA = torch.full((1, 1, 1, 64), -2.6e9)
    dA[..., :-1] -= 256
    states = SSDChunkStateFwdOp()(given.x, given.B, dt, dA)
    close(states, recurrence.chunk_state(given.x, given.B, dt, torch.zeros_like(dA)), TIGHT, "states")


@pytest.mark.parametrize("with_index", [False, True])
@pytest.mark.parametrize(("batch", "seqlen"), [(0, 70), (2, 0)])
def test_report_34_empty(batch, seqlen, with_index):
    case = Case(batch, seqlen, 4, 16, 32, 2, 64)
    given = inputs(case, torch.bfloat16)
    index = torch.zeros(batch, seqlen, dtype=torch.int32) if with_index else None
    dt = torch.zeros(batch, 4, case.C, 64)
    assert SSDChunkStateFwdOp()(given.x, given.B, dt, dt, index).shape == (batch, case.C, 4, 16, 32)
