"""The table of tuned schedules, kernels/schedules.json: what ``python -m build_kernels tune`` measured to be fastest. A leaf: stdlib only.

A kernel's file has its default schedule (``schedule``) and what is worth trying instead (``candidates``). A row of the table names a
kernel, an arch and every value of a config; its schedule takes the default's place, name by name, and goes into the key. It also
holds the measured figures, which nothing reads but people. Configs without a row have the default.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

TABLE = Path(__file__).with_name("kernels") / "schedules.json"

#: Of a row, in the file's order.
FIELDS = ("kernel", "arch", "config", "schedule", "us", "default_us", "shapes", "gpu")


def chosen(kernel: str, arch: str, values: Mapping[str, Any]) -> dict[str, int]:
    """The schedule values of the table for this config; empty where it has none."""
    return dict(_index(TABLE).get(name(kernel, arch, values), {}))


@functools.cache
def _index(table: Path) -> dict[str, dict[str, int]]:
    return {name(row["kernel"], row["arch"], row["config"]): row["schedule"] for row in read(table)}


def name(kernel: str, arch: str, values: Mapping[str, Any]) -> str:
    """Of a config, as an index: whatever the order of its values."""
    return json.dumps([kernel, arch, sorted(values.items())])


def read(table: Path = TABLE) -> list[dict[str, Any]]:
    """The rows. Raises ValueError naming the file where it is no such table."""
    try:
        rows = json.loads(table.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{table} is not JSON: {error}.") from None
    for row in rows:
        if set(row) != set(FIELDS):
            raise ValueError(f"{table}: a row has {sorted(row)}; expected {sorted(FIELDS)}.")
        if not row["schedule"] or not all(type(value) is int for value in row["schedule"].values()):
            raise ValueError(f"{table}: the schedule of {row['kernel']} {row['config']} is {row['schedule']}; expected names and integers.")
    return list(rows)


def write(rows: Iterable[Mapping[str, Any]], table: Path = TABLE) -> None:
    """One row a line, sorted: a change of one schedule is a change of one line."""
    lines = sorted(json.dumps({name: row[name] for name in FIELDS}) for row in rows)
    table.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")
    _index.cache_clear()
