"""How tileops 0.1.0 is called: TileLang kernels that are compiled at run time, anew for every batch and sequence length.

Its process has that package first on the path, so ``tileops`` is not ours here. Its ops copy views (x, B and C of one projection)
at each call, and that is in their time. cumsum writes dt in float32, as ours does (its own forward: in x's dtype). Spared it: the
expansion of a rate per head in decode, and, as its own forward has it, dt between the other stages in x's dtype; such conversions are
made before the clock starts, and their rounding is in its error.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import tilelang
import torch
from torch import Tensor

from benchmarks import inputs
from benchmarks.shapes import Spec
from tileops import mamba

outputs = inputs.named


def versions() -> dict[str, str]:
    return {"tileops010": version("tileops"), "tilelang": tilelang.__version__}


def build(spec: Spec) -> Callable[[dict[str, Tensor]], Callable[[], Any]]:
    Q, dtype = spec.chunk_size, getattr(torch, spec.dtype)
    op: Any = {
        "Mamba2FwdOp": lambda: mamba.Mamba2FwdOp(Q),
        "SSDRecurrentFwdOp": lambda: mamba.SSDRecurrentFwdOp(),
        "SSDChunkCumsumFwdOp": lambda: mamba.SSDChunkCumsumFwdOp(Q, torch.float32, dt_softplus=True),
        "SSDChunkCouplingFwdOp": lambda: mamba.SSDChunkCouplingFwdOp(Q),
        "SSDChunkStateFwdOp": lambda: mamba.SSDChunkStateFwdOp(),
        "SSDStatePassingFwdOp": lambda: mamba.SSDStatePassingFwdOp(),
        "SSDChunkScanFwdOp": lambda: mamba.SSDChunkScanFwdOp(),
    }[spec.op]()

    def bind(tensors: dict[str, Tensor]) -> Callable[[], Any]:
        tensors = dict(tensors)
        if spec.op == "SSDRecurrentFwdOp":
            tensors.update({name: tensors[name].contiguous() for name in ("A", "dt")})
        if spec.op in ("SSDChunkStateFwdOp", "SSDChunkScanFwdOp"):
            tensors["dt"] = tensors["dt"].to(dtype)
        arguments = [tensors[name] for name in inputs.ARGUMENTS[spec.op]]
        return lambda: op(*arguments)

    return bind
