"""recurrent against its definition in float64: full and tied rates, expanded inputs, states that are a slice of a pool."""

from __future__ import annotations

import numpy as np
import pytest
from helpers_tile import Guarded, run, scattered


def case(B, H, G, P, N, tied):
    rng = np.random.default_rng(P + N)
    A = -np.exp(rng.normal(size=(H,) if tied else (H, P, N))).astype(np.float32)
    dt = rng.uniform(0, 1, (B, H) if tied else (B, H, P)).astype(np.float32)
    x = rng.normal(size=(B, H, P)).astype(np.float32)
    Bm, Cm = (rng.normal(size=(B, G, N)).astype(np.float32) for _ in range(2))
    return A, dt, x, Bm, Cm, rng.normal(size=(B, H, P, N)).astype(np.float32)


def launch(A, dt, x, Bm, Cm, state):
    (B, H, P, N), G = state.shape, Bm.shape[1]
    y = Guarded((B, H, P))
    tensors = {"A": A, "dt": dt, "x": scattered(x), "Bm": scattered(Bm), "Cm": scattered(Cm), "state": state, "y": y.array}
    run("recurrent", {"P": P, "N": N, "dtype": "float32", "tied": A.ndim == 1}, tensors, B=B, H=H, G=G)
    return y.check()


def expected(A, dt, x, Bm, Cm, state):
    H, G = state.shape[1], Bm.shape[1]
    A, dt = (A[:, None, None], dt[..., None]) if A.ndim == 1 else (A, dt)
    b, c = (np.repeat(m.astype(float), H // G, axis=1)[:, :, None] for m in (Bm, Cm))
    new = np.exp(dt[..., None].astype(float) * A) * state + dt[..., None] * b * x[..., None]
    return new, (new * c).sum(-1)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("H", "G", "P", "N"), [(1, 1, 16, 16), (4, 2, 32, 48), (6, 1, 64, 128), (3, 3, 16, 80), (2, 1, 16, 256)])
def test_state_in_place_and_output(H: int, G: int, P: int, N: int, tied: bool) -> None:
    A, dt, x, Bm, Cm, state = case(3, H, G, P, N, tied)
    want, y = expected(A, dt, x, Bm, Cm, state)
    got = launch(A, dt, x, Bm, Cm, state)
    assert np.linalg.norm(got - y) <= 1e-6 * np.linalg.norm(y)
    np.testing.assert_allclose(state, want, atol=1e-6)


def test_only_the_slice_of_the_pool_changes() -> None:
    A, dt, x, Bm, Cm, state = case(4, 2, 1, 16, 16, False)
    pool = np.full((7, 3, 20, 16), 5, np.float32)
    view = pool[2:6, 1:, 4:]
    view[...] = state
    before = pool.copy()
    want, _ = expected(A, dt, x, Bm, Cm, state)
    launch(A, dt, x, Bm, Cm, view)
    np.testing.assert_allclose(view, want, atol=1e-6)
    before[2:6, 1:, 4:] = view
    assert (before == pool).all()


def test_expanded_rates_give_the_bits_of_full_ones() -> None:
    _, _, x, Bm, Cm, state = case(2, 2, 1, 16, 16, False)
    rates, steps = np.float32([-0.5, -2]), np.float32([[0.1, 0.2], [0.3, 0.4]])
    A = np.broadcast_to(rates[:, None, None], (2, 16, 16))
    dt = np.broadcast_to(steps[:, :, None], (2, 2, 16))
    states = [state.copy() for _ in range(3)]
    full = launch(np.ascontiguousarray(A), np.ascontiguousarray(dt), x, Bm, Cm, states[0])
    expanded = launch(np.ascontiguousarray(A), dt, x, Bm, Cm, states[1])
    tied = launch(rates, steps, x, Bm, Cm, states[2])
    assert (full == expanded).all() and (full == tied).all()
    assert (states[0] == states[1]).all() and (states[0] == states[2]).all()


def test_a_step_of_zero_leaves_the_state_even_where_the_rate_is_infinite() -> None:
    A, dt, x, Bm, Cm, state = case(2, 2, 1, 16, 16, True)
    A[:] = -np.inf
    dt[0, 0] = 0
    before = state.copy()
    y = launch(A, dt, x, Bm, Cm, state)
    assert (state[0, 0] == before[0, 0]).all() and np.isfinite(y).all() and np.isfinite(state).all()
    np.testing.assert_allclose(state[1, 1], dt[1, 1] * x[1, 1][:, None] * Bm[1, 0], rtol=1e-6)
