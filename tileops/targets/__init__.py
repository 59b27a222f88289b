"""Which implementation serves an op: the in-tree CUDA kernels, the plain-PyTorch reference, or a third party's target.

A *target* is a named set of implementations. Two are in-tree: :data:`BUILTIN` (the precompiled kernels, CUDA tensors
only) and ``"reference"`` (plain PyTorch, any device). Others come from installed distributions by the entry-point group
``tileops.targets``: each entry point's name is the target's name and it loads an object (see :class:`TargetLike`) with

- ``name: str``, the same name;
- ``implementation(op_name) -> callable or None``. The name is that of a class of ``tileops.mamba``, also where a user's
  subclass of it is called. The callable gets the tensors of the op's ``forward`` in order
  (None for an optional one that was not passed), checked, then the constructor's values as keywords
  (``Op.options()``); it returns what ``forward`` returns. None means that the target does not serve this op. Features beyond the
  spec (``SSDRecurrentFwdOp``: D, z, dt_bias, state_batch_indices, out; dt_softplus, out_dtype; ``Mamba2FwdOp``: D, z, seq_idx,
  cu_seqlens, out; dt_limit, out_dtype) come as keywords, and only those that a call uses: a call with one that the callable does
  not take raises TargetError.

Which target serves a call: the op's explicit ``target=``, else the process default (:func:`set_default_target`), else
the input's device: CUDA tensors -> BUILTIN, all others -> ``"reference"``. For tensors on the meta device, and
fake ones, the op alone says which shapes and dtypes come out, whatever the target.

Entry points are looked for when a name that is not in-tree is asked for, or the registered names are. One that fails
to load costs one warning, never an import. Importing this module imports no torch.
"""

from __future__ import annotations

import inspect
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from tileops.errors import TargetError

__all__ = [
    "BUILTIN",
    "REFERENCE",
    "Target",
    "TargetLike",
    "choose",
    "default",
    "implementation",
    "registered_targets",
    "set_default_target",
    "validate",
]

#: The in-tree CUDA kernels, as a target name.
BUILTIN = "builtin"

#: The in-tree plain-PyTorch definitions, as a target name.
REFERENCE = "reference"

#: What the ops' ``target`` argument takes: a target name, BUILTIN, or None to decide from the input device.
Target = str | None

ENTRY_POINT_GROUP = "tileops.targets"

Implementation = Callable[..., Any]


class TargetLike(Protocol):
    """What an entry point of the group ``tileops.targets`` loads."""

    name: str

    def implementation(self, op_name: str) -> Implementation | None: ...


_default: str | None = None
_lock = threading.RLock()
_entry_points: dict[str, Any] | None = None  # name -> importlib.metadata.EntryPoint; None: not looked for yet
_loaded: dict[str, TargetLike | None] = {}  # None: tried, and broken
_broken: dict[str, str] = {}  # name -> why


def set_default_target(name: Target) -> None:
    """Make ``name`` the target of every op that was built with ``target=None``; None restores the choice by device.

    Takes effect at each op's next call, in all threads.

    Raises:
        TargetError: the name is not registered.
        TypeError: the name is neither a str nor None.
    """
    global _default
    if name is not None:
        validate(name)
    _default = name


def default() -> Target:
    """The name given to :func:`set_default_target`, or None."""
    return _default


def registered_targets() -> tuple[str, ...]:
    """The names that ``target=`` takes: the in-tree ones, then third parties' in alphabetical order.

    Loads every third-party target, so a name that is listed can be used; one that fails to load is warned of once.
    """
    return (BUILTIN, REFERENCE, *(name for name in sorted(_discover()) if _load(name) is not None))


def validate(name: str) -> None:
    """Raise unless ``name`` is registered (and, for a third party's target, loads).

    Raises:
        TargetError: unknown name.
        TypeError: the name is not a str.
    """
    if not isinstance(name, str):
        raise TypeError(f"target: expected a target name, BUILTIN or None, got {type(name).__name__}.")
    if name not in (BUILTIN, REFERENCE) and _load(name) is None:
        raise _unknown(name)


def choose(explicit: Target, device_type: str, op_name: str) -> str:
    """The name of the target of one call, by the order in the module's docstring.

    Args:
        explicit: the op's ``target``.
        device_type: ``tensor.device.type`` of the inputs.
        op_name: the op's name, for the message.

    Raises:
        TargetError: BUILTIN was asked for, explicitly or as the default, and the inputs are not on a CUDA device.
    """
    name = explicit if explicit is not None else _default
    if name is None:
        return BUILTIN if device_type == "cuda" else REFERENCE
    if name == BUILTIN and device_type != "cuda":
        raise TargetError(
            f"{op_name}: target {BUILTIN!r} runs CUDA tensors only, and the inputs are on {device_type!r}; "
            f"use target={REFERENCE!r}, or target=None to decide from the input's device.",
            target=name,
            op=op_name,
            registered=registered_targets(),
        )
    return name


def implementation(name: str, op_name: str, keywords: Sequence[str] = ()) -> Implementation:
    """The callable with which the target ``name`` serves ``op_name``; see the module's docstring for its arguments.

    BUILTIN has none: its kernels are launched by ``tileops.ops``.

    Raises:
        TargetError: unknown name, or the target does not serve the op, or its callable does not take one of ``keywords``.
    """
    if name == REFERENCE:
        from tileops import reference

        found = reference.implementation(op_name)
    else:
        target = None if name == BUILTIN else _load(name)
        if target is None:
            raise _unknown(name)
        found = target.implementation(op_name)
    if found is None:
        raise TargetError(
            f"target {name!r} does not serve {op_name}. Use another target; registered: {', '.join(registered_targets())}.",
            target=name,
            op=op_name,
            registered=registered_targets(),
        )
    refused = [word for word in keywords if not _takes(found, word)]
    if refused:
        raise TargetError(
            f"target {name!r} serves {op_name} without {', '.join(refused)}; leave that out, or use another target; "
            f"registered: {', '.join(registered_targets())}.",
            target=name,
            op=op_name,
            registered=registered_targets(),
        )
    return found


def _takes(function: Implementation, keyword: str) -> bool:
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # a callable that does not say: the call will
        return True
    named = parameters.get(keyword)
    if named is not None:
        return named.kind in (named.POSITIONAL_OR_KEYWORD, named.KEYWORD_ONLY)
    return any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _unknown(name: str) -> TargetError:
    registered = registered_targets()
    why = f" (it failed to load: {_broken[name]})" if name in _broken else ""
    return TargetError(
        f"target {name!r} is not registered{why}; registered: {', '.join(registered)}.", target=name, op=None, registered=registered
    )


def _discover() -> dict[str, Any]:
    """Entry points by name; the first of a name wins. Read once: distributions do not appear in a running process."""
    global _entry_points
    with _lock:
        if _entry_points is None:
            from importlib.metadata import entry_points

            found: dict[str, Any] = {}
            for point in entry_points(group=ENTRY_POINT_GROUP):
                if point.name in (BUILTIN, REFERENCE):
                    warnings.warn(f"tileops: target {point.name!r} ({point.value}) ignored: the name is an in-tree target's.", stacklevel=2)
                else:
                    found.setdefault(point.name, point)
            _entry_points = found
        return _entry_points


def _load(name: str) -> TargetLike | None:
    """The third-party target of that name, or None where there is none or it is broken (warned of once)."""
    with _lock:
        if name in _loaded:
            return _loaded[name]
        point = _discover().get(name)
        if point is None:
            return None
        target: TargetLike | None = None
        try:
            target = point.load()
            if not callable(getattr(target, "implementation", None)) or getattr(target, "name", None) != name:
                raise TypeError(f"{point.value} is not a target: it needs name == {name!r} and implementation(op_name)")
        except Exception as error:  # a third party's module may raise anything, and must not take the other targets with it
            target = None
            _broken[name] = f"{type(error).__name__}: {error}"
            warnings.warn(f"tileops: target {name!r} ({point.value}) ignored: {_broken[name]}", stacklevel=2)
        _loaded[name] = target
        return target
