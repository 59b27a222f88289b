"""Writes verified kernels into one file, for a machine without network, TileLang or compiler.

There, `tileops import BUNDLE` stores them, or TILEOPS_ARTIFACT_PATH=BUNDLE uses the file as it is. The same kernels give the
same bytes. Without a model: every kernel of every root that this package can look up.
"""

from __future__ import annotations

import argparse
import errno
import os

from tileops.cli import _arguments, _exit, _output
from tileops.config import KernelConfig
from tileops.errors import MissingKernelError

HELP = "carry kernels to another machine in one file"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", metavar="BUNDLE", help="the file to write; replaced at once where it is there")
    _arguments.add_model(parser)
    _arguments.add_arch(parser, "every arch; with a model, those of the GPUs present")


def run(args: argparse.Namespace) -> int:
    from tileops import store

    folder = os.path.dirname(os.path.abspath(args.bundle))
    if not os.path.isdir(folder):
        raise _exit.UsageError(f"{folder} is not a folder: make it, or write the bundle elsewhere.")
    if os.path.isdir(args.bundle):
        raise _exit.UsageError(f"{args.bundle} is a folder: give the name of the file to write.")
    if _arguments.models_of(args):
        configs = _of_models(args)
        archs = [config.arch for config in configs]
    else:
        configs = None
        archs = _held(args.arch)
    try:
        done = store.export_bundle(args.bundle, configs=configs, archs=args.arch)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        raise _exit.UsageError(f"{args.bundle} cannot be written ({error.strerror}): write the bundle elsewhere.") from error
    kernels = {arch: archs.count(arch) for arch in sorted(set(archs))}
    listed = ", ".join(f"{arch} {count}" for arch, count in kernels.items())
    line = f"{done.path}: {_output.many(done.kernels, 'kernel')} ({listed}), {_output.size(done.size)}"
    _output.emit(args, {"status": _exit.FINE, "path": done.path, "kernels": done.kernels, "bytes": done.size, "archs": kernels}, [line])
    return _exit.FINE


def _of_models(args: argparse.Namespace) -> list[KernelConfig]:
    """The configs of the models' kernels. Raises MissingKernelError that counts all that are missing, not only the first."""
    from tileops import store
    from tileops.cli import _wanted

    # Any compiler's entry may travel: the machine that it goes to is not this one.
    looked = [_wanted.Looked(one, store.find(one.config)) for one in _wanted.of_models(args)]
    missing = [one for one in looked if one.lookup.artifact is None]
    if missing:
        commands = _wanted.fixes(args, missing)
        count = f"{len(missing)} of {len(looked)} kernels are in no root"
        raise MissingKernelError(
            f"{count}, the first is {missing[0].wanted.config}. Run: {' && '.join(commands)}",
            missing=[_output.described(one.wanted.config) for one in missing],
            commands=commands,
        )
    return [one.lookup.config for one in looked]


def _held(archs: tuple[str, ...] | None) -> list[str]:
    """The arch of every kernel that would be exported. Raises MissingKernelError where there is none of an arch that was asked for."""
    from tileops import store
    from tileops.store.bundles import is_current

    held = {r.key: r.arch for root in store.roots() for r in root.entries() if (archs is None or r.arch in archs) and is_current(r)}
    absent = [arch for arch in archs or () if arch not in held.values()]
    if absent or not held:
        which = f" for {', '.join(absent)}" if absent else ""
        raise MissingKernelError(f"No root holds a kernel{which} that this package can look up. See: tileops list --totals", archs=absent)
    return list(held.values())
