"""A thousand calls give the same bits: the fused forward (with and without scouts), the stages, decode."""

from __future__ import annotations

import pytest
import torch
from ssd_cases import Case, inputs

import tileops.ops.mamba2 as mamba2
from tileops.mamba import Mamba2FwdOp, SSDRecurrentFwdOp

pytestmark = pytest.mark.gpu

CALLS = 1000
BF16, FP16 = torch.bfloat16, torch.float16
CASES = [
    (Case(2, 500, 8, 64, 128, 2, 256), BF16),
    (Case(2, 500, 8, 64, 128, 2, 256), FP16),
    (Case(1, 4096, 24, 64, 128, 1, 256), BF16),  # few chains: scouts go ahead
    (Case(1, 4096, 24, 64, 128, 1, 256), FP16),
    (Case(2, 1000, 4, 80, 128, 2, 128), BF16),
    (Case(4, 2048, 80, 64, 128, 1, 256), BF16),
]


@pytest.mark.parametrize(("case", "dtype"), CASES, ids=str)
@pytest.mark.parametrize("path", ["served", "stages"])
def test_forward(case, dtype, path, monkeypatch):
    if path == "stages":
        monkeypatch.setattr(mamba2, "serves", lambda *_: False)
    given = inputs(case, dtype, "cuda")
    op = Mamba2FwdOp(case.Q)
    y, final = op(*given.all)
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    kept = []
    for number in range(CALLS):
        other = op(*given.all)
        different += (other[0] != y).sum() + (other[1] != final).sum()
        kept = [*kept[-2:], other] if number % 3 else []  # outputs at other addresses than before
    assert not y.isnan().any() and int(different) == 0


@pytest.mark.parametrize("tied", [True, False], ids=["per head", "full"])
@pytest.mark.parametrize("batch", [1, 64])
def test_decode(batch, tied):
    given = inputs(Case(batch, 1, 80, 64, 128, 1, 256), BF16, "cuda")
    A = given.A.view(-1, 1, 1).expand(-1, 64, 128)
    dt = given.dt[:, 0].abs().unsqueeze(-1).expand(-1, -1, 64)
    if not tied:
        A, dt = A.contiguous(), dt.contiguous()
    op = SSDRecurrentFwdOp()

    def step():
        state = given.initial_states.clone()
        return op(A, dt, given.x[:, 0], given.B[:, 0], given.C[:, 0], state), state

    y, after = step()
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    kept = []
    for number in range(CALLS):
        other = step()
        different += (other[0] != y).sum() + (other[1] != after).sum()
        kept = [*kept[-2:], other] if number % 3 else []
    assert not y.isnan().any() and int(different) == 0
