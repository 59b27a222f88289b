"""The full forward in one kernel (kernels/fused_main.py), where the GPU and the layout allow it."""

from __future__ import annotations

import functools
import heapq
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from tileops.ops import _checks
from tileops.ops._layout import WIDE, expanded, packed, rows

if TYPE_CHECKING:
    from tileops.ops._planner import Planner, Slot

#: Tokens of a chunk.
CHUNK = 64

#: Strides of a tensor map are below this many bytes.
_LONGEST_STRIDE = 2**40


#: Bits of the kernel's ``flags``, as in kernels/fused_main.py; ALWAYS is set in every call.
SOFTPLUS, BIAS, INITIAL, SKIP, GATE, PACKED, SCOUTS, ALWAYS = (1 << i for i in range(8))


def tile_rows(head_dim: int, d_state: int) -> int:
    """Rows of d_head that one CTA makes, as in kernels/fused_main.py."""
    return 80 if 64 < head_dim <= 80 and d_state <= 128 else 64


def serves(p: Planner, x: Slot, B: Slot, C: Slot, seq_idx: Slot | None) -> bool:
    """Whether the fused kernel takes this call: it exists for the GPU, there are tokens, x, B and C can be read through tensor maps,
    and no seq_idx parts a row."""
    return seq_idx is None and p.has("fused_main") and 0 not in x.shape and all(_mappable(slot) for slot in (x, B, C))


def writes(out: Slot) -> bool:
    """Whether it can write y where it is to go: by a tensor map of contiguous rows."""
    return out.is_contiguous() and out.aligned(WIDE)


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


def cut_pack(chains: int, chunks: int, sequences: int, sms: int) -> Cut:
    """The cut for packed sequences of ``chunks`` chunks together. Their lengths are known on the device only: segments are as long as
    for equal ones, and a chain has CTAs for a sequence that is all of the pack. Those that a sequence does not need end at once."""
    mean = math.ceil(chunks / sequences)
    each = cut(chains, mean, sms)
    if sequences == 1:
        return each
    whole, found = Cut(1, chunks), Cut(math.ceil(chunks / each.seg_chunks), each.seg_chunks, each.scouts)
    if not each.scouts or chains * found.parts > _MOST_CTAS:
        return whole
    empty = chains * (found.segs - each.segs) / sms * _EMPTY
    return found if 1.1 * (_scouted_time(chains, each, sms) + empty) < mean + _START else whole


#: What a CTA that ends at once takes, in chunks (an estimate); and how many CTAs a cut pack has at most: each has a place for a state.
_EMPTY, _MOST_CTAS = 1.0, 2048


def _scouted_time(chains: int, cut: Cut, sms: int) -> float:
    """When the last CTA ends, if SMs take scouts, then all chains' first segments, and so on."""
    ahead = _SCOUT * cut.seg_chunks
    free = [(0.0, sms)]  # a heap of (time, how many SMs are free from then on)
    for start, length in [(0.0, (cut.segs - 1) * ahead), *((seg * ahead, float(cut.seg_chunks)) for seg in range(cut.segs))]:
        left = chains
        while left:
            time, count = heapq.heappop(free)
            taken = min(count, left)
            left -= taken
            if count > taken:
                heapq.heappush(free, (time, count - taken))
            heapq.heappush(free, (max(time, start) + _START + length, taken))
    return _TICKETS + max(time for time, _ in free)


def plan_fused(
    p: Planner,
    x: Slot,
    dt: Slot,
    A: Slot,
    B: Slot,
    C: Slot,
    dt_bias: Slot | None,
    initial: Slot | None,
    D: Slot | None,
    z: Slot | None,
    cu_seqlens: Slot | None,
    y: Slot,
    *,
    dt_softplus: bool,
    dt_min: float,
    dt_max: float,
) -> Slot:
    """Add the launches that fill ``y`` (contiguous) and make final_states; ``serves`` has said yes."""
    batch, seqlen, heads, head_dim = x.shape
    groups, d_state = B.shape[2:]
    sequences = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    tile = tile_rows(head_dim, d_state)
    chains = sequences * heads * math.ceil(head_dim / tile)
    chunks = math.ceil(seqlen / CHUNK)
    split = cut(chains, chunks, p.multiprocessors) if cu_seqlens is None else cut_pack(chains, chunks, sequences, p.multiprocessors)
    final_states = p.empty((sequences, heads, head_dim, d_state), torch.float32)
    carry = sync = None
    if split.parts > 1:
        columns = next(n for n in (64, 128, 256) if n >= d_state)  # the kernel's tile of d_state
        carry = p.workspace((chains * split.parts, tile * columns), torch.float32)
        sync = p.workspace((1 + chains * 4 * max(1, columns // 128),), torch.int32)  # a ticket, and a flag a warp that holds state
        p.launch("fused_clear", {}, {"sync": sync}, {"M": sync.shape[0]})
    if cu_seqlens is not None:
        cu_seqlens = packed(p, cu_seqlens)
        words = heads * head_dim * y.dtype.itemsize // 4
        outside = replace(y, shape=(seqlen, words), stride=(words, 1), dtype=torch.int32)
        p.launch("pack_rest", {}, {"cu_seqlens": cu_seqlens, "y": outside}, {"M": sequences + 1, "S": seqlen, "W": words})
    flags = {
        SOFTPLUS: dt_softplus,
        BIAS: dt_bias is not None,
        INITIAL: initial is not None,
        SKIP: D is not None,
        GATE: z is not None,
        PACKED: cu_seqlens is not None,
        SCOUTS: split.scouts,
    }
    p.launch(
        "fused_main",
        {"P": head_dim, "N": d_state, "dtype": _checks.dtype_name(x.dtype), "y_float32": y.dtype == torch.float32},
        {
            "x": x,
            "dt": p.dense(dt),
            "A": packed(p, A),
            "Bm": B,
            "Cm": C,
            "dt_bias": None if dt_bias is None else packed(p, dt_bias),
            "initial_states": None if initial is None else packed(p, initial),
            "D": None if D is None else expanded(D, (heads, head_dim)),
            "z": None if z is None else rows(p, z),
            "cu_seqlens": cu_seqlens,
            "carry": carry,
            "sync": sync,
            "y": y,
            "final_states": final_states,
        },
        {
            "B": batch,
            "S": seqlen,
            "H": heads,
            "G": groups,
            "M": sequences,
            "C": chains * split.parts,
            "parts": split.parts,
            "seg_chunks": split.seg_chunks,
            "flags": ALWAYS + sum(bit for bit, on in flags.items() if on),
        },
        {"dt_min": dt_min, "dt_max": dt_max},
    )
    return final_states
