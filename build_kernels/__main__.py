"""``python -m build_kernels``: compiles the matrix into artifacts/. Exit status: 0 done, 1 something failed or is missing,
2 usage, 3 --check found other bytes, 130 interrupted (what was finished is kept)."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from pathlib import Path

from build_kernels import building, matrix
from tileops import catalog, compiler
from tileops.compiler import pool

ARTIFACTS = Path(__file__).resolve().parents[1] / "artifacts"


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m build_kernels",
        description="Compiles kernels into artifacts/. Needs TileLang (pip install 'tileops[jit]'), no GPU.",
        epilog="python -m build_kernels tune --help: finds schedules by measurement.",
    )
    p.add_argument("--arch", metavar="A,B", help=f"instead of the matrix's archs; of {', '.join(catalog.ARCHS)}")
    p.add_argument("--model", metavar="NAME", action="append", default=[], help="a model preset instead of the matrix; may be repeated")
    p.add_argument(
        "--only",
        metavar="PATTERN",
        action="append",
        default=[],
        help='words that must all match: a kernel\'s name, field=value ("chunk_* Q=256"); may be repeated',
    )
    p.add_argument("--jobs", metavar="N", type=_positive, help="processes (default: as many as cores and memory allow)")
    p.add_argument("--matrix", metavar="FILE", type=Path, default=matrix.DEFAULT, help="the matrix (default: build_kernels/matrix.toml)")
    p.add_argument("--out", metavar="DIR", type=Path, default=ARTIFACTS, help="where the kernels go (default: artifacts/)")
    p.add_argument(
        "--program-of",
        metavar="ARCH",
        choices=catalog.ARCHS,
        help="compile for --arch what ARCH runs, into an --out of its own: a GPU at hand can then try another arch's programs",
    )
    p.add_argument("--check", action="store_true", help="compile again, write nothing, compare bytes with what is in --out")
    p.add_argument("--list", action="store_true", help="print the kernels that would be built, compile nothing")
    p.add_argument("--timeout", metavar="SECONDS", type=_positive, default=600, help="for one kernel (default: 600)")
    p.add_argument("--quiet", action="store_true", help="no progress, only the summary")
    return p


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["tune"]:
        from build_kernels import tune

        return tune.main(argv[1:])
    args = parser().parse_args(argv)
    try:
        archs = args.arch.split(",") if args.arch is not None else None
        configs = matrix.select(matrix.load(args.matrix, archs, args.model), args.only)
        if args.program_of:
            if args.out == ARTIFACTS or args.check or archs is None:
                raise matrix.MatrixError("--program-of needs --arch and an --out other than artifacts/, and has no --check.")
            configs = [config for config in configs if catalog.exists(config.kernel, args.program_of)]
    except (matrix.MatrixError, OSError) as error:
        print(f"build_kernels: {error}", file=sys.stderr)
        return 2
    if args.list:
        print("\n".join(f"{config.key}  {config}" for config in configs))
        return 0
    found, reason = compiler.toolchain.find()
    if found is None:
        print(f"build_kernels: cannot compile: {reason}.", file=sys.stderr)
        return 1
    jobs = min(args.jobs or pool.default_jobs(), pool.fitting_memory())
    stream = None if args.quiet else sys.stderr
    if stream is not None:
        print(f"{len(configs)} kernels, {jobs} processes, {found.name}", file=stream)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ended by a supervisor: as clean as Ctrl-C
    complete = args.arch is None and not args.model and not args.only and args.matrix == matrix.DEFAULT
    start = time.monotonic()
    try:
        if args.check:
            report = building.check(configs, args.out, jobs=jobs, timeout=args.timeout, stream=stream)
        else:
            report = building.build(
                configs, args.out, jobs=jobs, timeout=args.timeout, complete=complete, program_of=args.program_of, stream=stream
            )
    except OSError as error:
        print(f"build_kernels: {args.out} cannot be written: {error}.", file=sys.stderr)
        return 1
    print(building.summary(report))
    print(
        f"{time.monotonic() - start:.1f} s with {jobs} processes, into {args.out}"
        if not args.check
        else f"{time.monotonic() - start:.1f} s, nothing written"
    )
    return _status(report)


def _status(report: building.Report) -> int:
    for outcome in report.differing:
        print(f"DIFFERS {outcome.config}: {outcome.sha256} now ({outcome.config.key})")
    for config in report.missing:
        print(f"MISSING {config}: nothing to compare with ({config.key})")
    for outcome in report.failed:
        print(f"FAILED {outcome.config}: {outcome.error}")
    if report.interrupted:
        print("interrupted; what was finished is kept, and the next run goes on from there")
        return 130
    return 3 if report.differing else 1 if report.failed or report.missing else 0


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


if __name__ == "__main__":
    if "--list" in sys.argv and hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends this quietly; a build writes to processes that may be gone
    sys.exit(main())
