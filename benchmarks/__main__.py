"""``python -m benchmarks run | compare | table | portable``: see docs/benchmarks.md."""

from __future__ import annotations

import argparse
import json
import math
import signal
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import compare, runner, shapes, table

RESULTS = Path(__file__).parent / "results"


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m benchmarks", description="Speed and accuracy beside public implementations.")
    verbs = p.add_subparsers(dest="verb", required=True)
    run = verbs.add_parser("run", help="measure on this machine's GPU; needs the packaged kernels")
    run.add_argument("--suite", choices=shapes.SUITES, action="append", help="may be repeated (default: all)")
    run.add_argument("--peers", metavar="DIR", type=Path, help=f"folder with {', '.join(runner.PEERS)} (absent ones are left out)")
    run.add_argument("--only", metavar="TEXT", action="append", default=[], help="rows whose name contains it; may be repeated")
    run.add_argument("--jobs", metavar="N", type=int, help="processes that compile the peers' kernels (default: the CPUs)")
    run.add_argument("--out", metavar="FILE", type=Path, help="default: benchmarks/results/<date>-h200.json")
    run.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: tiny rows, to try the harness; its times mean nothing")
    two = verbs.add_parser("compare", help="what changed between two results; status 1 if anything became worse")
    two.add_argument("before", metavar="A", type=Path)
    two.add_argument("after", metavar="B", type=Path)
    two.add_argument("--threshold", metavar="F", type=_ratio, default=1.05, help="a ratio beyond it is a change (default: %(default)s)")
    show = verbs.add_parser("table", help="a result as Markdown, for README and docs")
    show.add_argument("file", metavar="FILE", type=Path)
    show.add_argument("--suite", choices=shapes.SUITES, action="append", help="may be repeated (default: all)")
    other = verbs.add_parser("portable", help="the programs that other archs run, on this GPU")
    other.add_argument("root", nargs="+", metavar="NAME=ROOT", help="made by build_kernels --program-of; NAME= alone: this GPU's own")
    other.add_argument("--out", metavar="FILE", type=Path, required=True)
    return p


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        return _run(args)
    except (OSError, Unusable) as error:
        print(f"benchmarks: {error}.", file=sys.stderr)
        return 2


def _run(args: argparse.Namespace) -> int:
    if args.verb == "run":
        out = args.out or RESULTS / f"{time.strftime('%Y-%m-%d')}-{'h200' if args.device != 'cpu' else 'cpu'}.json"
        if args.out is None and out.exists():
            print(f"{out} is there already: name another with --out.", file=sys.stderr)
            return 2
        wanted = [
            spec for suite in args.suite or shapes.SUITES for spec in runner.rows_of(suite, args.device) if runner.chosen(spec, args.only)
        ]
        if not wanted:
            raise Unusable(f"--only {' '.join(args.only)} selects no row of {', '.join(args.suite or shapes.SUITES)}")
        if args.device == "cuda":
            _need_gpu()
        data = runner.run(args.suite or shapes.SUITES, args.peers, out, device=args.device, jobs=args.jobs, only=args.only)
        print(f"{len(data['rows'])} rows in {data['seconds']['all']:.0f} s, {out}")
        return 0
    if args.verb == "compare":
        lines, worse = compare.compare(_load(args.before), _load(args.after), args.threshold)
        print("\n".join(lines))
        return 1 if worse else 0
    if args.verb == "portable":
        from benchmarks import portable

        _need_gpu()
        named = (root.partition("=") for root in args.root)
        data = portable.run({name: Path(root) if root else None for name, _, root in named})
        args.out.write_text(json.dumps(data, indent=1) + "\n")
        print(portable.table(data))
        return 0
    data = _load(args.file)
    suites = args.suite or shapes.SUITES
    if not any(row["suite"] in suites for row in data["rows"]):
        raise Unusable(f"{args.file} has no row of {', '.join(suites)}")
    print(table.markdown(data, suites))
    return 0


def _need_gpu() -> None:
    import torch

    if not torch.cuda.is_available():
        raise Unusable("a GPU is needed, and torch finds none")


def _ratio(text: str) -> float:
    value = float(text)
    if not 1 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number from 1 on, got {text}")
    return value


class Unusable(Exception):
    """What was asked for cannot be had from these arguments, files or this machine."""


def _load(path: Path) -> dict[str, Any]:
    try:
        data: dict[str, Any] = json.loads(path.read_text())
    except ValueError as error:
        raise Unusable(f"{path} is not JSON: {error}") from None
    whole = isinstance(data, dict) and {"date", "machine", "rows"} <= set(data) and isinstance(data["rows"], list)
    if not whole or not all(isinstance(row, dict) for row in data["rows"]):
        raise Unusable(f"{path} is not a result of `python -m benchmarks run`")
    return data


if __name__ == "__main__":
    if sys.argv[1:2] in (["table"], ["compare"]) and hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends these quietly; `run` writes to processes that may be gone
    sys.exit(main())
