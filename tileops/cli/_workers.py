"""Worker processes that compile, and the progress they make. A worker that dies or hangs costs the one kernel it had in hand.

concurrent.futures would not do: there, one dead worker (out of memory, a crash inside the compiler) breaks the whole pool.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import connection, get_context, resource_tracker
from typing import Any, TextIO

from tileops.config import KernelConfig

#: What one worker needs with TileLang, TVM and NVRTC in it, bytes (1.1 GiB seen).
WORKER_MEMORY = 1536 << 20

_CGROUP = "/sys/fs/cgroup"


@dataclass(frozen=True)
class Outcome:
    """What became of one kernel."""

    config: KernelConfig
    seconds: float  # wall time
    size: int = 0  # bytes of the cubin
    sha256: str = ""  # of the cubin
    source: str = "compiled"  # or the root that had it by then
    error: str = ""  # empty: it is there


Task = Callable[[KernelConfig], Outcome]


def jobs(asked: int | None) -> int:
    """Workers: as many as asked for, else as this machine has cores for; never more than its free memory holds."""
    return max(1, min(asked or _cores(), _fitting_memory()))


def _cores() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):  # no cgroup v2 here, or no limit ("max")
        with open(f"{_CGROUP}/cpu.max") as file:
            quota, period = file.read().split()
            cores = min(cores, -(-int(quota) // int(period)))
    return cores


def _fitting_memory() -> int:
    limits = []
    with contextlib.suppress(OSError, StopIteration):
        with open("/proc/meminfo") as file:
            limits.append(next(int(line.split()[1]) << 10 for line in file if line.startswith("MemAvailable:")))
    with contextlib.suppress(OSError, ValueError):
        with open(f"{_CGROUP}/memory.max") as limit, open(f"{_CGROUP}/memory.current") as used:
            limits.append(int(limit.read()) - int(used.read()))
    return max(1, min(limits, default=WORKER_MEMORY) // WORKER_MEMORY)


@dataclass
class _Worker:
    process: Any
    pipe: connection.Connection
    config: KernelConfig | None = None
    started: float = 0.0


def run(configs: Sequence[KernelConfig], task: Task, count: int, timeout: float) -> Generator[Outcome, None, None]:
    """Runs ``task`` on every config in ``count`` processes; yields outcomes as they come.

    Args:
        configs: in the order in which they are begun.
        task: a function at the top of a module.
        count: processes.
        timeout: seconds after which one kernel is given up and its worker ended.

    Closing the iterator (an interrupt, too) ends every worker at once.
    """
    waiting = deque(configs)
    workers: list[_Worker] = []
    try:
        while waiting or any(w.config for w in workers):
            while waiting and len(workers) < count:
                workers.append(_start(task))
            for worker in workers:
                if worker.config is None and waiting:
                    _hand(worker, waiting.popleft())
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
                    _end(worker)
                yield outcome
    finally:
        for worker in workers:
            _end(worker)


#: How errors begin that are the process's, not the kernel's.
_WORKER = "the worker process"


def _start(task: Task) -> _Worker:
    context = get_context("spawn")  # a fork would share the parent's threads and locks half way
    ours, theirs = context.Pipe()
    process = context.Process(target=_work, args=(theirs, task), daemon=True)
    # Ctrl-C reaches the whole process group: the parent alone decides what ends. Blocked, not ignored by the worker itself, which
    # would print a traceback for one that comes while it starts. (The tracker changes the mask when it starts, so it starts before.)
    resource_tracker.ensure_running()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    theirs.close()  # so that a dead worker is an end of file here
    return _Worker(process, ours)


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
    worker.process.kill()  # nothing to save: a kernel is published whole or not at all
    worker.process.join()


def _work(pipe: connection.Connection, task: Task) -> None:
    """The worker: does what it is handed until the pipe ends."""
    os.dup2(2, 1)  # whatever a compiler prints must not get into the one JSON object on stdout
    # Before TileLang is imported: what is built must not depend on the GPU of the machine that builds it.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            config = pipe.recv()
            start = time.perf_counter()
            try:
                outcome = task(config)
            except Exception as error:
                outcome = Outcome(config, time.perf_counter() - start, error=str(error) or type(error).__name__)
            pipe.send(outcome)


def store_kernel(config: KernelConfig) -> Outcome:
    """Task of ``warm``: compiles into the user cache what no other process has put there meanwhile."""
    from tileops import compiler, store

    start = time.perf_counter()
    with store.compile_lock(config.key):
        # Looked up under the lock: whoever held it may have published what we are about to compile.
        found = store.find(config, "auto", compiler.toolchain_name)
        if found.artifact is not None:
            record = found.artifact.record
            return Outcome(config, time.perf_counter() - start, record.cubin_size, record.cubin_sha256, source=str(found.root))
        artifact = compiler.build(config)
        published = store.publish(artifact)
    error = "" if published.stored else f"compiled, but it cannot be stored: {published.reason}"
    return Outcome(config, time.perf_counter() - start, artifact.record.cubin_size, artifact.record.cubin_sha256, error=error)


def compile_kernel(config: KernelConfig) -> Outcome:
    """Task of ``verify --rebuild``: compiles, stores nothing."""
    from tileops import compiler

    start = time.perf_counter()
    record = compiler.build(config).record
    return Outcome(config, time.perf_counter() - start, record.cubin_size, record.cubin_sha256)


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Within it, SIGTERM (a supervisor's end) is as clean as Ctrl-C."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class Progress:
    """How far it is, on stderr: one line that changes on a terminal, one every ten seconds elsewhere. Failures are told at once."""

    def __init__(self, total: int, doing: str, stream: TextIO | None = None) -> None:
        self._total, self._doing, self._stream = total, doing, sys.stderr if stream is None else stream
        self._done = self._failed = 0
        self._start = self._said = time.monotonic()
        self._terminal = self._stream.isatty()
        self._width = 0

    def __enter__(self) -> Progress:
        self._say()
        return self

    def __exit__(self, *error: object) -> None:
        if self._terminal and self._width:
            print(file=self._stream, flush=True)

    def step(self, outcome: Outcome) -> None:
        """Counts one outcome."""
        self._done += 1
        if outcome.error:
            self._failed += 1
            self._print(f"failed: {outcome.config}: {' '.join(outcome.error.split())}")
        if self._terminal or self._done == self._total or time.monotonic() - self._said > 10:
            self._say()

    def _say(self) -> None:
        self._said = time.monotonic()
        left = self._total - self._done
        text = f"{self._doing}: {self._done - self._failed} done, {self._failed} failed, {left} left"
        if self._done and left:
            text += f", about {(self._said - self._start) / self._done * left:.0f} s"
        if self._terminal:
            print("\r" + text.ljust(self._width), end="", file=self._stream, flush=True)
            self._width = len(text)
        else:
            print(text, file=self._stream, flush=True)

    def _print(self, text: str) -> None:
        if self._terminal and self._width:
            print("\r" + " " * self._width + "\r", end="", file=self._stream)
            self._width = 0
        print(text, file=self._stream, flush=True)
