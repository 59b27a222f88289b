"""What is taken from beneath torch's public interface: where the hot path would cost microseconds more, and where torch has no public
question. Each has a stand-in.

torch's own compiled code allocates and checks its inputs through the same functions.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

_guards: Any = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
_functorch: Any = getattr(torch._C, "_functorch", None)
_is_nested: Callable[[Any], bool] = operator.attrgetter("is_nested")


def empty_strided(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An uninitialised tensor on the current CUDA device."""
    return torch.empty_strided(shape, stride, dtype=dtype, device="cuda")


#: Whether torch is told to be deterministic, and so to fill it with NaN.
deterministic: Callable[[], bool] = getattr(torch._C, "_get_deterministic_algorithms", torch.are_deterministic_algorithms_enabled)

#: The same, but that it is not filled where torch is told to fill what is uninitialised.
allocate: Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor] = getattr(_guards, "_empty_strided_cuda", empty_strided)


def recogniser(tensors: Sequence[Tensor], exact: bool) -> Callable[..., bool]:
    """A function that says of as many arguments whether they are tensors like these: class, rank, dtype, device, lazy negation,
    inference mode, none that requires grad where grad is enabled, and with ``exact`` shape and strides. It says yes of no others, and may
    say no of some that are.

    Always no where torch has no such test. Whether grad is enabled and inference mode is on is for the caller to compare.
    """
    shapes = [list(t.shape) if exact else [None] * t.dim() for t in tensors]
    strides = [list(t.stride()) if exact else [None] * t.dim() for t in tensors]
    try:
        check: Callable[..., bool] = _guards.TensorGuards(*tensors, dynamic_dims_sizes=shapes, dynamic_dims_strides=strides).check
    except (AttributeError, TypeError, RuntimeError):
        return _no

    def same(*others: Any) -> bool:
        try:  # torch's test ends the process where it looks for a nested tensor's strides
            return True not in map(_is_nested, others) and check(*others)
        except AttributeError:  # no tensor
            return False

    return same


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
