"""Checks every artifact of every root: manifest, record, length, digest, and the arch in the cubin's own header.

With --rebuild, kernels of this package's sources and this machine's compiler are compiled again and compared.
Status: 0 all good, 1 a file is missing, 3 something is corrupt, 4 a cubin is for another GPU than its record says.
"""

from __future__ import annotations

import argparse
import contextlib
from typing import TYPE_CHECKING, Any

from tileops.cli import CORRUPT, INCOMPATIBLE, MISSING, OK, Usage, _output

if TYPE_CHECKING:
    from tileops.config import Record

HELP = "check every artifact of every root"

_STATUS = {"missing": MISSING, "arch": INCOMPATIBLE, "corrupt": CORRUPT, "schema": CORRUPT, "unusable": CORRUPT, "differs": CORRUPT}

#: Which status wins where several kinds of fault are found: the most alarming.
_RANK = (CORRUPT, INCOMPATIBLE, MISSING, OK)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--root", metavar="TEXT", help="only roots whose name contains this")
    parser.add_argument("--rebuild", action="store_true", help="compile again and compare bytes (needs the compiler)")
    parser.add_argument("--jobs", metavar="N", type=int, help="processes of --rebuild")


def run(args: argparse.Namespace) -> int:
    from tileops import store

    faults: list[dict[str, Any]] = []
    counted: list[dict[str, Any]] = []
    lines = []
    for root in store.roots():
        if args.root is not None and args.root not in root.name:
            continue
        found = [fault._asdict() for fault in root.verify()]
        records = list(root.entries())
        if args.rebuild and records:
            differing, compared = _rebuild(records, args.jobs)
            found += [{"root": root.name, "kind": "differs", "key": key, "path": root.path, "reason": reason} for key, reason in differing]
            lines.append(f"{root.name}: {compared} compiled again, {len(differing)} differ")
        counted.append({"root": root.name, "artifacts": len(records), "faults": len(found)})
        lines.append(f"{root.name}: {len(records)} artifacts, {len(found)} faults")
        lines += [f"  {fault['kind'].upper():9} {fault['path']}: {fault['reason']}" for fault in found]
        faults += found
    _output.emit(args.json, {"roots": counted, "faults": faults}, "\n".join(lines))
    statuses = {_STATUS.get(fault["kind"], CORRUPT) for fault in faults} | {OK}
    return next(status for status in _RANK if status in statuses)


def _rebuild(records: list[Record], jobs: int | None) -> tuple[list[tuple[str, str]], int]:
    """(key, reason) of every record that compiles to other bytes or not at all, and how many were compared."""
    from tileops import compiler
    from tileops.compiler import pool
    from tileops.store.bundles import is_current
    from tileops.store.cache import compiler_of

    found, reason = compiler.toolchain.find()
    if found is None:
        raise Usage(f"--rebuild cannot compile: {reason}")
    known = {r.key: r for r in records if is_current(r) and compiler_of(r) == found.name}
    configs = [r.config_object() for r in known.values()]
    differing = []
    if configs:
        with contextlib.closing(pool.run(configs, min(jobs or pool.default_jobs(), len(configs)), compiler.build, 600.0)) as outcomes:
            for outcome in outcomes:
                key = outcome.config.key
                if outcome.error:
                    differing.append((key, f"{outcome.config}: {outcome.error}"))
                elif outcome.sha256 != known[key].cubin_sha256:
                    differing.append((key, f"{outcome.config} compiles to {outcome.sha256}, stored is {known[key].cubin_sha256}"))
    return differing, len(configs)
