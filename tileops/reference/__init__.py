"""The ``reference`` target: every op in plain PyTorch. What CPU tensors run, and a readable definition of each op.

One file an op, named as the op's file in ``tileops.ops``. Functions take the checked tensors of ``forward`` in order
and, as keywords, those beyond the spec and the constructor's values. They run on any device, accumulate in float32, accept
bfloat16, float16 and float32 inputs (the CUDA kernels take the first two), and never write an input other than a decode state
and ``out``.

Importing this package imports no torch; :func:`implementation` imports the one file it needs.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

#: op -> module of this package and function in it
FUNCTIONS = {
    "Mamba2FwdOp": ("mamba2", "mamba2"),
    "SSDChunkCumsumFwdOp": ("chunk_cumsum", "chunk_cumsum"),
    "SSDChunkCouplingFwdOp": ("chunk_coupling", "chunk_coupling"),
    "SSDChunkStateFwdOp": ("chunk_state", "chunk_state"),
    "SSDStatePassingFwdOp": ("state_passing", "state_passing"),
    "SSDChunkScanFwdOp": ("chunk_scan", "chunk_scan"),
    "SSDRecurrentFwdOp": ("recurrent", "recurrent"),
}


def implementation(op_name: str) -> Callable[..., Any] | None:
    """The function that computes ``op_name``, or None for a name that is not an op."""
    if op_name not in FUNCTIONS:
        return None
    module, function = FUNCTIONS[op_name]
    found: Callable[..., Any] = getattr(importlib.import_module(f"tileops.reference.{module}"), function)
    return found
