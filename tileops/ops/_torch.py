"""What is taken from beneath torch's public interface: where the hot path would cost microseconds more, and where torch has no public
question. Each has a stand-in.

torch's own compiled code allocates and checks its inputs through the same functions.
"""

from __future__ import annotations

import functools
import textwrap
from collections.abc import Callable, Mapping, Sequence
from types import CodeType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

_guards: Any = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
_functorch: Any = getattr(torch._C, "_functorch", None)


def empty_strided(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An uninitialised tensor on the current CUDA device."""
    return torch.empty_strided(shape, stride, dtype=dtype, device="cuda")


#: Whether torch is told to be deterministic, and so to fill it with NaN.
deterministic: Callable[[], bool] = getattr(torch._C, "_get_deterministic_algorithms", torch.are_deterministic_algorithms_enabled)

#: The same, but that it is not filled where torch is told to fill what is uninitialised.
allocate: Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor] = getattr(_guards, "_empty_strided_cuda", empty_strided)


def recogniser(
    tensors: Sequence[Tensor | None],
    modes: Callable[[], object],
    same_modes: object,
    *,
    exact: bool,
    then: str,
    names: Mapping[str, object] | None = None,
) -> Callable[..., Any]:
    """A function of as many arguments that does ``then`` where the call is like one with ``tensors`` when ``modes()`` was ``same_modes``,
    and else returns None.

    Like: tensors in the same places and None in the others; equal ``modes()``; of each tensor class, rank, dtype, device, lazy negation,
    inference mode, none that requires grad where grad is enabled; with ``exact`` also shape, strides, address modulo 16 and whether the
    address is 0. It may say None of some that are alike, and always does where torch has no such test. ``modes`` must have whether grad is
    enabled and inference mode is on.

    ``then``: statements over ``names`` and, with ``exact``, a0, a1 ..., the addresses of the tensors; ``{addresses}`` stands for all of
    these, ``{given}`` for the call's tensors.
    """
    there = [t for t in tensors if t is not None]
    shapes = [list(t.shape) if exact else [None] * t.dim() for t in there]
    strides = [list(t.stride()) if exact else [None] * t.dim() for t in there]
    try:
        check = _guards.TensorGuards(*there, dynamic_dims_sizes=shapes, dynamic_dims_strides=strides).check
    except (AttributeError, TypeError, RuntimeError):
        return unknown
    at = [t.data_ptr() for t in there] if exact else []
    made = {**(names or {}), "check": check, "modes": modes, "same_modes": same_modes, "address": Tensor.data_ptr}
    made.update(remainders=tuple([a & 15 for a in at]), __name__=__name__)
    exec(_written(tuple([t is not None for t in tensors]), tuple([a != 0 for a in at]), then), made)
    call: Callable[..., Any] = made.pop("call")  # which holds ``made``
    return call


def unknown(*tensors: Any) -> None:
    """What a ``recogniser`` would make that knows no call."""


#: Written out for a call's arguments, since loops over them and calls in between would take half as long again. torch's test ends the
#: process where it looks for a nested tensor's strides.
_CALL = """
def call({arguments}):
    if {absent}modes() != same_modes:
        return None
    try:
        if {nested} or not check({given}):
            return None
    except AttributeError:  # no tensor
        return None
"""
_EXACT = """
    {read}
    if ({remainders},) != remainders or not ({memory}):
        return None
"""


@functools.lru_cache(maxsize=256)
def _written(there: tuple[bool, ...], memory: tuple[bool, ...], then: str) -> CodeType:
    """The code of a ``recogniser``, for the arguments that are tensors and, where it is an exact one, those of them that have memory."""
    every = [f"t{i}" for i in range(len(there))]
    given = [name for name, is_there in zip(every, there) if is_there]
    addresses = [f"a{i}" for i in range(len(memory))]
    words = {
        "arguments": ", ".join(every),
        "absent": "".join(f"{name} is not None or " for name in every if name not in given),
        "nested": " or ".join(f"{name}.is_nested" for name in given),
        "given": ", ".join(given),
        "addresses": ", ".join(addresses),
        "read": "; ".join(f"{a} = address({name})" for a, name in zip(addresses, given)),
        "remainders": ", ".join(f"{a} & 15" for a in addresses),
        "memory": " and ".join(["True", *[a for a, has in zip(addresses, memory) if has]]),
    }
    text = _CALL + (_EXACT if memory else "") + textwrap.indent(then, "    ")
    return compile(text.format_map(words), "<a recognised call>", "exec")


def _no(*tensors: Tensor) -> bool:
    return False


#: Whether vmap hides a dimension of the tensor.
is_batched: Callable[[Tensor], bool] = getattr(_functorch, "is_batchedtensor", _no)

#: Whether grad, jvp or another derivative of torch.func follows the tensor, in whichever mode.
is_differentiated: Callable[[Tensor], bool] = getattr(_functorch, "is_gradtrackingtensor", _no)


def dual_level() -> int:
    """Levels of torch.autograd.forward_ad that are entered, less one."""
    level: int = getattr(forward_ad, "_current_level", -1)
    return level


def is_dual(tensor: Tensor) -> bool:
    """Whether the tensor has a tangent of torch.autograd.forward_ad."""
    if dual_level() < 0:
        return False
    try:
        return forward_ad.unpack_dual(tensor).tangent is not None
    except RuntimeError:  # below autograd, inside of an operator of torch.library, tangents are not seen
        return False
