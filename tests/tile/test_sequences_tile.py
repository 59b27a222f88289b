"""seq_runs, seq_mask and seq_passing: sequences that begin anywhere in a row, and chains of a pack."""

from __future__ import annotations

import numpy as np
import pytest
from helpers_tile import Guarded, run, scattered

FAR = 128


def begins(seq_idx: np.ndarray) -> np.ndarray:
    return np.concatenate([np.zeros_like(seq_idx[:, :1]), seq_idx[:, 1:] != seq_idx[:, :-1]], 1).astype(np.int32)


def runs_of(seq_idx: np.ndarray, Q: int) -> tuple[np.ndarray, np.ndarray]:
    """runs (B,S) and, with the chunk's last value behind the end, (B,C,Q)."""
    (B, S), C = seq_idx.shape, -(-seq_idx.shape[1] // Q)
    padded = np.zeros((B, C * Q), np.int32)
    padded[:, :S] = begins(seq_idx)
    full = np.cumsum(padded.reshape(B, C, Q), -1, dtype=np.int32)
    return full.reshape(B, -1)[:, :S], full


def case(Q: int, S: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    seq_idx = np.cumsum(rng.random((3, S)) < 3 / Q, 1).astype(np.int32)
    seq_idx[1] = 4  # one sequence
    return seq_idx


@pytest.mark.parametrize(("Q", "S"), [(16, 50), (64, 128), (256, 300)])
def test_runs_cuts_and_sums(Q: int, S: int) -> None:
    seq_idx, H, C = case(Q, S), 3, -(-S // Q)
    B = len(seq_idx)
    rng = np.random.default_rng(1)
    sums = -rng.exponential(size=(B, H, C, Q)).astype(np.float32)
    made = [Guarded((B, S)), Guarded((B, C)), Guarded((B, H, C, Q))]
    runs, cuts, dA = made[0].array.view(np.int32), made[1].array.view(np.int32), made[2].array
    dA[...] = sums
    tensors = {"seq_idx": scattered(seq_idx).repeat(2, 1)[:, ::2], "dA_cumsum": dA, "runs": runs, "cuts": cuts}
    run("seq_runs", {"Q": Q}, tensors, B=B, S=S, H=H, C=C)
    for g in made:
        g.check()
    want, full = runs_of(seq_idx, Q)
    np.testing.assert_array_equal(runs, want)
    np.testing.assert_array_equal(cuts, full[..., -1])
    np.testing.assert_allclose(dA, np.where(full[:, None] > 0, sums - FAR, sums), rtol=1e-6)


@pytest.mark.parametrize(("Q", "S"), [(16, 50), (64, 128)])
def test_couplings_of_different_sequences_are_0(Q: int, S: int) -> None:
    seq_idx, G, C = case(Q, S), 2, -(-S // Q)
    B = len(seq_idx)
    runs, full = runs_of(seq_idx, Q)
    cb = np.random.default_rng(2).integers(1, 999, (B, C, G, Q, Q)).astype(np.int32)
    got = cb.copy()
    tensors = {"cb": got, "runs": np.ascontiguousarray(runs), "cuts": np.ascontiguousarray(full[..., -1])}
    run("seq_mask", {"Q": Q}, tensors, B=B, S=S, G=G, C=C)
    same = full[..., :, None] == full[..., None, :]
    np.testing.assert_array_equal(got, np.where(same[:, :, None], cb, 0))


@pytest.mark.parametrize("has_initial_states", [False, True])
@pytest.mark.parametrize(("C", "M"), [(1, 16), (9, 300), (21, 129)])
def test_a_state_is_dropped_where_a_sequence_begins_be_it_nan(C: int, M: int, has_initial_states: bool) -> None:
    B, H = 2, 3
    rng = np.random.default_rng(C + M)
    states = rng.normal(size=(B, C, H, M)).astype(np.float32)
    passed = -rng.exponential(size=(B, H, C)).astype(np.float32)
    initial = rng.normal(size=(B, H, M)).astype(np.float32)
    cuts = np.where(rng.random((B, C)) < 0.3, 2, 0).astype(np.int32)
    cuts[:, C // 2] = 1
    states[0, max(C // 2 - 1, 0)] = np.nan
    before, final = Guarded((B, C, H, M)), Guarded((B, H, M))
    tensors = {"states": scattered(states), "dA_chunk": passed, "bounds": cuts, "prev_states": before.array, "final_states": final.array}
    tensors["initial_states"] = scattered(initial) if has_initial_states else None
    run("seq_passing", {"packed": False}, tensors, B=B, H=H, C=C, M=M)
    s = initial.astype(float) if has_initial_states else np.zeros((B, H, M))
    for c in range(C):
        np.testing.assert_allclose(before.check()[:, c], s, rtol=1e-5, atol=1e-6)
        kept = np.exp(passed[:, :, c].astype(float))[..., None] * s
        s = np.where(cuts[:, c, None, None] > 0, 0, kept) + states[:, c]
    np.testing.assert_allclose(final.check(), s, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("has_initial_states", [False, True])
def test_chains_of_a_pack(has_initial_states: bool) -> None:
    starts, H, C, M = [0, 0, 3, 4, 4, 14], 2, 16, 130
    B = len(starts) - 1
    rng = np.random.default_rng(3)
    states = rng.normal(size=(1, C, H, M)).astype(np.float32)
    states[0, 3] = np.nan  # a sequence by itself
    passed = -rng.exponential(size=(1, H, C)).astype(np.float32)
    initial = rng.normal(size=(B, H, M)).astype(np.float32)
    before, final = Guarded((1, C, H, M)), Guarded((B, H, M))
    tensors = {"states": states, "dA_chunk": passed, "prev_states": before.array, "final_states": final.array}
    tensors["bounds"] = np.array(starts, np.int32)
    tensors["initial_states"] = initial if has_initial_states else None
    run("seq_passing", {"packed": True}, tensors, B=B, H=H, C=C, M=M)
    for n in range(B):
        s = initial[n].astype(float) if has_initial_states else np.zeros((H, M))
        for c in range(starts[n], starts[n + 1]):
            np.testing.assert_allclose(before.check()[0, c], s, rtol=1e-5, atol=1e-6)
            s = np.exp(passed[0, :, c].astype(float))[:, None] * s + states[0, c]
        np.testing.assert_allclose(final.check()[n], s, rtol=1e-5, atol=1e-6)
    assert (before.check()[0, 14:] == 0).all(), "chunks of no sequence"
