"""What the tests of chunk_cumsum's program and of its CUDA code share: the values in float64, and limits."""

from __future__ import annotations

import numpy as np


def expected(dt, A, bias, Q, softplus, dt_min=0.0, dt_max=np.inf):
    """Token by token in float64, of the float32 sum dt + bias that the definition starts from."""
    B, S, H = dt.shape
    C = -(-S // Q)
    v = (dt if bias is None else dt + bias).astype(np.float64)
    if softplus:
        v = np.where(v > 20, v, np.log1p(np.exp(np.minimum(v, 20))))
    v = np.clip(v, dt_min, dt_max)
    out, cumsum = np.zeros((B, H, C, Q)), np.zeros((B, H, C, Q))
    for c in range(C):
        total = np.zeros((B, H))
        for i in range(Q):
            if c * Q + i < S:
                out[:, :, c, i] = v[:, c * Q + i]
                total = total + v[:, c * Q + i] * A
            cumsum[:, :, c, i] = total
    return out, cumsum


#: softplus, lowest and highest step: each limit by itself, and none that is one.
LIMITS = {
    "highest alone": (True, 0.0, 0.3),
    "lowest alone": (True, 0.3, np.inf),
    "both": (True, 0.1, 0.3),
    "a lowest below 0, which softplus is not": (True, -1.0, np.inf),
    "no softplus: steps below 0 become 0": (False, 0.0, np.inf),
    "no softplus, a lowest below 0": (False, -0.5, np.inf),
    "the largest float32": (False, 0.0, float(np.finfo(np.float32).max)),
    "the largest float32, softplus": (True, 0.0, float(np.finfo(np.float32).max)),
}


def steps_about_limits() -> np.ndarray:
    dt = np.random.default_rng(3).normal(-1, 1, (1, 40, 3)).astype(np.float32)
    dt[0, 7, 1] = np.inf
    return dt
