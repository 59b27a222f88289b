"""SSDRecurrentFwdOp: one decode step, the state updated in place."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tileops.config import Value
from tileops.ops import _checks
from tileops.ops._base import Op
from tileops.ops._layout import WIDE, expanded, rows
from tileops.ops._library import library_op

if TYPE_CHECKING:
    from tileops.ops._planner import Planner, Slot

#: Steps above this are taken as they are where softplus is asked for.
SOFTPLUS_BYPASS = 20.0


def rows_per_cta(batch: int, tied: bool) -> int:
    """Batch rows that a CTA does one after the other: two share one reading of a full A where enough CTAs are left for the GPU."""
    return 2 if not tied and batch >= 16 else 1


@library_op
class SSDRecurrentFwdOp(Op):
    """Mamba-2 recurrent decode step: updates the state in place and returns the token's output.

        g = h // (n_heads // n_groups);  s = state_batch_indices[b], or b
        v[b, h, p]        =  softplus?(dt[b, h, p] + dt_bias[h, p])
        state[s, h, p, n] <- exp(v[b, h, p] * A[h, p, n]) * state[s, h, p, n] + v[b, h, p] * B_in[b, g, n] * x[b, h, p]
        y_out[b, h, p]    =  (sum_n state[s, h, p, n] * C_in[b, g, n] + D[h, p] * x[b, h, p]) * silu(z[b, h, p])

    What is not given is not computed: the call with the six tensors of the spec has no bias, softplus, D or gate.

    One value per head: ``A`` (n_heads,), ``dt`` (batch, n_heads), ``D`` and ``dt_bias`` (n_heads,), or the full shapes expanded with
    strides of 0 (``A.view(H, 1, 1).expand(H, P, N)``). A, dt and dt_bias that are all so are read once per head: the same bits, less
    memory traffic.

    ``state`` may be a view of a larger pool (``pool[2:6]``), or the pool itself with ``state_batch_indices``; elements outside the
    view, and slots that no row names, are neither read nor written. A slot outside 0 ... n_slots - 1 (-1 by convention) is a pad: no state
    is accessed for its row, and its y_out is 0. Two rows of one call with the same slot are the caller's error: which of the two
    states is kept, element by element, is not defined. A state of 16 bits is computed with in float32 and rounded to nearest
    when it is stored; y_out comes from the state before that rounding. Over thousands of tokens its error grows; float32 stays exact.

    Source: Dao and Gu, "Transformers are SSMs", 2024 (arXiv 2405.21060), the recurrent form; D, z, dt_bias, softplus and slots as in
    mamba_ssm's selective_state_update.
    Targets: any layout of the inputs. On CUDA a B_in or C_in whose last dimension is strided is copied at each call, and so is, but
    for one value per head as above, an A that is not of contiguous 16-byte aligned rows. ``state`` and ``out`` are never copied.

    Args:
        dt_softplus: apply softplus to dt + dt_bias (values above 20 are taken as they are).
        out_dtype: of y_out where no ``out`` is given: float32, or x's dtype.
        target: a target name, ``tileops.BUILTIN`` for the in-tree kernels, or None to decide from the input device.

    Raises:
        ValueError, TypeError: dt_softplus is not a bool, out_dtype not one of float32, float16, bfloat16.
        TargetError: ``target`` is not registered.
    """

    mutated = ("state", "out")
    features = ("D", "z", "dt_bias", "state_batch_indices", "out")

    def __init__(self, *, dt_softplus: bool = False, out_dtype: torch.dtype = torch.float32, target: str | None = None) -> None:
        self.dt_softplus = _checks.flag("dt_softplus", dt_softplus)
        self.out_dtype = _checks.out_dtype("out_dtype", out_dtype)
        super().__init__(target)

    def forward(
        self,
        A: Tensor,
        dt: Tensor,
        x: Tensor,
        B_in: Tensor,
        C_in: Tensor,
        state: Tensor,
        *,
        D: Tensor | None = None,
        z: Tensor | None = None,
        dt_bias: Tensor | None = None,
        state_batch_indices: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Run a single Mamba-2 decode step.

        Args:
            A: (n_heads, d_head, d_state) or (n_heads,) float32, decay rates, <= 0.
            dt: (batch, n_heads, d_head) or (batch, n_heads) float32, the step; after bias and softplus, unless they are asked for here.
            x: (batch, n_heads, d_head) bfloat16 or float16 (the reference also takes float32).
            B_in: (batch, n_groups, d_state), x's dtype; n_heads is a multiple of n_groups.
            C_in: as B_in.
            state: (batch, n_heads, d_head, d_state) float32, bfloat16 or float16, updated in place exactly once; with
                state_batch_indices (n_slots, n_heads, d_head, d_state), n_slots of any size. It must share no memory with an
                input; what is cheaply seen to do so is refused where a call's sizes are new.
            D: (n_heads, d_head) or (n_heads,) float32, optional: the skip connection.
            z: as x, optional: the gate.
            dt_bias: (n_heads, d_head) or (n_heads,) float32, optional, added to dt.
            state_batch_indices: (batch,) int32 or int64, optional: the slot of each row in ``state``.
            out: (batch, n_heads, d_head) float32 or x's dtype, any strides, optional: written and returned. It may share no memory with
                another argument. A common start, and contiguous tensors that overlap, are refused; interleaved views are not looked into.

        Returns:
            y_out: (batch, n_heads, d_head), ``out`` or a new tensor of ``out_dtype``.

        Raises:
            ValueError: a wrong shape, dtype or device, n_heads % n_groups, an argument that requires grad (no backward), a
                state that cannot be updated in place: its last dimension strided, elements that share memory, on CUDA
                rows that are not 16-byte aligned; an ``out`` whose elements share memory, or are another argument's; an out_dtype
                that is neither float32 nor x's; on CUDA a d_head or d_state outside 16, 32 ... 256.
            TypeError: an argument that is no tensor.
            TargetError: a third party's target does not take a keyword that the call uses.
            MissingKernelError, IncompatibleArtifactError, CompileError: CUDA tensors whose kernel cannot be had.
        """
        if out is not None and not torch.compiler.is_compiling():  # at every call: addresses are no part of what a plan is kept by
            others = {"A": A, "dt": dt, "x": x, "B_in": B_in, "C_in": C_in, "state": state}
            _checks.apart("out", out, {**others, "D": D, "z": z, "dt_bias": dt_bias, "state_batch_indices": state_batch_indices})
        result: Tensor = self._run(A, dt, x, B_in, C_in, state, D, z, dt_bias, state_batch_indices, out)
        return result

    @staticmethod
    def empty(A: Tensor, dt: Tensor, x: Tensor, *_: Any, out_dtype: torch.dtype, **__: Any) -> Tensor:
        return x.new_empty(x.shape, dtype=out_dtype)

    def options(self) -> dict[str, Any]:
        defaults = {"dt_softplus": False, "out_dtype": torch.float32}
        return {name: getattr(self, name) for name, default in defaults.items() if getattr(self, name) != default}

    def check(self, *tensors: Any, alike: bool = False) -> None:
        A, dt, x, B_in, C_in, state, D, z, dt_bias, indices, out = tensors
        a = _checks.Arguments(alike)
        per_head, per_element = ("n_heads",), ("n_heads", "d_head")
        a.tensor("A", A, ("n_heads", "d_head", "d_state"), _checks.FLOAT32, or_dims=per_head)
        a.at_least_one("n_heads")
        a.tensor("dt", dt, ("batch", "n_heads", "d_head"), _checks.FLOAT32, or_dims=("batch", "n_heads"))
        a.tensor("x", x, ("batch", "n_heads", "d_head"), _checks.INPUT_DTYPES)
        a.at_least_one("d_head")
        a.tensor("B_in", B_in, ("batch", "n_groups", "d_state"), (x.dtype,), "that of x")
        a.at_least_one("n_groups", "d_state")
        a.heads_per_group()
        a.tensor("C_in", C_in, ("batch", "n_groups", "d_state"), (x.dtype,), "that of x")
        slots = "batch" if indices is None else "n_slots"
        a.tensor("state", state, (slots, "n_heads", "d_head", "d_state"), _checks.OUT_DTYPES)
        _checks.updated_in_place("state", state)
        a.optional("D", D, per_element, _checks.FLOAT32, or_dims=per_head)
        a.optional("z", z, ("batch", "n_heads", "d_head"), (x.dtype,), "that of x")
        a.optional("dt_bias", dt_bias, per_element, _checks.FLOAT32, or_dims=per_head)
        a.optional("state_batch_indices", indices, ("batch",), (torch.int32, torch.int64))
        inputs = {"A": A, "dt": dt, "x": x, "B_in": B_in, "C_in": C_in, "D": D, "z": z, "dt_bias": dt_bias, "state_batch_indices": indices}
        _checks.apart("state", state, inputs)
        results = tuple(dict.fromkeys((torch.float32, x.dtype)))
        if out is not None:
            a.tensor("out", out, ("batch", "n_heads", "d_head"), results, "float32, or that of x")
            _checks.written("out", out)
        elif self.out_dtype not in results:
            expected, came = " or ".join(map(_checks.dtype_name, results)), _checks.dtype_name(self.out_dtype)
            raise ValueError(f"out_dtype: expected {expected} (float32, or that of x), got {came}.")

    def check_builtin(self, *tensors: Any) -> None:
        x, B_in = tensors[2:4]
        _checks.half("x", x.dtype)
        _checks.supported("recurrent", d_head=x.shape[2], d_state=B_in.shape[2])

    def full(self, *tensors: Tensor | None) -> Sequence[Tensor | None]:
        A, dt, x, B_in, C_in, state, D, z, dt_bias, indices, out = tensors
        assert A is not None and dt is not None and x is not None and B_in is not None
        heads, head_dim = x.shape[1:]
        return (
            A if A.dim() == 3 else A.view(heads, 1, 1).expand(heads, head_dim, B_in.shape[2]),
            dt if dt.dim() == 3 else dt.unsqueeze(-1).expand(x.shape),
            *(x, B_in, C_in, state),
            D if D is None or D.dim() == 2 else D.unsqueeze(-1).expand(heads, head_dim),
            z,
            dt_bias if dt_bias is None or dt_bias.dim() == 2 else dt_bias.unsqueeze(-1).expand(heads, head_dim),
            *(indices, out),
        )

    def kernels(self) -> list[tuple[str, dict[str, Value]]]:
        return [("recurrent", {})]

    def plan(self, p: Planner, *slots: Slot | None) -> Slot:
        A, dt, x, B_in, C_in, state, D, z, dt_bias, indices, out = slots
        assert A is not None and dt is not None and x is not None and B_in is not None and C_in is not None and state is not None
        if not state.aligned(WIDE):
            raise ValueError(
                f"state: cannot be updated in place: expected every row to start at a multiple of {WIDE} bytes, "
                f"got strides {state.stride} (elements) from an address that is a multiple of {state.base_alignment}."
            )
        batch, heads, head_dim = x.shape
        groups, d_state = B_in.shape[1:]
        A, dt = expanded(A, (heads, head_dim, d_state)), expanded(dt, x.shape)
        D, dt_bias = (None if slot is None else expanded(slot, (heads, head_dim)) for slot in (D, dt_bias))
        tied = A.stride[1:] == (0, 0) and dt.stride[-1] == 0 and (dt_bias is None or dt_bias.stride[-1] == 0)
        y = p.empty(x.shape, self.out_dtype) if out is None else out
        if state.shape[0] == 0:  # a pool without slots: every row is a pad
            p.fill_zero(y)
            return y
        p.launch(
            "recurrent",
            {
                "P": head_dim,
                "N": d_state,
                "dtype": _checks.dtype_name(x.dtype),
                "state_dtype": _checks.dtype_name(state.dtype),
                "tied": tied,
            },
            {
                "A": A if tied else rows(p, A),
                "dt": dt,
                "x": x,
                "Bm": p.dense(B_in),
                "Cm": p.dense(C_in),
                "state": state,
                "D": D,
                "z": z,
                "dt_bias": dt_bias,
                "slots": indices if indices is not None and indices.dtype == torch.int32 else None,
                "slots64": indices if indices is not None and indices.dtype == torch.int64 else None,
                "y": y if y.dtype == torch.float32 else None,
                "y_half": y if y.dtype != torch.float32 else None,
            },
            {
                "B": batch,
                "H": heads,
                "G": groups,
                "M": state.shape[0],
                "per": rows_per_cta(batch, tied),
                "per_group": heads // groups,
            },
            {"softplus_to": SOFTPLUS_BYPASS if self.dt_softplus else -math.inf},
        )
        return y
