"""The full forward in one kernel (kernels/fused_main.py), where the GPU and the layout allow it."""

from __future__ import annotations

import math
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING

import torch

from tileops.ops import _checks
from tileops.ops._layout import WIDE, packed

if TYPE_CHECKING:
    from tileops.ops._planner import Planner, Slot

#: Tokens of a chunk, and rows of d_head that one CTA makes.
CHUNK = ROWS = 64

#: Strides of a tensor map are below this many bytes.
_LONGEST_STRIDE = 2**40


#: Features of the full forward that the fused kernel lacks.
LACKS = frozenset(
    {
        "seq_idx",
        "cu_seqlens",
    }
)


def serves(p: Planner, x: Slot, B: Slot, C: Slot, features: AbstractSet[str] = frozenset()) -> bool:
    """Whether the fused kernel takes this call: it exists for the GPU and has the features, there are tokens, x, B and C can be read
    through tensor maps."""
    return not LACKS & features and p.has("fused_main") and 0 not in x.shape and all(_mappable(slot) for slot in (x, B, C))


def _mappable(slot: Slot) -> bool:
    """Whether a tensor map can describe the slot: contiguous 16-byte aligned rows, no stride of 0 (an expanded dimension)."""
    pitches = [s * slot.dtype.itemsize for n, s in zip(slot.shape[:-1], slot.stride[:-1]) if n > 1]
    return slot.stride[-1] == 1 and slot.aligned(WIDE) and all(0 < pitch < _LONGEST_STRIDE for pitch in pitches)


def segments(chains: int, chunks: int, sms: int) -> tuple[int, int]:
    """How a sequence is cut: (segments, chunks of each), for ``chains`` sequences of ``chunks`` chunks on ``sms`` SMs.

    A chain's segments follow one another, so they only even out the last wave of CTAs: the cut with the least waves * time is
    taken, where a CTA's start costs as much as 3 chunks. The result's bits do not depend on it.
    """
    if chains <= sms:
        return 1, chunks
    candidates = range(1, max(1, min(16, chunks // 8)) + 1)
    best = min(candidates, key=lambda n: (math.ceil(chains * n / sms) * (math.ceil(chunks / n) + 3), n))
    seg_chunks = math.ceil(chunks / best)
    return math.ceil(chunks / seg_chunks), seg_chunks


def plan_fused(
    p: Planner,
    x: Slot,
    dt: Slot,
    A: Slot,
    B: Slot,
    C: Slot,
    dt_bias: Slot | None,
    initial: Slot | None,
    *,
    dt_softplus: bool,
    dt_min: float,
    dt_max: float,
) -> tuple[Slot, Slot]:
    """Add the launches of y and final_states; ``serves`` has said yes."""
    batch, seqlen, heads, head_dim = x.shape
    groups, d_state = B.shape[2:]
    chains = batch * heads * math.ceil(head_dim / ROWS)
    segs, seg_chunks = segments(chains, math.ceil(seqlen / CHUNK), p.multiprocessors)
    y = p.empty((batch, seqlen, heads, head_dim), torch.float32)
    final_states = p.empty((batch, heads, head_dim, d_state), torch.float32)
    carry = sync = final_states  # not touched with one segment
    if segs > 1:
        columns = next(n for n in (64, 128, 256) if n >= d_state)  # the kernel's tile of d_state
        carry = p.workspace((chains, ROWS * columns), torch.float32)
        sync = p.workspace((1 + chains * 4 * max(1, columns // 128),), torch.int32)  # a ticket, and a flag a warp that holds state
        p.launch("fused_clear", {}, {"sync": sync}, {"M": sync.shape[0]})
    tensors = {
        "x": x,
        "dt": p.dense(dt),
        "A": packed(p, A),
        "Bm": B,
        "Cm": C,
        "carry": carry,
        "sync": sync,
        "y": y,
        "final_states": final_states,
    }
    if dt_bias is not None:
        tensors["dt_bias"] = packed(p, dt_bias)
    if initial is not None:
        tensors["initial_states"] = packed(p, initial)
    p.launch(
        "fused_main",
        {
            "P": head_dim,
            "N": d_state,
            "dtype": _checks.dtype_name(x.dtype),
            "softplus": dt_softplus,
            "has_bias": dt_bias is not None,
            "has_initial_states": initial is not None,
        },
        tensors,
        {"B": batch, "S": seqlen, "H": heads, "G": groups, "segs": segs, "seg_chunks": seg_chunks},
        {"dt_min": dt_min, "dt_max": dt_max},
    )
    return y, final_states
