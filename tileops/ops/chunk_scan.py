"""SSDChunkScanFwdOp: the output from the state before each chunk and the chunk's own tokens."""

from __future__ import annotations

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
class SSDChunkScanFwdOp(Op):
    """Mamba-2 fused chunk output: history and intra-chunk part in one pass. With l, s within a chunk:

        out[l, p] = exp(dA_cumsum[l]) * sum_n C[l, n] * prev_states[p, n]
                    + sum_{s <= l} cb[l, s] * exp(min(dA_cumsum[l] - dA_cumsum[s], 0)) * dt[s] * x[s, p]

    Head h uses group g = h // (n_heads // n_groups) of C and cb. cb above the diagonal has no effect. The op takes no
    seq_idx: it does not separate sequences that share a row.

    Source: Dao and Gu, "Transformers are SSMs", 2024 (arXiv 2405.21060), section 6.
    Targets: any layout. On CUDA an x or C whose last dimension is strided is copied at each call, and so is any of the
    others that is not contiguous and 16-byte aligned (what the other stages return is).

    Args:
        target: a target name, ``tileops.BUILTIN`` for the in-tree kernels, or None to decide from the input device.

    Raises:
        TargetError: ``target`` is not registered.
    """

    def __init__(self, *, target: str | None = None) -> None:
        super().__init__(target)

    def forward(self, x: Tensor, cb: Tensor, dA_cumsum: Tensor, C: Tensor, prev_states: Tensor, dt: Tensor) -> Tensor:
        """Run the fused SSD chunk output pass.

        Args:
            x: (batch, seqlen, n_heads, d_head) bfloat16 or float16 (the reference also takes float32).
            cb: (batch, num_chunks, n_groups, chunk_len, chunk_len), x's dtype; n_heads is a multiple of n_groups.
            dA_cumsum: (batch, n_heads, num_chunks, chunk_len) float32.
            C: (batch, seqlen, n_groups, d_state), x's dtype.
            prev_states: (batch, num_chunks, n_heads, d_head, d_state) float32, the state before each chunk.
            dt: (batch, n_heads, num_chunks, chunk_len), x's dtype or float32, after bias and softplus.

        Returns:
            y: (batch, seqlen, n_heads, d_head) float32.

        Raises:
            ValueError: a wrong shape, dtype or device, n_heads % n_groups, num_chunks != ceil(seqlen / chunk_len), an
                input that requires grad, on CUDA a d_head or d_state outside 16, 32 ... 256 or an unsupported chunk_len.
            TypeError: an argument that is no tensor.
            MissingKernelError, IncompatibleArtifactError, CompileError: CUDA tensors whose kernel cannot be had.
        """
        result: Tensor = self._run(x, cb, dA_cumsum, C, prev_states, dt)
        return result

    @staticmethod
    def empty(x: Tensor, cb: Tensor, dA_cumsum: Tensor, C: Tensor, prev_states: Tensor, dt: Tensor) -> Tensor:
        return x.new_empty(x.shape, dtype=torch.float32)

    def check(self, *tensors: Any, alike: bool = False) -> None:
        x, cb, dA_cumsum, C, prev_states, dt = tensors
        a = _checks.Arguments(alike)
        a.tensor("x", x, ("batch", "seqlen", "n_heads", "d_head"), _checks.INPUT_DTYPES)
        if isinstance(C, Tensor) and C.dim() == 4:
            a.sizes["n_groups"] = C.shape[2]  # C's group count is the call's; it tells a cb per head from a cb per group
        a.tensor("cb", cb, ("batch", "num_chunks", "n_groups", "chunk_len", "chunk_len"), (x.dtype,), "that of x")
        a.at_least_one("n_heads", "d_head", "n_groups", "chunk_len")
        if cb.shape[-2] != cb.shape[-1]:
            raise ValueError(f"cb: expected chunk_len twice in its last two dimensions, got shape {tuple(cb.shape)}.")
        a.heads_per_group()
        a.chunks("cb", "seqlen")
        a.tensor("dA_cumsum", dA_cumsum, ("batch", "n_heads", "num_chunks", "chunk_len"), _checks.FLOAT32)
        a.tensor("C", C, ("batch", "seqlen", "n_groups", "d_state"), (x.dtype,), "that of x")
        a.at_least_one("d_state")
        a.tensor("prev_states", prev_states, ("batch", "num_chunks", "n_heads", "d_head", "d_state"), _checks.FLOAT32)
        a.tensor("dt", dt, ("batch", "n_heads", "num_chunks", "chunk_len"), (x.dtype, torch.float32), "that of x, or float32")

    def check_builtin(self, *tensors: Any) -> None:
        x, cb, _, C = tensors[:4]
        _checks.half("x", x.dtype)
        _checks.supported("chunk_scan", chunk_len=cb.shape[-1], d_head=x.shape[-1], d_state=C.shape[-1])

    def kernels(self) -> list[tuple[str, dict[str, Value]]]:
        return [("chunk_scan", {"cb_float32": False})]

    def plan(self, p: Planner, *slots: Slot | None) -> Slot:
        x, cb, dA_cumsum, C, prev_states, dt = (s for s in slots if s is not None)
        return plan_chunk_scan(p, x, packed(p, cb), packed(p, dA_cumsum), C, packed(p, prev_states), packed(p, dt))


def plan_chunk_scan(p: Planner, x: Slot, cb: Slot, dA_cumsum: Slot, C: Slot, prev_states: Slot, dt: Slot) -> Slot:
    """Add the launch; y is always an output. All but x and C are packed; cb is in x's dtype, or float32."""
    batch, seqlen, heads, head_dim = x.shape
    groups, d_state = C.shape[2:]
    chunks, chunk_len = dt.shape[2:]
    y = p.empty((batch, seqlen, heads, head_dim), torch.float32)
    x, C = p.dense(x), p.dense(C)
    p.launch(
        "chunk_scan",
        {
            "Q": chunk_len,
            "P": head_dim,
            "N": d_state,
            "dtype": _checks.dtype_name(x.dtype),
            "dt_dtype": _checks.dtype_name(dt.dtype),
            "aligned": all_aligned(x, C),
            "cb_float32": cb.dtype == torch.float32,
        },
        {"x": x, "Cm": C, "cb": cb, "dA_cumsum": dA_cumsum, "prev_states": prev_states, "dt": dt, "y": y},
        {"B": batch, "S": seqlen, "H": heads, "G": groups, "C": chunks},
    )
    return y
