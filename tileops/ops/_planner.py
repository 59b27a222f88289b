"""A call's plan: which kernels run, with which sizes, over which memory. Made once per call signature, run at every call.

An op describes its launches over ``Slot``s, tensors known by shape, strides and alignment only; the planner resolves the
kernels, evaluates grids and scalars, and lays out one workspace. ``Plan.run`` then allocates, fills in addresses and
launches: no checks, no arithmetic over sizes.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tileops.config import Value
from tileops.driver import Launch, corrupt, device_info
from tileops.ops import _resolve
from tileops.ops._torch import allocate, deterministic, empty_strided

_WORKSPACE_ALIGNMENT = 256


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides in elements of a contiguous tensor of this shape."""
    strides = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(strides[::-1])


class Slot(NamedTuple):
    """A tensor of a plan: an input, an output or a piece of the workspace."""

    base: int  # index of the memory it lies in: inputs that are given, then outputs, then the workspace
    offset: int  # bytes from the start of that memory
    shape: tuple[int, ...]
    stride: tuple[int, ...]  # elements
    dtype: torch.dtype
    base_alignment: int  # bytes that the memory's start is known to be a multiple of

    def aligned(self, nbytes: int) -> bool:
        """Whether every row starts at a multiple of ``nbytes``: base address, and all strides but the last."""
        if self.base_alignment % nbytes or self.offset % nbytes:
            return False
        size = self.dtype.itemsize
        for n, s in zip(self.shape[:-1], self.stride):
            if n > 1 and s * size % nbytes:
                return False
        return True

    def is_contiguous(self) -> bool:
        contiguous = contiguous_strides(self.shape)
        return self.stride == contiguous or all(n <= 1 or s == c for n, s, c in zip(self.shape, self.stride, contiguous))

    def last(self) -> Slot:
        """The view of index -1 in the last dimension."""
        skip = max(self.shape[-1] - 1, 0) * self.stride[-1] * self.dtype.itemsize
        return self._replace(offset=self.offset + skip, shape=self.shape[:-1], stride=self.stride[:-1])

    def view(self, shape: Sequence[int]) -> Slot:
        """The same contiguous memory with another shape."""
        if not self.is_contiguous() or math.prod(shape) != math.prod(self.shape):
            raise ValueError(f"a slot of shape {self.shape}, strides {self.stride} has no view of shape {tuple(shape)}")
        return self._replace(shape=tuple(shape), stride=contiguous_strides(shape))


class Plan:
    """What one call signature does on the GPU."""

    def __init__(self, planner: Planner, outputs: Slot | tuple[Slot, ...]) -> None:
        self.ordinal: int = planner.device.index
        made = [(slot.shape, slot.stride, slot.dtype) for slot in planner.outputs]
        if planner.workspace_bytes:
            made.append(((planner.workspace_bytes,), (1,), torch.uint8))
        self._made = tuple(made)
        # The addresses of a call are those of its memories, then of places within one.
        count = planner.inputs + len(made)
        inside: dict[tuple[int, int], int] = {}

        def place(slot: Slot) -> int:
            at = slot.base % count  # the workspace, -1, is the last
            return inside.setdefault((at, slot.offset), count + len(inside)) if slot.offset else at

        self._steps = tuple(
            [(step.run, _picker([slot.base if step.memory else place(slot) for slot in step.slots]), step.memory) for step in planner.steps]
        )
        self._inside = tuple(inside)
        self._densify = tuple(planner.densify.items())
        self._single = isinstance(outputs, Slot)
        slots: Iterable[Slot] = (outputs,) if isinstance(outputs, Slot) else outputs
        self._returned = tuple([s.base for s in slots])
        # One launch that fills one new tensor, as decode: the launch, which of the call's addresses it takes, which is the new one's.
        self._alone: tuple[Launch, list[int], int] | None = None
        if len(made) == len(self._steps) == 1 and self._single and self._returned[0] == planner.inputs:
            (step,) = planner.steps
            if step.launch is not None and not (self._densify or self._inside):
                self._alone = step.launch, [place(slot) for slot in step.slots], planner.inputs

    def run(self, tensors: Sequence[Tensor], addresses: list[int]) -> Tensor | tuple[Tensor, ...]:
        """Runs over the tensors that are given, on the current stream of their device.

        ``addresses`` are theirs; it is added to."""
        if torch._C._cuda_getDevice() != self.ordinal:
            with torch.cuda.device(self.ordinal):
                return self.run(tensors, addresses)
        if self._densify:
            tensors = list(tensors)
            for base, more in self._densify:
                tensor = tensors[base]
                if more:
                    tensor = tensor.view(*tensor.shape, *(1 for _ in more)).expand(*tensor.shape, *more)
                tensors[base] = tensor = tensor.clone(memory_format=torch.contiguous_format)
                addresses[base] = tensor.data_ptr()
        new = empty_strided if deterministic() else allocate
        made = [new(shape, stride, dtype) for shape, stride, dtype in self._made]
        addresses += map(Tensor.data_ptr, made)
        for at, offset in self._inside:
            addresses.append(addresses[at] + offset)
        memory = (*tensors, *made)
        stream = torch._C._cuda_getCurrentRawStream(self.ordinal)
        for step, pick, of_memory in self._steps:
            step(pick(memory if of_memory else addresses), stream)
        if self._single:
            return memory[self._returned[0]]
        return tuple([memory[base] for base in self._returned])

    def written(self) -> tuple[str, dict[str, object]]:
        """What a call that is recognised does: statements for ``_torch.recogniser``, and the names in them."""
        written = None
        if self._alone is not None:
            launch, places, new = self._alone
            taken = ["out.data_ptr()" if place == new else f"a{place}" for place in places]
            written = launch.written(", ".join(taken), "stream(ordinal)")
        if written is None:
            return _RUN, {"run": self.run}
        fire, names = written
        shape, stride, dtype = self._made[0]
        names.update(run=self.run, ordinal=self.ordinal, shape=shape, stride=stride, dtype=dtype)
        names.update(current=torch._C._cuda_getDevice, stream=torch._C._cuda_getCurrentRawStream)
        names.update(allocate=allocate, empty_strided=empty_strided, deterministic=deterministic)
        return f"if current() != ordinal:\n    {_RUN}\n{_NEW}{fire}return out", names


_RUN = "return run(({given},), [{addresses}])"
_NEW = "out = (empty_strided if deterministic() else allocate)(shape, stride, dtype)"


class _Step(NamedTuple):
    """``run`` gets, of the call's memories or of their addresses, those of ``slots``, and the stream."""

    run: Callable[[Sequence[Any], int], None]
    slots: Sequence[Slot]
    memory: bool = False
    launch: Launch | None = None  # whose ``fire`` it is


def _picker(places: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    if len(places) == 1:  # of one place itemgetter would give no tuple
        return lambda values, place=places[0]: (values[place],)  # type: ignore[misc]
    return operator.itemgetter(*places)


class Planner:
    """Collects the steps of one plan. Ops see this object as ``p``."""

    def __init__(self, tensors: Sequence[Tensor | None], device: torch.device) -> None:
        self.device = device
        self.densify: dict[int, tuple[int, ...]] = {}  # inputs copied at each call -> dimensions they are expanded by
        self.outputs: list[Slot] = []
        self.steps: list[_Step] = []
        self._workspace_offset = 0
        self.given: list[Slot] = []
        self.slots = tuple([None if t is None else self._input(t) for t in tensors])
        self.inputs = len(self.given)

    def _input(self, tensor: Tensor) -> Slot:
        alignment = math.gcd(tensor.data_ptr(), 16)
        slot = Slot(len(self.given), 0, tuple(tensor.shape), tensor.stride(), tensor.dtype, alignment)
        self.given.append(slot)
        return slot

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
        slot = Slot(self.inputs + len(self.outputs), 0, tuple(shape), contiguous_strides(shape), dtype, _WORKSPACE_ALIGNMENT)
        self.outputs.append(slot)
        return slot

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
        given = self.given[slot.base]
        rank = len(given.shape)
        self.densify[slot.base] = slot.shape[rank:] if slot.shape[:rank] == given.shape else ()
        return slot._replace(stride=contiguous_strides(slot.shape), base_alignment=_WORKSPACE_ALIGNMENT)

    def launch(
        self,
        kernel: str,
        values: dict[str, Value],
        tensors: Mapping[str, Slot | None],
        dims: dict[str, int],
        floats: dict[str, float] | None = None,
    ) -> None:
        """Adds a launch. ``tensors`` by the kernel's parameter names, of which those that its record has are looked at; None for one that
        the kernel takes as optional and that is not given. Strides are bound from them as ``name.stride<i>``, 0 for one that is not
        given."""
        if 0 in dims.values():
            return  # nothing to compute; the op has filled what a zero size still defines
        loaded = _resolve.obtain(kernel, values, self.device.index)
        slots = []
        absent: tuple[str, ...] = ()
        sizes = dict(dims)
        for name, optional, alignment, strides in loaded.form.bindings:
            try:
                slot = tensors[name]
            except KeyError:
                raise corrupt(loaded.record, f"its record has a tensor {name!r} that no call has") from None
            if slot is None:
                if not optional:
                    raise ValueError(f"{kernel}: {name} is not optional.")
                absent += (name,)
                for stride, _ in strides:
                    sizes[stride] = 0
                continue
            if slot.base_alignment % alignment or slot.offset % alignment:
                slot = self._realigned(slot, alignment, f"{kernel}: {name}")
            slots.append(slot)
            for stride, i in strides:
                # The stride of a dimension of size 1 is arbitrary in torch; the kernel may assume that it is a multiple of 16 bytes.
                if i < len(slot.shape):
                    sizes[stride] = slot.stride[i] if slot.shape[i] > 1 else 0
        launch = Launch(loaded, sizes, floats or {}, absent)
        if not launch.empty:
            self.steps.append(_Step(launch.fire, slots, launch=launch))

    def _realigned(self, slot: Slot, nbytes: int, what: str) -> Slot:
        """A copy of ``slot``, of which the kernel needs a better aligned start (a small vector cut out of a larger one)."""
        if 0 <= slot.base < self.inputs and slot.is_contiguous():
            return self.copied(slot)
        raise ValueError(f"{what} must start at a multiple of {nbytes} bytes for this variant of the kernel.")

    def fill_zero(self, slot: Slot) -> None:
        """Adds a step that zeroes a whole output."""

        def zero(memory: Sequence[Tensor], stream: int) -> None:
            _shaped(memory[0], slot).zero_()

        self.steps.append(_Step(zero, [slot], memory=True))

    def copy(self, destination: Slot, source: Slot) -> None:
        """Adds a step that copies an input into a whole output."""

        def copy(memory: Sequence[Tensor], stream: int) -> None:
            _shaped(memory[0], destination).copy_(_shaped(memory[1], source))

        self.steps.append(_Step(copy, [destination, source], memory=True))


def _shaped(tensor: Tensor, slot: Slot) -> Tensor:
    """The whole tensor that is an input or an output, in the slot's shape."""
    return tensor.view(slot.shape) if tensor.is_contiguous() else tensor


#: Base index of the workspace: last in the list of memories.
_WORKSPACE = -1
