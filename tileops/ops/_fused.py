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
    return seq_idx is None and p.has("fused_main") and 0 not in x.shape and _mappable(x) and _mappable(B) and _mappable(C)


def writes(out: Slot) -> bool:
    """Whether it can write y where it is to go: by a tensor map of contiguous rows."""
    return out.is_contiguous() and out.aligned(WIDE)


def _mappable(slot: Slot) -> bool:
    """Whether a tensor map can describe the slot: contiguous 16-byte aligned rows, no stride of 0 (an expanded dimension)."""
    longest = _LONGEST_STRIDE // slot.dtype.itemsize
    for n, s in zip(slot.shape[:-1], slot.stride):
        if not 0 < s < longest and n > 1:
            return False
    return slot.stride[-1] == 1 and slot.aligned(WIDE)


@dataclass(frozen=True)
class Cut:
    """How a chain is cut: ``segs`` segments, the first of ``first`` chunks, the others of ``seg_chunks`` (the last of what is left), and
    whether a scout makes the states at their starts."""

    segs: int
    first: int
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
        return _cut(best, chunks, 1 / best)
    # Of two sequences that are nearly as long, the second costs no search.
    step = 1 << max(0, chunks.bit_length() - 5)
    segs, share = _scouted(chains, chunks // step * step, sms)
    return _cut(segs, chunks, share, scouts=segs > 1)


#: In chunks of a CTA: its start and end, what a scout needs for a chunk, the way of a state from the scout to a segment, and the tickets
#: with their clearing. Fitted to 40 cuts of 7 sizes on an H200, which they give within 2.2 % (docs/kernels.md, "Cuts").
_START, _SCOUT, _CARRY, _TICKETS = 3.0, 0.5, 1.5, 3.0


def _cut(segs: int, chunks: int, share: float, scouts: bool = False) -> Cut:
    """``segs`` segments, the first with ``share`` of the chunks."""
    first = min(max(1, round(share * chunks)), chunks)
    seg_chunks = math.ceil((chunks - first) / max(segs - 1, 1)) or 1
    return Cut(1 + math.ceil((chunks - first) / seg_chunks), first, seg_chunks, scouts)


@functools.lru_cache(maxsize=256)
def _scouted(chains: int, chunks: int, sms: int) -> tuple[int, float]:
    """How many segments with a scout, and the first one's share; (1, 1.0) where that gains less than a tenth. The first segment need not
    wait for the scout, so it is tried as long as the others, as long as makes it end with the last of them, and between."""
    best, found = (chunks + _START) / 1.1, (1, 1.0)
    for n in (2, 3, 4, 6, 8, 16):
        if chunks < 8 * n or n > 2 + sms / chains:  # more segments than that have no SMs to run on
            break
        later = (1 + _SCOUT * (n - 2)) / (n - 1)
        longest = later / (1 - _SCOUT + later)
        for share in (1 / n, (1 / n + longest) / 2, longest):
            time = _scouted_time(chains, _cut(n, chunks, share, scouts=True), chunks, sms)
            if time < best:
                best, found = time, (n, share)
    return found


def cut_pack(chains: int, chunks: int, sequences: int, sms: int) -> Cut:
    """The cut for packed sequences of ``chunks`` chunks together. Their lengths are known on the device only: segments are as long as
    for equal ones, and a chain has CTAs for a sequence that is all of the pack. Those that a sequence does not need end at once."""
    mean = math.ceil(chunks / sequences)
    each = cut(chains, mean, sms)
    if sequences == 1:
        return each
    whole = _cut(1, chunks, 1.0)
    found = replace(each, segs=1 + math.ceil((chunks - each.first) / each.seg_chunks))
    if not each.scouts or chains * found.parts > _MOST_CTAS:
        return whole
    empty = chains * (found.segs - each.segs) / sms * _EMPTY
    return found if 1.1 * (_scouted_time(chains, each, mean, sms) + empty) < mean + _START else whole


#: What a CTA that ends at once takes, in chunks (an estimate); and how many CTAs a cut pack has at most: each has a place for a state.
_EMPTY, _MOST_CTAS = 1.0, 2048


def _scouted_time(chains: int, cut: Cut, chunks: int, sms: int) -> float:
    """When the last CTA ends, if SMs take scouts, then all chains' first segments, and so on."""
    free = [(0.0, sms)]  # a heap of (time, how many SMs are free from then on)
    starts = [0, *range(cut.first, chunks, cut.seg_chunks)]
    lengths = [b - a for a, b in zip(starts, [*starts[1:], chunks])]
    segments = [(_SCOUT * a + (_CARRY if a else 0.0), float(n)) for a, n in zip(starts, lengths)]
    for start, length in [(0.0, _SCOUT * starts[-1]), *segments]:
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
        outside = y._replace(shape=(seqlen, words), stride=(words, 1), dtype=torch.int32)
        p.launch("pack_rest", {}, {"cu_seqlens": cu_seqlens, "y": outside}, {"M": sequences + 1, "S": seqlen, "W": words})
    flags = ALWAYS + SOFTPLUS * dt_softplus + BIAS * (dt_bias is not None) + INITIAL * (initial is not None) + SKIP * (D is not None)
    flags += GATE * (z is not None) + PACKED * (cu_seqlens is not None) + SCOUTS * split.scouts
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
            "first_chunks": split.first,
            "seg_chunks": split.seg_chunks,
            "flags": flags,
        },
        {"dt_min": dt_min, "dt_max": dt_max},
    )
    return final_states
