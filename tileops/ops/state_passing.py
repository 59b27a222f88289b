"""SSDStatePassingFwdOp: the recurrence over chunk states."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tileops.config import Value
from tileops.ops import _checks
from tileops.ops._base import Op
from tileops.ops._layout import WIDE, all_aligned
from tileops.ops._library import library_op

if TYPE_CHECKING:
    from tileops.ops._planner import Planner, Slot


@library_op
class SSDStatePassingFwdOp(Op):
    """Mamba-2 state passing: the inter-chunk recurrent scan, elementwise over m < d_state.

        s_c[m] = exp(dA_chunk_cumsum[b, h, c]) * s_{c-1}[m] + states[b, c, h, m]        s_{-1} = initial_states, or 0

    ``prev_states[:, c]`` is the state before chunk c, s_{c-1}; ``final_states`` is the state after the last one.
    d_state here is any size >= 1: the full forward passes d_head * d_state flattened.

    Source: Dao and Gu, "Transformers are SSMs", 2024 (arXiv 2405.21060), section 6.
    Targets: any layout. On CUDA states or initial_states whose last dimension is strided are copied at each call;
    dA_chunk_cumsum never is, so the last column of a dA_cumsum costs nothing.

    Args:
        target: a target name, ``tileops.BUILTIN`` for the in-tree kernels, or None to decide from the input device.

    Raises:
        TargetError: ``target`` is not registered.
    """

    def __init__(self, *, target: str | None = None) -> None:
        super().__init__(target)

    def forward(self, states: Tensor, dA_chunk_cumsum: Tensor, initial_states: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Run the SSD state passing forward pass.

        Args:
            states: (batch, num_chunks, n_heads, d_state) float32; num_chunks may be 0.
            dA_chunk_cumsum: (batch, n_heads, num_chunks) float32, <= 0: dA_cumsum at each chunk's end.
            initial_states: (batch, n_heads, d_state) float32, optional; None is the same as zeros.

        Returns:
            prev_states: (batch, num_chunks, n_heads, d_state) float32.
            final_states: (batch, n_heads, d_state) float32, its own memory.

        Raises:
            ValueError: a wrong shape, dtype or device, or an input that requires grad (no backward).
            TypeError: an argument that is no tensor.
            MissingKernelError, IncompatibleArtifactError, CompileError: CUDA tensors whose kernel cannot be had.
        """
        result: tuple[Tensor, Tensor] = self._run(states, dA_chunk_cumsum, initial_states)
        return result

    @staticmethod
    def empty(states: Tensor, dA_chunk_cumsum: Tensor, initial_states: Tensor | None) -> tuple[Tensor, Tensor]:
        return states.new_empty(states.shape), states.new_empty((states.shape[0], *states.shape[2:]))

    def check(self, *tensors: Any, alike: bool = False) -> None:
        states, dA_chunk_cumsum, initial_states = tensors
        a = _checks.Arguments(alike)
        a.tensor("states", states, ("batch", "num_chunks", "n_heads", "d_state"), _checks.FLOAT32)
        a.at_least_one("n_heads", "d_state")
        a.tensor("dA_chunk_cumsum", dA_chunk_cumsum, ("batch", "n_heads", "num_chunks"), _checks.FLOAT32)
        a.optional("initial_states", initial_states, ("batch", "n_heads", "d_state"), _checks.FLOAT32)

    def kernels(self) -> list[tuple[str, dict[str, Value]]]:
        return [("state_passing", {})]

    def plan(self, p: Planner, *slots: Slot | None) -> tuple[Slot, Slot]:
        states, dA_chunk, initial = slots
        assert states is not None and dA_chunk is not None
        batch, _, heads, d_state = states.shape
        final_states = p.empty((batch, heads, d_state), torch.float32)
        prev_states = plan_state_passing(p, p.empty, p.dense(states), dA_chunk, None if initial is None else p.dense(initial), final_states)
        return prev_states, final_states


def plan_state_passing(
    p: Planner,
    new: Callable[[tuple[int, ...], torch.dtype], Slot],
    states: Slot,
    dA_chunk: Slot,
    initial_states: Slot | None,
    final_states: Slot,
) -> Slot:
    """Add the launch; ``new`` (p.empty or p.workspace) makes prev_states. final_states is filled also for no chunks."""
    batch, chunks, heads, d_state = states.shape
    prev_states = new((batch, chunks, heads, d_state), torch.float32)
    if chunks == 0:
        if initial_states is None:
            p.fill_zero(final_states)
        else:
            p.copy(final_states, initial_states)
        return prev_states
    given = (states, prev_states, final_states, *([] if initial_states is None else [initial_states]))
    p.launch(
        "state_passing",
        {"aligned": all_aligned(*given) and d_state * states.dtype.itemsize % WIDE == 0},
        {
            "states": states,
            "dA_chunk": dA_chunk,
            "initial_states": initial_states,
            "prev_states": prev_states,
            "final_states": final_states,
        },
        {"B": batch, "C": chunks, "H": heads, "M": d_state},
    )
    return prev_states
