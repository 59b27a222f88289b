"""The full forward in one kernel (kernels/fused_main.py), where the GPU and the layout allow it."""

from __future__ import annotations

import functools
import heapq
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from tileops.ops import _checks
from tileops.ops._layout import WIDE, packed
from tileops.ops._layout import rows as aligned_rows

if TYPE_CHECKING:
    from tileops.ops._planner import Planner, Slot

#: Tokens of a chunk, and rows of d_head that one CTA makes.
CHUNK = ROWS = 64

#: Strides of a tensor map are below this many bytes.
_LONGEST_STRIDE = 2**40


def serves(p: Planner, x: Slot, B: Slot, C: Slot) -> bool:
    """Whether the fused kernel takes this call: it exists for the GPU, there are tokens, x, B and C can be read through tensor maps."""
    return p.has("fused_main") and 0 not in x.shape and all(_mappable(slot) for slot in (x, B, C))


def _mappable(slot: Slot) -> bool:
    """Whether a tensor map can describe the slot: contiguous 16-byte aligned rows, no stride of 0 (an expanded dimension)."""
    pitches = [s * slot.dtype.itemsize for n, s in zip(slot.shape[:-1], slot.stride[:-1]) if n > 1]
    return slot.stride[-1] == 1 and slot.aligned(WIDE) and all(0 < pitch < _LONGEST_STRIDE for pitch in pitches)


@dataclass(frozen=True)
class Cut:
    """How a chain is cut: ``segs`` segments of ``seg_chunks`` chunks, and whether a scout makes the states at their starts."""

    segs: int
    seg_chunks: int
    scouts: bool = False

    @property
    def parts(self) -> int:
        """CTAs of a chain."""
        return self.segs + self.scouts


@functools.lru_cache(maxsize=256)
def cut(chains: int, chunks: int, sms: int) -> Cut:
    """The cut that takes least, for ``chains`` sequences of ``chunks`` chunks on ``sms`` SMs. The result's bits do not depend on it.

    Times are in chunks of a CTA (about 1 us). With more chains than SMs, segments that follow one another even out the last wave
    of CTAs. With fewer, scouts let a chain's segments run at the same time, where that gains a tenth.
    """
    if chains > sms:
        counts = range(1, max(1, min(16, chunks // 8)) + 1)
        best = min(counts, key=lambda n: (math.ceil(chains * n / sms) * (math.ceil(chunks / n) + _START), n))
        return _cut(best, chunks)
    whole = Cut(1, chunks)
    scouted = [_cut(n, chunks, scouts=True) for n in (2, 3, 4, 6, 8, 16) if chunks >= 8 * n]
    if not scouted:
        return whole
    best_time, best_cut = min(((_scouted_time(chains, c, sms), c) for c in scouted), key=lambda pair: pair[0])
    return best_cut if 1.1 * best_time < chunks + _START else whole


#: A CTA's start and end, what a scout needs for a chunk, and the ticket with its clearing, in chunks of a CTA.
_START, _SCOUT, _TICKETS = 3.5, 0.52, 3.0


def _cut(n: int, chunks: int, scouts: bool = False) -> Cut:
    seg_chunks = math.ceil(chunks / n)
    return Cut(math.ceil(chunks / seg_chunks), seg_chunks, scouts)


def _scouted_time(chains: int, cut: Cut, sms: int) -> float:
    """When the last CTA ends, if SMs take scouts, then all chains' first segments, and so on."""
    free = [0.0] * sms
    ahead = _SCOUT * cut.seg_chunks
    for _ in range(chains):
        heapq.heapreplace(free, free[0] + _START + (cut.segs - 1) * ahead)
    for seg in range(cut.segs):
        for _ in range(chains):
            heapq.heapreplace(free, max(free[0], seg * ahead) + _START + cut.seg_chunks)
    return _TICKETS + max(free)


@dataclass(frozen=True)
class Extras:
    """What a call may have besides the five inputs: a skip D (H) or (H, P), a gate z, packed sequences, y in x's dtype."""

    D: Slot | None = None
    z: Slot | None = None
    cu_seqlens: Slot | None = None
    y_dtype: torch.dtype = torch.float32


def plan_fused(
    p: Planner,
    x: Slot,
    dt: Slot,
    A: Slot,
    B: Slot,
    C: Slot,
    dt_bias: Slot | None,
    initial: Slot | None,
    extras: Extras | None = None,
    *,
    dt_softplus: bool,
    dt_min: float,
    dt_max: float,
) -> tuple[Slot, Slot]:
    """Add the launches of y and final_states; ``serves`` has said yes. With cu_seqlens (int32, n + 1) the states are n sequences'."""
    extras = extras or Extras()
    D, z, cu_seqlens = extras.D, extras.z, extras.cu_seqlens
    batch, seqlen, heads, head_dim = x.shape
    groups, d_state = B.shape[2:]
    sequences = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    chains = sequences * heads * math.ceil(head_dim / ROWS)
    # Packed sequences are of any length: only the longest possible one is known here, and cutting them is not worth it.
    chunks = math.ceil(seqlen / CHUNK)
    split = cut(chains, chunks, p.multiprocessors) if cu_seqlens is None or sequences == 1 else Cut(1, chunks)
    y = p.empty((batch, seqlen, heads, head_dim), extras.y_dtype)
    final_states = p.empty((sequences, heads, head_dim, d_state), torch.float32)
    carry = sync = final_states  # not touched with one CTA a chain
    if split.parts > 1:
        columns = next(n for n in (64, 128, 256) if n >= d_state)  # the kernel's tile of d_state
        carry = p.workspace((chains * split.parts, ROWS * columns), torch.float32)
        sync = p.workspace((1 + chains * 4 * max(1, columns // 128),), torch.int32)  # a ticket, and a flag a warp that holds state
        p.launch("fused_clear", {}, {"sync": sync}, {"M": sync.shape[0]})
    flags = {
        "SOFTPLUS": dt_softplus,
        "BIAS": dt_bias is not None,
        "INITIAL": initial is not None,
        "SKIP": D is not None,
        "GATE": z is not None,
        "PACKED": cu_seqlens is not None,
        "SCOUTS": split.scouts,
        "ALWAYS": True,
    }
    packed_A = packed(p, A)
    tensors = {
        "x": x,
        "dt": p.dense(dt),
        "A": packed_A,
        "Bm": B,
        "Cm": C,
        "carry": carry,
        "sync": sync,
        "y": y,
        "final_states": final_states,
        # Where one of these is not given its flag is off, and any memory stands for it.
        "dt_bias": packed_A if dt_bias is None else packed(p, dt_bias),
        "initial_states": final_states if initial is None else packed(p, initial),
        "D": final_states if D is None else _by_column(p, D, head_dim),
        "z": x if z is None else aligned_rows(p, z),
        "cu_seqlens": final_states if cu_seqlens is None else packed(p, cu_seqlens),
    }
    p.launch(
        "fused_main",
        {"P": head_dim, "N": d_state, "dtype": _checks.dtype_name(x.dtype), "y_float32": extras.y_dtype == torch.float32},
        tensors,
        {
            "B": batch,
            "S": seqlen,
            "H": heads,
            "G": groups,
            "M": sequences,
            "parts": split.parts,
            "seg_chunks": split.seg_chunks,
            "flags": sum(on << bit for bit, on in enumerate(flags.values())),
        },
        {"dt_min": dt_min, "dt_max": dt_max},
    )
    return y, final_states


def _by_column(p: Planner, D: Slot, head_dim: int) -> Slot:
    """D as (H, P), with a stride of 0 where it is (H)."""
    if len(D.shape) == 2:
        return p.dense(D)
    return replace(D, shape=(*D.shape, head_dim), stride=(*D.stride, 0))
