"""The ops as ``torch.ops.tileops.*``, which is how torch.compile and torch.export see them.

A schema is made from the op's own signatures: the tensors of ``forward``, then the constructor's arguments. Eager calls
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
    """Registers an op class: ``Mamba2FwdOp`` as ``tileops::mamba2_fwd``."""
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", cls.__name__.removesuffix("Op")).lower()
    forward, options = inspect.signature(cls.forward), inspect.signature(cls.__init__)
    tensors = [p for p in forward.parameters.values() if p.name != "self"]
    fixed = [p for p in options.parameters.values() if p.name != "self"]
    arguments = [f"{_tensor_type(cls, p)} {p.name}" for p in tensors] + [f"{_TYPES[p.annotation]} {p.name}" for p in fixed]
    results = "(Tensor, Tensor)" if forward.return_annotation.startswith("tuple") else "Tensor"
    names = tuple(p.name for p in fixed)

    @functools.lru_cache(maxsize=64)
    def instance(*values: Any) -> Op:
        return cls(**dict(zip(names, values)))

    def run(*args: Any) -> Any:
        values = (tuple(v) if isinstance(v, list) else v for v in args[len(tensors) :])
        return instance(*values)._run(*args[: len(tensors)])

    def fake(*args: Any) -> Any:
        return cls.empty(*args[: len(tensors)], **{n: v for n, v in zip(names, args[len(tensors) :]) if n != "target"})

    _library.define(f"{name}({', '.join(arguments)}) -> {results}")
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"tileops::{name}", fake, lib=_library)
    cls.library_call = staticmethod(getattr(torch.ops.tileops, name))
    return cls


def _tensor_type(cls: type[Op], parameter: inspect.Parameter) -> str:
    kind = _TYPES[parameter.annotation]
    return kind.replace("Tensor", "Tensor(a!)") if parameter.name in cls.mutated else kind
