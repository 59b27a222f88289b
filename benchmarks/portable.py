"""The programs of other archs on this GPU: ``python -m benchmarks portable NAME=ROOT...``, see docs/benchmarks.md.

A root is made by ``python -m build_kernels --program-of sm_80 --arch sm_90a --out ROOT``. Its kernels take the place of this GPU's
own, and the forward runs on the stages, as it does on those archs.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks import ours, timing, worker
from benchmarks.shapes import STAGES, Spec
from tileops import catalog
from tileops.ops import mamba2
from tileops.ops._resolve import pinned
from tileops.store.packaged import PackagedRoot

_SIZES: dict[str, Any] = {"batch": 4, "seqlen": 2048, "n_heads": 80}

#: One model's ops: P=64, N=128, Q=256, bfloat16.
SPECS = (
    Spec("portable", "Mamba2FwdOp", "forward 4x2048x80", **_SIZES),
    Spec("portable", "Mamba2FwdOp", "forward 3x1000x24 G=2", batch=3, seqlen=1000, n_heads=24, n_groups=2),
    *(Spec("portable", op, f"{op} 4x2048x80", **_SIZES) for op in STAGES),
    *(
        Spec("portable", "SSDRecurrentFwdOp", f"decode B=64 {'per head' if tied else 'full'}", 64, 1, 80, tied=tied)
        for tied in (True, False)
    ),
)


def run(roots: dict[str, Path | None]) -> dict[str, Any]:
    """Errors and GPU times of every row, by root; None: this GPU's own kernels."""
    rows = []
    torch.set_grad_enabled(False)
    served, mamba2.serves = mamba2.serves, lambda *_: False
    try:
        for name, root in roots.items():
            with _in_place(root):
                for spec in SPECS:
                    measured = worker.measure(ours, spec, "cuda", rounding=True)
                    rows.append({**spec.to_json(), "program": name, **measured})
    finally:
        mamba2.serves = served
    return {
        "date": time.strftime("%Y-%m-%d"),
        "machine": worker.machine("cuda"),
        "versions": worker.versions(ours),
        "ceilings": timing.ceilings(),
        "rows": rows,
    }


@contextlib.contextmanager
def _in_place(root: Path | None) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        if root is not None:
            found = PackagedRoot("site", str(root), str(root))
            records = list(found.entries())
            if not records:
                raise FileNotFoundError(
                    f"{root} holds no artifacts; make it with `python -m build_kernels --program-of ARCH --arch sm_90a --out {root}`"
                )
            wanted = catalog.for_model(chunk_size=256, head_dim=64, d_state=128, dtype="bfloat16", archs=[records[0].arch])
            program = records[0].provenance.get("program", records[0].arch)
            missing = {c.key for c in wanted if catalog.exists(c.kernel, program)} - {record.key for record in records}
            if missing:
                raise FileNotFoundError(f"{root} lacks {len(missing)} kernels of the model that is run, which this GPU's own would replace")
            for record in records:
                stack.enter_context(pinned(found.load(f"{record.arch}/{record.key}"), torch.cuda.current_device()))
        yield


def table(data: dict[str, Any]) -> str:
    """As Markdown: a row for each case, a column for each program."""
    programs = list(dict.fromkeys(row["program"] for row in data["rows"]))
    lines = [
        "| case | " + " | ".join(f"{name}: us, error" for name in programs) + " | rounding alone |",
        "|---" * (len(programs) + 2) + "|",
    ]
    for case in dict.fromkeys(row["name"] for row in data["rows"]):
        cells = {row["program"]: row for row in data["rows"] if row["name"] == case}
        forced = next(iter(next(iter(cells.values())).get("rounding_errors", {}).values()), None)
        shown = " | ".join(f"{cells[p]['gpu_us']:.1f}, {cells[p]['error']:.2e}" for p in programs)
        lines.append(f"| {case} | {shown} | {'-' if forced is None else f'{forced:.2e}'} |")
    return "\n".join(lines)
