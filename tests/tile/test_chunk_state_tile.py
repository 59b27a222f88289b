"""chunk_state against a token-by-token recurrence in float64: groups, tails, seq_idx, A = -inf, values beyond float16."""

from __future__ import annotations

import numpy as np
import pytest
from helpers_tile import Guarded, run, scattered, scheduled


def launch(x, Bm, dt, cumsum, seq_idx=None):
    (B, S, H, P), (G, N), (C, Q) = x.shape, Bm.shape[2:], dt.shape[2:]
    out = Guarded((B, C, H, P, N))
    tensors = {"x": scattered(x), "Bm": scattered(Bm), "dt": dt, "dA_cumsum": cumsum, "states": out.array}
    tensors["seq_idx"] = None if seq_idx is None else scattered(seq_idx)
    fields = {"Q": Q, "P": P, "N": N, "dtype": x.dtype.name, "dt_dtype": "float32", "aligned": False}
    run("chunk_state", fields, tensors, B=B, S=S, H=H, G=G, C=C)
    return out.check()


def inputs(Q, P, N, S, H, G, B=2, dtype=np.float32, rate=0.3):
    rng = np.random.default_rng(Q + P + N + S)
    C = -(-S // Q)
    x = rng.normal(size=(B, S, H, P)).astype(dtype)
    Bm = rng.normal(size=(B, S, G, N)).astype(dtype)
    dt = np.zeros((B, H, C * Q), np.float32)
    dt[:, :, :S] = rng.uniform(0.01, 1, (B, H, S))
    dt = dt.reshape(B, H, C, Q)
    return x, Bm, dt, np.cumsum(-rate * dt, axis=3, dtype=np.float32)


def recurrence(x, Bm, dt, cumsum):
    (B, S, H, P), (G, N), (C, Q) = x.shape, Bm.shape[2:], dt.shape[2:]
    states = np.zeros((B, C, H, P, N))
    for l in range(S):
        c, i = divmod(l, Q)
        passed = cumsum[:, :, c, i].astype(float) - (cumsum[:, :, c, i - 1] if i else 0)
        b = np.repeat(Bm[:, l].astype(float), H // G, axis=1)
        added = dt[:, :, c, i, None, None] * x[:, l].astype(float)[..., None] * b[:, :, None]
        states[:, c] = np.exp(np.minimum(passed, 0))[..., None, None] * states[:, c] + added
    return states


@pytest.mark.parametrize(
    ("Q", "P", "N", "S", "H", "G"), [(16, 16, 16, 37, 2, 1), (64, 80, 48, 130, 4, 2), (128, 64, 144, 100, 3, 3), (256, 48, 16, 300, 2, 1)]
)
def test_state_at_the_end_of_each_chunk(Q: int, P: int, N: int, S: int, H: int, G: int) -> None:
    case = inputs(Q, P, N, S, H, G)
    np.testing.assert_allclose(launch(*case), recurrence(*case), atol=3e-5)


@pytest.mark.parametrize(
    ("P", "chosen"), [(32, {"stages": 4}), (64, {"rows": 128, "stages": 1}), (80, {"rows": 128, "slab": 32}), (48, {"slab": 16})], ids=str
)
def test_other_schedules(P: int, chosen: dict[str, int]) -> None:
    case = inputs(128, P, 48, 300, 6, 2)  # three heads a group, two or four in a CTA where P divides its rows
    with scheduled(**chosen):
        np.testing.assert_allclose(launch(*case), recurrence(*case), atol=3e-5)


def test_float16_products_beyond_its_range_and_below_it() -> None:
    x, Bm, dt, cumsum = inputs(64, 16, 16, 100, 2, 1, dtype=np.float16)
    x[..., 0], x[..., 1] = 6e4, 1e-5
    dt *= 100
    got, want = launch(x, Bm, dt, cumsum), recurrence(x, Bm, dt, cumsum)
    assert np.abs(want).max() > 1e6
    scale = np.linalg.norm(want, axis=-1, keepdims=True)
    assert (np.abs(got - want) <= 2e-3 * scale).all()


def test_seq_idx_selects_the_last_sequence_and_lets_no_other_in() -> None:
    Q, S, H = 16, 45, 2
    x, Bm, dt, cumsum = inputs(Q, 16, 16, S, H, 1)
    seq_idx = np.zeros((2, S), np.int32)
    seq_idx[:, Q // 2 :] = 1
    seq_idx[:, 40:] = 2
    kept = seq_idx == np.repeat(seq_idx[:, [15, 31, 44]], [16, 16, 13], axis=1)
    want = recurrence(np.where(kept[..., None, None], x, 0), Bm, dt, cumsum)
    x = np.where(kept[..., None, None], x, np.float32(np.nan))
    Bm = np.where(kept[..., None, None], Bm, np.float32(np.nan))
    np.testing.assert_allclose(launch(x, Bm, dt, cumsum, seq_idx), want, atol=3e-5)


def test_a_negative_seq_idx_at_the_end_of_a_chunk_empties_it() -> None:
    case = inputs(16, 16, 16, 40, 2, 1)
    seq_idx = np.full((2, 40), -1, np.int32)
    seq_idx[:, :16] = 0
    got = launch(*case, seq_idx)
    assert (got[:, 1:] == 0).all() and (got[:, 0] != 0).any()


def test_infinite_rate_keeps_only_the_last_real_token() -> None:
    x, Bm, dt, cumsum = inputs(16, 16, 16, 21, 1, 1)
    got = launch(x, Bm, dt, np.full_like(cumsum, -np.inf))
    for c, l in enumerate((15, 20)):
        want = dt[:, :, c, l % 16, None, None] * x[:, l].astype(float)[..., None] * Bm[:, l].astype(float)[:, :, None]
        np.testing.assert_allclose(got[:, c], want, rtol=1e-6)


def test_a_cumsum_that_rises_by_rounding_is_taken_as_flat() -> None:
    x, Bm, dt, cumsum = inputs(16, 16, 16, 16, 1, 1)
    got = launch(x, Bm, dt, np.linspace(-2.6e9, -2.5e9, 16, dtype=np.float32).reshape(1, 1, 1, 16).repeat(2, axis=0))
    np.testing.assert_allclose(got, recurrence(x, Bm, dt, np.zeros_like(cumsum)), atol=3e-5)
