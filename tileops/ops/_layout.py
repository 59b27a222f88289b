"""Which memory layouts the kernels read in place, and what stands in for the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tileops.ops._planner import Planner, Slot

#: Widest load of the kernels, bytes.
WIDE = 16


def packed(p: Planner, slot: Slot) -> Slot:
    """``slot`` where it is contiguous and 16-byte aligned, as every workspace is; else a copy that is, made at each call."""
    return slot if slot.is_contiguous() and slot.aligned(WIDE) else p.copied(slot)


def rows(p: Planner, slot: Slot) -> Slot:
    """``slot`` where its last dimension is contiguous and every row 16-byte aligned; else a copy, made at each call."""
    inner = slot.shape[-1] <= 1 or slot.stride[-1] == 1
    return slot if inner and slot.aligned(WIDE) else p.copied(slot)


def all_aligned(*slots: Slot) -> bool:
    """Whether every row of every slot starts at a multiple of 16 bytes: the kernels' variant with wide loads."""
    return all(slot.aligned(WIDE) for slot in slots)


def expanded(slot: Slot, shape: Sequence[int]) -> Slot:
    """``slot``, given without its last dimensions, as a view of this shape with strides of 0 in them."""
    return slot._replace(shape=tuple(shape), stride=slot.stride + (0,) * (len(shape) - len(slot.shape)))
