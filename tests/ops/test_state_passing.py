"""SSDStatePassingFwdOp on the reference target, against the float64 recurrence over chunks."""

from __future__ import annotations

import pytest
import recurrence
import torch
from ssd_cases import close, generator

from tileops.mamba import SSDStatePassingFwdOp


def case(batch: int = 2, chunks: int = 5, heads: int = 3, d_state: int = 48) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = generator(0)
    states = torch.randn(batch, chunks, heads, d_state, generator=g)
    return states, -3 * torch.rand(batch, heads, chunks, generator=g), torch.randn(batch, heads, d_state, generator=g)


@pytest.mark.parametrize("with_initial", [False, True])
@pytest.mark.parametrize("chunks", [1, 2, 7, 64])
@pytest.mark.parametrize("d_state", [1, 48, 8192])
def test_against_the_recurrence(chunks, d_state, with_initial):
    states, dA, initial = case(chunks=chunks, d_state=d_state)
    given = initial if with_initial else None
    prev, final = SSDStatePassingFwdOp()(states, dA, given)
    expected_prev, expected_final = recurrence.state_passing(states, dA, given)
    assert prev.dtype == final.dtype == torch.float32
    close(prev, expected_prev, 1e-6, "prev_states")
    close(final, expected_final, 1e-6, "final_states")


def test_report_28_what_stands_before_the_first_chunk_is_the_initial_state():
    states, dA, initial = case()
    assert torch.equal(SSDStatePassingFwdOp()(states, dA, initial)[0][:, 0], initial)
    assert SSDStatePassingFwdOp()(states, dA)[0][:, 0].eq(0).all()


def test_report_32_none_is_zeros_bit_for_bit():
    states, dA, initial = case()
    none, zeros = SSDStatePassingFwdOp()(states, dA), SSDStatePassingFwdOp()(states, dA, torch.zeros_like(initial))
    assert all(torch.equal(a, b) for a, b in zip(none, zeros))


def test_last_column_of_a_cumsum_is_taken_as_it_lies():
    states, dA, _ = case()
    wide = torch.randn(2, 3, 5, 64)
    wide[..., -1] = dA
    assert all(torch.equal(a, b) for a, b in zip(SSDStatePassingFwdOp()(states, dA), SSDStatePassingFwdOp()(states, wide[..., -1])))


@pytest.mark.parametrize("with_initial", [False, True])
@pytest.mark.parametrize(("batch", "chunks"), [(0, 5), (2, 0)])
def test_report_34_empty(batch, chunks, with_initial):
    states, dA, initial = case(batch=batch, chunks=chunks)
    prev, final = SSDStatePassingFwdOp()(states, dA, initial if with_initial else None)
    assert prev.shape == states.shape
    assert torch.equal(final, initial if with_initial else torch.zeros_like(initial))
    assert batch == 0 or final.data_ptr() != initial.data_ptr()
