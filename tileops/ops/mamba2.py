"""Mamba2FwdOp: the full forward in one call: one kernel where there is one for the GPU and the layout, else five stages."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tileops.config import Value
from tileops.ops import _checks
from tileops.ops._base import Op
from tileops.ops._fused import plan_fused, serves
from tileops.ops._layout import packed
from tileops.ops.chunk_coupling import plan_chunk_coupling
from tileops.ops.chunk_cumsum import plan_chunk_cumsum
from tileops.ops.chunk_scan import plan_chunk_scan
from tileops.ops.chunk_state import plan_chunk_state
from tileops.ops.state_passing import plan_state_passing

if TYPE_CHECKING:
    from tileops.ops._planner import Planner, Slot


class Mamba2FwdOp(Op):
    """Mamba-2 state-space dual (SSD) full forward pass. For each token t, with g = h // (n_heads // n_groups):

        v[t, h]       = max(softplus?(dt[t, h] + dt_bias[h]), 0)
        S[t, h, p, n] = exp(v[t, h] * A[h]) * S[t-1, h, p, n] + v[t, h] * x[t, h, p] * B[t, g, n]      S[-1] = initial_states, or 0
        y[t, h, p]    = sum_n S[t, h, p, n] * C[t, g, n]

    It is computed in chunks: on CUDA by one kernel where there is one (sm_90a, rows of x, B and C 16-byte aligned, no dimension
    of them expanded), else as SSDChunkCumsum, SSDChunkCoupling, SSDChunkState, SSDStatePassing, SSDChunkScan in this order,
    with dt and states in float32 between them. The interface matches mamba_ssm's mamba_chunk_scan_combined,
    except that final_states is always returned. The only limit on v is the stage's default, dt_min = 0 (as mamba_ssm's),
    which softplus keeps by itself; use the stages for other limits. D and z are the caller's, and a row is one sequence.

    Source: Dao and Gu, "Transformers are SSMs", 2024 (arXiv 2405.21060), sections 6 and 7.
    Targets: any layout. On CUDA views whose last dimension is contiguous (slices of one projection) are read in place,
    fastest where rows are 16-byte aligned; a tensor whose last dimension is strided is copied at each call, and so are
    initial_states that are not contiguous and 16-byte aligned.

    Args:
        chunk_size: tokens per chunk of the five stages. It does not change the result but for rounding, and nothing where one
            kernel serves. The CUDA kernels take 16, 32, 64, 128, 256.
        dt_softplus: apply softplus to dt + dt_bias before use.
        target: a target name, ``tileops.BUILTIN`` for the in-tree kernels, or None to decide from the input device.

    Raises:
        ValueError, TypeError: chunk_size is not a positive int, dt_softplus not a bool.
        TargetError: ``target`` is not registered.
    """

    def __init__(self, chunk_size: int = 256, dt_softplus: bool = True, *, target: str | None = None) -> None:
        self.chunk_size = _checks.positive_int("chunk_size", chunk_size)
        self.dt_softplus = _checks.flag("dt_softplus", dt_softplus)
        super().__init__(target)

    def forward(
        self,
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        dt_bias: Tensor | None = None,
        initial_states: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Run the full Mamba-2 SSD forward pass.

        Args:
            x: (batch, seqlen, n_heads, d_head) bfloat16 or float16 (the reference also takes float32). batch and seqlen
                may be 0, and seqlen need not be a multiple of chunk_size.
            dt: (batch, seqlen, n_heads) float32, raw.
            A: (n_heads,) float32, decay rates, <= 0 (that is -exp(A_log)); bfloat16 is refused, it ruins long contexts.
            B: (batch, seqlen, n_groups, d_state), x's dtype; n_heads is a multiple of n_groups.
            C: as B.
            dt_bias: (n_heads,) float32, optional.
            initial_states: (batch, n_heads, d_head, d_state) float32, optional; None is the same as zeros.

        Returns:
            y: (batch, seqlen, n_heads, d_head) float32.
            final_states: (batch, n_heads, d_head, d_state) float32, the state after the last token.

        Raises:
            ValueError: a wrong shape, dtype or device, n_heads % n_groups, an input that requires grad (no backward), on
                CUDA a d_head or d_state outside 16, 32 ... 256 or an unsupported chunk_size.
            TypeError: an argument that is no tensor.
            MissingKernelError, IncompatibleArtifactError: CUDA tensors whose kernels cannot be had.
        """
        result: tuple[Tensor, Tensor] = self._run(x, dt, A, B, C, dt_bias, initial_states)
        return result

    def options(self) -> dict[str, Any]:
        return {"chunk_size": self.chunk_size, "dt_softplus": self.dt_softplus}

    def check(self, *tensors: Any) -> None:
        x, dt, A, B, C, dt_bias, initial_states = tensors
        a = _checks.Arguments()
        a.tensor("x", x, ("batch", "seqlen", "n_heads", "d_head"), _checks.INPUT_DTYPES)
        a.at_least_one("n_heads", "d_head")
        a.tensor("dt", dt, ("batch", "seqlen", "n_heads"), _checks.FLOAT32)
        a.tensor("A", A, ("n_heads",), _checks.FLOAT32)
        a.tensor("B", B, ("batch", "seqlen", "n_groups", "d_state"), (x.dtype,), "that of x")
        a.at_least_one("n_groups", "d_state")
        a.heads_per_group()
        a.tensor("C", C, ("batch", "seqlen", "n_groups", "d_state"), (x.dtype,), "that of x")
        a.optional("dt_bias", dt_bias, ("n_heads",), _checks.FLOAT32)
        a.optional("initial_states", initial_states, ("batch", "n_heads", "d_head", "d_state"), _checks.FLOAT32)

    def check_builtin(self, *tensors: Any) -> None:
        x, B = tensors[0], tensors[3]
        _checks.half("x", x.dtype)
        stages = [name for name, _ in self.kernels()]
        _checks.supported(stages, chunk_size=self.chunk_size, d_head=x.shape[-1], d_state=B.shape[-1])

    def kernels(self) -> list[tuple[str, dict[str, Value]]]:
        Q = self.chunk_size
        return [
            ("fused_main", {"y_float32": True}),
            ("fused_clear", {}),
            ("chunk_cumsum", {"Q": Q, "out_dtype": "float32", "softplus": self.dt_softplus}),
            ("chunk_coupling", {"Q": Q}),
            ("chunk_state", {"Q": Q, "dt_dtype": "float32", "has_seq_idx": False}),
            ("state_passing", {}),
            ("chunk_scan", {"Q": Q, "dt_dtype": "float32"}),
        ]

    def plan(self, p: Planner, *slots: Slot | None) -> tuple[Slot, Slot]:
        x, dt, A, B, C, dt_bias, initial = slots
        assert x is not None and dt is not None and A is not None and B is not None and C is not None
        limits: dict[str, Any] = {"dt_softplus": self.dt_softplus, "dt_min": 0.0, "dt_max": math.inf}
        x, B, C = p.dense(x), p.dense(B), p.dense(C)
        if serves(p, x, B, C):
            return plan_fused(p, x, dt, A, B, C, dt_bias, initial, **limits)
        batch, _, heads, head_dim = x.shape
        flat = head_dim * B.shape[-1]
        dt_out, dA_cumsum = plan_chunk_cumsum(
            p,
            p.workspace,
            dt,
            A,
            dt_bias,
            chunk_len=self.chunk_size,
            out_dtype=torch.float32,
            **limits,
        )
        cb = plan_chunk_coupling(p, p.workspace, C, B, chunk_len=self.chunk_size)
        states = plan_chunk_state(p, p.workspace, x, B, dt_out, dA_cumsum)
        chunks = states.shape[1]
        final_states = p.empty((batch, heads, head_dim, B.shape[-1]), torch.float32)
        prev_states = plan_state_passing(
            p,
            p.workspace,
            states.view((batch, chunks, heads, flat)),
            dA_cumsum.last(),
            None if initial is None else packed(p, initial).view((batch, heads, flat)),
            final_states.view((batch, heads, flat)),
        )
        y = plan_chunk_scan(p, x, cb, dA_cumsum, C, prev_states.view(states.shape), dt_out)
        return y, final_states
