"""``python -m build_kernels.size WHEEL``: is a wheel, or the one that the whole matrix would make, within the size budget?

A wheel that holds a part of the matrix says what the whole would weigh: each kernel counts as the mean of its name's cubins
that are there, compressed, with its record's share of the manifest. Exit status 1 over the budget.
"""

from __future__ import annotations

import argparse
import json
import sys
import zipfile
from collections import Counter, defaultdict
from pathlib import Path

from build_kernels import matrix

BUDGET = 50_000_000


def estimate(wheel: Path) -> tuple[int, int, int]:
    """(kernels in the wheel, kernels in the matrix, bytes of a wheel with all of the matrix)."""
    cubins: dict[str, list[int]] = defaultdict(list)
    size = wheel.stat().st_size
    with zipfile.ZipFile(wheel) as archive:
        for info in archive.infolist():
            if not info.filename.endswith("/manifest.json"):
                continue
            records = json.loads(archive.read(info))["records"]
            share = info.compress_size // max(1, len(records))
            folder = info.filename.rpartition("/")[0]
            size -= share * len(records)
            for key, record in records.items():
                packed = archive.getinfo(f"{folder}/{key}.cubin").compress_size
                cubins[record["kernel"]].append(packed + share)
                size -= packed
    wanted = Counter(config.kernel for config in matrix.load())
    known = [value for values in cubins.values() for value in values]
    for kernel, count in wanted.items():
        values = cubins.get(kernel, known)
        size += round(sum(values) / len(values) * count) if values else 0
    return len(known), sum(wanted.values()), size


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m build_kernels.size", description="Checks a wheel against the size budget.")
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--budget", type=int, default=BUDGET, metavar="BYTES")
    args = parser.parse_args()
    try:
        held, wanted, whole = estimate(args.wheel)
    except (OSError, zipfile.BadZipFile) as error:
        print(f"build_kernels.size: {args.wheel} is no wheel that can be read: {error}.", file=sys.stderr)
        return 2
    actual = args.wheel.stat().st_size
    print(f"{args.wheel.name}: {actual:,} bytes with {held} kernels, about {whole:,} with the matrix's {wanted} (budget {args.budget:,})")
    return int(max(actual, whole) > args.budget)


if __name__ == "__main__":
    sys.exit(main())
