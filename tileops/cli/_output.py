"""What every verb prints: text for people or one JSON object on stdout, everything else on stderr."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tileops.config import KernelConfig


def emit(args: argparse.Namespace, data: Mapping[str, Any], lines: Iterable[str]) -> None:
    """Prints ``data`` with ``--json``, else ``lines``."""
    if args.json:
        print(json.dumps(data, indent=1, default=str))
    else:
        for line in lines:
            print(line)


def note(text: str) -> None:
    """One line for people on stderr."""
    print(" ".join(text.split()), file=sys.stderr, flush=True)


def described(config: KernelConfig) -> dict[str, Any]:
    """A config as JSON shows it."""
    return {"kernel": config.kernel, "arch": config.arch, "config": config.fields, "key": config.key}


def fields(values: Mapping[str, Any]) -> str:
    """``N=128 P=64 dtype=bfloat16``."""
    return " ".join(f"{name}={value}" for name, value in sorted(values.items()))


def table(rows: Sequence[Sequence[object]], right: Iterable[int] = (), indent: str = "  ") -> list[str]:
    """Aligned columns, two spaces apart; those in ``right`` to the right."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells)]
    aligned = set(right)
    padded = [[c.rjust(w) if i in aligned else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths))] for row in cells]
    return [(indent + "  ".join(row)).rstrip() for row in padded]


def size(count: int) -> str:
    """Bytes in decimal units: ``999 B``, ``12.3 kB``."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000 or unit == "GB":
            break
        value /= 1000
    return f"{count} B" if unit == "B" else f"{value:.1f} {unit}"


def many(count: int, thing: str, things: str | None = None) -> str:
    """``1 kernel``, ``2 kernels``."""
    return f"{count} {thing if count == 1 else things or thing + 's'}"
