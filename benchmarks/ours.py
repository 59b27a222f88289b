"""How this package is called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from benchmarks import inputs
from benchmarks.shapes import Spec
from tileops import mamba
from tileops.config import VERSION

outputs = inputs.named


def versions() -> dict[str, str]:
    return {"tileops": VERSION}


def build(spec: Spec) -> Callable[[dict[str, Tensor]], Callable[[], Any]]:
    """Constructs the op; what comes back turns a set of inputs into a call without arguments."""
    Q = spec.chunk_size
    op: Any = {
        "Mamba2FwdOp": lambda: mamba.Mamba2FwdOp(Q),
        "SSDRecurrentFwdOp": lambda: mamba.SSDRecurrentFwdOp(),
        "SSDChunkCumsumFwdOp": lambda: mamba.SSDChunkCumsumFwdOp(Q, dt_softplus=True),
        "SSDChunkCouplingFwdOp": lambda: mamba.SSDChunkCouplingFwdOp(Q),
        "SSDChunkStateFwdOp": lambda: mamba.SSDChunkStateFwdOp(),
        "SSDStatePassingFwdOp": lambda: mamba.SSDStatePassingFwdOp(),
        "SSDChunkScanFwdOp": lambda: mamba.SSDChunkScanFwdOp(),
    }[spec.op]()

    def bind(tensors: dict[str, Tensor]) -> Callable[[], Any]:
        arguments = [tensors[name] for name in inputs.ARGUMENTS[spec.op]]
        return lambda: op(*arguments)

    return bind
