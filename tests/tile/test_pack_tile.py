"""pack_starts, pack_map, pack_rows and pack_steps: a pack in whole chunks, whatever cu_seqlens holds."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from helpers_tile import Guarded, run, scattered


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
    rows, tokens, starts = np.full(S, -1), np.full(C * Q, -2), [0]
    for first, last in itertools.pairwise(ends):
        chunks = -(-(last - first) // Q)
        at = starts[-1] * Q
        tokens[at : at + chunks * Q] = -1
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


@pytest.mark.parametrize("seed", range(8))
def test_values_out_of_order_or_range_stay_inside(seed: int) -> None:
    rng = np.random.default_rng(seed)
    S, Q, n = 200, 16, 40
    ends = rng.choice([-(2**31), -5, 0, 3, 100, 150, 199, 200, 201, 2**31 - 1], n + 1).tolist()
    starts, rows, tokens = layout(ends, S, Q)
    C = most_chunks(S, n, Q)
    assert (np.diff(starts) >= 0).all() and 0 <= starts.min() and starts.max() <= C
    assert (-1 <= rows).all() and (rows < C * Q).all()
    assert (-2 <= tokens).all() and (tokens < S).all()


@pytest.mark.parametrize("aligned", [False, True])
def test_rows_are_copied_or_zeroed_or_left(aligned: bool) -> None:
    S, R, A, W = 20, 32, 3, 8 if aligned else 1
    D = 16 // W
    rng = np.random.default_rng(0)
    source = rng.integers(-9999, 9999, (S, A, D, W)).astype(np.int16)
    wide = np.zeros((S, A + 1, D + 1, W), np.int16)
    wide[:, 1:, :D] = source
    tokens = rng.integers(-2, S, R).astype(np.int32)
    out = np.full((R, A, D, W), 77, np.int16)
    run("pack_rows", {"aligned": aligned}, {"source": wide[:, 1:, :D], "tokens": tokens, "out": out}, S=S, R=R, A=A, D=D)
    want = np.where((tokens >= 0)[:, None, None, None], source[tokens], np.where(tokens == -1, 0, 77)[:, None, None, None])
    np.testing.assert_array_equal(out, want)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("softplus", [False, True])
def test_steps_behind_a_sequence_are_0_whatever_the_limits(softplus: bool, has_bias: bool) -> None:
    S, R, H = 20, 32, 131
    rng = np.random.default_rng(1)
    dt, bias = rng.normal(size=(S, H)).astype(np.float32), rng.normal(size=H).astype(np.float32)
    dt[3, 5] = np.nan
    A = -np.exp(rng.normal(size=H)).astype(np.float32)
    A[7] = -np.inf
    tokens = rng.integers(-2, S, R).astype(np.int32)
    tokens[0] = 3
    out, rates = Guarded((R, H)), Guarded((H,))
    tensors = {"dt": scattered(dt), "tokens": tokens, "A": A, "out": out.array, "rates": rates.array}
    if has_bias:
        tensors["dt_bias"] = bias
    run("pack_steps", {"softplus": softplus, "has_bias": has_bias}, tensors, S=S, R=R, H=H, dt_min=0.3, dt_max=0.9)
    v = (dt + bias if has_bias else dt).astype(float)
    v = np.clip(np.log1p(np.exp(v)) if softplus else v, np.float32(0.3), np.float32(0.9))
    np.testing.assert_allclose(out.check(), np.where((tokens >= 0)[:, None], v[tokens], 0), rtol=1e-6)
    np.testing.assert_array_equal(rates.check(), np.where(A == -np.inf, np.float32(-1e32), A))
