"""The rules of the fused forward and of decode that pick run-time sizes."""

from __future__ import annotations

import pytest
import torch

from tileops.ops import _fused
from tileops.ops._fused import Cut, cut, cut_pack
from tileops.ops.recurrent import rows_per_cta

SMS = 132  # an H200's


@pytest.mark.parametrize(
    ("batch", "seqlen", "heads", "segs", "scouts"),
    [
        (1, 4096, 48, 4, True),
        (1, 4096, 80, 1, False),
        (1, 1024, 80, 1, False),
        (1, 512, 128, 1, False),
        (4, 2048, 80, 2, False),
        (8, 2048, 64, 1, False),
        (2, 32768, 80, 4, False),
        (1, 8192, 128, 1, False),
        (1, 1, 1, 1, False),
    ],
)
def test_the_cuts_that_measured_best(batch, seqlen, heads, segs, scouts):
    chunks = -(-seqlen // 64)
    found = cut(batch * heads, chunks, SMS)
    assert (found.segs, found.scouts, found.parts) == (segs, scouts, segs + scouts)
    assert covers(found, chunks)


def covers(cut: Cut, chunks: int) -> bool:
    """Whether the segments before the last one end before the sequence, and the last one not before it."""
    ends = [cut.first + i * cut.seg_chunks for i in range(cut.segs)]
    return cut.first >= 1 and cut.seg_chunks >= 1 and ends[-1] >= chunks and all(end < chunks for end in ends[:-1])


def test_report_57_every_cut_covers_the_sequence_and_leaves_no_segment_empty():
    for chains in (1, 8, 48, 64, 80, 131, 132, 133, 200, 264, 265, 1000, 5000):
        for chunks in (1, 2, 7, 8, 15, 16, 17, 31, 64, 129, 1000):
            found = cut(chains, chunks, SMS)
            assert 1 <= found.segs <= 16 and covers(found, chunks)
            assert found.scouts == (found.segs > 1 and chains <= SMS)
            assert found.segs > 1 or found == Cut(1, chunks, 1)


def test_decode_shares_a_full_A_between_batch_rows_once_there_are_enough():
    assert [rows_per_cta(batch, tied=False) for batch in (1, 15, 16, 1024)] == [1, 1, 2, 2]
    assert rows_per_cta(1024, tied=True) == 1


def test_a_pack_is_cut_like_equal_sequences_with_segments_for_the_longest_possible():
    alone = cut(24, 256, SMS)
    assert alone.scouts
    assert cut_pack(24, 256, 1, SMS) == alone
    pair = cut_pack(24, 512, 2, SMS)
    assert pair.scouts and (pair.first, pair.seg_chunks) == (alone.first, alone.seg_chunks) and covers(pair, 512)
    # Enough chains, short sequences, or many: whole.
    assert cut_pack(320, 512, 2, SMS) == Cut(1, 512, 1)
    assert cut_pack(24, 16, 2, SMS) == Cut(1, 16, 1)
    assert cut_pack(100, 25600, 50, SMS) == Cut(1, 25600, 1)


@pytest.mark.parametrize(
    ("given", "flag"),
    [("dt_bias", _fused.BIAS), ("initial", _fused.INITIAL), ("D", _fused.SKIP), ("z", _fused.GATE), ("dt_softplus", _fused.SOFTPLUS)],
)
def test_the_kernel_is_told_which_features_are_given(monkeypatch, given, flag):
    planner = pytest.importorskip("tileops.ops._planner", reason="cuda-bindings is not installed")
    launched = {}
    monkeypatch.setattr(planner.Planner, "launch", lambda self, kernel, values, tensors, dims, floats=None: launched.update({kernel: dims}))
    monkeypatch.setattr(planner.Planner, "multiprocessors", SMS)
    half, full = torch.bfloat16, torch.float32
    x, dt, A, B, C = (2, 64, 4, 64), (2, 64, 4), (4,), (2, 64, 1, 128), (2, 64, 1, 128)
    shapes = {"dt_bias": (4,), "initial": (2, 4, 64, 128), "D": (4, 64), "z": x}
    tensors = [torch.zeros(s, dtype=full if s in (dt, A) else half) for s in (x, dt, A, B, C)]
    tensors += [torch.zeros(s, dtype=half if name == "z" else full) if name == given else None for name, s in shapes.items()]
    p = planner.Planner(tensors, torch.device("cpu"))
    y = p.empty(x, full)
    _fused.plan_fused(p, *p.slots, None, y, dt_softplus=given == "dt_softplus", dt_min=0.0, dt_max=1.0)
    assert launched["fused_main"]["flags"] == _fused.ALWAYS | flag
