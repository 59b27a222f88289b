"""Verifies a bundle of `tileops export` as a whole, then stores its kernels: in the user cache, or as a root in a folder.

A folder of --into (or the bundle itself) is used when TILEOPS_ARTIFACT_PATH names it. Nothing is stored of a bundle in which
anything is wrong. Digests show that a bundle is whole, not who made it: take one only from whom you trust.
"""

from __future__ import annotations

import argparse
import os

from tileops.cli import _arguments, _exit, _output

HELP = "store the kernels of a bundle"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", metavar="BUNDLE", help="a file that `tileops export` wrote")
    parser.add_argument("--into", metavar="DIR", help="make a root of this folder instead of filling the user cache")
    _arguments.add_arch(parser, "every arch in the bundle")


def run(args: argparse.Namespace) -> int:
    from tileops import store

    if not os.path.isfile(args.bundle):
        raise _exit.UsageError(f"{args.bundle} is not a file.")
    done = store.import_bundle(args.bundle, into=args.into, archs=args.arch)
    status = _exit.FINE if done.kernels else _exit.MISSING
    lines = [f"{done.destination}: {_output.many(done.kernels, 'kernel')}, {_output.size(done.size)}"]
    if not done.kernels:
        lines = [f"{args.bundle} holds no kernel for {', '.join(args.arch)}." if args.arch else f"{args.bundle} holds no kernel."]
    elif args.into is not None:
        lines.append(f"To use it: export TILEOPS_ARTIFACT_PATH={done.destination}")
    else:
        lines += _other_compiler(args.bundle)
    _output.emit(args, {"status": status, **done._asdict(), "notes": lines[1:]}, lines)
    return status


def _other_compiler(bundle: str) -> list[str]:
    """A word of warning where the user cache will not serve what was just put there."""
    from tileops import compiler, store
    from tileops.store.bundles import BundleRoot

    installed = compiler.toolchain_name()
    root = BundleRoot("site", "bundle", os.path.abspath(bundle))
    others = sorted({store.compiler_of(record) for record in root.entries()} - {installed})
    if installed is None or not others:
        return []
    return [
        f"Note: made by {'; '.join(others)}, and {installed} is installed here: the user cache serves only the latter's kernels.",
        "To use them nevertheless: tileops import --into DIR, or TILEOPS_ARTIFACT_PATH=BUNDLE.",
    ]
