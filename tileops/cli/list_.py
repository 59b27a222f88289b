"""Lists the kernels that each root holds: name, arch, compile-time values, bytes, compiler.

An old one was made from other kernel sources than this package's: it is never found by a look-up.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from tileops.cli import _arguments, _exit, _output

HELP = "the kernels that there are, by root"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _arguments.add_arch(parser, "every arch")
    parser.add_argument("--kernel", metavar="PATTERN", help='a kernel\'s name and field=value words, as "chunk_* Q=256 dtype=bfloat16"')
    _arguments.add_root(parser)
    parser.add_argument("--totals", action="store_true", help="only the totals of each root")


def run(args: argparse.Namespace) -> int:
    from tileops import store

    roots = [_content(root, args) for root in _arguments.matching_roots(store.roots(), args.root)]
    kernels = [kernel for root in roots for kernel in root["kernels"]]
    total = {"kernels": len(kernels), "bytes": sum(kernel["bytes"] for kernel in kernels), "archs": _by_arch(kernels)}
    # A root that someone named and that serves nothing is a fault; a cache that was never written is not.
    status = _exit.MISSING if any(root["kind"] == "site" and root["problem"] for root in roots) else _exit.FINE
    _output.emit(args, {"status": status, "roots": roots, "total": total}, _lines(args, roots, total))
    return status


def _content(root: Any, args: argparse.Namespace) -> dict[str, Any]:
    from tileops import catalog, store
    from tileops.store.bundles import is_current

    order = {name: at for at, name in enumerate(catalog.KERNELS)}
    kernels = []
    for record in root.entries():
        if args.arch is not None and record.arch not in args.arch:
            continue
        if args.kernel is not None and not _arguments.matches(record.kernel, record.arch, record.config, args.kernel):
            continue
        kernels.append(
            {
                "kernel": record.kernel,
                "arch": record.arch,
                "config": record.config,
                "key": record.key,
                "bytes": record.cubin_size,
                "compiler": store.compiler_of(record),
                "current": is_current(record),
            }
        )
    kernels.sort(key=lambda k: (k["arch"], order.get(k["kernel"], len(order)), k["kernel"], _output.fields(k["config"]), k["key"]))
    size = sum(kernel["bytes"] for kernel in kernels)
    return {"kind": root.kind, "name": root.name, "path": root.path, "problem": root.problem(), "bytes": size, "kernels": kernels}


def _by_arch(kernels: list[dict[str, Any]]) -> dict[str, int]:
    found: dict[str, int] = {}
    for kernel in kernels:
        found[kernel["arch"]] = found.get(kernel["arch"], 0) + 1
    return dict(sorted(found.items()))


def _lines(args: argparse.Namespace, roots: list[dict[str, Any]], total: dict[str, Any]) -> Iterator[str]:
    for root in roots:
        kernels = root["kernels"]
        where = "" if root["path"] in root["name"] else f"  {root['path']}"
        archs = ", ".join(f"{arch} {count}" for arch, count in _by_arch(kernels).items())
        what = f"{_output.many(len(kernels), 'kernel')}, {_output.size(root['bytes'])} ({archs})" if kernels else "no kernels"
        yield f"{root['name']}: {root['problem'] or what}{where}"
        compilers = sorted({kernel["compiler"] for kernel in kernels})
        if args.totals or not kernels:
            continue
        # One compiler made everything in most roots: said once, not on each line.
        if len(compilers) == 1:
            yield f"  compiler: {compilers[0]}"
        rows = []
        for k in kernels:
            extra = ("old" if not k["current"] else "", k["compiler"] if len(compilers) > 1 else "")
            rows.append((k["kernel"], k["arch"], k["bytes"], _output.fields(k["config"]), *extra))
        yield from _output.table(rows, right=(2,))
    if len(roots) > 1:
        archs = ", ".join(f"{arch} {count}" for arch, count in total["archs"].items())
        yield f"total: {_output.many(total['kernels'], 'kernel')}, {_output.size(total['bytes'])}" + (f" ({archs})" if archs else "")
