"""Mamba2FwdOp: the full forward in one call: one kernel where there is one for the GPU and the layout, else five stages."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tileops.config import Value
from tileops.ops import _checks
from tileops.ops._base import Op
from tileops.ops._fused import plan_fused, serves, writes
from tileops.ops._gate import plan_gate
from tileops.ops._layout import packed
from tileops.ops._library import library_op
from tileops.ops._sequences import plan_pack, plan_runs, plan_seq_passing
from tileops.ops.chunk_coupling import plan_chunk_coupling
from tileops.ops.chunk_cumsum import FADED_TERM, plan_chunk_cumsum
from tileops.ops.chunk_scan import plan_chunk_scan
from tileops.ops.chunk_state import plan_chunk_state
from tileops.ops.state_passing import plan_state_passing

if TYPE_CHECKING:
    from tileops.ops._planner import Planner, Slot

#: The tensors of a call, in forward's order.
_SPEC = ("x", "dt", "A", "B", "C", "dt_bias", "initial_states")
_FEATURES = ("D", "z", "seq_idx", "cu_seqlens", "out")
_NAMES = (*_SPEC, *_FEATURES)

_NO_LIMIT = (0.0, math.inf)


@library_op
class Mamba2FwdOp(Op):
    """Mamba-2 state-space dual (SSD) full forward pass. For each token t, with g = h // (n_heads // n_groups):

        v[t, h]       = clamp(softplus?(dt[t, h] + dt_bias[h]), *dt_limit)
        S[t, h, p, n] = exp(v[t, h] * A[h]) * S[t-1, h, p, n] + v[t, h] * x[t, h, p] * B[t, g, n]      S[-1] = initial_states, or 0
        y[t, h, p]    = sum_n S[t, h, p, n] * C[t, g, n]
        y[t, h, p]    = (y[t, h, p] + D[h, p] * x[t, h, p]) * z[t, h, p] * sigmoid(z[t, h, p])         each only where it is passed

    It is computed in chunks: on CUDA by one kernel where there is one (sm_90a, rows of x, B and C 16-byte aligned, no dimension
    of them expanded, no seq_idx), else as SSDChunkCumsum, SSDChunkCoupling, SSDChunkState, SSDStatePassing,
    SSDChunkScan in this order, with dt, cb and states in float32 between them. The interface matches mamba_ssm's
    mamba_chunk_scan_combined, except that final_states is always returned. A feature that is not asked for launches nothing.

    A row holds one sequence, or several, in one of two ways:

    ``cu_seqlens``: batch is 1, and sequence n is tokens cu_seqlens[n] to cu_seqlens[n + 1]. Each has its own initial and final
    state, and gets what it would get alone: on CUDA the same bits where the same kernels serve both, and nothing of another
    sequence, be it NaN. The values stay on the device, so a call can be captured in a CUDA graph and replayed with others;
    values that are out of order or beyond seqlen are clamped and cannot make a kernel leave its tensors. On the stages the
    pack is laid out anew at each call, each sequence in whole chunks: memory and time are those of up to
    seqlen + n_seqs * chunk_size tokens, whether or not a sequence is empty (cu_seqlens padded for a captured graph: 256 sequences of
    chunk_size 256 are 65536 tokens), so prefer a small chunk_size for many short sequences.

    ``seq_idx``: a token whose seq_idx differs from that of the token before it begins a sequence, from a state of 0. The row's
    first sequence begins from initial_states (whatever its index: mamba_ssm wants it to be 0), and final_states is the state
    after the row's last token, so of its last sequence. Only neighbours are compared: an index that comes back is a new sequence.
    On CUDA a NaN or inf of one sequence can reach tokens of others in the chunks that it has tokens or a carried state in, as it
    does its own earlier tokens; never a state passed on. In chunks with such a boundary decays are off by up to 2e-5.

    Source: Dao and Gu, "Transformers are SSMs", 2024 (arXiv 2405.21060), sections 6 and 7.
    Targets: any layout. On CUDA views whose last dimension is contiguous (slices of one projection) are read in place,
    fastest where rows are 16-byte aligned; a tensor whose last dimension is strided is copied at each call, and so are
    initial_states that are not contiguous and 16-byte aligned, and a z whose rows are not. Where one kernel serves, D, z, out_dtype and a
    contiguous, 16-byte aligned out cost no pass of their own; another out, and the stages, cost one more pass over y. The reference
    reads cu_seqlens and seq_idx on the host.

    Args:
        chunk_size: tokens per chunk of the five stages. It does not change the result but for rounding, and nothing where one
            kernel serves. The CUDA kernels take 16, 32, 64, 128, 256, the reference up to 4096.
        dt_softplus: apply softplus to dt + dt_bias before use.
        dt_limit: lowest and highest step, applied after bias and softplus; the lowest is at least 0.
        out_dtype: of y: float32 or x's dtype; None is float32. Sums are float32, rounded once at the end.
        target: a target name, ``tileops.BUILTIN`` for the in-tree kernels, or None to decide from the input device.

    Raises:
        ValueError, TypeError: chunk_size is not a positive int, dt_softplus not a bool, dt_limit not two numbers with
            0 <= lowest <= highest, out_dtype not float32, float16 or bfloat16.
        TargetError: ``target`` is not registered.
    """

    features = _FEATURES
    mutated = ("out",)

    def __init__(
        self,
        chunk_size: int = 256,
        dt_softplus: bool = True,
        *,
        dt_limit: tuple[float, float] = _NO_LIMIT,
        out_dtype: torch.dtype | None = None,
        target: str | None = None,
    ) -> None:
        self.chunk_size = _checks.positive_int("chunk_size", chunk_size)
        self.dt_softplus = _checks.flag("dt_softplus", dt_softplus)
        self.dt_limit = _checks.step_limits("dt_limit", dt_limit)
        self.out_dtype = None if out_dtype is None else _checks.out_dtype("out_dtype", out_dtype)
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
        *,
        D: Tensor | None = None,
        z: Tensor | None = None,
        seq_idx: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        out: Tensor | None = None,
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
            D: (n_heads,) or (n_heads, d_head) float32, optional: the skip, y + D * x.
            z: as x, optional: the gate, y * z * sigmoid(z), after the skip.
            seq_idx: (batch, seqlen) int32, optional: see the class; not together with cu_seqlens.
            cu_seqlens: (n_seqs + 1,) int32, optional: see the class; batch is 1. 0 <= cu_seqlens[n] <= cu_seqlens[n + 1] <= seqlen;
                sequences may be empty. y of tokens outside of all sequences is 0. initial_states and final_states are
                (n_seqs, n_heads, d_head, d_state).
            out: (batch, seqlen, n_heads, d_head) float32 or x's dtype (out_dtype, where that is given), last dimension contiguous,
                no element twice; y is written there and ``out`` returned. It must share no memory with an input; what is cheaply
                seen to do so is refused (the same start, or two contiguous tensors that overlap).

        Returns:
            y: (batch, seqlen, n_heads, d_head) float32, or as out_dtype and out say.
            final_states: (batch, n_heads, d_head, d_state) float32, the state after the last token.

        Raises:
            ValueError: a wrong shape, dtype or device, n_heads % n_groups, an input that requires grad (no backward), seq_idx
                and cu_seqlens together, a batch other than 1 with cu_seqlens, an ``out`` that overlaps an input, on
                CUDA a d_head or d_state outside 16, 32 ... 256 or an unsupported chunk_size.
            TypeError: an argument that is no tensor.
            TargetError: a third party's target does not take a keyword that the call uses.
            MissingKernelError, IncompatibleArtifactError, CompileError: CUDA tensors whose kernels cannot be had.
        """
        tensors = (x, dt, A, B, C, dt_bias, initial_states, D, z, seq_idx, cu_seqlens, out)
        if out is not None and not torch.compiler.is_compiling():  # at every call: a plan knows no addresses
            _checks.apart("out", out, dict(zip(_NAMES, tensors[:-1])))
        result: tuple[Tensor, Tensor] = self._run(*tensors)
        return result

    def options(self) -> dict[str, Any]:
        extra = {"dt_limit": _NO_LIMIT, "out_dtype": None}
        asked = {name: getattr(self, name) for name, default in extra.items() if getattr(self, name) != default}
        return {"chunk_size": self.chunk_size, "dt_softplus": self.dt_softplus, **asked}

    @staticmethod
    def empty(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, *rest: Any, out_dtype: torch.dtype | None, **_: Any) -> tuple[Tensor, Tensor]:
        cu_seqlens = rest[6]
        chains = x.shape[0] if cu_seqlens is None else max(cu_seqlens.shape[0] - 1, 0)
        y = x.new_empty(x.shape, dtype=out_dtype or torch.float32)
        return y, x.new_empty((chains, *x.shape[2:], B.shape[3]), dtype=torch.float32)

    def check(self, *tensors: Any, alike: bool = False) -> None:
        x, dt, A, B, C, dt_bias, initial_states, D, z, seq_idx, cu_seqlens, out = tensors
        token = ("batch", "seqlen", "n_heads", "d_head")
        a = _checks.Arguments(alike)
        a.tensor("x", x, token, _checks.INPUT_DTYPES)
        a.at_least_one("n_heads", "d_head")
        a.tensor("dt", dt, ("batch", "seqlen", "n_heads"), _checks.FLOAT32)
        a.tensor("A", A, ("n_heads",), _checks.FLOAT32)
        a.tensor("B", B, ("batch", "seqlen", "n_groups", "d_state"), (x.dtype,), "that of x")
        a.at_least_one("n_groups", "d_state")
        a.heads_per_group()
        a.tensor("C", C, ("batch", "seqlen", "n_groups", "d_state"), (x.dtype,), "that of x")
        a.optional("dt_bias", dt_bias, ("n_heads",), _checks.FLOAT32)
        if cu_seqlens is not None:
            a.tensor("cu_seqlens", cu_seqlens, ("n_seqs + 1",), _checks.INT32)
            if cu_seqlens.shape[0] == 0:
                raise ValueError("cu_seqlens: expected shape (n_seqs + 1,), so at least one value, got none.")
            if seq_idx is not None:
                raise ValueError("seq_idx: expected None where cu_seqlens is given, got both: each says where sequences begin.")
            if x.shape[0] != 1:
                raise ValueError(f"x: expected batch = 1 where cu_seqlens is given, got {x.shape[0]}.")
            a.sizes["n_seqs"] = a["n_seqs + 1"] - 1
        chain = "batch" if cu_seqlens is None else "n_seqs"
        a.optional("initial_states", initial_states, (chain, "n_heads", "d_head", "d_state"), _checks.FLOAT32)
        a.optional("D", D, ("n_heads",), _checks.FLOAT32, or_dims=("n_heads", "d_head"))
        a.optional("z", z, token, (x.dtype,), "that of x")
        a.optional("seq_idx", seq_idx, ("batch", "seqlen"), _checks.INT32)
        if self.out_dtype not in (None, torch.float32, x.dtype):
            raise ValueError(
                f"out_dtype: expected float32 or that of x, {_checks.dtype_name(x.dtype)}, got {_checks.dtype_name(self.out_dtype)}."
            )
        if out is not None:
            if self.out_dtype is None:
                a.tensor("out", out, token, tuple(dict.fromkeys((torch.float32, x.dtype))), "float32, or that of x")
            else:
                a.tensor("out", out, token, (self.out_dtype,), "the op's out_dtype")
            _checks.written("out", out, rows=True)

    def check_builtin(self, *tensors: Any) -> None:
        x, B = tensors[0], tensors[3]
        _checks.half("x", x.dtype)
        _checks.supported("fused_main", "chunk_scan", chunk_size=self.chunk_size, d_head=x.shape[-1], d_state=B.shape[-1])

    def kernels(self) -> list[tuple[str, dict[str, Value]]]:
        Q = self.chunk_size
        return [
            ("fused_main", {}),
            ("fused_clear", {}),
            ("pack_rest", {}),
            ("chunk_cumsum", {"Q": Q, "out_dtype": "float32"}),
            ("chunk_coupling", {"Q": Q, "cb_float32": True}),
            ("chunk_state", {"Q": Q, "dt_dtype": "float32"}),
            ("state_passing", {}),
            ("chunk_scan", {"Q": Q, "dt_dtype": "float32", "cb_float32": True}),
            ("gate", {}),
            ("pack_starts", {}),
            ("pack_map", {}),
            ("pack_rows", {}),
            ("pack_tails", {}),
            ("seq_runs", {"Q": Q}),
            ("seq_mask", {"Q": Q}),
            ("seq_passing", {}),
        ]

    def plan(self, p: Planner, *slots: Slot | None) -> tuple[Slot, Slot]:
        x, dt, A, B, C, dt_bias, initial, D, z, seq_idx, cu_seqlens, out = slots
        assert x is not None and dt is not None and A is not None and B is not None and C is not None
        low, high = self.dt_limit
        limits: dict[str, Any] = {"dt_softplus": self.dt_softplus, "dt_min": low, "dt_max": high}
        x, B, C = p.dense(x), p.dense(B), p.dense(C)
        y_dtype = out.dtype if out is not None else self.out_dtype or torch.float32
        if cu_seqlens is not None and cu_seqlens.shape[0] == 1:  # no sequence: no token is of one
            y = out if out is not None else p.empty(x.shape, y_dtype)
            p.fill_zero(y)
            return y, p.empty((0, *x.shape[2:], B.shape[-1]), torch.float32)
        rows = None
        if serves(p, x, B, C, seq_idx):
            direct = out is None or writes(out)
            y = out if out is not None and direct else p.empty(x.shape, y_dtype if direct else torch.float32)
            final_states = plan_fused(p, x, dt, A, B, C, dt_bias, initial, D, z, cu_seqlens, y, **limits)
            if direct:
                return y, final_states
            D = z = None  # done: what is left is to move y
        else:
            y, final_states, rows = self._plan_stages(p, x, dt, A, B, C, dt_bias, initial, seq_idx, cu_seqlens, limits)
        if rows is not None or D is not None or z is not None or out is not None or y_dtype != torch.float32:
            made = out if out is not None else p.empty(x.shape, y_dtype)
            plan_gate(p, y, x, D, z, rows, made)
            y = made
        return y, final_states

    def _plan_stages(
        self,
        p: Planner,
        x: Slot,
        dt: Slot,
        A: Slot,
        B: Slot,
        C: Slot,
        dt_bias: Slot | None,
        initial: Slot | None,
        seq_idx: Slot | None,
        cu_seqlens: Slot | None,
        limits: dict[str, Any],
    ) -> tuple[Slot, Slot, Slot | None]:
        """Add the launches of the five stages: y, final_states and, for a pack, which row of y is whose."""
        Q = self.chunk_size
        chains, rows, bounds = x.shape[0], None, None
        pack = None
        if cu_seqlens is not None:
            pack = plan_pack(p, cu_seqlens, x.shape[1], Q)
            chains, rows, bounds = cu_seqlens.shape[0] - 1, pack.rows, pack.starts
            x, dt, B, C = (pack.laid_out(p, slot) for slot in (x, dt, B, C))
        heads, head_dim = x.shape[2:]
        flat = head_dim * B.shape[-1]
        dt_out, dA_cumsum = plan_chunk_cumsum(
            p, p.workspace, dt, A, dt_bias, chunk_len=Q, out_dtype=torch.float32, lowest=FADED_TERM, **limits
        )
        if pack is not None:
            pack.end(p, dt_out, dA_cumsum)
        # float32: scan rounds its products with decay and dt, and rounded before that too, y would be off by 1.4 times as much.
        cb = plan_chunk_coupling(p, p.workspace, C, B, chunk_len=Q, cb_float32=True)
        runs = None
        if seq_idx is not None:
            runs, bounds = plan_runs(p, seq_idx, dA_cumsum, cb)
        states = plan_chunk_state(p, p.workspace, x, B, dt_out, dA_cumsum, runs)
        final_states = p.empty((chains, heads, head_dim, B.shape[-1]), torch.float32)
        passed = (
            states.view((*states.shape[:2], heads, flat)),
            dA_cumsum.last(),
            None if initial is None else packed(p, initial).view((chains, heads, flat)),
        )
        final = final_states.view((chains, heads, flat))
        if bounds is None:
            prev_states = plan_state_passing(p, p.workspace, *passed, final)
        else:
            prev_states = plan_seq_passing(p, *passed, bounds, final, is_pack=rows is not None)
        y = plan_chunk_scan(p, x, cb, dA_cumsum, C, prev_states.view(states.shape), dt_out)
        return y, final_states, rows
