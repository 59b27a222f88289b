"""SSDChunkCouplingFwdOp: the products C[l] . B[s] within each chunk."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tileops.config import Value
from tileops.ops import _checks
from tileops.ops._base import Op
from tileops.ops._layout import all_aligned
from tileops.ops._library import library_op

if TYPE_CHECKING:
    from tileops.ops._planner import Planner, Slot


@library_op
class SSDChunkCouplingFwdOp(Op):
    """CB (C @ B) matrix producer.

        cb[b, c, g, l, s] = sum_n C[b, cQ+l, g, n] * B[b, cQ+s, g, n]  for s <= l, else 0

    Sums are float32; cb is rounded to the inputs' dtype, so float16 needs |cb| <= 65504. Rows past seqlen count as 0.

    Source: Dao and Gu, "Transformers are SSMs", 2024 (arXiv 2405.21060), section 6.
    Targets: any layout; on CUDA a tensor whose last dimension is strided is copied at each call.

    Args:
        chunk_len: tokens per chunk (Q). The CUDA kernels take 16, 32, 64, 128 and 256, the reference up to 4096.
        target: a target name, ``tileops.BUILTIN`` for the in-tree kernels, or None to decide from the input device.

    Raises:
        ValueError, TypeError: chunk_len is not a positive int.
        TargetError: ``target`` is not registered.
    """

    def __init__(self, chunk_len: int, *, target: str | None = None) -> None:
        self.chunk_len = _checks.positive_int("chunk_len", chunk_len)
        super().__init__(target)

    def forward(self, C_mat: Tensor, B_mat: Tensor) -> Tensor:
        """Compute cb.

        Args:
            C_mat: (batch, seqlen, n_groups, d_state) bfloat16 or float16 (the reference also takes float32).
            B_mat: as C_mat, same dtype.

        Returns:
            cb: (batch, num_chunks, n_groups, chunk_len, chunk_len), the inputs' dtype; num_chunks = ceil(seqlen / chunk_len).

        Raises:
            ValueError: a wrong shape, dtype or device, an input that requires grad, on CUDA a d_state outside 16, 32 ... 256.
            TypeError: an argument that is no tensor.
            MissingKernelError, IncompatibleArtifactError, CompileError: CUDA tensors whose kernel cannot be had.
        """
        result: Tensor = self._run(C_mat, B_mat)
        return result

    def options(self) -> dict[str, Any]:
        return {"chunk_len": self.chunk_len}

    @staticmethod
    def empty(C_mat: Tensor, B_mat: Tensor, *, chunk_len: int) -> Tensor:
        batch, seqlen, groups, _ = C_mat.shape
        return C_mat.new_empty((batch, -(-seqlen // chunk_len), groups, chunk_len, chunk_len))

    def check(self, *tensors: Any, alike: bool = False) -> None:
        C_mat, B_mat = tensors
        a = _checks.Arguments(alike)
        a.tensor("C_mat", C_mat, ("batch", "seqlen", "n_groups", "d_state"), _checks.INPUT_DTYPES)
        a.at_least_one("n_groups", "d_state")
        a.tensor("B_mat", B_mat, ("batch", "seqlen", "n_groups", "d_state"), (C_mat.dtype,), "that of C_mat")

    def check_builtin(self, *tensors: Any) -> None:
        _checks.half("C_mat", tensors[0].dtype)
        _checks.supported("chunk_coupling", chunk_len=self.chunk_len, d_state=tensors[0].shape[-1])

    def kernels(self) -> list[tuple[str, dict[str, Value]]]:
        return [("chunk_coupling", {"Q": self.chunk_len, "cb_float32": False})]

    def plan(self, p: Planner, *slots: Slot | None) -> Slot:
        C_mat, B_mat = slots
        assert C_mat is not None and B_mat is not None
        return plan_chunk_coupling(p, p.empty, C_mat, B_mat, chunk_len=self.chunk_len)


def plan_chunk_coupling(
    p: Planner, new: Callable[[tuple[int, ...], torch.dtype], Slot], C_mat: Slot, B_mat: Slot, *, chunk_len: int, cb_float32: bool = False
) -> Slot:
    """Add the launch; ``new`` (p.empty or p.workspace) makes cb, of float32 or of the inputs' dtype."""
    batch, seqlen, groups, d_state = C_mat.shape
    chunks = _checks.num_chunks(seqlen, chunk_len)
    cb = new((batch, chunks, groups, chunk_len, chunk_len), torch.float32 if cb_float32 else C_mat.dtype)
    C_mat, B_mat = p.dense(C_mat), p.dense(B_mat)
    p.launch(
        "chunk_coupling",
        {
            "Q": chunk_len,
            "N": d_state,
            "dtype": _checks.dtype_name(C_mat.dtype),
            "aligned": all_aligned(C_mat, B_mat),
            "cb_float32": cb_float32,
        },
        {"Cm": C_mat, "Bm": B_mat, "cb": cb},
        {"B": batch, "S": seqlen, "G": groups, "C": chunks},
    )
    return cb
