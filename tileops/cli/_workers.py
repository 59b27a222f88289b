"""Compiling from the command line: what the workers of tileops.compiler.pool do, and the progress they make."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TextIO

from tileops.cli import _output
from tileops.config import Artifact, KernelConfig
from tileops.errors import TileOpsError

if TYPE_CHECKING:
    from tileops.compiler.pool import Outcome


def run(
    configs: Sequence[KernelConfig], make: Callable[[KernelConfig], Artifact], jobs: int | None, timeout: float, doing: str
) -> tuple[list[Outcome], bool]:
    """Runs ``make`` on every config in worker processes, with progress on stderr.

    Args:
        configs: in the order in which they are begun.
        make: ``store_kernel`` or ``compile_kernel``.
        jobs: processes; None: as many as cores and memory allow, which is never exceeded.
        timeout: seconds for one kernel.
        doing: what the progress calls it.

    Returns:
        The outcomes so far, and whether it was interrupted (Ctrl-C, SIGTERM): then the workers were ended at once.
    """
    from tileops.compiler import pool

    outcomes: list[Outcome] = []
    if not configs:
        return outcomes, False
    count = max(1, min(jobs or pool.default_jobs(), pool.fitting_memory(), len(configs)))
    try:
        with (
            _terminable(),
            _Progress(len(configs), f"{doing} with {_output.many(count, 'process', 'processes')}") as progress,
            contextlib.closing(pool.run(configs, count, make, timeout)) as running,
        ):
            for outcome in running:
                outcomes.append(outcome)
                progress.step(outcome)
    except KeyboardInterrupt:
        return outcomes, True
    return outcomes, False


def store_kernel(config: KernelConfig) -> Artifact:
    """Of ``warm``, in a worker: compiles into the user cache what no other process has put there meanwhile.

    Raises:
        CompileError; TileOpsError where the cache could not keep it: for the next process it is as missing as before.
    """
    from tileops import compiler, store

    _quiet()
    with store.compile_lock(config.key):
        # Looked up under the lock: whoever held it may have published what we are about to compile.
        found = store.find(config, "auto", compiler.toolchain_name)
        if found.artifact is not None:
            return found.artifact
        artifact = compiler.jit(config)
        published = store.publish(artifact)
    if not published.stored:
        raise TileOpsError(f"Compiled, but it cannot be stored: {published.reason}.", reason=published.reason)
    return artifact


def compile_kernel(config: KernelConfig) -> Artifact:
    """Of ``verify --rebuild``, in a worker: compiles, stores nothing. Raises CompileError."""
    from tileops import compiler

    _quiet()
    return compiler.jit(config)


def _quiet() -> None:
    os.dup2(2, 1)  # whatever a compiler prints must not get into the one JSON object on stdout
    warnings.simplefilter("ignore")  # what they would say is in the outcome, or was said by the parent


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Within it, SIGTERM (a supervisor's end) is as clean as Ctrl-C."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class _Progress:
    """How far it is, on stderr: one line that changes on a terminal, one every ten seconds elsewhere. Failures are told at once."""

    def __init__(self, total: int, doing: str, stream: TextIO | None = None) -> None:
        self._total, self._doing, self._stream = total, doing, sys.stderr if stream is None else stream
        self._done = self._failed = 0
        self._start = self._said = time.monotonic()
        self._terminal = self._stream.isatty()
        self._width = 0

    def __enter__(self) -> _Progress:
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
            self._clear()
            print(f"failed: {outcome.config}: {' '.join(outcome.error.split())}", file=self._stream, flush=True)
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

    def _clear(self) -> None:
        if self._terminal and self._width:
            print("\r" + " " * self._width + "\r", end="", file=self._stream)
            self._width = 0
