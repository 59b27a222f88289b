"""The ops as ``torch.ops.tileops.*``, which is how torch.compile and torch.export see them.

A schema is made from the op's own signatures: the tensors of ``forward``, then the constructor's arguments as keywords. Eager calls
do not come through here.
"""

from __future__ import annotations

import functools
import inspect
import re
from typing import TYPE_CHECKING, Any, TypeVar

import torch

if TYPE_CHECKING:
    from tileops.ops._base import Op

#: Annotation of an argument -> its type in a schema.
_TYPES = {
    "Tensor": "Tensor",
    "Tensor | None": "Tensor?",
    "int": "int",
    "bool": "bool",
    "float": "float",
    "str | None": "str?",
    "torch.dtype": "ScalarType",
    "torch.dtype | None": "ScalarType?",
    "tuple[float, float]": "float[2]",
}

_library = torch.library.Library("tileops", "DEF")

Class = TypeVar("Class", bound="type[Op]")


def library_op(cls: Class) -> Class:
    """Registers an op class: ``Mamba2FwdOp`` as ``tileops::mamba2_fwd``, and fixes what its instances are built with."""
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", cls.__name__.removesuffix("Op")).lower()
    forward, options = inspect.signature(cls.forward), inspect.signature(cls.__init__)
    tensors = [p for p in forward.parameters.values() if p.name != "self"]
    fixed = [p for p in options.parameters.values() if p.name != "self"]
    names = tuple(p.name for p in tensors)
    arguments = [f"{_tensor_type(cls, p)} {p.name}{'=None' if p.default is None else ''}" for p in tensors]
    arguments += ["*", *(f"{_TYPES[p.annotation]} {p.name}{'=None' if p.default is None else ''}" for p in fixed)]
    results = "(Tensor, Tensor)" if forward.return_annotation.startswith("tuple") else "Tensor"

    @functools.lru_cache(maxsize=64)
    def instance(**options: Any) -> Op:
        return cls(**options)

    def bound(args: tuple[Any, ...], options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """The call's tensors and options by name. What stands at its default may be missing, and tuples come as lists."""
        given = {**dict.fromkeys(names), **dict(zip(names, args)), **{n: options[n] for n in names if n in options}}
        chosen = {p.name: options.get(p.name) for p in fixed}
        return given, {n: tuple(v) if isinstance(v, list) else v for n, v in chosen.items()}

    # An operator may not return what it was given: where ``out`` is, the first result stands empty, and the caller puts ``out`` there.
    def run(*args: Any, **kwargs: Any) -> Any:
        given, options = bound(args, kwargs)
        return _without(given.get("out"), instance(**options).forward(**given))

    def fake(*args: Any, **kwargs: Any) -> Any:
        given, options = bound(args, kwargs)
        del options["target"]
        return _without(given.get("out"), cls.empty(*given.values(), **options))

    def call(op: Op, *args: Any) -> Any:
        result = getattr(torch.ops.tileops, name)(*args, **{p.name: getattr(op, p.name) for p in fixed})
        out = dict(zip(names, args)).get("out")
        if out is None:
            return result
        return (out, *result[1:]) if isinstance(result, tuple) else out

    _library.define(f"{name}({', '.join(arguments)}) -> {results}")
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"tileops::{name}", fake, lib=_library)
    cls.op_name, cls.library_name, cls.arguments = cls.__name__, name, names
    for p in fixed:
        setattr(cls, p.name, _fixed(p.name))
    cls.library_call = call  # type: ignore[assignment]
    return cls


def _fixed(name: str) -> property:
    """The constructor's argument ``name`` as an attribute that the constructor sets: plans and compiled graphs hold its value."""
    kept = f"_{name}"

    def get(op: Op) -> Any:
        return getattr(op, kept)

    def put(op: Op, value: Any) -> None:
        if hasattr(op, kept):
            raise AttributeError(f"{name}: expected to stay what the op was built with; build another, {type(op).__name__}({name}=...).")
        setattr(op, kept, value)

    return property(get, put, doc="As the op was built.")


def _without(out: torch.Tensor | None, result: Any) -> Any:
    if out is None:
        return result
    first = out.new_empty((0,))
    return (first, *result[1:]) if isinstance(result, tuple) else first


def _tensor_type(cls: type[Op], parameter: inspect.Parameter) -> str:
    kind = _TYPES[parameter.annotation]
    if parameter.name not in cls.mutated:
        return kind
    return kind.replace("Tensor", f"Tensor({chr(ord('a') + cls.mutated.index(parameter.name))}!)")
