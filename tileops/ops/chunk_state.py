"""SSDChunkStateFwdOp: the state that each chunk alone would end in."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tileops.config import Value
from tileops.ops import _checks
from tileops.ops._base import Op
from tileops.ops._layout import all_aligned, packed
from tileops.ops._library import library_op

if TYPE_CHECKING:
    from tileops.ops._planner import Planner, Slot


@library_op
class SSDChunkStateFwdOp(Op):
    """Mamba-2 chunk state: the state at each chunk's end, from that chunk's tokens alone.

        out[b, c, h, p, n] = sum_{l < Q} x[b, cQ+l, h, p] * B[b, cQ+l, g, n] * w[b, h, c, l]        g = h // (n_heads // n_groups)
        w[b, h, c, l]      = exp(min(dA_cumsum[b, h, c, Q-1] - dA_cumsum[b, h, c, l], 0)) * dt[b, h, c, l]

    With seq_idx, w counts only where ``seq_idx[b, cQ+l] == seq_idx[b, cQ+Q-1] >= 0``: tokens of the sequence that the chunk
    ends in. A chunk whose end has a negative index is 0. Tokens that do not count are not read into the sum, so NaN
    there does no harm. In a last chunk that seq_len cuts short, the last real token is the chunk's end.

    Source: Dao and Gu, "Transformers are SSMs", 2024 (arXiv 2405.21060), section 6.
    Targets: any layout. On CUDA a tensor whose last dimension is strided is copied at each call, and so is a dt or
    dA_cumsum that is not contiguous and 16-byte aligned (what SSDChunkCumsumFwdOp returns is).

    Args:
        target: a target name, ``tileops.BUILTIN`` for the in-tree kernels, or None to decide from the input device.

    Raises:
        TargetError: ``target`` is not registered.
    """

    def __init__(self, *, target: str | None = None) -> None:
        super().__init__(target)

    def forward(self, x: Tensor, Bmat: Tensor, dt: Tensor, dA_cumsum: Tensor, seq_idx: Tensor | None = None) -> Tensor:
        """Run the SSD chunk state forward pass.

        Args:
            x: (batch, seq_len, n_heads, d_head) bfloat16 or float16 (the reference also takes float32).
            Bmat: (batch, seq_len, n_groups, d_state), x's dtype; n_heads is a multiple of n_groups.
            dt: (batch, n_heads, num_chunks, chunk_len), x's dtype or float32, after bias and softplus.
            dA_cumsum: (batch, n_heads, num_chunks, chunk_len) float32, as SSDChunkCumsumFwdOp makes it.
            seq_idx: (batch, seq_len) int32, optional: which sequence each token belongs to.

        Returns:
            states: (batch, num_chunks, n_heads, d_head, d_state) float32.

        Raises:
            ValueError: a wrong shape, dtype or device, n_heads % n_groups, num_chunks != ceil(seq_len / chunk_len), an
                input that requires grad, on CUDA a d_head or d_state outside 16, 32 ... 256 or an unsupported chunk_len.
            TypeError: an argument that is no tensor.
            MissingKernelError, IncompatibleArtifactError, CompileError: CUDA tensors whose kernel cannot be had.
        """
        result: Tensor = self._run(x, Bmat, dt, dA_cumsum, seq_idx)
        return result

    @staticmethod
    def empty(x: Tensor, Bmat: Tensor, dt: Tensor, dA_cumsum: Tensor, seq_idx: Tensor | None) -> Tensor:
        return x.new_empty((x.shape[0], dt.shape[2], *x.shape[2:], Bmat.shape[3]), dtype=torch.float32)

    def check(self, *tensors: Any, alike: bool = False) -> None:
        x, Bmat, dt, dA_cumsum, seq_idx = tensors
        a = _checks.Arguments(alike)
        a.tensor("x", x, ("batch", "seq_len", "n_heads", "d_head"), _checks.INPUT_DTYPES)
        a.tensor("Bmat", Bmat, ("batch", "seq_len", "n_groups", "d_state"), (x.dtype,), "that of x")
        a.at_least_one("n_heads", "d_head", "n_groups", "d_state")
        a.heads_per_group()
        a.tensor("dt", dt, ("batch", "n_heads", "num_chunks", "chunk_len"), (x.dtype, torch.float32), "that of x, or float32")
        a.at_least_one("chunk_len")
        a.chunks("dt", "seq_len")
        a.tensor("dA_cumsum", dA_cumsum, ("batch", "n_heads", "num_chunks", "chunk_len"), _checks.FLOAT32)
        a.optional("seq_idx", seq_idx, ("batch", "seq_len"), _checks.INT32)

    def check_builtin(self, *tensors: Any) -> None:
        x, Bmat, dt = tensors[:3]
        _checks.half("x", x.dtype)
        _checks.supported("chunk_state", chunk_len=dt.shape[-1], d_head=x.shape[-1], d_state=Bmat.shape[-1])

    def kernels(self) -> list[tuple[str, dict[str, Value]]]:
        return [("chunk_state", {})]

    def plan(self, p: Planner, *slots: Slot | None) -> Slot:
        x, Bmat, dt, dA_cumsum, seq_idx = slots
        assert x is not None and Bmat is not None and dt is not None and dA_cumsum is not None
        return plan_chunk_state(p, p.empty, x, Bmat, packed(p, dt), packed(p, dA_cumsum), seq_idx)


def plan_chunk_state(
    p: Planner,
    new: Callable[[tuple[int, ...], torch.dtype], Slot],
    x: Slot,
    Bmat: Slot,
    dt: Slot,
    dA_cumsum: Slot,
    seq_idx: Slot | None = None,
) -> Slot:
    """Add the launch; ``new`` (p.empty or p.workspace) makes states. dt and dA_cumsum are packed."""
    batch, seqlen, heads, head_dim = x.shape
    groups, d_state = Bmat.shape[2:]
    chunks, chunk_len = dt.shape[2:]
    states = new((batch, chunks, heads, head_dim, d_state), torch.float32)
    x, Bmat = p.dense(x), p.dense(Bmat)
    sequences = None if seq_idx is None else p.dense(seq_idx)
    p.launch(
        "chunk_state",
        {
            "Q": chunk_len,
            "P": head_dim,
            "N": d_state,
            "dtype": _checks.dtype_name(x.dtype),
            "dt_dtype": _checks.dtype_name(dt.dtype),
            "aligned": all_aligned(x, Bmat),
        },
        {"x": x, "Bm": Bmat, "dt": dt, "dA_cumsum": dA_cumsum, "seq_idx": sequences, "states": states},
        {"B": batch, "S": seqlen, "H": heads, "G": groups, "C": chunks},
    )
    return states
