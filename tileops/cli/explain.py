"""Tells root by root why a kernel is found or not, without compiling or raising.

    tileops explain chunk_scan Q=256 P=64 N=128 dtype=bfloat16 dt_dtype=float32 aligned=true --arch sm_90a
    tileops explain --model mamba2-130m --arch sm_90a
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from tileops.cli import MISSING, OK, Usage, _output, _select

if TYPE_CHECKING:
    from tileops.config import KernelConfig
    from tileops.store import Lookup

HELP = "why a kernel is found or not, root by root"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kernel", nargs="?", help="kernel name; without it, all kernels of a model")
    parser.add_argument("fields", nargs="*", metavar="FIELD=VALUE", help="its compile-time values; absent ones: all")
    _select.add_model_arguments(parser)
    parser.add_argument("--policy", choices=("auto", "cached", "packaged"), help="as if under this policy")


def run(args: argparse.Namespace) -> int:
    from tileops import compiler, store

    archs = _select.archs(args)
    if args.kernel is None:
        configs = _select.kernels(args, archs)
    elif _select.has_model(args):
        raise Usage("give a kernel with its fields, or a model, not both")
    else:
        configs = _named(args.kernel, args.fields, archs)
    lookups = [store.find(config, args.policy, toolchain=compiler.toolchain_name) for config in configs]
    missing = [lookup for lookup in lookups if lookup.artifact is None]
    brief = len(lookups) > 8
    lines = [text for lookup in lookups for text in _lines(lookup, brief)]
    lines.append(f"{len(lookups) - len(missing)} of {len(lookups)} kernels found")
    _output.emit(args.json, {"found": len(lookups) - len(missing), "kernels": [_data(lookup) for lookup in lookups]}, "\n".join(lines))
    return MISSING if missing else OK


def _named(kernel: str, texts: list[str], archs: list[str]) -> list[KernelConfig]:
    from tileops import catalog

    if kernel not in catalog.KERNELS:
        raise Usage(f"there is no kernel {kernel!r}; kernels: {', '.join(catalog.KERNELS)}")
    given: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        allowed = catalog.KERNELS[kernel].get(name)
        if not equals or allowed is None:
            raise Usage(f"{text!r}: expected FIELD=VALUE with a field of {', '.join(catalog.KERNELS[kernel])}")
        matching = [v for v in allowed if str(v).lower() == value.lower()]
        if not matching:
            raise Usage(f"{kernel} does not support {name}={value}; supported: {catalog.describe(allowed)}")
        given[name] = matching[0]
    return [catalog.config(kernel, arch, **values) for arch in archs for values in catalog.expand(kernel, given)]


def _lines(lookup: Lookup, brief: bool) -> list[str]:
    from tileops import store

    if brief and lookup.artifact is not None:
        return [f"hit   {lookup.config}  {lookup.root}"]
    lines = [str(lookup.config)]
    lines += [f"  {line}" for line in store.trace_lines(lookup)]
    if lookup.artifact is None:
        if lookup.nearest is not None:
            lines.append(f"  nearest: {lookup.nearest.config_object()}")
            lines += [f"    {name}: asked for {wanted}, it has {has}" for name, (wanted, has) in lookup.differs.items()]
        lines.append(f"  run: {store.fix_command(lookup.config)}")
    return lines


def _data(lookup: Lookup) -> dict[str, Any]:
    from tileops import store

    nearest = lookup.nearest if lookup.artifact is None else None
    return {
        "key": lookup.config.key,
        "config": lookup.config.as_dict(),
        "policy": lookup.policy,
        "found": lookup.artifact is not None,
        "root": lookup.root,
        "trace": [step._asdict() for step in lookup.trace],
        "nearest": nearest.key if nearest is not None else None,
        "differs": lookup.differs if nearest is not None else {},
        "command": None if lookup.artifact is not None else store.fix_command(lookup.config),
    }
