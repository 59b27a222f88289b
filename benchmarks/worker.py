"""A process that runs one implementation: ``python -m benchmarks.worker NAME DEVICE``, a JSON request a line in, an answer a line out.

    {"command": "versions"}                        -> {"versions": {...}}
    {"command": "machine"}                         -> what runs here
    {"command": "ceilings"}                        -> see timing.ceilings
    {"command": "selfcheck"}                       -> see reference.selfcheck
    {"command": "prepare", "spec": {...}, "share": [i, n] or null}   -> {"seconds": ...}: compiles what the row needs
    {"command": "measure", "spec": {...}, "contiguous": false}       -> the numbers of the row

An answer to a request that failed is {"failed": "the error in a line"}. Standard output belongs to the answers; what libraries print
goes to standard error.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import json
import os
import platform
import subprocess
import sys
import time
from typing import Any

import torch

from benchmarks import inputs, reference, timing
from benchmarks.shapes import Spec

#: One round over the input sets is at least this many times the L2.
_L2_ROUNDS = 2
_MOST_SETS = 64


def measure(adaptor: Any, spec: Spec, device: str, contiguous: bool = False, rounding: bool = False) -> dict[str, Any]:
    """First call, errors of its results, GPU time and host time of one row; ``contiguous``: of copies of the inputs that are views;
    ``rounding``: also the errors that rounding the products' operands alone makes, and the time of torch's kernel for as many bytes."""

    def make(number: int) -> inputs.Tensors:
        tensors = inputs.make(spec, device, number)
        drawn.append(inputs.digest(tensors))
        return {name: t.contiguous() for name, t in tensors.items()} if contiguous else tensors

    drawn: list[float] = []
    getattr(adaptor, "fresh", lambda: None)()
    first = make(0)
    wanted = reference.evaluate(spec, first)
    forced = {}
    if rounding and spec.op == "Mamba2FwdOp":
        floor = reference.evaluate(spec, first, first["x"].dtype)
        forced = {"rounding_errors": {name: reference.error(floor[name], ref) for name, ref in wanted.items()}}
        del floor
    bind = adaptor.build(spec)
    call = bind(first)
    if device != "cpu":
        reference.poison(max(1 << 30, 2 * sum(t.numel() * 4 for t in wanted.values())))
        torch.cuda.synchronize()
    start = time.perf_counter()
    result = call()
    if device != "cpu":
        torch.cuda.synchronize()
    first_call_ms = (time.perf_counter() - start) * 1e3
    got = adaptor.outputs(spec, first, result)
    errors = {name: reference.error(got[name], ref) for name, ref in wanted.items()}
    # What must move: inputs once, outputs once. A state that is updated is both.
    moved = sum(inputs.nbytes(t) for t in first.values()) + sum(inputs.nbytes(t) for t in got.values())
    main = next(iter(wanted))
    dtype = str(got[main].dtype).removeprefix("torch.")
    del wanted, got, result
    size = sum(inputs.nbytes(t) for t in first.values())
    sets = 1 if device == "cpu" else min(max(-(-_L2_ROUNDS * timing.l2_bytes() // size), 1), _MOST_SETS)
    others = [make(number) for number in range(1, sets)]
    calls = [call, *map(bind, others)]
    gpu, spread, in_replay = timing.gpu_us(calls, device)
    beside = {}
    if rounding and "state" in first:  # what reading and writing the states in place takes here and now
        passes = [functools.partial(tensors["state"].mul_, 1.0) for tensors in (first, *others)]
        beside = {"in_place_us": timing.gpu_us(passes, device)[0]}
    elif rounding and spec.op == "SSDChunkCumsumFwdOp":  # what reading half of the bytes and writing half takes
        halves = [torch.ones(moved // 8, device=device) for _ in calls]
        beside = {"negation_us": timing.gpu_us([functools.partial(torch.neg, half) for half in halves], device)[0]}
    host, host_spread = timing.host_us(calls, device)
    return {
        "gpu_us": gpu,
        "spread": spread,
        "host_us": host,
        "cpu_us": timing.cpu_us(),
        "host_spread": host_spread,
        "first_call_ms": first_call_ms,
        "error": errors[main],
        "errors": errors,
        **forced,
        **beside,
        "output_dtype": dtype,
        "bytes": moved,
        "input_sets": sets,
        "calls_in_replay": in_replay,
        "digest": drawn[0],
    }


def prepare(adaptor: Any, spec: Spec, device: str, share: list[int] | None) -> dict[str, Any]:
    """Calls the op once, so that what it compiles lies in its cache on disk."""
    if share is not None:
        adaptor.share(*share)
    call = adaptor.build(spec)(inputs.make(spec, device))
    start = time.perf_counter()
    call()
    if device != "cpu":
        torch.cuda.synchronize()
    return {"seconds": time.perf_counter() - start}


def machine(device: str) -> dict[str, Any]:
    about: dict[str, Any] = {"cpus": os.cpu_count(), "system": f"{platform.system()} {platform.machine()}", "gpu": None}
    if device != "cpu":
        properties = torch.cuda.get_device_properties(0)
        about.update(
            gpu=properties.name,
            multiprocessors=properties.multi_processor_count,
            l2_bytes=timing.l2_bytes(),
            memory_bytes=properties.total_memory,
            capability=f"{properties.major}.{properties.minor}",
            driver=_driver(),
        )
    return about


def _driver() -> str | None:
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "-i", "0"]
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def versions(adaptor: Any) -> dict[str, Any]:
    return {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda, **adaptor.versions()}


def answer(adaptor: Any, request: dict[str, Any], device: str) -> dict[str, Any]:
    command = request["command"]
    if command == "versions":
        return {"versions": versions(adaptor)}
    if command == "machine":
        return machine(device)
    if command == "ceilings":
        return timing.ceilings()
    if command == "selfcheck":
        return {"error": reference.selfcheck(device)}
    spec = Spec(**request["spec"])
    if command == "prepare":
        return prepare(adaptor, spec, device, request.get("share"))
    if command == "measure":
        return measure(adaptor, spec, device, request.get("contiguous", False), request.get("rounding", False))
    raise ValueError(f"unknown command {command!r}")


def main() -> int:
    name, device = sys.argv[1:]
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    torch.set_grad_enabled(False)
    try:
        adaptor: Any = importlib.import_module(f"benchmarks.{name}")
        broken = None
    except Exception as error:
        adaptor, broken = None, _words(error)
    for line in sys.stdin:
        reply: dict[str, Any]
        if broken is not None:
            reply = {"failed": broken}
        else:
            try:
                reply = answer(adaptor, json.loads(line), device)
            except Exception as error:
                reply = {"failed": _words(error)}
        replies.write(json.dumps(reply) + "\n")
        gc.collect()
        if device != "cpu":
            with contextlib.suppress(RuntimeError):
                torch.cuda.empty_cache()
    return 0


def _words(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:300]}"


if __name__ == "__main__":
    sys.exit(main())
