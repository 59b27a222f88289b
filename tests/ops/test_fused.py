"""The rules of the fused forward and of decode that pick run-time sizes."""

from __future__ import annotations

import pytest

from tileops.ops._fused import segments
from tileops.ops.recurrent import rows_per_cta

SMS = 132  # an H200's


@pytest.mark.parametrize(
    ("batch", "seqlen", "heads", "expected"),
    [
        (1, 4096, 48, 1),
        (1, 4096, 80, 1),
        (4, 2048, 80, 2),
        (8, 2048, 64, 1),
        (2, 32768, 80, 4),
        (1, 8192, 128, 1),
        (1, 1, 1, 1),
    ],
)
def test_the_cuts_that_measured_best(batch, seqlen, heads, expected):
    chunks = -(-seqlen // 64)
    segs, seg_chunks = segments(batch * heads, chunks, SMS)
    assert segs == expected
    assert (segs - 1) * seg_chunks < chunks <= segs * seg_chunks


def test_report_57_every_cut_covers_the_sequence_and_leaves_no_segment_empty():
    for chains in (1, 131, 132, 133, 200, 264, 265, 1000, 5000):
        for chunks in (1, 2, 7, 8, 15, 16, 17, 31, 64, 129, 1000):
            segs, seg_chunks = segments(chains, chunks, SMS)
            assert 1 <= segs <= 16 and (segs - 1) * seg_chunks < chunks <= segs * seg_chunks
            assert segs == 1 or chains > SMS


def test_decode_shares_a_full_A_between_batch_rows_once_there_are_enough():
    assert [rows_per_cta(batch, tied=False) for batch in (1, 15, 16, 1024)] == [1, 1, 2, 2]
    assert rows_per_cta(1024, tied=True) == 1
