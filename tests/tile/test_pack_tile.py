"""pack_starts, pack_map, pack_rows and pack_tails: a pack in whole chunks, whatever cu_seqlens holds."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from helpers_tile import Guarded, run


def most_chunks(S: int, n_seqs: int, Q: int) -> int:
    return min(S, (S + n_seqs * (Q - 1)) // Q)


def layout(ends: list[int], S: int, Q: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """starts, rows, tokens as the kernels make them; every element written, and nothing else."""
    C = most_chunks(S, len(ends) - 1, Q)
    cu_seqlens = np.array(ends, np.int32)
    made = [Guarded(shape, np.float32) for shape in ((len(ends),), (S,), (C * Q,))]
    starts, rows, tokens = (g.array.view(np.int32) for g in made)
    run("pack_starts", {}, {"cu_seqlens": cu_seqlens, "starts": starts}, M=len(ends), S=S, Q=Q, C=C)
    run("pack_map", {}, {"cu_seqlens": cu_seqlens, "starts": starts, "rows": rows, "tokens": tokens}, M=len(ends), S=S, R=C * Q, Q=Q)
    unwritten = np.float32(np.nan).view(np.int32)
    assert not any((g.check().view(np.int32) == unwritten).any() for g in made)
    return starts, rows, tokens


def expected(ends: list[int], S: int, Q: int) -> tuple[list[int], np.ndarray, np.ndarray]:
    C = most_chunks(S, len(ends) - 1, Q)
    rows, tokens, starts = np.full(S, -1), np.full(C * Q, -1), [0]
    for first, last in itertools.pairwise(ends):
        chunks = -(-(last - first) // Q)
        at = starts[-1] * Q
        tokens[at : at + chunks * Q] = -2 - (last - first - 1) % Q
        tokens[at : at + last - first] = np.arange(first, last)
        rows[first:last] = at + np.arange(last - first)
        starts.append(starts[-1] + chunks)
    return starts, rows, tokens


@pytest.mark.parametrize(
    ("ends", "S"),
    [
        ([0, 300], 300),
        ([0, 16, 48, 48, 49], 60),
        ([0, 0, 0, 5], 5),
        ([7, 20, 20, 39], 50),
        ([0, 0, 0], 9),
        (list(range(1300)), 1299),  # more sequences than threads
    ],
    ids=["one", "whole chunks", "empty ones first", "tokens before and behind", "nothing", "many"],
)
def test_where_tokens_go_and_rows_come_from(ends: list[int], S: int) -> None:
    for got, want in zip(layout(ends, S, 16), expected(ends, S, 16)):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("seed", range(20))
def test_values_out_of_order_or_range_stay_inside(seed: int) -> None:
    rng = np.random.default_rng(seed)
    S, Q, n = 200, 16, 40
    ends = rng.choice([-(2**31), -5, 0, 3, 100, 150, 199, 200, 201, 2**31 - 1], n + 1).tolist()
    starts, rows, tokens = layout(ends, S, Q)
    C = most_chunks(S, n, Q)
    assert (np.diff(starts) >= 0).all() and 0 <= starts.min() and starts.max() <= C
    assert (-1 <= rows).all() and (rows < C * Q).all()
    assert (-2 - Q < tokens).all() and (tokens < S).all()


@pytest.mark.parametrize("aligned", [False, True])
def test_rows_are_copied_or_zeroed(aligned: bool) -> None:
    S, R, A, W = 20, 32, 3, 8 if aligned else 1
    D = 16 // W
    rng = np.random.default_rng(0)
    source = rng.integers(-9999, 9999, (S, A, D, W)).astype(np.int16)
    wide = np.zeros((S, A + 1, D + 1, W), np.int16)
    wide[:, 1:, :D] = source
    tokens = rng.integers(-7, S, R).astype(np.int32)
    tokens[:2] = -1, -2
    out = np.full((R, A, D, W), 77, np.int16)
    run("pack_rows", {"aligned": aligned}, {"source": wide[:, 1:, :D], "tokens": tokens, "out": out}, S=S, R=R, A=A, D=D)
    want = np.where((tokens >= 0)[:, None, None, None], source[tokens], 0)
    np.testing.assert_array_equal(out, want)


def test_no_time_passes_behind_a_sequence() -> None:
    H, Q, lengths = 3, 16, (16, 5, 1, 0)  # of four chunks
    R = Q * len(lengths)
    rng = np.random.default_rng(1)
    dt = rng.random((H, R)).astype(np.float32)
    dA = -np.cumsum(dt.reshape(H, -1, Q), -1).reshape(H, R)
    dA[1] *= np.float32(1e30)
    dA[2, Q + 3 : Q + 5] = np.nan
    before = dA.copy()
    tokens = np.full(R, -1, np.int32)
    want_dt, want_dA = dt.copy(), dA.copy()
    for c, n in enumerate(lengths):
        if n:
            row = slice(c * Q, (c + 1) * Q)
            tokens[row] = np.where(np.arange(Q) < n, c * Q + np.arange(Q), -2 - (n - 1))
            want_dt[:, c * Q + n : (c + 1) * Q] = 0
            want_dA[:, c * Q + n : (c + 1) * Q] = before[:, c * Q + n - 1, None]
    run("pack_tails", {}, {"tokens": tokens, "dt_out": dt, "dA_cumsum": dA}, H=H, R=R, Q=Q)
    np.testing.assert_array_equal(dt, want_dt)
    np.testing.assert_array_equal(dA, want_dA)
