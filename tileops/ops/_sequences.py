"""Several sequences in one call of the full forward, on the five stages: ``cu_seqlens`` and ``seq_idx``.

A pack (cu_seqlens) is laid out anew so that every sequence starts a chunk and chunks are filled up with tokens on which no
time passes; the stages then see whole chunks, and a sequence's results have the bits that it has alone. How many chunks
the pack has is known on the device only; the launches are sized for the most there can be.

With seq_idx the tokens stay where they are: sums over a chunk leave out the pairs of different sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
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
    """Where the tokens of a pack lie in whole chunks."""

    seqlen: int
    starts: Slot  # (n_seqs + 1) chunks before each sequence
    rows: Slot  # (seqlen) where each token is; -1 for one of no sequence
    tokens: Slot  # (all rows) which token each row holds, as kernels/pack_map.py has it

    def laid_out(self, p: Planner, source: Slot) -> Slot:
        """Add the launch that copies a (1, seqlen, ...) input, of 16-bit or 32-bit elements, to where its tokens lie."""
        from tileops.ops._planner import contiguous_strides  # here: it brings the driver

        source = p.dense(source)
        size = source.dtype.itemsize // 2  # the kernel copies 16-bit elements
        *outer, inner = source.shape[2:]
        *pitches, _ = source.stride[1:]
        width = 8 if source.aligned(WIDE) and inner * size % 8 == 0 else 1
        tail = (*(outer or [1]), inner * size // width, width)
        stride = (*(s * size for s in pitches), *([] if outer else [0]), width, 1)
        length = self.tokens.shape[0]
        out = p.workspace((1, length, *source.shape[2:]), source.dtype)
        p.launch(
            "pack_rows",
            {"aligned": width > 1},
            {
                "source": source._replace(shape=(self.seqlen, *tail), stride=stride),
                "tokens": self.tokens,
                "out": out._replace(shape=(length, *tail), stride=contiguous_strides((length, *tail))),
            },
            {"S": self.seqlen, "R": length, "A": tail[0], "D": tail[1]},
        )
        return out

    def end(self, p: Planner, dt_out: Slot, dA_cumsum: Slot) -> None:
        """Add the launch that makes no time pass behind the end of each sequence."""
        _, heads, chunks, chunk_len = dt_out.shape
        flat = (heads, chunks * chunk_len)
        tensors = {"tokens": self.tokens, "dt_out": dt_out.view(flat), "dA_cumsum": dA_cumsum.view(flat)}
        p.launch("pack_tails", {}, tensors, {"H": heads, "R": flat[1], "Q": chunk_len})


def plan_pack(p: Planner, cu_seqlens: Slot, seqlen: int, chunk_len: int) -> Pack:
    """Add the launches that say where the tokens of a pack lie."""
    n_seqs = cu_seqlens.shape[0] - 1
    chunks = most_chunks(seqlen, n_seqs, chunk_len)
    length = chunks * chunk_len
    if seqlen + length > _MOST_ROWS:
        raise ValueError(
            f"cu_seqlens: expected at most {_MOST_ROWS} tokens, counting up to {length} of {n_seqs} sequences in whole chunks of "
            f"{chunk_len}, got {seqlen + length}."
        )
    cu_seqlens = packed(p, cu_seqlens)
    pack = Pack(seqlen, *(p.workspace((n,), torch.int32) for n in (n_seqs + 1, seqlen, length)))
    sizes = {"M": n_seqs + 1, "S": seqlen, "Q": chunk_len}
    tensors = {"cu_seqlens": cu_seqlens, "starts": pack.starts}
    p.launch("pack_starts", {}, tensors, {**sizes, "C": chunks})
    p.launch("pack_map", {}, {**tensors, "rows": pack.rows, "tokens": pack.tokens}, {**sizes, "R": length})
    return pack


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
    p.launch(
        "seq_passing",
        {"packed": is_pack},
        {
            "states": states,
            "dA_chunk": dA_chunk,
            "initial_states": initial_states,
            "bounds": bounds,
            "prev_states": prev_states,
            "final_states": final_states,
        },
        {"B": chains, "H": heads, "C": chunks, "M": size},
    )
    return prev_states
