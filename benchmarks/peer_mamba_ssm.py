"""How mamba_ssm is called: Triton kernels, most of them autotuned at their first call.

The autotuner keeps the choice that it made for the first shape of a kind. Here it is made to choose again for every row, with
shorter trials (5 ms of warm-up and 20 ms of runs a candidate, instead of 25 and 100): its best, at bearable cost. Its stages get
what its own forward gives them: cb in float32, prev_states in x's dtype; conversions are made before the clock starts, and their
rounding is in its error.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
import triton.testing
from mamba_ssm.ops.triton import selective_state_update as decode
from mamba_ssm.ops.triton import ssd_bmm, ssd_chunk_scan, ssd_chunk_state, ssd_combined, ssd_state_passing
from torch import Tensor

from benchmarks import inputs
from benchmarks.shapes import Spec

_SOURCE = "2.3.2.post1"  # the sources carry no metadata of their own


def versions() -> dict[str, str]:
    return {"mamba_ssm": _SOURCE, "triton": triton.__version__}


def _tuners() -> Iterator[Any]:
    for module in (ssd_bmm, ssd_chunk_scan, ssd_chunk_state, ssd_state_passing):
        for name, value in vars(module).items():
            if "_fwd" in name and hasattr(value, "configs") and hasattr(value, "cache"):
                yield value


def fresh() -> None:
    """Forgets what was tuned, before a row."""
    for tuner in _tuners():
        tuner.cache.clear()
        tuner.__dict__["do_bench"] = lambda call, quantiles: triton.testing.do_bench(call, warmup=5, rep=20, quantiles=quantiles)


def share(index: int, count: int) -> None:
    """Makes this process compile every ``count``-th candidate and time none: several fill Triton's cache side by side."""

    turns = itertools.count()

    def once(call: Callable[[], Any], quantiles: Any) -> list[float]:
        call()
        return [-float(next(turns))] * 3

    for tuner in _tuners():
        tuner.cache.clear()
        candidates = tuner.__dict__.setdefault("candidates", list(tuner.configs))
        # The last wins, and runs: of every list it is one that needs little shared memory.
        tuner.configs = [*candidates[index::count], candidates[-1]]
        tuner.__dict__["do_bench"] = once


def build(spec: Spec) -> Callable[[dict[str, Tensor]], Callable[[], Any]]:
    return lambda tensors: _BINDERS[spec.op](spec, tensors)


def outputs(spec: Spec, tensors: dict[str, Tensor], result: Any) -> dict[str, Tensor]:
    if spec.op == "SSDChunkCumsumFwdOp":
        result = result[::-1]
    elif spec.op == "SSDChunkCouplingFwdOp":
        result = result.tril()  # it leaves the upper triangle to its reader
    elif spec.op == "SSDChunkScanFwdOp":
        result = result[0]
    return inputs.named(spec, tensors, result)


def _forward(spec: Spec, t: dict[str, Tensor]) -> Callable[[], Any]:
    arguments = [t[name] for name in ("x", "dt", "A", "B", "C")]
    return lambda: ssd_combined.mamba_chunk_scan_combined(
        *arguments, spec.chunk_size, dt_bias=t["dt_bias"], dt_softplus=True, return_final_states=True
    )


def _decode(spec: Spec, t: dict[str, Tensor]) -> Callable[[], Any]:
    # D and dt_bias may be None by its signature, which then raises TypeError.
    zeros = torch.zeros(spec.n_heads, 1, device=t["x"].device).expand(-1, spec.d_head)
    zeros = zeros if spec.tied else zeros.contiguous()
    arguments = [t[name] for name in ("state", "x", "dt", "A", "B", "C")]
    return lambda: decode.selective_state_update(*arguments, D=zeros, dt_bias=zeros)


def _cumsum(spec: Spec, t: dict[str, Tensor]) -> Callable[[], Any]:
    return lambda: ssd_chunk_state._chunk_cumsum_fwd(t["dt"], t["A"], spec.chunk_size, dt_bias=t["dt_bias"], dt_softplus=True)


def _coupling(spec: Spec, t: dict[str, Tensor]) -> Callable[[], Any]:
    return lambda: ssd_bmm._bmm_chunk_fwd(t["C"], t["B"], spec.chunk_size, output_dtype=torch.float32)


def _state(spec: Spec, t: dict[str, Tensor]) -> Callable[[], Any]:
    return lambda: ssd_chunk_state._chunk_state_fwd(t["B"], t["x"], t["dt"], t["dA_cumsum"], states_in_fp32=True)


def _passing(spec: Spec, t: dict[str, Tensor]) -> Callable[[], Any]:
    # float32, as ours writes them; its own forward takes x's dtype here
    return lambda: ssd_state_passing._state_passing_fwd(t["states"], t["dA_chunk_cumsum"], out_dtype=torch.float32)


def _scan(spec: Spec, t: dict[str, Tensor]) -> Callable[[], Any]:
    cb, prev_states = t["cb"].float(), t["prev_states"].to(getattr(torch, spec.dtype))
    return lambda: ssd_chunk_scan._chunk_scan_fwd(cb, t["x"], t["dt"], t["dA_cumsum"], t["C"], prev_states)


_BINDERS = {
    "Mamba2FwdOp": _forward,
    "SSDRecurrentFwdOp": _decode,
    "SSDChunkCumsumFwdOp": _cumsum,
    "SSDChunkCouplingFwdOp": _coupling,
    "SSDChunkStateFwdOp": _state,
    "SSDStatePassingFwdOp": _passing,
    "SSDChunkScanFwdOp": _scan,
}
