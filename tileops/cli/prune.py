"""Removes kernels from the user cache, longest unused first, and what killed processes left there.

Safe beside readers and writers. A kernel that is removed is compiled, warmed or imported again when it is needed.
"""

from __future__ import annotations

import argparse

from tileops.cli import _arguments, _exit, _output

HELP = "make the user cache smaller"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--max-size", metavar="SIZE", type=_arguments.size, help="what may stay: 500M, 2G, 1.5GiB; 0 empties the cache")
    parser.add_argument("--older-than", metavar="AGE", type=_arguments.age, help="remove what was not used for this long: 30d, 12h, 90m")


def run(args: argparse.Namespace) -> int:
    from tileops import store

    if args.max_size is None and args.older_than is None:
        raise _exit.UsageError("Say what may stay: --max-size SIZE, --older-than AGE, or both.")
    done = store.prune(max_bytes=args.max_size, older_than_seconds=args.older_than)
    status = _exit.FINE if done.reason is None else _exit.MISSING
    path = store.location().path
    text = [f"{path or 'user cache'}: cannot be pruned: {done.reason}."]
    if done.reason is None:
        text = [
            f"{path}",
            f"  removed  {_output.many(done.removed, 'kernel')}, {_output.size(done.removed_bytes)}",
            f"  kept     {_output.many(done.kept, 'kernel')}, {_output.size(done.kept_bytes)}",
        ]
        if done.swept:
            text.append(f"  swept    {_output.many(done.swept, 'leftover')} of killed processes")
    _output.emit(args, {"status": status, "path": path, **done._asdict()}, text)
    return status
