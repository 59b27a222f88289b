"""Makes sure that every kernel a model needs is there: compiles what no root holds into the user cache.

    tileops warm --model mamba2-130m
    tileops warm --config /models/my-model/config.json --arch sm_80,sm_90a
    tileops warm --chunk-size 256 --head-dim 64 --d-state 128 --dtype bfloat16 --check

Run before serving; then the process calls tileops.freeze() and never compiles. Status 1: something is missing still.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from tileops.cli import MISSING, OK, _output, _select

if TYPE_CHECKING:
    from tileops.config import Artifact, KernelConfig

HELP = "make sure that every kernel of a model is there"

#: Seconds after which one kernel is given up.
TIMEOUT = 600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _select.add_model_arguments(parser)
    parser.add_argument("--check", action="store_true", help="report only, compile nothing; status 1 if anything is missing")
    parser.add_argument("--jobs", metavar="N", type=int, help="processes (default: as many as cores and memory allow)")
    parser.add_argument("--quiet", action="store_true", help="no progress")


def run(args: argparse.Namespace) -> int:
    from tileops import compiler, store

    archs = _select.archs(args)
    configs = _select.kernels(args, archs)
    start = time.monotonic()
    there: Counter[str] = Counter()
    missing: list[KernelConfig] = []
    size = 0
    for config in configs:
        lookup = store.find(config, toolchain=compiler.toolchain_name)
        if lookup.artifact is None:
            missing.append(config)
        else:
            there[lookup.root or ""] += 1
            size += lookup.artifact.record.cubin_size
    data: dict[str, Any] = {"archs": archs, "kernels": len(configs), "present": dict(there), "compiled": 0, "failed": [], "missing": []}
    lines = [f"{len(configs)} kernels for {', '.join(archs)}"]
    lines += [f"{count:6} in {root}" for root, count in there.items()]
    if args.check or not missing:
        data["missing"] = [{"key": config.key, "config": config.as_dict()} for config in missing]
        lines += [f"{len(missing):6} missing"] if missing else ["nothing is missing"]
        lines += [f"       {config}" for config in missing]
    else:
        failed, compiled, added = _compile(missing, args)
        size += added
        data["compiled"] = compiled
        data["failed"] = [{"config": config.as_dict(), "error": error} for config, error in failed]
        data["missing"] = [{"key": config.key, "config": config.as_dict()} for config, _ in failed]
        lines.append(f"{compiled:6} compiled into {store.location().path}")
        lines += [f"FAILED {config}: {error}" for config, error in failed]
    data.update(bytes=size, seconds=round(time.monotonic() - start, 2))
    lines.append(f"{_output.size(size)}, {data['seconds']:.1f} s")
    _output.emit(args.json, data, "\n".join(lines))
    return MISSING if data["missing"] else OK


def _compile(missing: list[KernelConfig], args: argparse.Namespace) -> tuple[list[tuple[KernelConfig, str]], int, int]:
    """Compiles in parallel; failures do not lose the others. Returns failures, number compiled and their bytes."""
    from tileops import compiler, store
    from tileops.cli import Usage
    from tileops.compiler import pool

    if store.current_policy() != "auto":
        raise Usage(f"{len(missing)} kernels are missing and the policy {store.current_policy()!r} forbids compiling them")
    found, reason = compiler.toolchain.find()
    if found is None:
        return [(config, f"cannot compile: {reason}") for config in missing], 0, 0
    if args.jobs is not None and args.jobs < 1:
        raise Usage(f"--jobs {args.jobs}: expected a positive number")
    jobs = min(args.jobs or pool.default_jobs(), pool.fitting_memory(), len(missing))
    failed: list[tuple[KernelConfig, str]] = []
    done = size = 0
    begun = said = time.monotonic()
    if not args.quiet:
        _output.note(f"compiling {len(missing)} kernels with {jobs} processes, {found.name}")
    with contextlib.closing(pool.run(missing, jobs, make, TIMEOUT)) as outcomes:
        for outcome in outcomes:
            done += 1
            size += outcome.size
            if outcome.error:
                failed.append((outcome.config, outcome.error))
            now = time.monotonic()
            if not args.quiet and (now - said > 5 or done == len(missing) or outcome.error):
                said = now
                left = (now - begun) / done * (len(missing) - done)
                _output.note(f"{done}/{len(missing)} done, {len(failed)} failed, about {left:.0f} s left")
    return failed, done - len(failed), size


def make(config: KernelConfig) -> Artifact:
    """Compiles one kernel into the user cache, in a worker process. Another process that is at it already is waited for.

    Raises:
        CompileError, and OSError where the cache cannot keep it: a warm that only warms a dying process is a failure.
    """
    from tileops import compiler, store

    lookup = store.find_or_build(config, compiler.build, policy="auto", toolchain=compiler.toolchain_name)
    assert lookup.artifact is not None
    if lookup.kind == "jit" and store.stats()["publish_failures"]:
        raise OSError(f"compiled, but the cache cannot keep it: {lookup.trace[-1].reason}")
    return lookup.artifact
