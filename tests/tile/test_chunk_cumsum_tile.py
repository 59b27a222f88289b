"""chunk_cumsum against float64: softplus, clamp, tails, A = -inf, strides."""

from __future__ import annotations

import numpy as np
import pytest
from helpers_cumsum import LIMITS, expected, steps_about_limits
from helpers_tile import Guarded, run, scattered


def launch(dt, A, bias, Q, softplus, dt_min=0.0, dt_max=np.inf, lowest=-1e30):
    B, S, H = dt.shape
    C = -(-S // Q)
    out, cumsum = Guarded((B, H, C, Q)), Guarded((B, H, C, Q))
    tensors = {"dt": scattered(dt), "A": A, "dt_bias": bias, "dt_out": out.array, "dA_cumsum": cumsum.array}
    sizes = {"B": B, "S": S, "H": H, "C": C}
    run(
        "chunk_cumsum",
        {"Q": Q, "out_dtype": "float32"},
        tensors,
        **sizes,
        dt_min=dt_min,
        dt_max=dt_max,
        softplus=float(softplus),
        lowest=lowest,
    )
    return out.check(), cumsum.check()


@pytest.mark.parametrize("Q", [16, 32, 64, 256])
@pytest.mark.parametrize("H", [1, 8, 11])
def test_values_of_every_token_and_the_tail(Q: int, H: int) -> None:
    rng = np.random.default_rng(Q + H)
    dt = rng.normal(-2, 2, (2, 2 * Q + 5, H)).astype(np.float32)
    A = -np.exp(rng.normal(size=H)).astype(np.float32)
    bias = rng.normal(size=H).astype(np.float32)
    got, want = launch(dt, A, bias, Q, True), expected(dt, A, bias, Q, True)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-6)
    np.testing.assert_allclose(got[1], want[1], rtol=2e-6)


def test_softplus_keeps_its_digits_far_below_zero_and_near_the_bypass() -> None:
    v = np.concatenate([np.arange(-80, 20.5, 0.5), [-25, 19.999, 20, 20.001, 200]]).astype(np.float32)
    got, _ = launch(v.reshape(1, -1, 1), np.float32([-1]), None, 256, True)
    v64 = v.astype(np.float64)
    want = np.where(v64 > 20, v64, np.log1p(np.exp(np.minimum(v64, 20))))
    np.testing.assert_allclose(got[0, 0, 0, : v.size], want, rtol=1e-6)


def test_the_clamp_comes_after_bias_and_softplus_and_the_sum_sees_it() -> None:
    dt = np.float32([[[-10.0], [10.0], [-2.5]]])
    A, bias = np.float32([-2]), np.float32([0.25])
    for softplus in (False, True):
        got = launch(dt, A, bias, 16, softplus, np.float32(0.05), np.float32(0.1))
        want = expected(dt, A, bias, 16, softplus, np.float32(0.05), np.float32(0.1))
        np.testing.assert_allclose(got[0], want[0], rtol=1e-6)
        np.testing.assert_allclose(got[1], want[1], rtol=1e-6)


@pytest.mark.parametrize("case", [c for c in LIMITS if "float32, softplus" not in c])  # the CPU backend writes constants with seven digits
def test_each_limit_by_itself(case: str) -> None:
    softplus, low, high = LIMITS[case]
    dt, A = steps_about_limits(), -np.ones(3, np.float32)
    got, want = launch(dt, A, None, 16, softplus, low, high), expected(dt, A, None, 16, softplus, low, high)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-6)


def test_infinite_rate_makes_no_nan_from_dt_of_zero() -> None:
    dt = np.float32([[[0.0], [1.0], [0.0]]])
    _, cumsum = launch(dt, np.float32([-np.inf]), None, 16, False)
    assert cumsum[0, 0, 0, 0] == 0 and (cumsum[0, 0, 0, 1:] == np.float32(-1e30)).all()


def test_a_term_below_the_lowest_counts_as_that_and_leaves_digits_to_the_sums_behind_it() -> None:
    dt = np.float32([1e30, 1, 1, 1e30, 1]).reshape(1, 5, 1)
    _, cumsum = launch(dt, np.float32([-0.25]), None, 16, False, lowest=-96.0)
    np.testing.assert_array_equal(cumsum[0, 0, 0, :6], [-96, -96.25, -96.5, -192.5, -192.75, -192.75])


def test_nan_stays_nan_and_stays_with_its_head() -> None:
    dt = np.ones((1, 4, 2), np.float32)
    dt[0, 2, 1] = np.nan
    out, cumsum = launch(dt, np.float32([-1, -1]), None, 16, True, 0.0, 10.0)
    assert np.isnan(out[0, 1, 0, 2]) and np.isfinite(out[0, 0]).all() and np.isfinite(cumsum[0, 0]).all()
