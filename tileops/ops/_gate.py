"""What the full forward does with y after the recurrence: skip, gate, dtype, a given tensor. One launch (kernels/gate.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tileops.ops import _checks
from tileops.ops._layout import WIDE, all_aligned

if TYPE_CHECKING:
    from tileops.ops._planner import Planner, Slot

#: Elements of a wide access.
_WIDTH = 8
#: The kernel's ``parts``.
_ALWAYS, _SKIP, _GATE, _PACK = 1, 2, 4, 8


def plan_gate(p: Planner, y: Slot, x: Slot, D: Slot | None, z: Slot | None, rows: Slot | None, out: Slot) -> None:
    """Add the launch that makes ``out`` of ``y``; with ``rows`` token s of the only batch row is row rows[s] of y, or 0."""
    batch, seqlen, heads, head_dim = x.shape
    z = None if z is None else p.dense(z)
    aligned = all_aligned(*(s for s in (x if D is not None else None, z) if s is not None)) and _wide(out)
    width = _WIDTH if aligned else 1

    def split(slot: Slot | None) -> Slot | None:
        if slot is None:
            return None
        return slot._replace(shape=(*slot.shape[:3], head_dim // width, width), stride=(*slot.stride[:3], width, 1))

    tensors = {"y": split(y), "x": split(x if D is not None else None), "z": split(z), "D": None, "rows": rows, "out": split(out)}
    if D is not None:
        step = D.stride[1] if len(D.shape) == 2 else 0
        tensors["D"] = D._replace(shape=(heads, head_dim // width, width), stride=(D.stride[0], step * width, step))
    parts = _ALWAYS + _SKIP * (D is not None) + _GATE * (z is not None) + _PACK * (rows is not None)
    p.launch(
        "gate",
        {"dtype": _checks.dtype_name(x.dtype), "half": out.dtype != torch.float32, "aligned": aligned},
        tensors,
        {"B": batch, "S": seqlen, "R": y.shape[1], "H": heads, "V": head_dim // width, "parts": parts},
    )


def _wide(out: Slot) -> bool:
    return out.aligned(WIDE) and all(s % _WIDTH == 0 for n, s in zip(out.shape[:-1], out.stride[:-1]) if n > 1)
