"""Builds a list of kernels into a packaged root, or checks that a rebuild gives the same bytes."""

from __future__ import annotations

import errno
import functools
import hashlib
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from filelock import FileLock, Timeout

from tileops import catalog, compiler, store
from tileops.compiler import pool
from tileops.config import Artifact, KernelConfig, Record, source_digest
from tileops.errors import CorruptArtifactError
from tileops.store.packaged import PackagedRoot


@dataclass
class Report:
    """What a run did. Lists are in the order in which it happened."""

    wanted: list[KernelConfig]
    present: list[KernelConfig] = field(default_factory=list)  # there before, and valid
    built: list[pool.Outcome] = field(default_factory=list)
    failed: list[pool.Outcome] = field(default_factory=list)
    differing: list[pool.Outcome] = field(default_factory=list)  # --check: other bytes than before
    missing: list[KernelConfig] = field(default_factory=list)  # --check: nothing to compare with
    size: dict[str, int] = field(default_factory=dict)  # bytes of cubins by arch, of what is wanted
    most_smem: dict[str, int] = field(default_factory=dict)  # by arch: bytes of shared memory of the kernel with most
    most_registers: dict[str, int] = field(default_factory=dict)
    interrupted: bool = False


def build(
    configs: Sequence[KernelConfig],
    out: Path,
    *,
    jobs: int,
    timeout: float = 600.0,
    complete: bool = False,
    program_of: str | None = None,
    stream: TextIO | None = None,
) -> Report:
    """Compiles what ``out`` lacks and publishes it there, also after a failure or an interrupt.

    Valid artifacts of the same config, sources and compiler are kept; a kernel that was finished before a kill counts.
    Artifacts made from older sources, which nothing can look up any more, are removed.

    Args:
        configs: the kernels.
        out: packaged root, made if need be.
        jobs: processes.
        timeout: seconds for one kernel.
        complete: ``configs`` is the whole matrix: whatever else lies in ``out`` is removed, and with no failure
            ``digests.json`` is written.
        program_of: the arch whose programs are compiled, for the configs' arch; None: their own.
        stream: where progress goes; None: nowhere.

    Raises:
        OSError: ``out`` cannot be written, or another build is writing it.
    """
    report = Report(list(configs))
    out.mkdir(parents=True, exist_ok=True)
    lock = FileLock(out / ".build.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise BlockingIOError(errno.EAGAIN, "another build is writing there; wait for it to end") from None
    try:
        _build(report, out, jobs, timeout, complete, program_of, stream)
    finally:
        lock.release()
    return report


def _build(report: Report, out: Path, jobs: int, timeout: float, complete: bool, program_of: str | None, stream: TextIO | None) -> None:
    configs = report.wanted
    writer = store.PackagedWriter(out)
    toolchain = compiler.toolchain_name()
    absent: list[KernelConfig] = []
    for config in configs:
        (report.present if writer.has(config, toolchain) else absent).append(config)
    _run(report, absent, functools.partial(_compile_into, str(out), program_of), jobs, timeout, stream)
    _publish(writer, report, complete)


def check(configs: Sequence[KernelConfig], out: Path, *, jobs: int, timeout: float = 600.0, stream: TextIO | None = None) -> Report:
    """Compiles every kernel again, writes nothing, and compares with the cubins in ``out``; where there is none, with
    ``digests.json``. A kernel in neither is ``missing``."""
    report = Report(list(configs))
    known = _digests(out)
    report.missing = [config for config in configs if config.key not in known]
    _run(report, [config for config in configs if config.key in known], compiler.build, jobs, timeout, stream)
    report.differing = [outcome for outcome in report.built if outcome.sha256 != known[outcome.config.key]]
    return report


def _digests(out: Path) -> dict[str, str]:
    try:
        listed = store.read_digests(out)
    except (OSError, CorruptArtifactError):
        listed = {}
    # The files' own bytes: a damaged cubin differs, whatever its manifest says.
    found = {path.stem: hashlib.sha256(path.read_bytes()).hexdigest() for path in out.glob("sm_*/*.cubin")}
    return {**listed, **found}


def _publish(writer: store.PackagedWriter, report: Report, complete: bool) -> None:
    writer.finish()
    root = PackagedRoot("packaged", str(writer.root), str(writer.root))
    records = {record.key: record for record in root.entries()}
    whole = complete and not report.failed and not report.interrupted
    wanted = {config.key for config in report.wanted}
    keep = {key for key, record in records.items() if key in wanted or (not whole and _is_current(record))}
    if keep != set(records):
        writer.finish(keep=keep)
    for config in report.wanted:
        if config.key in records:
            record = records[config.key]
            report.size[config.arch] = report.size.get(config.arch, 0) + record.cubin_size
            report.most_smem[config.arch] = max(report.most_smem.get(config.arch, 0), record.dynamic_smem + record.static_smem)
            report.most_registers[config.arch] = max(report.most_registers.get(config.arch, 0), record.registers)
    if whole:
        writer.write_digests()


def _is_current(record: Record) -> bool:
    return record.kernel in catalog.KERNELS and record.source == source_digest(record.kernel)


def _compile_into(out: str, program_of: str | None, config: KernelConfig) -> Artifact:
    """In a worker: compiles, and stages the artifact, flushed, before it is reported."""
    artifact = compiler.build(config, catalog.config(config.kernel, program_of, **config.fields) if program_of else None)
    store.PackagedWriter(out).add(artifact)
    return artifact


def _run(
    report: Report,
    configs: Sequence[KernelConfig],
    make: Callable[[KernelConfig], Artifact],
    jobs: int,
    timeout: float,
    stream: TextIO | None,
) -> None:
    if not configs:
        return
    try:
        with Progress(len(configs), stream) as progress, closing(pool.run(configs, min(jobs, len(configs)), make, timeout)) as outcomes:
            for outcome in outcomes:
                (report.failed if outcome.error else report.built).append(outcome)
                progress.step(outcome)
    except KeyboardInterrupt:
        report.interrupted = True


class Progress:
    """A bar on a terminal; elsewhere a line now and then. Failures are told as they happen."""

    def __init__(self, total: int, stream: TextIO | None) -> None:
        self._total, self._stream = total, stream
        self._done = self._failed = 0
        self._start = self._said = time.monotonic()
        self._bar: Any = None

    def __enter__(self) -> Progress:
        if self._stream is not None and self._stream.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=self._total, unit="kernel", file=self._stream, smoothing=0.05, dynamic_ncols=True, postfix={"failed": 0})
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def step(self, outcome: pool.Outcome) -> None:
        self._done += 1
        if outcome.error:
            self._failed += 1
            self._write(f"FAILED {outcome.config}\n       {outcome.error}")
        if self._bar is not None:
            self._bar.set_postfix(failed=self._failed, refresh=False)
            self._bar.update()
        elif time.monotonic() - self._said > 15 or self._done == self._total:
            self._said = time.monotonic()
            left = (self._said - self._start) / self._done * (self._total - self._done)
            self._write(f"{self._done}/{self._total} kernels, {self._failed} failed, about {left:.0f} s left")

    def _write(self, text: str) -> None:
        if self._bar is not None:
            self._bar.write(text, file=self._stream)
        elif self._stream is not None:
            print(text, file=self._stream, flush=True)


def summary(report: Report) -> str:
    """A table by arch: kernels wanted, built now, there before, failed; bytes; seconds of compilation; the most shared memory (bytes a
    CTA) and registers (a thread) of one kernel."""
    rows = []
    for arch in dict.fromkeys(config.arch for config in report.wanted):

        def count(found: Iterable[KernelConfig], arch: str = arch) -> int:
            return sum(config.arch == arch for config in found)

        built = [o for o in report.built if o.config.arch == arch]
        rows.append(
            (
                arch,
                count(report.wanted),
                len(built),
                count(report.present),
                count(o.config for o in report.failed),
                report.size.get(arch, sum(o.size for o in built)),
                sum(o.seconds for o in built),
                report.most_smem.get(arch, 0),
                report.most_registers.get(arch, 0),
            )
        )
    lines = [f"{'arch':9} {'kernels':>8} {'built':>8} {'present':>8} {'failed':>8} {'bytes':>12} {'compile s':>10} {'smem':>8} {'regs':>5}"]
    lines += ["{:9} {:8} {:8} {:8} {:8} {:12} {:10.1f} {:8} {:5}".format(*row) for row in rows]
    if len(rows) > 1:
        columns = list(zip(*(row[1:] for row in rows)))
        sums = [*map(sum, columns[:6]), *map(max, columns[6:])]
        lines.append("{:9} {:8} {:8} {:8} {:8} {:12} {:10.1f} {:8} {:5}".format("all", *sums))
    return "\n".join(lines)
