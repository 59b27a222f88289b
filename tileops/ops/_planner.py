"""A call's plan: which kernels run, with which sizes, over which memory. Made once per call signature, run at every call.

An op describes its launches over ``Slot``s, tensors known by shape, strides and alignment only; the planner resolves the
kernels, evaluates grids and scalars, and lays out one workspace. ``Plan.run`` then allocates, fills in addresses and
launches: no checks, no arithmetic over sizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tileops.config import Value
from tileops.driver import Launch, device_info, stream_handle
from tileops.ops import _resolve

_WORKSPACE_ALIGNMENT = 256


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides in elements of a contiguous tensor of this shape."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * size)
    return tuple(reversed(strides)) if shape else ()


@dataclass(frozen=True)
class Slot:
    """A tensor of a plan: an input, an output or a piece of the workspace."""

    base: int  # index of the memory it lies in: inputs, then outputs, then the workspace
    offset: int  # bytes from the start of that memory
    shape: tuple[int, ...]
    stride: tuple[int, ...]  # elements
    dtype: torch.dtype
    base_alignment: int  # bytes that the memory's start is known to be a multiple of

    def aligned(self, nbytes: int) -> bool:
        """Whether every row starts at a multiple of ``nbytes``: base address, and all strides but the last."""
        size = self.dtype.itemsize
        pitches = (s * size for n, s in zip(self.shape[:-1], self.stride[:-1]) if n > 1)
        return math.gcd(self.base_alignment, self.offset) % nbytes == 0 and all(p % nbytes == 0 for p in pitches)

    def is_contiguous(self) -> bool:
        return all(n <= 1 or s == c for n, s, c in zip(self.shape, self.stride, contiguous_strides(self.shape)))

    def last(self) -> Slot:
        """The view of index -1 in the last dimension."""
        skip = max(self.shape[-1] - 1, 0) * self.stride[-1] * self.dtype.itemsize
        return replace(self, offset=self.offset + skip, shape=self.shape[:-1], stride=self.stride[:-1])

    def view(self, shape: Sequence[int]) -> Slot:
        """The same contiguous memory with another shape."""
        if not self.is_contiguous() or math.prod(shape) != math.prod(self.shape):
            raise ValueError(f"a slot of shape {self.shape}, strides {self.stride} has no view of shape {tuple(shape)}")
        return replace(self, shape=tuple(shape), stride=contiguous_strides(shape))


class Plan:
    """What one call signature does on the GPU."""

    def __init__(self, planner: Planner, outputs: Slot | tuple[Slot, ...]) -> None:
        self.device = planner.device
        self._densify = tuple(planner.densify.items())
        self._outputs = tuple((shape, contiguous_strides(shape), dtype) for shape, dtype in planner.outputs)
        self._workspace = planner.workspace_bytes
        self._steps = tuple(planner.steps)
        slots = outputs if isinstance(outputs, tuple) else (outputs,)
        self._returned = tuple(s.base for s in slots)
        self._single = not isinstance(outputs, tuple)

    def run(self, tensors: Sequence[Tensor | None]) -> Tensor | tuple[Tensor, ...]:
        """Runs on the current stream of the tensors' device, which is the current device."""
        device = self.device
        if self._densify:
            tensors = list(tensors)
            for index, more in self._densify:
                tensor = tensors[index]
                assert tensor is not None
                if more:
                    tensor = tensor.view(*tensor.shape, *(1 for _ in more)).expand(*tensor.shape, *more)
                tensors[index] = tensor.clone(memory_format=torch.contiguous_format)
        # empty_strided: less of torch's own time than empty takes.
        memory: list[Tensor | None] = list(tensors)
        for shape, stride, dtype in self._outputs:
            memory.append(torch.empty_strided(shape, stride, dtype=dtype, device=device))
        memory.append(torch.empty(self._workspace, dtype=torch.uint8, device=device) if self._workspace else None)
        stream = stream_handle(torch._C._cuda_getCurrentRawStream(device.index))
        for step in self._steps:
            step(memory, stream)
        if self._single:
            return memory[self._returned[0]]  # type: ignore[return-value]
        return tuple(memory[base] for base in self._returned)  # type: ignore[misc]


class _LaunchStep:
    def __init__(self, launch: Launch, slots: Mapping[str, Slot | None]) -> None:
        self._fire = launch.fire
        placed = (slots[name] for name in launch.tensors)
        self._places = tuple((slot.base, slot.offset) for slot in placed if slot is not None)

    def __call__(self, memory: list[Any], stream: Any) -> None:
        self._fire([memory[base].data_ptr() + offset for base, offset in self._places], stream)


class Planner:
    """Collects the steps of one plan. Ops see this object as ``p``."""

    def __init__(self, tensors: Sequence[Tensor | None], device: torch.device) -> None:
        self.device = device
        self.inputs = len(tensors)
        self.densify: dict[int, tuple[int, ...]] = {}  # inputs copied at each call -> dimensions they are expanded by
        self.outputs: list[tuple[tuple[int, ...], torch.dtype]] = []
        self.steps: list[Callable[[list[Tensor | None], Any], None]] = []
        self._workspace_offset = 0
        self._given = tuple(() if t is None else tuple(t.shape) for t in tensors)
        self.slots = tuple(None if t is None else _slot_of(i, t) for i, t in enumerate(tensors))

    @property
    def workspace_bytes(self) -> int:
        return self._workspace_offset

    @property
    def multiprocessors(self) -> int:
        """SMs of the device."""
        return device_info(self.device.index).multiprocessors

    def has(self, kernel: str) -> bool:
        """Whether the package has ``kernel`` for the device's arch."""
        return bool(_resolve.archs_of(kernel, device_info(self.device.index)))

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Slot:
        """A fresh contiguous tensor that the call returns."""
        self.outputs.append((tuple(shape), dtype))
        return Slot(self.inputs + len(self.outputs) - 1, 0, tuple(shape), contiguous_strides(shape), dtype, _WORKSPACE_ALIGNMENT)

    def workspace(self, shape: Sequence[int], dtype: torch.dtype) -> Slot:
        """Contiguous memory that lives for the call; its content is undefined."""
        offset = self._workspace_offset
        nbytes = math.prod(shape) * dtype.itemsize
        self._workspace_offset += -(-nbytes // _WORKSPACE_ALIGNMENT) * _WORKSPACE_ALIGNMENT
        return Slot(_WORKSPACE, offset, tuple(shape), contiguous_strides(shape), dtype, _WORKSPACE_ALIGNMENT)

    def dense(self, slot: Slot) -> Slot:
        """``slot``, or where its last dimension is strided a contiguous copy of that input, made at each call."""
        if slot.shape[-1] <= 1 or slot.stride[-1] == 1:
            return slot
        return self.copied(slot)

    def copied(self, slot: Slot) -> Slot:
        """A contiguous, aligned copy of an input, made at each call; of an input ``expanded`` to more dimensions, in its full shape."""
        given = self._given[slot.base]
        self.densify[slot.base] = slot.shape[len(given) :] if slot.shape[: len(given)] == given else ()
        return replace(slot, stride=contiguous_strides(slot.shape), base_alignment=_WORKSPACE_ALIGNMENT)

    def launch(
        self,
        kernel: str,
        values: dict[str, Value],
        tensors: Mapping[str, Slot | None],
        dims: dict[str, int],
        floats: dict[str, float] | None = None,
    ) -> None:
        """Adds a launch. ``tensors`` by the kernel's parameter names, None for one that the kernel takes as optional and that
        is not given; strides are bound from them as ``name.stride<i>``."""
        if 0 in dims.values():
            return  # nothing to compute; the op has filled what a zero size still defines
        loaded = _resolve.obtain(kernel, values, self.device.index)
        record = loaded.record
        placed: dict[str, Slot | None] = {}
        sizes = dict(dims)
        for name, slot in tensors.items():
            if slot is None:
                if name not in record.optional:
                    raise ValueError(f"{kernel}: {name} is not optional.")
                placed[name] = None
                sizes.update((f"{name}.stride{i}", 0) for i in range(_MAX_RANK))
                continue
            placed[name] = slot = self._aligned(slot, record.alignment.get(name, 1), f"{kernel}: {name}")
            # The stride of a dimension of size 1 is arbitrary in torch; the kernel may assume that it is a multiple of 16 bytes.
            sizes.update((f"{name}.stride{i}", s if n > 1 else 0) for i, (n, s) in enumerate(zip(slot.shape, slot.stride)))
        launch = Launch(loaded, sizes, floats or {}, absent=[name for name, slot in placed.items() if slot is None])
        if launch.empty:
            return
        self.steps.append(_LaunchStep(launch, placed))

    def _aligned(self, slot: Slot, nbytes: int, what: str) -> Slot:
        """``slot``, or a copy of it where the kernel needs a better aligned start (a small vector cut out of a larger one)."""
        if _starts_aligned(slot, nbytes):
            return slot
        if slot.base < self.inputs and slot.is_contiguous():
            return self.copied(slot)
        raise ValueError(f"{what} must start at a multiple of {nbytes} bytes for this variant of the kernel.")

    def fill_zero(self, slot: Slot) -> None:
        """Adds a step that zeroes a whole output."""

        def zero(memory: list[Tensor | None], stream: Any) -> None:
            _whole(memory, slot).zero_()

        self.steps.append(zero)

    def copy(self, destination: Slot, source: Slot) -> None:
        """Adds a step that copies an input into a whole output."""

        def copy(memory: list[Tensor | None], stream: Any) -> None:
            _whole(memory, destination).copy_(_whole(memory, source))

        self.steps.append(copy)


def _whole(memory: list[Tensor | None], slot: Slot) -> Tensor:
    """The tensor of a slot that is an input or an output, in the slot's shape."""
    tensor = memory[slot.base]
    assert tensor is not None
    return tensor.view(slot.shape) if tensor.is_contiguous() else tensor


#: Base index of the workspace: last in the list of memories.
_WORKSPACE = -1

#: Dimensions of the tensors that kernels take, at most.
_MAX_RANK = 6


def _starts_aligned(slot: Slot, nbytes: int) -> bool:
    return math.gcd(slot.base_alignment, slot.offset) % nbytes == 0


def _slot_of(index: int, tensor: Tensor) -> Slot:
    address = tensor.data_ptr()
    alignment = next(n for n in (16, 8, 4, 2, 1) if address % n == 0)
    return Slot(index, 0, tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, alignment)
