"""SSDChunkCumsumFwdOp: processed dt and the chunk-local prefix sum of dt * A."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tileops.config import Value
from tileops.ops import _checks
from tileops.ops._base import Op
from tileops.ops._layout import packed
from tileops.ops._library import library_op

if TYPE_CHECKING:
    from tileops.ops._planner import Planner, Slot


#: A term dt * A below this counts as this: every sum is finite, and what comes after a term of -inf is still seen in differences.
LOWEST_TERM = -1e30

#: The same in the full forward: exp of it is 0 in float32, so a larger magnitude changes no decay, but would cost the sums behind it
#: their digits. fused_main has the same bound, 160 halvings.
FADED_TERM = -110.9


@library_op
class SSDChunkCumsumFwdOp(Op):
    """Mamba-2 dA_cumsum: bias, softplus and clamp of dt, then the inclusive prefix sum of dt * A within each chunk.

        v       = clamp(softplus?(dt + dt_bias), dt_min, dt_max)         softplus(v) = log1p(exp(v)), v itself above 20
        dt_out  = v                                                      rounded to out_dtype
        dA_cumsum[b, h, c, l] = sum_{i <= l} v[b, cQ+i, h] * A[h]        from v in float32, before that rounding

    A term v * A below -1e30, so also -inf, counts as -1e30, and v = 0 makes a term of 0 at any rate: sums are finite, and a
    difference of two of them is the decay's exponent wherever it is above -1e30, to the digits that float32 leaves a sum.

    Source: Dao and Gu, "Transformers are SSMs", 2024 (arXiv 2405.21060), section 6.
    Targets: any layout; a ``dt`` whose last dimension is strided is copied at each call on CUDA.

    Args:
        chunk_len: tokens per chunk. The CUDA kernels take 16, 32, 64, 128 and 256, the reference up to 4096.
        out_dtype: storage dtype of dt_out: float32, float16 or bfloat16.
        dt_softplus: apply softplus to dt + dt_bias.
        dt_min: lower clamp bound, applied after bias and softplus; the unit is that of dt.
        dt_max: upper clamp bound, likewise.
        target: a target name, ``tileops.BUILTIN`` for the in-tree kernels, or None to decide from the input device.

    Raises:
        ValueError: chunk_len < 1, an out_dtype outside the three, dt_min > dt_max, a NaN bound.
        TypeError: an argument of another kind.
        TargetError: ``target`` is not registered.
    """

    def __init__(
        self,
        chunk_len: int,
        out_dtype: torch.dtype = torch.float32,
        dt_softplus: bool = False,
        dt_min: float = 0.0,
        dt_max: float = math.inf,
        *,
        target: str | None = None,
    ) -> None:
        self.chunk_len = _checks.positive_int("chunk_len", chunk_len)
        self.out_dtype = _checks.out_dtype("out_dtype", out_dtype)
        self.dt_softplus = _checks.flag("dt_softplus", dt_softplus)
        self.dt_min = _checks.limit("dt_min", dt_min)
        self.dt_max = _checks.limit("dt_max", dt_max)
        if self.dt_min > self.dt_max:
            raise ValueError(f"dt_min: expected at most dt_max = {self.dt_max}, got {self.dt_min}.")
        super().__init__(target)

    def forward(self, dt: Tensor, A: Tensor, dt_bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Run the dA_cumsum forward pass.

        Args:
            dt: (batch, seq_len, n_heads) float32, raw dt. seq_len need not be a multiple of chunk_len and may be 0.
            A: (n_heads,) float32, decay rates, <= 0 (that is -exp(A_log)).
            dt_bias: (n_heads,) float32, optional.

        Returns:
            dt_out: (batch, n_heads, num_chunks, chunk_len) out_dtype; 0 for rows past seq_len.
            dA_cumsum: (batch, n_heads, num_chunks, chunk_len) float32; flat past seq_len.

        Raises:
            ValueError: a wrong shape, dtype or device, or an input that requires grad (no backward).
            TypeError: an argument that is no tensor.
            MissingKernelError, IncompatibleArtifactError, CompileError: CUDA tensors whose kernel cannot be had.
        """
        result: tuple[Tensor, Tensor] = self._run(dt, A, dt_bias)
        return result

    def options(self) -> dict[str, Any]:
        return {
            "chunk_len": self.chunk_len,
            "out_dtype": self.out_dtype,
            "dt_softplus": self.dt_softplus,
            "dt_min": self.dt_min,
            "dt_max": self.dt_max,
        }

    @staticmethod
    def empty(dt: Tensor, A: Tensor, dt_bias: Tensor | None, *, chunk_len: int, out_dtype: torch.dtype, **_: Any) -> tuple[Tensor, Tensor]:
        shape = (dt.shape[0], dt.shape[2], -(-dt.shape[1] // chunk_len), chunk_len)
        return dt.new_empty(shape, dtype=out_dtype), dt.new_empty(shape)

    def check(self, *tensors: Any, alike: bool = False) -> None:
        dt, A, dt_bias = tensors
        a = _checks.Arguments(alike)
        a.tensor("dt", dt, ("batch", "seq_len", "n_heads"), _checks.FLOAT32)
        a.at_least_one("n_heads")
        a.tensor("A", A, ("n_heads",), _checks.FLOAT32)
        a.optional("dt_bias", dt_bias, ("n_heads",), _checks.FLOAT32)

    def check_builtin(self, *tensors: Any) -> None:
        _checks.supported("chunk_cumsum", chunk_len=self.chunk_len)

    def kernels(self) -> list[tuple[str, dict[str, Value]]]:
        return [("chunk_cumsum", {"Q": self.chunk_len, "out_dtype": _checks.dtype_name(self.out_dtype)})]

    def plan(self, p: Planner, *slots: Slot | None) -> tuple[Slot, Slot]:
        dt, A, dt_bias = slots
        assert dt is not None and A is not None
        return plan_chunk_cumsum(p, p.empty, dt, A, dt_bias, **self.options())


def plan_chunk_cumsum(
    p: Planner,
    new: Callable[[tuple[int, ...], torch.dtype], Slot],
    dt: Slot,
    A: Slot,
    dt_bias: Slot | None,
    *,
    chunk_len: int,
    out_dtype: torch.dtype,
    dt_softplus: bool,
    dt_min: float,
    dt_max: float,
    lowest: float = LOWEST_TERM,
) -> tuple[Slot, Slot]:
    """Add the launch; ``new`` (p.empty or p.workspace) makes dt_out and dA_cumsum. A term below ``lowest`` counts as that."""
    batch, seqlen, heads = dt.shape
    chunks = _checks.num_chunks(seqlen, chunk_len)
    dt_out = new((batch, heads, chunks, chunk_len), out_dtype)
    dA_cumsum = new((batch, heads, chunks, chunk_len), torch.float32)
    p.launch(
        "chunk_cumsum",
        {"Q": chunk_len, "out_dtype": _checks.dtype_name(out_dtype)},
        {
            "dt": p.dense(dt),
            "A": packed(p, A),
            "dt_bias": None if dt_bias is None else packed(p, dt_bias),
            "dt_out": dt_out,
            "dA_cumsum": dA_cumsum,
        },
        {"B": batch, "S": seqlen, "H": heads, "C": chunks},
        {"dt_min": dt_min, "dt_max": dt_max, "softplus": float(dt_softplus), "lowest": lowest},
    )
    return dt_out, dA_cumsum
