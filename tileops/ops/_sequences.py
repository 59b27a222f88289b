"""Several sequences in one call of the full forward, on the five stages: ``cu_seqlens`` and ``seq_idx``.

A pack (cu_seqlens) is laid out anew so that every sequence starts a chunk and chunks are filled up with tokens on which no
time passes; the stages then see whole chunks, and a sequence's results have the bits that it has alone. How many chunks
the pack has is known on the device only; the launches are sized for the most there can be.

With seq_idx the tokens stay where they are: sums over a chunk leave out the pairs of different sequences.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from tileops.ops._layout import WIDE, packed

if TYPE_CHECKING:
    from tileops.ops._planner import Planner, Slot

#: The kernels count tokens, and rows of the chunks that hold them, in 32 bits.
_MOST_ROWS = 2**31 - 1


def most_chunks(seqlen: int, n_seqs: int, chunk_len: int) -> int:
    """The most chunks that n_seqs sequences of seqlen tokens in all can have: each ends with at least one token in its last."""
    return min(seqlen, (seqlen + n_seqs * (chunk_len - 1)) // chunk_len) if n_seqs else 0


@dataclass(frozen=True)
class Pack:
    """A pack in whole chunks, a batch of 1: dt is after bias, softplus and limits."""

    x: Slot
    dt: Slot
    A: Slot
    B: Slot
    C: Slot
    starts: Slot  # (n_seqs + 1) chunks before each sequence
    rows: Slot  # (seqlen) where each token is; -1 for one of no sequence


def plan_pack(
    p: Planner,
    cu_seqlens: Slot,
    x: Slot,
    dt: Slot,
    A: Slot,
    B: Slot,
    C: Slot,
    dt_bias: Slot | None,
    *,
    chunk_len: int,
    dt_softplus: bool,
    dt_min: float,
    dt_max: float,
) -> Pack:
    """Add the launches that lay a pack out in whole chunks."""
    seqlen, heads = dt.shape[1:]
    n_seqs = cu_seqlens.shape[0] - 1
    chunks = most_chunks(seqlen, n_seqs, chunk_len)
    length = chunks * chunk_len
    if seqlen + length > _MOST_ROWS:
        raise ValueError(
            f"cu_seqlens: expected at most {_MOST_ROWS} tokens, counting up to {length} of {n_seqs} sequences in whole chunks of "
            f"{chunk_len}, got {seqlen + length}."
        )
    cu_seqlens = packed(p, cu_seqlens)
    starts = p.workspace((n_seqs + 1,), torch.int32)
    rows = p.workspace((seqlen,), torch.int32)
    tokens = p.workspace((length,), torch.int32)
    sizes = {"M": n_seqs + 1, "S": seqlen, "Q": chunk_len}
    p.launch("pack_starts", {}, {"cu_seqlens": cu_seqlens, "starts": starts}, {**sizes, "C": chunks})
    p.launch("pack_map", {}, {"cu_seqlens": cu_seqlens, "starts": starts, "rows": rows, "tokens": tokens}, {**sizes, "R": length})
    steps = p.workspace((1, length, heads), torch.float32)
    rates = p.workspace((heads,), torch.float32)
    dt = p.dense(dt)
    tensors = {
        "dt": replace(dt, shape=dt.shape[1:], stride=dt.stride[1:]),
        "tokens": tokens,
        "A": packed(p, A),
        "out": steps,
        "rates": rates,
    }
    if dt_bias is not None:
        tensors["dt_bias"] = packed(p, dt_bias)
    p.launch(
        "pack_steps",
        {"softplus": dt_softplus, "has_bias": dt_bias is not None},
        tensors,
        {"S": seqlen, "R": length, "H": heads},
        {"dt_min": dt_min, "dt_max": dt_max},
    )
    return Pack(_rows(p, x, tokens), steps, rates, _rows(p, B, tokens), _rows(p, C, tokens), starts, rows)


def _rows(p: Planner, source: Slot, tokens: Slot) -> Slot:
    """A (1, seqlen, A, D) tensor of 16-bit elements in whole chunks."""
    seqlen, outer, inner = source.shape[1:]
    length = tokens.shape[0]
    source = p.dense(source)
    aligned = source.aligned(WIDE)
    width = 8 if aligned else 1
    out = p.workspace((1, length, outer, inner), source.dtype)
    tail = (outer, inner // width, width)
    p.launch(
        "pack_rows",
        {"aligned": aligned},
        {
            "source": replace(source, shape=(seqlen, *tail), stride=(*source.stride[1:3], width, 1)),
            "tokens": tokens,
            "out": out.view((length, *tail)),
        },
        {"S": seqlen, "R": length, "A": outer, "D": inner // width},
    )
    return out


def plan_runs(p: Planner, seq_idx: Slot, dA_cumsum: Slot, cb: Slot) -> tuple[Slot, Slot]:
    """Add the launches that part the sequences of each row, in dA_cumsum and cb; (runs, cuts) as kernels/seq_runs.py has them."""
    batch, heads, chunks, chunk_len = dA_cumsum.shape
    seqlen = seq_idx.shape[1]
    runs, cuts = p.workspace((batch, seqlen), torch.int32), p.workspace((batch, chunks), torch.int32)
    sizes = {"B": batch, "S": seqlen, "C": chunks}
    p.launch("seq_runs", {"Q": chunk_len}, {"seq_idx": seq_idx, "dA_cumsum": dA_cumsum, "runs": runs, "cuts": cuts}, {**sizes, "H": heads})
    p.launch("seq_mask", {"Q": chunk_len}, {"cb": cb, "runs": runs, "cuts": cuts}, {**sizes, "G": cb.shape[2]})
    return runs, cuts


def plan_seq_passing(
    p: Planner, states: Slot, dA_chunk: Slot, initial_states: Slot | None, bounds: Slot, final_states: Slot, *, is_pack: bool
) -> Slot:
    """As ``plan_state_passing``; ``bounds`` are a pack's starts, else the cuts of ``plan_runs``."""
    chains, heads, size = final_states.shape
    chunks = states.shape[1]
    prev_states = p.workspace(states.shape, torch.float32)
    if chunks == 0:
        if initial_states is None:
            p.fill_zero(final_states)
        else:
            p.copy(final_states, initial_states)
        return prev_states
    tensors = {"states": states, "dA_chunk": dA_chunk, "bounds": bounds, "prev_states": prev_states, "final_states": final_states}
    if initial_states is not None:
        tensors["initial_states"] = initial_states
    p.launch(
        "seq_passing",
        {"has_initial_states": initial_states is not None, "packed": is_pack},
        tensors,
        {"B": chains, "H": heads, "C": chunks, "M": size},
    )
    return prev_states
