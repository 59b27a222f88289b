"""SSDRecurrentFwdOp: one decode step, the state updated in place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tileops.config import Value
from tileops.ops import _checks
from tileops.ops._base import Op
from tileops.ops._layout import WIDE, rows
from tileops.ops._library import library_op

if TYPE_CHECKING:
    from tileops.ops._planner import Planner, Slot


def rows_per_cta(batch: int, tied: bool) -> int:
    """Batch rows that a CTA does one after the other: two share one reading of a full A where enough CTAs are left for the GPU."""
    return 2 if not tied and batch >= 16 else 1


@library_op
class SSDRecurrentFwdOp(Op):
    """Mamba-2 recurrent decode step: updates the state in place and returns the token's output.

        g = h // (n_heads // n_groups)
        state[b, h, p, n] <- exp(dt[b, h, p] * A[h, p, n]) * state[b, h, p, n] + dt[b, h, p] * B_in[b, g, n] * x[b, h, p]
        y_out[b, h, p]    =  sum_n state[b, h, p, n] * C_in[b, g, n]

    The skip connection (D * x) and the output gate (z * silu) are the caller's.

    A rate per head, expanded (``A.view(H, 1, 1).expand(H, P, N)``), together with a step per head, expanded
    (``dt.unsqueeze(-1).expand(B, H, P)``), is recognised by its strides of 0 and read once per head: the same bits, less
    memory traffic. ``state`` may be a view of a larger pool (``pool[2:6]``); elements outside the view are not touched.

    Source: Dao and Gu, "Transformers are SSMs", 2024 (arXiv 2405.21060), the recurrent form.
    Targets: any layout of the inputs. On CUDA an x, B_in or C_in whose last dimension is strided is copied at each call, as
    are, but for a rate per head with a step per head, a dt whose last dimension is strided or expanded and an A that is not of
    contiguous 16-byte aligned rows. ``state`` is never copied.

    Args:
        target: a target name, ``tileops.BUILTIN`` for the in-tree kernels, or None to decide from the input device.

    Raises:
        TargetError: ``target`` is not registered.
    """

    mutated = ("state",)

    def __init__(self, *, target: str | None = None) -> None:
        super().__init__(target)

    def forward(self, A: Tensor, dt: Tensor, x: Tensor, B_in: Tensor, C_in: Tensor, state: Tensor) -> Tensor:
        """Run a single Mamba-2 decode step.

        Args:
            A: (n_heads, d_head, d_state) float32, decay rates, <= 0.
            dt: (batch, n_heads, d_head) float32, the step after bias and softplus.
            x: (batch, n_heads, d_head) bfloat16 or float16 (the reference also takes float32).
            B_in: (batch, n_groups, d_state), x's dtype; n_heads is a multiple of n_groups.
            C_in: as B_in.
            state: (batch, n_heads, d_head, d_state) float32, updated in place exactly once.

        Returns:
            y_out: (batch, n_heads, d_head) float32.

        Raises:
            ValueError: a wrong shape, dtype or device, n_heads % n_groups, an argument that requires grad (no backward), a
                state that cannot be updated in place: its last dimension strided, elements that share memory, on CUDA
                rows that are not 16-byte aligned; on CUDA a d_head or d_state outside 16, 32 ... 256.
            TypeError: an argument that is no tensor.
            MissingKernelError, IncompatibleArtifactError: CUDA tensors whose kernel cannot be had.
        """
        result: Tensor = self._run(A, dt, x, B_in, C_in, state)
        return result

    @staticmethod
    def empty(A: Tensor, dt: Tensor, x: Tensor, *_: Any) -> Tensor:
        return x.new_empty(x.shape, dtype=torch.float32)

    def check(self, *tensors: Any) -> None:
        A, dt, x, B_in, C_in, state = tensors
        a = _checks.Arguments()
        a.tensor("A", A, ("n_heads", "d_head", "d_state"), _checks.FLOAT32)
        a.at_least_one("n_heads", "d_head", "d_state")
        a.tensor("dt", dt, ("batch", "n_heads", "d_head"), _checks.FLOAT32)
        a.tensor("x", x, ("batch", "n_heads", "d_head"), _checks.INPUT_DTYPES)
        a.tensor("B_in", B_in, ("batch", "n_groups", "d_state"), (x.dtype,), "that of x")
        a.at_least_one("n_groups")
        a.heads_per_group()
        a.tensor("C_in", C_in, ("batch", "n_groups", "d_state"), (x.dtype,), "that of x")
        a.tensor("state", state, ("batch", "n_heads", "d_head", "d_state"), _checks.FLOAT32)
        _checks.updated_in_place("state", state)

    def check_builtin(self, *tensors: Any) -> None:
        A, _, x = tensors[:3]
        _checks.half("x", x.dtype)
        _checks.supported(["recurrent"], d_head=A.shape[1], d_state=A.shape[2])

    def kernels(self) -> list[tuple[str, dict[str, Value]]]:
        return [("recurrent", {})]

    def plan(self, p: Planner, *slots: Slot | None) -> Slot:
        A, dt, x, B_in, C_in, state = (s for s in slots if s is not None)
        if not state.aligned(WIDE):
            raise ValueError(
                f"state: cannot be updated in place: expected every row to start at a multiple of {WIDE} bytes, "
                f"got strides {state.stride} (elements) from an address that is a multiple of {state.base_alignment}."
            )
        batch, heads, head_dim = x.shape
        tied = A.stride[1:] == (0, 0) and dt.stride[-1] == 0
        y = p.empty((batch, heads, head_dim), torch.float32)
        p.launch(
            "recurrent",
            {"P": head_dim, "N": A.shape[2], "dtype": _checks.dtype_name(x.dtype), "tied": tied},
            {
                "A": A if tied else rows(p, A),
                "dt": dt if tied else p.dense(dt),
                "x": p.dense(x),
                "Bm": p.dense(B_in),
                "Cm": p.dense(C_in),
                "state": state,
                "y": y,
            },
            {"B": batch, "H": heads, "G": B_in.shape[1], "per": rows_per_cta(batch, tied)},
        )
        return y
