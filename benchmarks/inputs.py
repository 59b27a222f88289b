"""The tensors of a row, the same in every process: drawn from a generator seeded by the row's sizes."""

from __future__ import annotations

import math
import zlib
from typing import Any

import torch
from torch import Tensor

from benchmarks.shapes import Spec

Tensors = dict[str, Tensor]


def make(spec: Spec, device: str, number: int = 0) -> Tensors:
    """Input set ``number`` of a row. x, B and C of everything but decode are views of one projection, as in a Mamba-2 layer."""
    generator = torch.Generator(device).manual_seed(zlib.crc32(f"{spec} {number}".encode()))
    dtype = getattr(torch, spec.dtype)
    batch, seqlen, heads, P, N, groups = spec.batch, spec.seqlen, spec.n_heads, spec.d_head, spec.d_state, spec.n_groups
    chunks, Q = -(-seqlen // spec.chunk_size), spec.chunk_size

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, generator=generator)

    def rates(*shape: int) -> Tensor:
        return -torch.rand(*shape, device=device, generator=generator) * 15 - 1

    def bias(*shape: int) -> Tensor:
        """Such that softplus of it is between 0.001 and 0.1, as Mamba-2 is initialised: most heads remember over many chunks."""
        step = torch.exp(torch.rand(*shape, device=device, generator=generator) * math.log(100) + math.log(1e-3))
        return torch.log(torch.expm1(step))

    def steps(*shape: int) -> Tensor:
        """(batch, heads, ...), after softplus."""
        return torch.nn.functional.softplus(randn(*shape) / 2 + bias(heads, 1))

    if spec.op == "SSDRecurrentFwdOp":
        tensors = {
            "A": rates(heads, 1, 1).expand(heads, P, N) if spec.tied else rates(heads, P, N),
            "dt": steps(batch, heads, 1).expand(batch, heads, P) if spec.tied else steps(batch, heads, P),
            "x": randn(batch, heads, P).to(dtype),
            "B": randn(batch, groups, N).to(dtype),
            "C": randn(batch, groups, N).to(dtype),
            "state": randn(batch, heads, P, N),
        }
        return tensors

    def projection() -> Tensors:
        packed = randn(batch, seqlen, heads * P + 2 * groups * N).to(dtype)
        x, B, C = packed.split([heads * P, groups * N, groups * N], -1)
        return {"x": x.unflatten(-1, (heads, P)), "B": B.unflatten(-1, (groups, N)), "C": C.unflatten(-1, (groups, N))}

    def raw_steps() -> Tensors:
        return {"dt": randn(batch, seqlen, heads) / 2, "A": rates(heads), "dt_bias": bias(heads)}

    def processed_steps() -> Tensors:
        dt = steps(batch, heads, chunks * Q)
        dt[..., seqlen:] = 0  # past the end no time passes
        dt = dt.unflatten(-1, (chunks, Q))
        return {"dt": dt, "dA_cumsum": (dt * rates(heads, 1, 1)).cumsum(-1)}

    if spec.op == "Mamba2FwdOp":
        return {**projection(), **raw_steps()}
    if spec.op == "SSDChunkCumsumFwdOp":
        return raw_steps()
    if spec.op == "SSDChunkCouplingFwdOp":
        views = projection()
        return {"C": views["C"], "B": views["B"]}
    if spec.op == "SSDChunkStateFwdOp":
        views = projection()
        return {"x": views["x"], "B": views["B"], **processed_steps()}
    if spec.op == "SSDStatePassingFwdOp":
        return {"states": randn(batch, chunks, heads, P * N), "dA_chunk_cumsum": processed_steps()["dA_cumsum"][..., -1]}
    if spec.op == "SSDChunkScanFwdOp":
        views = projection()
        cb = (randn(batch, chunks, groups, Q, Q) * N**0.5).tril().to(dtype)
        return {"x": views["x"], "C": views["C"], "cb": cb, "prev_states": randn(batch, chunks, heads, P, N), **processed_steps()}
    raise ValueError(f"no inputs for {spec.op!r}")


def nbytes(tensor: Tensor) -> int:
    """Bytes that must be read to see every element: expanded dimensions count once."""
    count = tensor.element_size()
    for size, stride in zip(tensor.shape, tensor.stride()):
        count *= size if stride else 1
    return count


def digest(tensors: Tensors) -> float:
    """Tells whether two processes drew the same numbers."""
    return sum(t.sum(dtype=torch.float64).item() for t in tensors.values())


#: op -> its arguments in the order of the call, by the names that ``make`` gives them; its results in their order. tileops 0.1.0
#: shares both.
ARGUMENTS = {
    "Mamba2FwdOp": ("x", "dt", "A", "B", "C", "dt_bias"),
    "SSDRecurrentFwdOp": ("A", "dt", "x", "B", "C", "state"),
    "SSDChunkCumsumFwdOp": ("dt", "A", "dt_bias"),
    "SSDChunkCouplingFwdOp": ("C", "B"),
    "SSDChunkStateFwdOp": ("x", "B", "dt", "dA_cumsum"),
    "SSDStatePassingFwdOp": ("states", "dA_chunk_cumsum"),
    "SSDChunkScanFwdOp": ("x", "cb", "dA_cumsum", "C", "prev_states", "dt"),
}
RESULTS = {
    "Mamba2FwdOp": ("y", "state"),
    "SSDRecurrentFwdOp": ("y",),
    "SSDChunkCumsumFwdOp": ("dt", "dA_cumsum"),
    "SSDChunkCouplingFwdOp": ("cb",),
    "SSDChunkStateFwdOp": ("states",),
    "SSDStatePassingFwdOp": ("prev_states", "final_states"),
    "SSDChunkScanFwdOp": ("y",),
}


def named(spec: Spec, tensors: Tensors, result: Any) -> Tensors:
    """A call's results, and the state that decode has updated, under the names of ``reference.evaluate``."""
    values = result if isinstance(result, (tuple, list)) else (result,)
    out = dict(zip(RESULTS[spec.op], values))
    if spec.op == "SSDRecurrentFwdOp":
        out["state"] = tensors["state"]
    return out
