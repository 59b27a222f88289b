"""gate: skip, gate, dtype and place of y."""

from __future__ import annotations

import numpy as np
import pytest
from helpers_tile import run

SKIP, GATE, PACK = 2, 4, 8


@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("wide_skip", [False, True])
@pytest.mark.parametrize("parts", [0, SKIP, GATE, SKIP + GATE, SKIP + GATE + PACK, PACK])
def test_what_is_asked_for_and_nothing_else(parts: int, wide_skip: bool, half: bool, aligned: bool) -> None:
    B, S, H, P, W = 1 if parts & PACK else 2, 9, 5, 48, 8 if aligned else 1
    R, V = 30 if parts & PACK else S, P // W
    rng = np.random.default_rng(parts)
    y = rng.normal(size=(B, R, H, P)).astype(np.float32)
    x, z = (rng.normal(size=(B, S, H, P)).astype(np.float16) for _ in range(2))
    D = rng.normal(size=(H, P) if wide_skip else (H, 1)).astype(np.float32)
    rows = rng.permutation(R)[:S].astype(np.int32)
    rows[4] = -1
    if not parts & PACK:
        rows[:] = np.arange(S)
    # Behind a token's heads, in x, z and out, lies what must neither be read nor written.
    memory = np.full((B, S, H + 1, V, W), np.nan, np.float16 if half else np.float32)
    out = memory[:, :, :H]
    tensors = {"y": y.reshape(B, R, H, V, W), "out": out}
    absent = np.zeros((0,) * 5, np.float16)
    for name, value, part in (("x", x, SKIP), ("z", z, GATE)):
        padded = np.full((B, S, H + 1, V, W), np.nan, np.float16)
        padded[:, :, :H] = value.reshape(B, S, H, V, W)
        tensors[name] = padded[:, :, :H] if parts & part else absent
    skip = np.broadcast_to(D, (H, P)).reshape(H, V, W) if not wide_skip else D.reshape(H, V, W)
    tensors["D"] = skip if parts & SKIP else np.zeros((0, 0, 0), np.float32)
    tensors["rows"] = rows if parts & PACK else np.zeros(0, np.int32)
    sizes = {"B": B, "S": S, "R": R, "H": H, "V": V}
    run("gate", {"dtype": "float16", "half": half, "aligned": aligned}, tensors, **sizes, parts=1 + parts)
    want = np.where((rows >= 0)[:, None, None], y[:, rows].astype(float), 0)
    if parts & SKIP:
        want = want + D * x.astype(float)
    if parts & GATE:
        want = want * z.astype(float) / (1 + np.exp(-z.astype(float)))
    want = np.where((rows >= 0)[:, None, None], want, 0)
    np.testing.assert_allclose(out.reshape(B, S, H, P), want, rtol=1e-3 if half else 1e-6, atol=1e-3 if half else 1e-6)
    assert np.isnan(memory[:, :, H]).all()
