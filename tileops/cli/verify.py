"""Checks every root against its manifest: lengths, digests, records, the arch in each cubin.

With --rebuild, compiles each kernel again that was made from these sources by the installed compiler, and compares bytes.
Exit status by the worst fault: 3 corrupt (or other bytes after a rebuild), 4 of another arch or schema, 1 missing.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tileops.cli import _arguments, _exit, _output
from tileops.errors import CompileError

if TYPE_CHECKING:
    from tileops.config import KernelConfig
    from tileops.store import Fault, Root

HELP = "check every kernel on disk; --rebuild compiles again and compares"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", nargs="*", metavar="PATH", help="bundles or folders with artifacts, instead of the roots in use")
    _arguments.add_root(parser)
    parser.add_argument("--rebuild", action="store_true", help="compile again and compare bytes; stores nothing")
    _arguments.add_arch(parser, "every arch; for --rebuild")
    _arguments.add_only(parser)
    _arguments.add_jobs(parser)


def run(args: argparse.Namespace) -> int:
    roots = _roots(args)
    faults = {root.name: list(root.verify()) for root in roots}
    statuses = [_exit.of_fault(fault.kind) for found in faults.values() for fault in found]
    rebuilt: dict[str, Any] | None = None
    if args.rebuild:
        rebuilt = _rebuild(args, roots)
        statuses += [_exit.CORRUPT] * len(rebuilt["differing"]) + [_exit.MISSING] * len(rebuilt["failed"])
    status = _exit.INTERRUPTED if rebuilt is not None and rebuilt["interrupted"] else _exit.worst(statuses)
    shown = [_shown(root, faults[root.name]) for root in roots]
    _output.emit(args, {"status": status, "roots": shown, "rebuilt": rebuilt}, _lines(shown, rebuilt))
    return status


def _roots(args: argparse.Namespace) -> list[Root]:
    from tileops import store
    from tileops.store.discovery import site_root

    roots = [site_root(path) for path in args.path] if args.path else store.roots()
    return _arguments.matching_roots(roots, args.root)


def _shown(root: Root, faults: Sequence[Fault]) -> dict[str, Any]:
    kernels = sum(1 for _ in root.entries())
    listed = [{**fault._asdict(), "status": _exit.of_fault(fault.kind), "remedy": _exit.remedy(root.kind, fault.kind)} for fault in faults]
    return {"kind": root.kind, "name": root.name, "path": root.path, "kernels": kernels, "faults": listed}


def _rebuild(args: argparse.Namespace, roots: Sequence[Root]) -> dict[str, Any]:
    """Compiles what can be compared. Raises CompileError where there is no compiler."""
    from tileops import compiler, store
    from tileops.cli import _workers
    from tileops.store.bundles import is_current

    found, reason = compiler.toolchain.find()
    if found is None:
        raise CompileError(f"Nothing can be rebuilt here: {reason}.", kernel=None, arch=None, log=reason, folder=None)
    digests: dict[str, dict[str, str]] = {}  # key -> root name -> sha256: the same kernel may lie in several roots
    configs: dict[str, KernelConfig] = {}
    skipped = 0
    for root in roots:
        for record in root.entries():
            if args.arch is not None and record.arch not in args.arch:
                continue
            if store.compiler_of(record) != found.name or not is_current(record):
                skipped += 1
                continue
            configs[record.key] = record.config_object()
            digests.setdefault(record.key, {})[root.name] = record.cubin_sha256
    chosen = _arguments.select(list(configs.values()), args.only)
    outcomes, interrupted = _workers.run(chosen, _workers.compile_kernel, args.jobs, args.timeout, "rebuilding")
    differing = [
        {**_output.described(o.config), "root": root, "has": has, "rebuilt": o.sha256}
        for o in outcomes
        if not o.error
        for root, has in digests[o.config.key].items()
        if has != o.sha256
    ]
    return {
        "compiler": found.name,
        "kernels": sum(not o.error for o in outcomes),
        "skipped": skipped,
        "differing": differing,
        "failed": [{**_output.described(o.config), "error": o.error} for o in outcomes if o.error],
        "interrupted": interrupted,
    }


def _lines(roots: Sequence[dict[str, Any]], rebuilt: dict[str, Any] | None) -> Iterator[str]:
    for root in roots:
        faults = root["faults"]
        what = f"{_output.many(len(faults), 'fault')}, " if faults else ""
        yield f"{root['name']}: {what}{_output.many(root['kernels'], 'kernel')}{'' if faults else ', all well' if root['kernels'] else ''}"
        for fault in faults:
            yield f"  {fault['kind']:8} {fault['path']}"
            yield f"           {fault['reason']}"
        for text in dict.fromkeys(fault["remedy"] for fault in faults):
            yield f"  remedy: {text}"
    if rebuilt is None:
        return
    skipped = f"; {rebuilt['skipped']} skipped (other sources or another compiler)" if rebuilt["skipped"] else ""
    same = rebuilt["kernels"] - len({each["key"] for each in rebuilt["differing"]})
    yield f"rebuilt {_output.many(rebuilt['kernels'], 'kernel')} with {rebuilt['compiler']}: {same} the same{skipped}"
    for each in rebuilt["differing"]:
        yield f"  differs  {each['kernel']} {each['arch']} {_output.fields(each['config'])} in {each['root']}"
        yield f"           {each['has']} on disk, {each['rebuilt']} rebuilt"
    for each in rebuilt["failed"]:
        yield f"  failed   {each['kernel']} {each['arch']} {_output.fields(each['config'])}"
        yield f"           {' '.join(each['error'].split())}"
    if rebuilt["interrupted"]:
        yield "Interrupted."
