"""Verifies a bundle, then stores its artifacts in the user cache, or with --into as a root of their own.

Nothing is stored unless all of it is good. A bundle can also serve as it is: put it into TILEOPS_ARTIFACT_PATH.
"""

from __future__ import annotations

import argparse

from tileops.cli import OK, _output, _select

HELP = "store the artifacts of a bundle"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", metavar="BUNDLE", help="a file that `tileops export` wrote")
    parser.add_argument("--into", metavar="DIR", help="a folder for TILEOPS_ARTIFACT_PATH instead of the user cache")
    _select.add_arch_argument(parser)


def run(args: argparse.Namespace) -> int:
    from tileops import store

    imported = store.import_bundle(args.bundle, into=args.into, archs=None if args.arch is None else _select.archs(args))
    _output.emit(
        args.json, imported._asdict(), f"{imported.kernels} kernels, {_output.size(imported.size)}, into {imported.destination}"
    )
    return OK
