"""The command ``tileops``: one file a verb, each with HELP, ``add_arguments(parser)`` and ``run(args) -> status``.

``_exit.py`` has the statuses. At the top of these files stand the standard library, leaves and the store: ``tileops --help``
imports neither torch nor TileLang nor CUDA, and a verb imports what it needs when it runs.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import warnings
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NoReturn, TextIO

from tileops.cli import _exit, _output
from tileops.errors import TileOpsError

#: verb -> module, in the order of the help.
VERBS = {
    "doctor": "doctor",
    "warm": "warm",
    "list": "list_",  # a module called list would hide the builtin in this one
    "explain": "explain",
    "verify": "verify",
    "prune": "prune",
    "export": "export",
    "import": "import_",
}

_STATUS_HELP = "exit status: 0 fine, 1 missing, 2 usage, 3 corrupt, 4 incompatible GPU or driver, 130 interrupted"


class _Parser(argparse.ArgumentParser):
    """Says what it does not understand as JSON too, where that is asked for: the arguments are not parsed then."""

    def parse(self, argv: list[str]) -> argparse.Namespace:
        self.json = "--json" in argv
        return self.parse_args(argv)

    def error(self, message: str) -> NoReturn:
        if self.json:
            _print_error(_exit.USAGE, message, "UsageError", {})
        super().error(message)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status; ``argv`` is sys.argv[1:] where it is None."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # a path that the terminal cannot show must not end the command
    try:
        status = _main(list(sys.argv[1:] if argv is None else argv))
        _flush()
        return status
    except BrokenPipeError:
        _silence()
        return _exit.CLOSED
    except KeyboardInterrupt:
        print("tileops: interrupted", file=sys.stderr)
        return _exit.INTERRUPTED


def _main(argv: list[str]) -> int:
    try:
        if not argv or argv[0].startswith("-") or argv[0] not in VERBS:
            return _without_verb(argv)
        verb = argv[0]
        module = _module(verb)
        parser = _Parser(
            prog=f"tileops {verb}",
            description=module.__doc__,
            epilog=_STATUS_HELP,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(parser)
        parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
        args = parser.parse(argv[1:])
    except SystemExit as end:  # argparse: --help, or a message and the usage status
        return end.code if isinstance(end.code, int) else _exit.USAGE
    return _run(verb, module, args)


def _without_verb(argv: list[str]) -> int:
    width = max(map(len, VERBS))
    lines = [f"  {verb:{width}}  {_module(verb).HELP}" for verb in VERBS]
    parser = _Parser(
        prog="tileops",
        usage="tileops VERB [options]",
        description="Kernels of tileops: where they are, what is missing, and how to get it.",
        epilog="\n".join(["verbs:", *lines, "", "tileops VERB --help says more.", _STATUS_HELP]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("verb", nargs="?", choices=list(VERBS), metavar="VERB", help=argparse.SUPPRESS)
    parser.add_argument("--version", action="version", version=f"tileops {version()}")
    parser.add_argument("--json", action="store_true", help=argparse.SUPPRESS)
    if parser.parse(argv).json:
        parser.error("expected a verb, and --json after it")
    parser.print_help(sys.stderr)
    return _exit.USAGE


def _module(verb: str) -> ModuleType:
    return importlib.import_module(f"tileops.cli.{VERBS[verb]}")


def _run(verb: str, module: ModuleType, args: argparse.Namespace) -> int:
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning
        try:
            status: int = module.run(args)
            return status
        except BrokenPipeError:
            raise
        except (TileOpsError, _exit.UsageError, OSError) as error:
            return _failed(verb, args, error)


def _failed(verb: str, args: argparse.Namespace, error: Exception) -> int:
    status = _exit.of_error(error)
    message = " ".join(str(error).split())
    print(f"tileops {verb}: {message}", file=sys.stderr)
    if args.json:
        name = "UsageError" if isinstance(error, _exit.UsageError) else type(error).__name__
        data = getattr(error, "data", {})
        _print_error(status, message, name, data)
    return status


def _print_error(status: int, message: str, kind: str, data: dict[str, Any]) -> None:
    print(json.dumps({"status": status, "error": message, "kind": kind, "data": data}, indent=1, default=str))


def _show_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, file: TextIO | None = None, line: str | None = None
) -> None:
    if category.__module__.startswith("tileops."):
        _output.note(f"tileops: warning: {message}")
    else:
        print(warnings.formatwarning(message, category, filename, lineno, line), end="", file=sys.stderr)


def version() -> str:
    """The version of this package."""
    from tileops.config import VERSION

    return VERSION


def _flush() -> None:
    stream: Any = sys.stdout
    if stream is not None:
        stream.flush()


def _silence() -> None:
    # The interpreter flushes stdout once more at its end, and would complain about the closed pipe then.
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError, AttributeError):
        pass
