"""state_passing against its recurrence in float64."""

from __future__ import annotations

import numpy as np
import pytest
from helpers_tile import Guarded, run, scattered


@pytest.mark.parametrize("has_initial_states", [False, True])
@pytest.mark.parametrize(("C", "M", "aligned"), [(1, 16, True), (7, 300, False), (8, 1028, True), (21, 129, False), (13, 36, True)])
def test_states_before_each_chunk_and_after_the_last(C: int, M: int, aligned: bool, has_initial_states: bool) -> None:
    B, H = 2, 3
    rng = np.random.default_rng(C + M)
    states = rng.normal(size=(B, C, H, M)).astype(np.float32)
    passed = -rng.exponential(size=(B, H, C)).astype(np.float32)
    passed[0, 0, C // 2] = -np.inf
    extra = 4 if aligned else 3
    initial = rng.normal(size=(B, H, M)).astype(np.float32)
    before, final = Guarded((B, C, H, M)), Guarded((B, H, M))
    # The last column of a (B,H,C,Q) cumsum: no stride is 1.
    cumsum = np.full((B, H, C, 4), np.nan, np.float32)
    cumsum[..., -1] = passed
    tensors = {"states": scattered(states, extra), "dA_chunk": cumsum[..., -1], "prev_states": before.array, "final_states": final.array}
    tensors["initial_states"] = scattered(initial, extra) if has_initial_states else None
    run("state_passing", {"aligned": aligned}, tensors, B=B, H=H, C=C, M=M)
    s = initial.astype(float) if has_initial_states else np.zeros((B, H, M))
    for c in range(C):
        np.testing.assert_allclose(before.check()[:, c], s, rtol=1e-5, atol=1e-6)
        s = np.exp(passed[:, :, c].astype(float))[..., None] * s + states[:, c]
    np.testing.assert_allclose(final.check(), s, rtol=1e-5, atol=1e-6)
