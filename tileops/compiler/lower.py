"""TileLang program -> CUDA source and what is needed to launch it. Needs TileLang, no GPU, and never asks for one."""

from __future__ import annotations

import atexit
import functools
import importlib
import inspect
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tileops.compiler import flags
from tileops.compiler.shared import lowered_like
from tileops.config import KernelConfig, Param, TensorMap

_STRIDE = re.compile(r"(?P<tensor>\w+)_stride(?P<dim>\d+)(?:_div(?P<div>\d+))?")


@dataclass(frozen=True)
class Lowered:
    """One device function: its source and its launch in the record's terms."""

    source: str
    symbol: str
    params: tuple[Param, ...]
    grid: tuple[str, str, str]
    block: tuple[int, int, int]
    dynamic_smem: int
    alignment: dict[str, int]
    tensormaps: dict[str, TensorMap]
    optional: tuple[str, ...]


def lower(config: KernelConfig) -> Lowered:
    """Lowers the program of ``config``. Raises whatever TileLang raises; the caller turns it into CompileError."""
    _shelter()
    module = importlib.import_module(f"tileops.kernels.{config.kernel}")
    fields: dict[str, Any] = config.fields
    chosen = schedule(module, config.arch, fields, dict(config.schedule))
    if "arch" in inspect.signature(module.program).parameters:
        fields["arch"] = lowered_like(config).arch
    return _lower(lowered_like(config), tuple(fields.items()), tuple(chosen.items()))


@functools.lru_cache(maxsize=1)  # a worker is handed configs that share a source one after the other
def _lower(config: KernelConfig, fields: tuple[tuple[str, Any], ...], chosen: tuple[tuple[str, int], ...]) -> Lowered:
    from tilelang import tvm
    from tilelang.engine.lower import lower as lower_program

    module = importlib.import_module(f"tileops.kernels.{config.kernel}")
    program = module.program(**dict(fields), **dict(chosen))
    options = {**flags.PASS_CONFIGS, **getattr(module, "PASS_CONFIGS", {})}
    # An explicit target with an explicit arch: TileLang's "auto" would look at the machine's GPU.
    target = tvm.target.Target({"kind": "cuda", "arch": config.arch})
    with tvm.transform.PassContext(opt_level=3, config=options), target:
        lowered = lower_program(program, target=target)
    functions = list(lowered.device_mod.functions.items())
    if len(functions) != 1:
        raise ValueError(f"kernel {config.kernel} lowered to {len(functions)} device functions; one is expected")
    function = functions[0][1]
    extents = dict(function.attrs["thread_extent"].items())
    descriptors = _descriptors(lowered.host_mod)
    params = tuple(_param(p, descriptors) for p in function.params)
    return Lowered(
        source=lowered.kernel_source,
        symbol=str(function.attrs["global_symbol"]),
        params=params,
        grid=tuple(_expression(extents[f"blockIdx.{d}"]) if f"blockIdx.{d}" in extents else "1" for d in "xyz"),  # type: ignore[arg-type]
        block=tuple(int(extents.get(f"threadIdx.{d}", 1)) for d in "xyz"),  # type: ignore[arg-type]
        dynamic_smem=int(function.attrs.get("dyn_shared_memory_buf", 0) or 0),
        alignment=_alignment(params, function),
        tensormaps={name: _tensormap(name, descriptors[name]) for name in sorted(descriptors)},
        optional=_optional(config.kernel, getattr(module, "OPTIONAL", ()), params),
    )


def _optional(kernel: str, names: Sequence[str], params: Sequence[Param]) -> tuple[str, ...]:
    """Those of the kernel file's ``OPTIONAL`` that this variant has. The program tests their pointers before it reads through them."""
    kinds = {p.bind: p.kind for p in params if p.kind in ("pointer", "tensormap")}
    for name in names:
        if kinds.get(name, "pointer") != "pointer":
            raise ValueError(f"kernel {kernel}: {name} is read through a tensor map and cannot be optional")
    return tuple(sorted(name for name in names if name in kinds))


def schedule(module: Any, arch: str, fields: Mapping[str, Any], chosen: Mapping[str, int]) -> dict[str, int]:
    """What ``program`` of a kernel's module takes besides the config's fields: its own default, and what was chosen instead."""
    default: dict[str, int] = module.schedule(arch, **fields) if hasattr(module, "schedule") else {}
    if not set(chosen) <= set(default):
        raise ValueError(f"a schedule names {sorted(set(chosen) - set(default))}; the kernel has {sorted(default)}")
    return {**default, **chosen}


def _shelter() -> None:
    """Where there is no home folder to write, gives TileLang a private one before its import makes its cache folder there."""
    home = os.path.expanduser("~")
    if "tilelang" in sys.modules or (os.path.isdir(home) and os.access(home, os.W_OK | os.X_OK)):
        return
    folder = tempfile.mkdtemp(prefix="tileops-tilelang-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ.setdefault("TILELANG_CACHE_DIR", folder)
    os.environ.setdefault("XDG_CACHE_HOME", folder)


def _descriptors(host: Any) -> dict[str, list[Any]]:
    """The program's tensor maps: parameter -> arguments of the call with which TileLang's own host code encodes it."""
    found: dict[str, list[Any]] = {}
    for function in host.functions.values():
        for variable, arguments in dict(function.attrs.get("tma_descriptor_args") or {}).items():
            found[str(variable.name)] = list(arguments)
    return found


def _tensormap(name: str, arguments: list[Any]) -> TensorMap:
    """From (function, map, dtype, rank, tensor, dims, strides from the element's on, box, element strides, interleave, swizzle,
    promotion, fill)."""
    dtype, rank = int(arguments[2]), int(arguments[3])
    dims, strides, box, steps = (arguments[5 + i * rank : 5 + (i + 1) * rank] for i in range(4))
    interleave, swizzle, promotion, fill = (int(v) for v in arguments[5 + 4 * rank :])
    if "create_tiled" not in str(arguments[0]) or {int(s) for s in steps} != {1} or interleave or fill:
        raise ValueError(f"tensor map {name} is of a form that records do not hold")
    return TensorMap(
        dtype=dtype,
        dims=tuple(_expression(d) for d in dims),
        strides=tuple(_pitch(s) for s in strides[1:]),
        box=tuple(int(b) for b in box),
        swizzle=swizzle,
        promotion=promotion,
    )


def _pitch(node: Any) -> str:
    """A stride in bytes. That of a dimension of size 1, which is bound as 0, must still be one that the driver takes."""
    text = _expression(node)
    return f"max({text}, 16)" if ".stride" in text else text


def _param(variable: Any, descriptors: dict[str, list[Any]]) -> Param:
    """A parameter and its binding, which its name tells: ``x_stride0_div8`` is ``x.stride0 // 8``, ``B`` is B."""
    name, dtype = str(variable.name), str(variable.dtype)
    if name in descriptors:
        return Param(name, "tensormap", str(descriptors[name][4].name))
    if dtype == "handle":
        return Param(name, "pointer", name)
    if dtype not in ("int32", "int64", "float32"):
        raise ValueError(f"kernel parameter {name} has dtype {dtype}; int32, int64 and float32 can be passed")
    return Param(name, dtype, _binding(name))


def _binding(name: str) -> str:
    match = _STRIDE.fullmatch(name)
    if match is None:
        return name
    bind = f"{match['tensor']}.stride{match['dim']}"
    return f"{bind} // {match['div']}" if match["div"] else bind


def _alignment(params: tuple[Param, ...], function: Any) -> dict[str, int]:
    """Bytes each base address must be a multiple of: 16 where loads may be vectorised, else the element's size.

    A tensor passed with plain strides is read one element at a time; one without strides is contiguous and read wide, as is
    one behind a tensor map.
    """
    strides = [m for m in (_STRIDE.fullmatch(p.name) for p in params) if m]
    plain = {m["tensor"] for m in strides if not m["div"]} - {m["tensor"] for m in strides if m["div"]}
    variables = {str(p.name): p for p in function.params}
    found = {p.bind: _element_bytes(variables[p.name]) if p.bind in plain else 16 for p in params if p.kind == "pointer"}
    return {**found, **{p.bind: 16 for p in params if p.kind == "tensormap"}}


def _element_bytes(variable: Any) -> int:
    bits = re.search(r"(\d+)$", str(variable.type_annotation.element_type.dtype))
    return int(bits.group(1)) // 8 if bits else 4


def _expression(node: Any) -> str:
    """A TIR expression in the record's grammar (tileops.expr)."""
    from tilelang import tvm

    tir = tvm.tirx
    if isinstance(node, int):
        return str(node)
    if isinstance(node, tir.Var):
        bind = _binding(str(node.name))
        return f"({bind})" if " " in bind else bind
    if isinstance(node, tir.IntImm):
        return str(int(node))
    if isinstance(node, tir.Cast):
        return _expression(node.value)
    for kind, text in (
        (tir.Add, "({} + {})"),
        (tir.Sub, "({} - {})"),
        (tir.Mul, "{} * {}"),
        (tir.FloorDiv, "({} // {})"),
        (tir.Div, "({} // {})"),
        (tir.Min, "min({}, {})"),
        (tir.Max, "max({}, {})"),
    ):
        if isinstance(node, kind):
            return text.format(_expression(node.a), _expression(node.b))
    if isinstance(node, tir.Call) and "shift_right" in str(node.op):
        return f"({_expression(node.args[0])} // {2 ** int(node.args[1])})"
    raise ValueError(f"size {node} is outside the record's grammar")
