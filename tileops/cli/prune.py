"""Shrinks the user cache, longest unused first. Safe beside processes that read and write it."""

from __future__ import annotations

import argparse
import re

from tileops.cli import MISSING, OK, Usage, _output

HELP = "shrink the user cache"

_SIZES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}
_TIMES = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--max-size", metavar="SIZE", help="keep at most this much: 500M, 2G")
    parser.add_argument("--older-than", metavar="AGE", help="remove what was not used for this long: 12h, 30d, 4w")


def run(args: argparse.Namespace) -> int:
    from tileops import store

    if args.max_size is None and args.older_than is None:
        raise Usage("give --max-size, --older-than or both")
    pruned = store.prune(
        None if args.max_size is None else _read("--max-size", args.max_size, _SIZES, "500M or 2G", "b"),
        None if args.older_than is None else _read("--older-than", args.older_than, _TIMES, "12h or 30d", ""),
    )
    text = (
        f"removed {pruned.removed} kernels ({_output.size(pruned.removed_bytes)}), kept {pruned.kept} ({_output.size(pruned.kept_bytes)})"
        + (f", swept {pruned.swept} folders of dead writers" if pruned.swept else "")
        + (f"\nthe cache cannot be pruned: {pruned.reason}" if pruned.reason else "")
    )
    _output.emit(args.json, pruned._asdict(), text)
    return MISSING if pruned.reason else OK


def _read(option: str, text: str, units: dict[str, int], example: str, suffix: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]?)" + (f"{suffix}?" if suffix else ""), text.strip().lower())
    if match is None or match[2] not in units:
        raise Usage(f"{option} {text}: expected a number with a unit, like {example}")
    return int(float(match[1]) * units[match[2]])
