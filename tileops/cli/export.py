"""Writes a bundle: one verified file with artifacts, for a machine without network, TileLang or compiler.

    tileops export kernels.bundle --model mamba2-130m --arch sm_90a
    TILEOPS_ARTIFACT_PATH=kernels.bundle python serve.py      (there; or `tileops import kernels.bundle`)
"""

from __future__ import annotations

import argparse

from tileops.cli import OK, Usage, _output, _select

HELP = "write artifacts into one file"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", metavar="BUNDLE", help="the file to write")
    _select.add_model_arguments(parser)


def run(args: argparse.Namespace) -> int:
    from tileops import store

    if _select.has_model(args):
        exported = store.export_bundle(args.bundle, configs=_select.kernels(args, _select.archs(args)))
    else:
        if args.dtype is not None:
            raise Usage("--dtype goes with a model")
        exported = store.export_bundle(args.bundle, archs=None if args.arch is None else _select.archs(args))
    _output.emit(args.json, exported._asdict(), f"{exported.kernels} kernels, {_output.size(exported.size)}: {exported.path}")
    return OK
