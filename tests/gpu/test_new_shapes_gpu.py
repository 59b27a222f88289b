"""A shape never seen before costs no compilation, no load and no process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import tileops
from tileops.mamba import Mamba2FwdOp

pytestmark = pytest.mark.gpu


def children() -> set[str]:
    return {p for task in Path("/proc/self/task").iterdir() for p in (task / "children").read_text().split()}


def test_report_56_two_hundred_new_shapes_load_compile_and_start_nothing():
    op = Mamba2FwdOp(256)

    def call(batch: int, seqlen: int, heads: int) -> None:
        x = torch.randn(batch, seqlen, heads, 64, device="cuda").bfloat16()
        dt, A = torch.randn(batch, seqlen, heads, device="cuda"), -torch.rand(heads, device="cuda")
        B = torch.randn(batch, seqlen, 1, 128, device="cuda").bfloat16()
        y, _ = op(x, dt, A, B, B)
        assert torch.isfinite(y).all()

    call(1, 100, 8)
    call(200, 1000, 8)  # more chains than SMs: also the kernel that this needs is loaded
    before, started = tileops.stats(), children()
    for i in range(200):
        call(1 + i % 7, 1 + 13 * i, 8 * (1 + i % 3))
    after = tileops.stats()
    assert {k: after[k] for k in ("compiles", "loads", "misses")} == {k: before[k] for k in ("compiles", "loads", "misses")}
    assert children() == started
