"""A result as Markdown. The figures of README come from here, and the table of docs/models.md."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log
from typing import Any

_WIDTH = {"bfloat16": 2, "float16": 2, "float32": 4}
TITLES = {"forward": "Full forward", "decode": "Decode", "stages": "Stages", "cold": "Cold processes", "models": "Shapes of served models"}


def markdown(data: dict[str, Any], suites: Sequence[str]) -> str:
    parts = [_machine(data)]
    for suite in suites:
        rows = [row for row in data["rows"] if row["suite"] == suite]
        if rows:
            parts.append(f"### {TITLES[suite]}\n\n{_cold(rows) if suite == 'cold' else _measured(rows)}")
    return "\n\n".join(parts)


def _machine(data: dict[str, Any]) -> str:
    machine, ceilings = data["machine"], data["ceilings"]
    words = [f"{data['date']}, {machine.get('gpu')}, driver {machine.get('driver')}"]
    words += [f"{name} {version}" for name, version in data["versions"].items()]
    if "copy_bytes_per_s" in ceilings:
        words.append(f"copy {ceilings['copy_bytes_per_s'] / 1e12:.2f} TB/s")
        words.append(f"bf16 matmul {ceilings['matmul_flop_per_s'] / 1e12:.0f} TFLOP/s")
    return ", ".join(words) + "."


def _table(head: Sequence[str], body: Sequence[Sequence[str]], *, first: str | None = None) -> str:
    head = head if first is None else [first, *head]
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _peers(rows: list[dict[str, Any]], key: str) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row[key]))


def _served(rows: list[dict[str, Any]], peers: list[str]) -> str:
    """The table of docs/models.md: what is asked of a served model is whether it is as exact as it can be, then how fast."""
    from tileops import models  # not at the top: the processes of peers import this package, and one of them is called tileops too

    named: dict[tuple[Any, ...], list[str]] = {}
    for model in models.PRESETS.values():
        named.setdefault((model.n_heads, model.head_dim, model.d_state, model.n_groups), []).append(model.name)
    head = ["sizes", "models", "error of y: tileops", "rounding alone", "ratio", *peers]
    head += ["error of the state: tileops", "rounding alone", "µs: tileops", "floor", *peers]
    body = []
    for row in rows:
        ours, forced = row.get("errors", {}), row.get("rounding_errors", {})
        y, least_y = ours.get("y"), forced.get("y")
        errors = [_error(y, 2), _error(least_y, 2), f"{y / least_y:.2f}" if y is not None and least_y else "–"]
        errors += [_error(v, 2) for v in (*(row["peers_error"].get(p) for p in peers), ours.get("state"), forced.get("state"))]
        times = [_us(v) for v in (row["gpu_us"], row["floor_us"], *(row["peers_us"].get(p) for p in peers))]
        sizes = tuple(row[key] for key in ("n_heads", "d_head", "d_state", "n_groups"))
        body.append([row["name"], ", ".join(named.get(sizes, ["–"])), *errors, *times])
    return _table(head, body)


def _measured(rows: list[dict[str, Any]]) -> str:
    peers = _peers(rows, "peers_us")
    staged = len({row["op"] for row in rows}) > 1
    forced = any(row.get("rounding_errors") for row in rows)
    gpu, rest, ratios, worse, over = [], [], [], [], []
    for row in rows:
        name = f"{row['op'].removeprefix('SSD').removesuffix('FwdOp')} {row['name']}" if staged else row["name"]
        ratio = speedup(row)
        ratios += [ratio] if ratio is not None else []
        worse += [name] if less_accurate(row) else []
        times = [_us(v) for v in (row["gpu_us"], row["floor_us"], *(row["peers_us"].get(p) for p in peers))]
        gpu.append([name, *times, *([f"{ratio:.2f}" if ratio is not None else "–"] if peers else [])])
        hosts = [_us(v) for v in (row["host_us"], *(row["peers_host_us"].get(p) for p in peers))]
        errors = [row["error"], *(row["peers_error"].get(p) for p in peers)]
        if forced:
            floor = next(iter(row.get("rounding_errors", {}).values()), None)
            over += [row["error"] / floor] if floor and row["error"] is not None else []
            errors.append(floor)
        rest.append([name, *hosts, *(_error(v) for v in errors)])
    parts = [
        _table(["GPU µs", "tileops", "floor", *peers, *(["best peer / tileops"] if peers else [])], gpu),
        _table(
            [f"host µs: {name}" for name in ("tileops", *peers)]
            + [f"error: {name}" for name in ("tileops", *peers, *(["rounding alone"] if forced else []))],
            rest,
            first="host time, error",
        ),
    ]
    if {row["suite"] for row in rows} == {"models"}:
        parts = [_served(rows, peers)]
    if ratios:
        mean = exp(sum(map(log, ratios)) / len(ratios))
        words = f"Best peer / tileops: geometric mean {mean:.2f}, least {min(ratios):.2f}, over {len(ratios)} rows."
        parts.append(f"{words} Less accurate than the better peer: {', '.join(worse) or 'none'}.")
    if over:
        words = "rounding alone: float64 with the operands of the matrix products rounded to the inputs' dtype."
        parts.append(f"Error of tileops over that of rounding alone: {min(over):.2f} to {max(over):.2f} ({words})")
    reasons: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for peer, why in row.get("peers_reason", {}).items():
            reasons.setdefault((peer, why), []).append(row["name"])
    if reasons:
        parts.append(
            "\n".join(f"- not measured: {peer}, {', '.join(dict.fromkeys(names))}: {why}" for (peer, why), names in reasons.items())
        )
    return "\n\n".join(parts)


def speedup(row: dict[str, Any]) -> float | None:
    """GPU time of the fastest peer over ours."""
    times = [us for us in row["peers_us"].values() if us is not None]
    return min(times) / row["gpu_us"] if times and row["gpu_us"] else None


def less_accurate(row: dict[str, Any]) -> bool:
    """Whether our error is more than 5 % above that of the best peer whose output is of our dtype or a narrower one."""
    ours = _WIDTH.get(row.get("output_dtype"), 0)
    dtypes = row.get("peers_output_dtype", {})
    errors = [e for name, e in row["peers_error"].items() if e is not None and _WIDTH.get(dtypes.get(name), 0) <= ours]
    return bool(errors) and row["error"] is not None and not row["error"] <= 1.05 * min(errors)


def _cold(rows: list[dict[str, Any]]) -> str:
    peers = _peers(rows, "peers_ms")
    body = []
    for row in rows:
        spread = f" ({row['ms_spread'][0]:.3g} to {row['ms_spread'][1]:.3g})" if row.get("ms_spread") else ""
        spread = f" (p99 {row['ms_p99']:.3g}, {row['shapes']} shapes)" if row.get("ms_p99") is not None else spread
        body.append([row["name"], _ms(row["ms"]) + spread, *(_ms(row["peers_ms"].get(p)) for p in peers)])
    return _table(["milliseconds", "tileops", *peers], body)


def _us(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"


def _ms(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}" if value < 100 else f"{value:.0f}"


def _error(value: float | None, digits: int = 1) -> str:
    return "–" if value is None else f"{value:.{digits}e}"
