"""Argument checks of the ops: one line a tensor, and messages that name the argument, what was expected and what came.

Tensors are checked by shape, strides, dtype and device, never by value, so that a call seen before can skip all of it.
TypeError: not a tensor, int, bool, number or dtype at all. ValueError: the right kind of thing with a wrong rank, shape,
dtype, device, layout or value.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from tileops import catalog
from tileops.ops._torch import is_batched, is_differentiated, is_dual

FLOAT32 = (torch.float32,)
INT32 = (torch.int32,)
HALF_DTYPES = (torch.bfloat16, torch.float16)
#: What x, B and C may be. The in-tree CUDA kernels take the first two; float32 is the reference's alone.
INPUT_DTYPES = (*HALF_DTYPES, torch.float32)
OUT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

FORWARD_ONLY = (
    "{name}: requires grad, and this op is forward only (it has no backward); call it under torch.no_grad() or pass {name}.detach()."
)


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.bfloat16`` -> ``bfloat16``, as kernel configs spell it."""
    return str(dtype).removeprefix("torch.")


class Arguments:
    """The tensors of one call, checked in order: the first use of a dimension's name sets its size, later ones must agree.

    ``alike``: a call that passed differs in sizes alone, so that nothing else needs a look.
    """

    def __init__(self, alike: bool = False) -> None:
        self.sizes: dict[str, int] = {}
        self._alike = alike
        self._first: tuple[str, torch.device] | None = None

    def __getitem__(self, name: str) -> int:
        return self.sizes[name]

    def tensor(
        self,
        name: str,
        value: Any,
        dims: Sequence[str],
        dtypes: Sequence[torch.dtype],
        same_as: str = "",
        or_dims: Sequence[str] | None = None,
    ) -> None:
        """Check one tensor: its kind, rank and shape against ``dims`` (or ``or_dims``, by its rank), dtype, device, and that no
        gradient is asked for.

        ``same_as`` says in the message whose dtype ``dtypes`` is.
        """
        if self._alike:
            self._fits(name, value, dims, or_dims)
            return
        if not isinstance(value, Tensor):
            raise TypeError(f"{name}: expected a tensor of shape {self._shapes(dims, or_dims)}, got {type(value).__name__}.")
        if is_batched(value):  # before the shape, in which the dimension that vmap took away is missing
            raise ValueError(
                f"{name}: torch.vmap does not reach into this op; call it once, with what vmap maps over in the batch dimension."
            )
        if value.is_nested:
            raise ValueError(f"{name}: expected a strided tensor, got a nested one.")
        if value.layout != torch.strided:
            raise ValueError(f"{name}: expected a strided tensor, got layout {value.layout}.")
        self._fits(name, value, dims, or_dims)
        if value.dtype not in dtypes:
            whose = f" ({same_as})" if same_as else ""
            words = f"{name}: expected dtype {' or '.join(map(dtype_name, dtypes))}{whose}, got {dtype_name(value.dtype)}."
            raise ValueError(words + _remedy(name, value.dtype, tuple(dtypes)))
        if self._first is None:
            self._first = name, value.device
        elif value.device != self._first[1]:
            raise ValueError(f"{name}: expected device {self._first[1]} (where {self._first[0]} is), got {value.device}.")
        if value.is_neg() or value.is_conj():
            # Kernels read memory, where the sign that torch keeps in a flag is not.
            raise ValueError(f"{name}: is a lazily negated or conjugated view; pass {name}.resolve_conj().resolve_neg().")
        if value.requires_grad and torch.is_grad_enabled():
            raise ValueError(FORWARD_ONLY.format(name=name))
        if is_differentiated(value):
            raise ValueError(
                f"{name}: is differentiated by torch.func, and this op is forward only; call it outside of grad, jvp and the like."
            )
        if is_dual(value):
            raise ValueError(f"{name}: has a tangent of torch.autograd.forward_ad, and this op is forward only; pass its primal.")

    def _fits(self, name: str, value: Tensor, dims: Sequence[str], or_dims: Sequence[str] | None) -> None:
        shape, sizes = value.shape, self.sizes
        allowed = dims if or_dims is None or len(shape) != len(or_dims) else or_dims
        if len(shape) != len(allowed):
            raise ValueError(f"{name}: expected shape {self._shapes(dims, or_dims)}, got {tuple(shape)}.")
        if (*map(sizes.get, allowed),) == shape:
            return
        for dim, size in zip(allowed, shape):
            if sizes.get(dim, size) != size:
                raise ValueError(f"{name}: expected shape {self._shapes(dims, or_dims)}, got {tuple(shape)}.")
        sizes.update(zip(allowed, shape))

    def optional(
        self,
        name: str,
        value: Any,
        dims: Sequence[str],
        dtypes: Sequence[torch.dtype],
        same_as: str = "",
        or_dims: Sequence[str] | None = None,
    ) -> None:
        """As ``tensor``, and None is fine."""
        if value is not None:
            self.tensor(name, value, dims, dtypes, same_as, or_dims)

    def at_least_one(self, *names: str) -> None:
        """These sizes are >= 1; batch and seqlen alone may be 0."""
        for name in names:
            if self.sizes[name] < 1:
                raise ValueError(f"{name}: expected at least 1, got 0.")

    def heads_per_group(self) -> None:
        """n_heads is a multiple of n_groups (head h reads group h // (n_heads // n_groups))."""
        heads, groups = self.sizes["n_heads"], self.sizes["n_groups"]
        if heads % groups:
            raise ValueError(f"n_groups: expected a divisor of n_heads = {heads}, got {groups}.")

    def chunks(self, name: str, seqlen: str) -> None:
        """num_chunks, set by argument ``name``, is ceil(seqlen / chunk_len)."""
        length, chunk_len, came = self.sizes[seqlen], self.sizes["chunk_len"], self.sizes["num_chunks"]
        expected = num_chunks(length, chunk_len)
        if came != expected:
            raise ValueError(
                f"{name}: expected num_chunks = ceil({seqlen} / chunk_len) = ceil({length} / {chunk_len}) = {expected}, got {came}."
            )

    def _shapes(self, dims: Sequence[str], or_dims: Sequence[str] | None) -> str:
        return self._shape(dims) if or_dims is None else f"{self._shape(dims)} or {self._shape(or_dims)}"

    def _shape(self, dims: Sequence[str]) -> str:
        return f"({', '.join(str(self.sizes.get(d, d)) for d in dims)}{',' if len(dims) == 1 else ''})"


def _remedy(name: str, came: torch.dtype, expected: tuple[torch.dtype, ...]) -> str:
    """What to do about a dtype that users naturally have: integers as cumsum makes them, the steps and skips of a layer in bfloat16."""
    if expected == INT32 and came == torch.int64:
        return f" Pass {name}.to(torch.int32)."
    if expected == FLOAT32 and name == "A" and came in HALF_DTYPES:
        return " Keep rates in float32: rounded ones ruin long contexts."
    return f" Pass {name}.float()." if expected == FLOAT32 and came.is_floating_point else ""


def num_chunks(seqlen: int, chunk_len: int) -> int:
    """ceil(seqlen / chunk_len)."""
    return -(-seqlen // chunk_len)


@functools.lru_cache(maxsize=256)  # asked again for every new shape of a model
def supported(*kernels: str, **sizes: int) -> None:
    """Raise unless every in-tree kernel named takes these sizes; keywords chunk_len (or chunk_size), d_head, d_state."""
    fields = {"chunk_len": "Q", "chunk_size": "Q", "d_head": "P", "d_state": "N"}
    for kernel in kernels:
        for name, size in sizes.items():
            values = catalog.KERNELS[kernel].get(fields[name])
            if values is not None and size not in values:
                raise ValueError(
                    f"{name}: the in-tree CUDA kernels support {catalog.describe(values)}, got {size}; target='reference' takes any."
                )


def half(name: str, dtype: torch.dtype) -> None:
    """Raise unless the in-tree CUDA kernels take x, B and C of this dtype."""
    if dtype not in HALF_DTYPES:
        raise ValueError(
            f"{name}: the in-tree CUDA kernels take {' or '.join(map(dtype_name, HALF_DTYPES))}, got {dtype_name(dtype)}; "
            "target='reference' takes float32."
        )


#: The reference holds a square of this many tokens for every head; beyond it lies a mistake, not a chunk.
LONGEST_CHUNK = 4096


def positive_int(name: str, value: Any) -> int:
    """A constructor's size. Raises TypeError for anything but an int, ValueError outside 1 ... LONGEST_CHUNK."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: expected a positive int, got {type(value).__name__}.")
    if not 1 <= value <= LONGEST_CHUNK:
        raise ValueError(f"{name}: expected a positive int up to {LONGEST_CHUNK}, got {value}.")
    return value


def flag(name: str, value: Any) -> bool:
    """A constructor's bool. Raises TypeError for anything else, so that a misplaced argument is not a truth value."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}: expected True or False, got {type(value).__name__}.")
    return value


#: Largest float32.
_MOST = 3.4028234663852886e38


def limit(name: str, value: Any) -> float:
    """A constructor's clamp bound; infinite beyond float32. Raises TypeError for anything but a number, ValueError for NaN."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}: expected a number, got {type(value).__name__}.")
    if value != value:
        raise ValueError(f"{name}: expected a number, got nan.")
    return float(value) if abs(value) <= _MOST else math.inf if value > 0 else -math.inf


def step_limits(name: str, value: Any) -> tuple[float, float]:
    """A constructor's pair of clamp bounds of a step. Raises TypeError for another kind, ValueError unless 0 <= lowest <= highest,
    the lowest finite."""
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise TypeError(f"{name}: expected a pair of numbers (lowest, highest), got {value!r}.")
    low, high = (limit(name, bound) for bound in value)
    if not 0 <= low <= high:
        raise ValueError(f"{name}: expected 0 <= lowest <= highest (time does not run backwards), got ({low}, {high}).")
    if math.isinf(low):
        raise ValueError(f"{name}: expected a finite lowest step, got ({low}, {high}).")
    return low, high


def out_dtype(name: str, value: Any) -> torch.dtype:
    """A constructor's storage dtype. Raises TypeError for anything but a torch.dtype, ValueError outside OUT_DTYPES."""
    if not isinstance(value, torch.dtype):
        raise TypeError(f"{name}: expected a torch.dtype, got {type(value).__name__}.")
    if value not in OUT_DTYPES:
        raise ValueError(f"{name}: expected {' or '.join(map(dtype_name, OUT_DTYPES))}, got {dtype_name(value)}.")
    return value


def updated_in_place(name: str, value: Tensor) -> None:
    """Raise unless every element of ``value`` has its own memory and rows are contiguous: a copy would lose the update."""
    _writable(name, value, "updated in place", rows=True)


def written(name: str, value: Tensor, *, rows: bool = False) -> None:
    """Raise unless every element of ``value`` has its own memory, so that results can be written there, and, with ``rows``, its last
    dimension is contiguous."""
    _writable(name, value, "written", rows)


def _writable(name: str, value: Tensor, what: str, rows: bool) -> None:
    if value.is_inference() and not torch.is_inference_mode_enabled():
        raise ValueError(
            f"{name}: cannot be {what}: it was made under torch.inference_mode(); call this op under it too, or pass {name}.clone()."
        )
    why = None
    reach = 1  # elements spanned by the dimensions of smaller stride
    for stride, size in sorted((stride, size) for size, stride in zip(value.shape, value.stride()) if size > 1):
        if stride < reach:
            why = "its elements share memory"
        reach += (size - 1) * stride
    if why is None and rows and value.shape[-1] > 1 and value.stride(-1) != 1:
        why = "its last dimension is not contiguous"
    if why is not None:
        wanted = "distinct elements" + (" and a last dimension of stride 1" if rows else "")
        raise ValueError(
            f"{name}: cannot be {what}: expected {wanted}, got strides {tuple(value.stride())} for shape {tuple(value.shape)} ({why})."
        )


def apart(name: str, value: Tensor, others: Mapping[str, Tensor | None]) -> None:
    """Raise where ``value``, which is written, certainly shares memory with one of the others: a common start, or dense spans that meet.

    Interleaved views of one buffer pass, whether or not their elements meet; so does what has no address.
    """
    if isinstance(value, FakeTensor):  # torch warns where its address is asked for
        return
    try:
        start, size, dense = value.data_ptr(), value.numel() * value.element_size(), value.is_contiguous()
        spans = {other: (t.data_ptr(), t.numel() * t.element_size(), t.is_contiguous()) for other, t in others.items() if t is not None}
    except (AttributeError, RuntimeError):  # something that is no plain tensor: the op's check has the words for it
        return
    for other, (at, extent, whole) in spans.items():
        if size and extent and (at == start or (dense and whole and at < start + size and start < at + extent)):
            if not start:  # of the meta device: all are at 0
                return
            raise ValueError(f"{name}: shares memory with {other}; expected a tensor of its own.")
