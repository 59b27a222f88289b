"""``python -m build_kernels tune``: which schedule is the fastest for a config? Compiles the candidates, measures them, writes the table.

Two halves, each of which goes on where it was stopped, since the machine that compiles need not be the one with the GPU:
``--compile`` makes an artifact of the default schedule and of each candidate in the work folder (needs TileLang, no GPU);
``--measure`` runs what is there and this GPU can run, against the reference and then against the clock, and rewrites the
rows of those configs in tileops/kernels/schedules.json. A row changes its config's key: build and test again afterwards.

The work folder holds, for each key, ``<key>.cubin`` and ``<key>.json`` (the record), or ``<key>.failed`` with the reason (a
candidate may spill, or need more shared memory than there is), and ``<key>.measured``. What another kernel source made is ignored.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import json
import math
import os
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from build_kernels import matrix
from tileops import catalog, compiler, schedules
from tileops.compiler import pool
from tileops.config import Artifact, KernelConfig, Record, source_digest

if TYPE_CHECKING:
    import torch

WORK = Path(__file__).resolve().parents[1] / ".tune"

#: Kernels whose files have candidates.
KERNELS = ("chunk_cumsum", "chunk_coupling", "chunk_state", "state_passing", "chunk_scan")

#: Batch, tokens, heads of the calls that are timed; one group. A schedule is as good as the mean over them.
SHAPES = ((2, 32768, 80), (8, 2048, 64), (4, 2048, 80), (1, 4096, 48))

#: A candidate takes the default's place where it is faster by more than this.
GAIN = 0.01

#: Relative error in norm that a right result stays below.
TOLERANCE = {"float32": 1e-4, "float16": 1e-3, "bfloat16": 6e-3}


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m build_kernels tune", description=(__doc__ or "").split("\n\n")[0])
    p.add_argument("--compile", action="store_true", help="only compile the candidates")
    p.add_argument("--measure", action="store_true", help="only measure what is compiled, and write the table")
    p.add_argument("--arch", metavar="A,B", help="archs to compile for (default: this machine's GPU's)")
    p.add_argument("--model", metavar="NAME", action="append", default=[], help="a model preset instead of the matrix; may be repeated")
    p.add_argument("--only", metavar="PATTERN", action="append", default=[], help='as for the build ("chunk_scan Q=256"); may be repeated')
    p.add_argument("--matrix", metavar="FILE", type=Path, default=matrix.DEFAULT, help="the matrix (default: build_kernels/matrix.toml)")
    p.add_argument("--work", metavar="DIR", type=Path, default=WORK, help="what was compiled and measured (default: .tune)")
    p.add_argument("--table", metavar="FILE", type=Path, default=schedules.TABLE, help="default: tileops/kernels/schedules.json")
    p.add_argument("--jobs", metavar="N", type=int, help="processes that compile (default: as many as cores and memory allow)")
    p.add_argument("--timeout", metavar="SECONDS", type=int, default=600, help="for one compilation (default: 600)")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    both = args.compile == args.measure
    try:
        archs = args.arch.split(",") if args.arch is not None else _local_archs()
        configs = matrix.select([c for c in matrix.load(args.matrix, archs, args.model) if c.kernel in KERNELS], args.only)
        args.work.mkdir(parents=True, exist_ok=True)
    except (matrix.MatrixError, OSError) as error:
        print(f"build_kernels tune: {error}", file=sys.stderr)
        return 2
    if both or args.compile:
        found, reason = compiler.toolchain.find()
        if found is None:
            print(f"build_kernels tune: cannot compile: {reason}.", file=sys.stderr)
            return 1
        jobs = min(args.jobs or pool.default_jobs(), pool.fitting_memory())
        made, refused = compile_all(configs, args.work, jobs, args.timeout, sys.stderr)
        print(f"{made} candidates compiled, {refused} refused; {args.work}")
    if both or args.measure:
        wanted = {_title(c) for c in configs}
        measured = measure_all(args.work, wanted, sys.stderr)
        rows = decide(args.work, wanted)
        update(args.table, rows)
        chosen = sum(bool(row["schedule"]) for row in rows)
        print(f"{measured} candidates measured; {chosen} of {len(rows)} configs have a row in {args.table}")
    return 0


def _local_archs() -> list[str]:
    import torch

    if not torch.cuda.is_available():
        raise matrix.MatrixError("this machine has no GPU to tune for; name archs with --arch.")
    return list(catalog.archs_for(*torch.cuda.get_device_capability())[:1])


def _named(row: Mapping[str, Any]) -> str:
    """``_title`` of a row of the table."""
    return schedules.name(row["kernel"], row["arch"], row["config"])


def _title(of: KernelConfig | Record) -> str:
    """Kernel, arch and config, whatever the schedule."""
    fields = of.fields if isinstance(of, KernelConfig) else of.config
    return schedules.name(of.kernel, of.arch, fields)


# --- candidates ------------------------------------------------------------------------------------------------------


def variants(config: KernelConfig) -> list[KernelConfig]:
    """The config with its kernel's default schedule, then with each candidate. Imports TileLang."""
    module = importlib.import_module(f"tileops.kernels.{config.kernel}")
    chosen = [{}, *module.candidates(config.arch, **config.fields)]
    return [dataclasses.replace(config, schedule=tuple(sorted(schedule.items()))) for schedule in chosen]


def compile_all(configs: Iterable[KernelConfig], work: Path, jobs: int, timeout: float, stream: TextIO) -> tuple[int, int]:
    """Compiles the variants that the work folder lacks. Returns how many were made, and how many refused to be."""
    missing = [
        variant
        for config in configs
        for variant in variants(config)
        if not (work / f"{variant.key}.json").exists() and not (work / f"{variant.key}.failed").exists()
    ]
    made = refused = 0
    if missing:
        with closing(pool.run(missing, min(jobs, len(missing)), functools.partial(keep, work), timeout)) as outcomes:
            for outcome in outcomes:
                if outcome.error:
                    refused += 1
                    _put(work / f"{outcome.config.key}.failed", f"{outcome.config}\n{outcome.error}\n".encode())
                else:
                    made += 1
                print(f"{made + refused}/{len(missing)} {outcome.config}{': ' + outcome.error if outcome.error else ''}", file=stream)
    return made, refused


def keep(work: Path, config: KernelConfig) -> Artifact:
    artifact = compiler.build(config)
    _put(work / f"{config.key}.cubin", artifact.cubin)
    _put(work / f"{config.key}.json", artifact.record.to_json().encode())  # last: says that both are there
    return artifact


def _put(path: Path, data: bytes) -> None:
    part = path.with_name(f"{path.name}.{os.getpid()}")
    part.write_bytes(data)
    os.replace(part, path)


def compiled(work: Path, wanted: set[str]) -> Iterator[Artifact]:
    """The work folder's artifacts of these configs that the present sources make, the same configs' next to each other."""
    records = [Record.from_dict(json.loads(path.read_text()), str(path)) for path in sorted(work.glob("*.json"))]
    for record in sorted(records, key=lambda r: (_title(r), sorted(r.schedule.items()))):
        if _title(record) in wanted and record.source == source_digest(record.kernel):
            yield Artifact(record, (work / f"{record.key}.cubin").read_bytes()).check(record.key)


# --- measuring -------------------------------------------------------------------------------------------------------


def measure_all(work: Path, wanted: set[str], stream: TextIO) -> int:
    """Measures what is compiled, fits this GPU and was not measured yet on a GPU of its name."""
    import torch

    gpu = torch.cuda.get_device_name()

    capability = torch.cuda.get_device_capability()
    count = 0
    for artifact in compiled(work, wanted):
        record = artifact.record
        path = work / f"{record.key}.measured"
        if record.arch not in catalog.archs_for(*capability) or (path.exists() and json.loads(path.read_text())["gpu"] == gpu):
            continue
        result = measure(artifact)
        _put(path, json.dumps(result).encode())
        count += 1
        print(f"{record.config_object()}: {result['error'] or result['us']}", file=stream)
    return count


def measure(artifact: Artifact, shapes: Sequence[tuple[int, int, int]] = SHAPES) -> dict[str, Any]:
    """Microseconds at each shape; or why the result is wrong, which a table must never hold."""
    import torch

    from tileops.ops import _resolve

    record = artifact.record
    device = torch.cuda.current_device()
    torch.cuda.synchronize()  # makes the context that kernels are loaded into
    result: dict[str, Any] = {"us": [], "shapes": [list(s) for s in shapes], "gpu": torch.cuda.get_device_name(device), "error": ""}
    with _resolve.pinned(artifact, device):
        result["error"] = _wrong(*_call(record.kernel, record.config, 2, 5 * int(record.config.get("Q", 256)) // 2 + 3, 6, 2))
        for shape in shapes if not result["error"] else ():
            op, args = _call(record.kernel, record.config, *shape, 1)
            result["us"].append(_microseconds(functools.partial(op, *args)))
            del op, args
            torch.cuda.empty_cache()
    return result


def _call(kernel: str, config: Mapping[str, Any], B: int, S: int, H: int, G: int) -> tuple[Any, list[Any]]:
    """An op that launches ``kernel`` with this config, and arguments that make it do so."""
    import torch

    from tileops import mamba
    from tileops.ops.chunk_coupling import plan_chunk_coupling

    g = torch.Generator("cuda").manual_seed(S)
    Q, P, N = (int(config.get(name, default)) for name, default in (("Q", 256), ("P", 64), ("N", 128)))
    C = -(-S // Q)

    def normal(*shape: int) -> torch.Tensor:
        """In the config's dtype, and with the pitch that makes rows aligned or not."""
        dtype = getattr(torch, str(config.get("dtype", "float32")))
        wide = torch.empty(*shape[:-1], shape[-1] + (config.get("aligned") is False), dtype=dtype, device="cuda")
        return wide.normal_(generator=g)[..., : shape[-1]]

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=g, device="cuda")

    def steps() -> tuple[torch.Tensor, torch.Tensor]:
        dt = uniform(B, H, C, Q) * 0.1
        dt.view(B, H, C * Q)[..., S:] = 0
        return dt.to(getattr(torch, str(config["dt_dtype"]))), torch.cumsum(-dt * (1 + 15 * uniform(H, 1, 1)), -1)

    if kernel == "chunk_cumsum":
        op: Any = mamba.SSDChunkCumsumFwdOp(Q, getattr(torch, str(config["out_dtype"])), True)
        return op, [normal(B, S, H), -1 - 15 * uniform(H), uniform(H) - 3]
    if kernel == "chunk_coupling":
        op = mamba.SSDChunkCouplingFwdOp(Q)
        if config["cb_float32"]:  # the full forward launches these kernels, no call of the ops does
            op.plan = lambda p, *slots: plan_chunk_coupling(p, p.empty, *slots, chunk_len=Q, cb_float32=True)
        return op, [normal(B, S, G, N), normal(B, S, G, N)]
    if kernel == "state_passing":
        return mamba.SSDStatePassingFwdOp(), [normal(B, C, H, P * N), -uniform(B, H, C), normal(B, H, P * N)]
    dt, cumsum = steps()
    if kernel == "chunk_state":
        return mamba.SSDChunkStateFwdOp(), [normal(B, S, H, P), normal(B, S, G, N), dt, cumsum]
    x, Cm = normal(B, S, H, P), normal(B, S, G, N)
    cb = torch.empty(B, C, G, Q, Q, dtype=torch.float32 if config["cb_float32"] else x.dtype, device="cuda").normal_(generator=g)
    op = mamba.SSDChunkScanFwdOp()
    if config["cb_float32"]:
        op.check = lambda *_, **__: None
    return op, [x, cb, cumsum, Cm, torch.empty(B, C, H, P, N, device="cuda").normal_(generator=g), dt]


def _wrong(op: Any, args: list[Any]) -> str:
    """What is wrong with the result of a call, in words; empty where nothing is."""
    from tileops import reference

    define = reference.implementation(op.op_name)
    assert define is not None
    got, expected = op(*args), define(*args, **op.options())
    for value, right in zip(*((r if isinstance(r, tuple) else (r,)) for r in (got, expected))):
        error = float((value.double() - right.double()).norm() / right.double().norm().clamp(min=1e-30))
        tolerance = TOLERANCE[str(next(a for a in args if a is not None).dtype).removeprefix("torch.")]
        if not error <= tolerance:
            return f"relative error {error:.1e}, tolerance {tolerance:.0e}"
    return ""


def _microseconds(call: Callable[[], Any], repeats: int = 11) -> float:
    """Median of replays of a CUDA graph between events, the L2 flushed before each by reading."""
    import torch

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        fill = torch.ones(64 << 20, device="cuda")
        for _ in range(2):
            call()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            call()
        times = []
        for _ in range(repeats + 1):
            fill.sum()
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record()
            graph.replay()
            after.record()
            times.append((before, after))
        stream.synchronize()
    return round(float(statistics.median(before.elapsed_time(after) for before, after in times[1:])) * 1e3, 1)


# --- the table -------------------------------------------------------------------------------------------------------


def decide(work: Path, wanted: set[str]) -> list[dict[str, Any]]:
    """A row for each config whose default was measured; its ``schedule`` is empty where the default stays."""
    measured: dict[str, list[tuple[Record, dict[str, Any]]]] = {}
    for artifact in compiled(work, wanted):
        path = work / f"{artifact.record.key}.measured"
        if path.exists():
            result = json.loads(path.read_text())
            if not result["error"]:
                measured.setdefault(_title(artifact.record), []).append((artifact.record, result))
    rows = []
    for found in measured.values():
        default = next((result for record, result in found if not record.schedule), None)
        if default is None:
            continue
        found = [(record, result) for record, result in found if result["gpu"] == default["gpu"]]
        ratios = [_ratio(result["us"], default["us"]) for _, result in found]
        best = min(range(len(found)), key=lambda i: ratios[i])
        record, result = found[best]
        rows.append(
            {
                "kernel": record.kernel,
                "arch": record.arch,
                "config": record.config,
                "schedule": record.schedule if ratios[best] < 1 - GAIN else {},
                "us": result["us"],
                "default_us": default["us"],
                "shapes": result["shapes"],
                "gpu": result["gpu"],
            }
        )
    return rows


def _ratio(times: Sequence[float], default: Sequence[float]) -> float:
    """Geometric mean of the times over those of the default."""
    return math.exp(statistics.fmean(math.log(a / b) for a, b in zip(times, default)))


def update(table: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Puts the rows that choose something in place of what the table has for the same configs; all others stay."""
    rows = list(rows)
    decided = {_named(row) for row in rows}
    kept = [row for row in schedules.read(table) if _named(row) not in decided]
    schedules.write([*kept, *(row for row in rows if row["schedule"])], table)
