"""chunk_scan against a token-by-token recurrence in float64: groups, tails, A = -inf, values beyond float16."""

from __future__ import annotations

import numpy as np
import pytest
from helpers_tile import Guarded, run, scattered, scheduled


def inputs(Q, P, N, S, H, G, B=2, dtype=np.float32, rate=0.3):
    rng = np.random.default_rng(Q + P + N + S)
    C = -(-S // Q)
    x = rng.normal(size=(B, S, H, P)).astype(dtype)
    Bm, Cm = (rng.normal(size=(B, S, G, N)).astype(dtype) for _ in range(2))
    dt = np.zeros((B, H, C * Q), np.float32)
    dt[:, :, :S] = rng.uniform(0.01, 1, (B, H, S))
    dt = dt.reshape(B, H, C, Q)
    prev = rng.normal(size=(B, C, H, P, N)).astype(np.float32)
    return x, Bm, Cm, dt, np.cumsum(-rate * dt, axis=3, dtype=np.float32), prev


def coupling(Bm, Cm, C, Q, dtype):
    """cb with a NaN upper triangle: what is above the diagonal must not be used."""
    B, S, G, _ = Bm.shape
    cb = np.full((B, C, G, Q, Q), np.nan)
    for l in range(C * Q):
        for s in range(l // Q * Q, l + 1):
            cb[:, l // Q, :, l % Q, s % Q] = (Cm[:, l].astype(float) * Bm[:, s]).sum(-1) if l < S else 0
    return cb.astype(dtype)


def launch(x, Bm, Cm, dt, cumsum, prev, cb=None):
    (B, S, H, P), (G, N), (C, Q) = x.shape, Bm.shape[2:], dt.shape[2:]
    cb = coupling(Bm, Cm, C, Q, x.dtype) if cb is None else cb
    out = Guarded((B, S, H, P))
    tensors = {"x": scattered(x), "Cm": scattered(Cm), "cb": cb, "dA_cumsum": cumsum, "prev_states": prev, "dt": dt, "y": out.array}
    fields = {"Q": Q, "P": P, "N": N, "dtype": x.dtype.name, "dt_dtype": "float32", "aligned": False, "cb_float32": cb.dtype == np.float32}
    run("chunk_scan", fields, tensors, B=B, S=S, H=H, G=G, C=C)
    return out.check()


def recurrence(x, Bm, Cm, dt, cumsum, prev):
    (B, S, H, P), G, Q = x.shape, Bm.shape[2], dt.shape[3]
    y = np.zeros((B, S, H, P))
    for l in range(S):
        c, i = divmod(l, Q)
        if i == 0:
            state = prev[:, c].astype(float)
        passed = cumsum[:, :, c, i].astype(float) - (cumsum[:, :, c, i - 1] if i else 0)
        b, cm = (np.repeat(m[:, l].astype(float), H // G, axis=1) for m in (Bm, Cm))
        added = dt[:, :, c, i, None, None] * x[:, l].astype(float)[..., None] * b[:, :, None]
        state = np.exp(passed)[..., None, None] * state + added
        y[:, l] = (state * cm[:, :, None]).sum(-1)
    return y


@pytest.mark.parametrize(
    ("Q", "P", "N", "S", "H", "G"),
    [(16, 16, 16, 37, 2, 1), (32, 48, 32, 64, 2, 2), (64, 80, 48, 130, 4, 2), (128, 16, 144, 100, 3, 3), (256, 16, 16, 300, 2, 1)],
)
def test_output_of_every_token(Q: int, P: int, N: int, S: int, H: int, G: int) -> None:
    case = inputs(Q, P, N, S, H, G)
    want = recurrence(*case)
    assert np.linalg.norm(launch(*case) - want) <= 2e-6 * np.linalg.norm(want)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize(
    "chosen", [{"heads": 2}, {"rows": 128, "cols": 64, "per": 2}, {"heads": 2, "per": 4, "depth": 128, "stages": 1}], ids=str
)
def test_other_schedules(chosen: dict[str, int], dtype: type) -> None:
    case = inputs(256, 16, 80, 500, 6, 2, dtype=dtype)  # three heads a group: the second of the last pair does not exist
    want = recurrence(*case)
    with scheduled(**chosen):
        assert np.linalg.norm(launch(*case) - want) <= (2e-6 if dtype is np.float32 else 2e-3) * np.linalg.norm(want)


def test_decay_over_a_chunk_far_beyond_the_range_of_exp() -> None:
    case = inputs(256, 16, 16, 256, 2, 1, rate=16.0)
    want = recurrence(*case)
    assert np.linalg.norm(launch(*case) - want) <= 1e-5 * np.linalg.norm(want)


def test_infinite_rate_sees_only_the_token_itself() -> None:
    x, Bm, Cm, dt, cumsum, prev = inputs(16, 16, 16, 21, 1, 1)
    got = launch(x, Bm, Cm, dt, np.full_like(cumsum, -np.inf), prev)
    own = (Bm.astype(float) * Cm).sum(-1)[..., None] * x
    np.testing.assert_allclose(got, own * dt.reshape(2, 1, -1)[:, :, :21].transpose(0, 2, 1)[..., None], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("Q", "H"), [(16, 2), (64, 3), (256, 2)])
def test_cb_in_float32_is_rounded_once_with_its_weights(Q: int, H: int) -> None:
    case = inputs(Q, 16, 32, 2 * Q + 5, H, 1, dtype=np.float16)
    want = recurrence(*case)
    exact = launch(*case, cb=coupling(*case[1:3], case[3].shape[2], Q, np.float32))
    errors = [np.linalg.norm(got - want) / np.linalg.norm(want) for got in (exact, launch(*case))]
    assert errors[0] <= 3e-4 and errors[0] <= 0.85 * errors[1], errors


def test_float16_states_and_weights_beyond_its_range_and_below_it() -> None:
    x, Bm, Cm, dt, cumsum, prev = inputs(64, 16, 16, 100, 2, 1, dtype=np.float16)
    prev[:, :, :, 0] *= 1e6
    prev[:, :, :, 1] *= 1e-8
    x[..., 1] *= np.float16(1e-4)
    Bm *= np.float16(20)
    Cm *= np.float16(20)
    dt *= 50
    dt[:, 1] *= 1e-7
    case = (x, Bm, Cm, dt, cumsum, prev)
    got, want = launch(*case), recurrence(*case)
    assert np.isfinite(got).all() and np.abs(want).max() > 1e6
    scale = np.linalg.norm(want, axis=1, keepdims=True)  # each head and column by itself
    assert (np.linalg.norm(got - want, axis=1, keepdims=True) <= 2e-3 * scale).all()
