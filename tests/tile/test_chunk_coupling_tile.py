"""chunk_coupling against its definition in float64."""

from __future__ import annotations

import numpy as np
import pytest
from helpers_tile import Guarded, run, scattered


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize(("Q", "N", "S", "G"), [(16, 16, 37, 1), (32, 80, 64, 2), (64, 48, 100, 3), (256, 16, 300, 1), (128, 256, 1, 1)])
def test_causal_product_of_each_chunk_and_group(Q: int, N: int, S: int, G: int, dtype: type) -> None:
    B, C = 2, -(-S // Q)
    rng = np.random.default_rng(Q)
    Cm, Bm = (rng.normal(size=(B, S, G, N)).astype(dtype) for _ in range(2))
    out = Guarded((B, C, G, Q, Q))
    tensors = {"Cm": scattered(Cm), "Bm": scattered(Bm, 5), "cb": out.array}
    run(
        "chunk_coupling", {"Q": Q, "N": N, "dtype": np.dtype(dtype).name, "aligned": False, "cb_float32": True}, tensors, B=B, S=S, G=G, C=C
    )
    want = np.zeros((B, C, G, Q, Q))
    for l in range(S):
        for s in range(l // Q * Q, l + 1):
            want[:, l // Q, :, l % Q, s % Q] = (Cm[:, l].astype(float) * Bm[:, s].astype(float)).sum(-1)
    np.testing.assert_allclose(out.check(), want, atol=2e-5)
    assert (out.array[:, :, :, np.triu_indices(Q, 1)[0], np.triu_indices(Q, 1)[1]] == 0).all()
