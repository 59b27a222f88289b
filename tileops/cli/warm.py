"""Makes sure that every kernel of a model is there, before serving: in a packaged or site root, or in the user cache.

What is in no root is compiled, in parallel, into the user cache. A kernel that fails does not stop the others.
Without --arch, for the GPUs of this machine (a kernel of another arch that runs on them will do).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tileops.cli import _arguments, _exit, _output

if TYPE_CHECKING:
    from tileops.cli._wanted import Looked, Wanted
    from tileops.compiler.pool import Outcome

HELP = "make sure that every kernel of a model is there, compiling what is missing"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _arguments.add_model(parser)
    _arguments.add_arch(parser, "those of the GPUs present")
    _arguments.add_only(parser)
    parser.add_argument("--check", action="store_true", help="report only: compile nothing, exit status 1 if a kernel is missing")
    _arguments.add_jobs(parser)


def run(args: argparse.Namespace) -> int:
    from tileops import store
    from tileops.cli import _wanted, _workers

    start = time.perf_counter()
    models = _arguments.models_of(args)
    if not models:
        raise _exit.UsageError("Say which model: --model NAME, --config FILE, or --chunk-size --head-dim --d-state.")
    for model in models:
        if model.unconfirmed:
            _output.note(f"{model.name}: {', '.join(model.unconfirmed)} not confirmed; better warm it from its own config.json (--config)")
    wanted = _chosen(_wanted.of_models(args), args.only)
    policy = store.current_policy()
    looked = [_wanted.look(one, policy) for one in wanted]
    missing = [one for one in looked if one.lookup.artifact is None]
    outcomes: list[Outcome] = []
    reason, interrupted = "", False
    if missing and not args.check:
        reason = _forbidden(policy)
        if not reason:
            configs = [one.wanted.config for one in missing]
            outcomes, interrupted = _workers.run(configs, _workers.store_kernel, args.jobs, args.timeout, "compiling")
            if interrupted:
                store.prune()  # sweeps what the ended workers were writing; removes no entry
    report = _Report(args, policy, looked, outcomes, reason, interrupted, time.perf_counter() - start)
    _output.emit(args, report.data(), report.lines([model.name for model in models]))
    return report.status


def _chosen(wanted: Sequence[Wanted], patterns: Sequence[str]) -> list[Wanted]:
    keys = {config.key for config in _arguments.select([one.config for one in wanted], patterns)}
    return [one for one in wanted if one.config.key in keys]


def _forbidden(policy: str) -> str:
    """Why nothing is compiled, although something is missing; empty where it can be."""
    from tileops import compiler
    from tileops.cli import _cache

    if policy == "packaged":
        return "the policy is 'packaged', under which the user cache is not used: install artifacts, or set TILEOPS_POLICY=cached"
    found, reason = compiler.toolchain.find()
    if found is None:
        return f"nothing can be compiled here: {reason}; or import a bundle (tileops import)"
    unwritable = _cache.condition().unwritable
    return f"what is compiled could not be stored: {unwritable}; set TILEOPS_CACHE_DIR to a folder of your own" if unwritable else ""


class _Report:
    """The result of one run, as JSON and for people."""

    def __init__(
        self,
        args: argparse.Namespace,
        policy: str,
        looked: Sequence[Looked],
        outcomes: Sequence[Outcome],
        reason: str,
        interrupted: bool,
        seconds: float,
    ) -> None:
        self.args, self.policy, self.looked, self.seconds = args, policy, looked, seconds
        self.reason, self.interrupted = reason, interrupted
        self.refused = [one for one in looked if one.refused]
        self.failed = [outcome for outcome in outcomes if outcome.error]
        self.made = [outcome for outcome in outcomes if not outcome.error]
        done = {outcome.config.key for outcome in self.made}
        absent = [one for one in looked if one.lookup.artifact is None]
        self.missing = [one for one in absent if one.wanted.config.key not in done]
        #: where from -> (kernels, bytes)
        self.by_root: dict[str, tuple[int, int]] = {}
        for one in looked:
            if one.here and one.lookup.artifact is not None:
                self._count(str(one.lookup.root), one.lookup.artifact.record.cubin_size)
        for outcome in self.made:
            self._count("compiled", outcome.size)
        found = [_exit.INCOMPATIBLE if self.refused else _exit.FINE, _exit.MISSING if self.missing else _exit.FINE]
        self.status = _exit.INTERRUPTED if interrupted else _exit.worst(found)

    def _count(self, root: str, size: int) -> None:
        count, bytes_ = self.by_root.get(root, (0, 0))
        self.by_root[root] = (count + 1, bytes_ + size)

    @property
    def here(self) -> int:
        return sum(count for count, _ in self.by_root.values())

    def data(self) -> dict[str, Any]:
        from tileops.cli import _wanted

        return {
            "status": self.status,
            "policy": self.policy,
            "kernels": len(self.looked),
            "here": self.here,
            "by_root": {root: {"kernels": count, "bytes": size} for root, (count, size) in self.by_root.items() if root != "compiled"},
            "compiled": [{**_output.described(o.config), "bytes": o.size, "seconds": round(o.seconds, 3)} for o in self.made],
            "failed": [{**_output.described(o.config), "error": o.error} for o in self.failed],
            "missing": [_output.described(one.wanted.config) for one in self.missing],
            "refused": [{**_output.described(one.lookup.config), "reason": one.refused} for one in self.refused],
            "not_compiled_because": self.reason or None,
            "commands": _wanted.fixes(self.args, self.missing) if self.args.check else [],
            "bytes": sum(size for _, size in self.by_root.values()),
            "seconds": round(self.seconds, 3),
            "interrupted": self.interrupted,
        }

    def lines(self, models: Sequence[str]) -> Iterator[str]:
        from tileops.cli import _wanted

        archs = dict.fromkeys(one.wanted.config.arch for one in self.looked)
        yield f"{', '.join(models)} on {', '.join(archs)}: {_output.many(len(self.looked), 'kernel')}"
        rows: list[tuple[object, ...]] = [(root, count, _output.size(size)) for root, (count, size) in self.by_root.items()]
        if self.failed:
            rows.append(("failed", len(self.failed), ""))
        untried = len(self.missing) - len(self.failed)
        if untried:
            rows.append(("missing", untried, ""))
        if self.refused:
            rows.append(("refused", len(self.refused), ""))
        yield from _output.table(rows, right=(1, 2))
        tried = {outcome.config.key for outcome in self.failed}
        for outcome in self.failed:
            yield f"failed   {outcome.config}"
            yield f"         {' '.join(outcome.error.split())}"
        for one in self.missing:
            if one.wanted.config.key not in tried:
                yield f"missing  {one.wanted.config}"
        for refusal in dict.fromkeys(one.refused for one in self.refused):
            yield f"refused  {refusal}"
        yield f"{self.here} of {len(self.looked)} are there; {self.seconds:.1f} s."
        if self.interrupted:
            yield "Interrupted; what was finished is kept, and the same command goes on from there."
        elif self.reason:
            yield f"Not compiled: {self.reason}."
        elif self.missing and self.args.check:
            for command in _wanted.fixes(self.args, self.missing):
                yield f"Run: {command}"
