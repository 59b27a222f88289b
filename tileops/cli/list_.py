"""Lists the artifacts of every root, or with --models the presets."""

from __future__ import annotations

import argparse
from typing import Any

from tileops.cli import OK, _output

HELP = "list artifacts by root, or model presets"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--arch", metavar="ARCH", help="only this arch")
    parser.add_argument("--kernel", metavar="NAME", help="only this kernel")
    parser.add_argument("--root", metavar="TEXT", help="only roots whose name contains this")
    parser.add_argument("--models", action="store_true", help="list the model presets instead")


def run(args: argparse.Namespace) -> int:
    return _models(args) if args.models else _artifacts(args)


def _artifacts(args: argparse.Namespace) -> int:
    from tileops import store
    from tileops.store.cache import compiler_of

    data: list[dict[str, Any]] = []
    lines = []
    for root in store.roots():
        if args.root is not None and args.root not in root.name:
            continue
        records = [r for r in root.entries(args.arch) if args.kernel in (None, r.kernel)]
        records.sort(key=lambda r: (r.arch, r.kernel, sorted(r.config.items()), r.key))
        total = sum(r.cubin_size for r in records)
        problem = root.problem()
        lines.append(f"{root.name}: {len(records)} kernels, {_output.size(total)}" + (f" ({problem})" if problem else ""))
        rows = [
            (r.arch, r.kernel, " ".join(f"{k}={v}" for k, v in sorted(r.config.items())), r.cubin_size, r.key[:12], compiler_of(r))
            for r in records
        ]
        if rows:
            lines.append(_output.table(rows, "  "))
        entries = [
            {"key": r.key, "arch": r.arch, "kernel": r.kernel, "config": r.config, "bytes": r.cubin_size, "compiler": compiler_of(r)}
            for r in records
        ]
        data.append({"root": root.name, "kind": root.kind, "path": root.path, "problem": problem, "artifacts": entries, "bytes": total})
    _output.emit(args.json, {"roots": data}, "\n".join(lines))
    return OK


def _models(args: argparse.Namespace) -> int:
    from dataclasses import asdict

    from tileops.models import PRESETS

    rows: list[tuple[object, ...]] = [("model", "H", "P", "N", "G", "Q", "not confirmed from a config file")]
    rows += [(m.name, m.n_heads, m.head_dim, m.d_state, m.n_groups, m.chunk_size, ", ".join(m.unconfirmed)) for m in PRESETS.values()]
    _output.emit(args.json, {"models": [asdict(m) for m in PRESETS.values()]}, _output.table(rows))
    return OK
