"""What changed between two results."""

from __future__ import annotations

from typing import Any

#: key of a row -> what it is called; lower is better for all of them.
_QUANTITIES = {"gpu_us": "GPU us", "host_us": "host us", "first_call_ms": "first call ms", "ms": "ms", "error": "error"}
#: Of those, what the CPU's speed makes.
_OF_HOST = ("host_us", "ms")
#: Differences below these are nobody's concern, whatever their ratio.
_LEAST = {"gpu_us": 0.2, "host_us": 1.0, "first_call_ms": 1.0, "ms": 0.5, "error": 1e-5}


def identity(row: dict[str, Any]) -> tuple[Any, ...]:
    return row.get("suite"), row["op"], row["name"], row["dtype"]


def compare(before: dict[str, Any], after: dict[str, Any], threshold: float = 1.05) -> tuple[list[str], int]:
    """Lines to print, and how many quantities became worse. Rows that one file alone has are named."""
    old = {identity(row): row for row in before["rows"]}
    new = {identity(row): row for row in after["rows"]}
    lines, worse, slower = [], 0, 0
    for key, row in new.items():
        if key not in old:
            lines.append(f"only in the second: {_name(row)}")
            continue
        for quantity, words in _QUANTITIES.items():
            if quantity in _OF_HOST and old[key].get(quantity) is not None and _other_speed(old[key], row):
                slower += 1
                continue
            change = _change(old[key], row, quantity, threshold)
            if change is not None:
                worse += change != "better"
                numbers = f"{_number(old[key].get(quantity))} -> {_number(row.get(quantity))}"
                lines.append(f"{change:6} {_name(row)}: {words} {numbers}{_ratio(old[key], row, quantity)}")
    lines += [f"only in the first: {_name(row)}" for key, row in old.items() if key not in new]
    if not old.keys() & new.keys():
        worse += 1
        lines.append("LOST   no row is in both")
    lines.append(f"{len(old.keys() & new.keys())} rows compared, {worse} regressions (threshold {threshold:g})")
    if slower:
        lines.append(f"{slower} host times not compared: the CPU had another speed")
    for what in ("gpu", "driver"):
        if before["machine"].get(what) != after["machine"].get(what):
            lines.append(f"different machines: {what} {before['machine'].get(what)} and {after['machine'].get(what)}")
    return lines, worse


def _change(old: dict[str, Any], new: dict[str, Any], quantity: str, threshold: float) -> str | None:
    a, b = old.get(quantity), new.get(quantity)
    if a is None:
        return None
    if b is None or b != b:
        return "LOST" if a == a else None
    if abs(b - a) < _LEAST[quantity] or _within_spread(old, new, quantity):
        return None
    return "WORSE" if b > a * threshold else "better" if a > b * threshold else None


def _other_speed(old: dict[str, Any], new: dict[str, Any]) -> bool:
    """Whether the CPU was more than a fifth faster for one of them, where both say how fast it was."""
    a, b = old.get("cpu_us"), new.get("cpu_us")
    return a is not None and b is not None and max(a, b) > 1.2 * min(a, b)


def _within_spread(old: dict[str, Any], new: dict[str, Any], quantity: str) -> bool:
    """Whether the two medians lie within each other's 10th to 90th percentile."""
    name = {"gpu_us": "spread", "host_us": "host_spread"}.get(quantity)
    if name is None or not old.get(name) or not new.get(name):
        return False
    return bool(old[name][0] <= new[quantity] <= old[name][1] and new[name][0] <= old[quantity] <= new[name][1])


def _name(row: dict[str, Any]) -> str:
    return f"{row['op']} {row['name']}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _ratio(old: dict[str, Any], new: dict[str, Any], quantity: str) -> str:
    a, b = old.get(quantity), new.get(quantity)
    return f" (x {b / a:.2f})" if a and b else ""
