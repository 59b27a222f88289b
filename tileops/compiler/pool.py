"""Worker processes that compile, for the build step and ``tileops warm``. One that dies or hangs costs the kernel in its hand.

concurrent.futures would not do: there, one dead worker (out of memory, a crash inside the compiler) breaks the whole pool.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from multiprocessing import connection, get_context
from typing import Any

from tileops.compiler.shared import lowered_like
from tileops.config import Artifact, KernelConfig

#: What one worker needs with TileLang, TVM and NVRTC in it, bytes (1.1 GiB seen).
WORKER_MEMORY = 1536 << 20


@dataclass(frozen=True)
class Outcome:
    """What became of one kernel."""

    config: KernelConfig
    seconds: float  # wall time of the compilation
    size: int = 0  # bytes of the cubin
    sha256: str = ""  # of the cubin
    error: str = ""  # empty: it was compiled


def default_jobs() -> int:
    """Workers that this machine has cores and memory for."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, fitting_memory()))


def fitting_memory() -> int:
    """Workers that the free memory holds, at least 1."""
    limits = [_available()]
    with contextlib.suppress(OSError, ValueError):  # no cgroup v2 here, or no limit ("max")
        with open("/sys/fs/cgroup/memory.max") as limit, open("/sys/fs/cgroup/memory.current") as used:
            limits.append(int(limit.read()) - int(used.read()))
    return max(1, min(limits) // WORKER_MEMORY)


def _available() -> int:
    try:
        with open("/proc/meminfo") as file:
            return next(int(line.split()[1]) << 10 for line in file if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return WORKER_MEMORY


@dataclass
class _Worker:
    process: Any
    pipe: connection.Connection
    group: deque[KernelConfig]  # what it is handed next
    config: KernelConfig | None = None
    started: float = 0.0


def run(
    configs: Sequence[KernelConfig], jobs: int, make: Callable[[KernelConfig], Artifact], timeout: float
) -> Generator[Outcome, None, None]:
    """Makes every config's artifact; yields outcomes as they come.

    Args:
        configs: what to make, in the order in which it is begun, but that one worker makes all those that share a source.
        jobs: processes.
        make: called in a worker, so it must be picklable; it compiles, and stores what it made before it returns.
        timeout: seconds after which one kernel is given up and its worker ended.

    Closing the iterator (an interrupt, too) ends every worker at once; what was reported is on disk.
    """
    groups: dict[KernelConfig, deque[KernelConfig]] = {}
    for config in configs:
        groups.setdefault(lowered_like(config), deque()).append(config)
    waiting = deque(groups.values())
    workers: list[_Worker] = []
    try:
        while waiting or any(w.config or w.group for w in workers):
            while waiting and len(workers) < jobs:
                workers.append(_start(make))
            for worker in workers:
                if worker.config is None and not worker.group and waiting:
                    worker.group = waiting.popleft()
                if worker.config is None and worker.group:
                    _hand(worker, worker.group.popleft())
            ready = set(connection.wait([w.pipe for w in workers if w.config], timeout=1.0))
            for worker in list(workers):
                if worker.config is None:
                    continue
                outcome = _receive(worker) if worker.pipe in ready else _expired(worker, timeout)
                if outcome is None:
                    continue
                worker.config = None
                if not worker.process.is_alive() or outcome.error.startswith(_WORKER):
                    workers.remove(worker)
                    if worker.group:
                        waiting.appendleft(worker.group)
                    _end(worker)
                yield outcome
    finally:
        for worker in workers:
            _end(worker)


#: How errors begin that are the process's, not the kernel's.
_WORKER = "the worker process"


def _start(make: Callable[[KernelConfig], Artifact]) -> _Worker:
    context = get_context("spawn")  # a fork would share TileLang's and torch's threads and locks half way
    ours, theirs = context.Pipe()
    process = context.Process(target=_work, args=(theirs, make), daemon=True)
    process.start()
    theirs.close()  # so that a dead worker is an end of file here
    return _Worker(process, ours, deque())


def _hand(worker: _Worker, config: KernelConfig) -> None:
    worker.config, worker.started = config, time.monotonic()
    with contextlib.suppress(OSError):  # it died idle: the next wait sees the end of file
        worker.pipe.send(config)


def _receive(worker: _Worker) -> Outcome:
    assert worker.config is not None
    try:
        outcome: Outcome = worker.pipe.recv()
        return outcome
    except (EOFError, OSError):
        worker.process.join()
        code = worker.process.exitcode
        how = f"was killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"ended with status {code}"
        hint = " (out of memory? fewer --jobs)" if code == -signal.SIGKILL else ""
        return Outcome(worker.config, time.monotonic() - worker.started, error=f"{_WORKER} {how}{hint}")


def _expired(worker: _Worker, timeout: float) -> Outcome | None:
    assert worker.config is not None
    seconds = time.monotonic() - worker.started
    return Outcome(worker.config, seconds, error=f"{_WORKER} was ended after {seconds:.0f} s (--timeout)") if seconds > timeout else None


def _end(worker: _Worker) -> None:
    worker.pipe.close()
    worker.process.kill()  # nothing to save: a kernel is staged whole or not at all
    worker.process.join()


def _work(pipe: connection.Connection, make: Callable[[KernelConfig], Artifact]) -> None:
    """The worker: makes what it is handed until the pipe ends."""
    # Ctrl-C reaches the whole process group; the parent decides what ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Before TileLang is imported: what is built must not depend on the GPU of the machine that builds it.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            config = pipe.recv()
            start = time.perf_counter()
            try:
                record = make(config).record
                outcome = Outcome(config, time.perf_counter() - start, record.cubin_size, record.cubin_sha256)
            except Exception as error:
                outcome = Outcome(config, time.perf_counter() - start, error=str(error) or type(error).__name__)
            pipe.send(outcome)
