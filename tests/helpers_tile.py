"""Runs a tile program on the CPU: lowered to C by TileLang's CPU backend, compiled by the machine's C++ compiler, called by name.

What this covers: arithmetic, indexing, strides, masks and tails of the very programs that become cubins. What it does not:
layouts, synchronisation and vectorised access of the GPU code, which tests marked gpu cover.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import inspect
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tilelang", reason="TileLang is not installed; tile programs cannot be lowered")

from tilelang import tvm
from tilelang.engine.lower import lower

from tileops import expr
from tileops.compiler.lower import _param, schedule
from tileops.kernels import _common

COMPILER = shutil.which("g++") or shutil.which("clang++")

SCALARS = {"int32": ctypes.c_int32, "int64": ctypes.c_int64, "float32": ctypes.c_float}


#: Removed when the interpreter ends.
_folder = tempfile.TemporaryDirectory(prefix="tileops-tile-", ignore_cleanup_errors=True)


@functools.cache
def build(kernel: str, fields: tuple[tuple[str, Any], ...], chosen: tuple[tuple[str, int], ...] = ()) -> tuple[Any, list[Any]]:
    if COMPILER is None:
        pytest.skip("no C++ compiler (g++ or clang++) on PATH; tile programs cannot be executed on the CPU")
    module = importlib.import_module(f"tileops.kernels.{kernel}")
    target = tvm.target.Target({"kind": "c"})
    # The C code of vector expressions does not compile.
    options = {**module.PASS_CONFIGS, "tirx.disable_vectorize": True}
    with _common.cpu_dialect():
        arch = {"arch": "sm_80"} if "arch" in inspect.signature(module.program).parameters else {}
        program = module.program(**arch, **dict(fields), **schedule(module, "sm_80", dict(fields), dict(chosen)))
    with tvm.transform.PassContext(opt_level=3, config=options), target:
        lowered = lower(program, target=target)
    ((_, function),) = lowered.device_mod.functions.items()
    symbol = str(function.attrs["global_symbol"])
    source = Path(tempfile.mkdtemp(dir=_folder.name)) / "kernel.cpp"
    source.write_text("#include <cmath>\nusing std::max;\nusing std::min;\n" + lowered.kernel_source)
    library = source.with_suffix(".so")
    include = Path(tvm.__file__).parents[4] / "src"
    command = [COMPILER, "-O2", "-shared", "-fPIC", "-w", f"-I{include}", str(source), "-o", str(library)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{kernel} {fields}\n{done.stderr[:4000]}"
    return getattr(ctypes.CDLL(str(library)), symbol), [_param(p, {}) for p in function.params]


#: Schedule values that ``scheduled`` puts in place of the kernels' defaults.
_chosen: dict[str, int] = {}


@contextlib.contextmanager
def scheduled(**values: int) -> Iterator[None]:
    """While active, kernels are made with these schedule values."""
    _chosen.update(values)
    try:
        yield
    finally:
        _chosen.clear()


def run(kernel: str, fields: dict[str, Any], tensors: Mapping[str, np.ndarray | None], **scalars: float) -> None:
    """Calls ``kernel`` in place on ``tensors``, None for one that is not given; parameters are bound by name as a record binds them."""
    function, params = build(kernel, tuple(sorted(fields.items())), tuple(sorted(_chosen.items())))
    sizes: dict[str, Any] = dict(scalars)
    for name, tensor in tensors.items():
        if tensor is None:
            sizes.update((f"{name}.stride{dim}", 0) for dim in range(6))
            continue
        for dim, stride in enumerate(tensor.strides):
            assert stride % tensor.itemsize == 0
            sizes[f"{name}.stride{dim}"] = stride // tensor.itemsize
    values = []
    for p in params:
        if p.kind == "pointer":
            tensor = tensors[p.bind]
            values.append(ctypes.c_void_p(0 if tensor is None else tensor.ctypes.data))
        else:
            value = sizes[p.bind] if p.kind == "float32" else expr.evaluate(p.bind, sizes)
            values.append(SCALARS[p.kind](value))
    assert function(*values) == 0


class Guarded:
    """An output: a contiguous array poisoned with NaN inside a buffer whose ends must stay untouched."""

    PAD = 4096

    def __init__(self, shape: tuple[int, ...], dtype: Any = np.float32) -> None:
        size = int(np.prod(shape))
        self.buffer = np.full(size + 2 * self.PAD, np.nan, dtype)
        self.buffer[: self.PAD] = self.buffer[self.PAD + size :] = 123
        self.array = self.buffer[self.PAD : self.PAD + size].reshape(shape)

    def check(self) -> np.ndarray:
        """The array; fails where something was written outside of it. What was not written is still NaN."""
        assert (self.buffer[: self.PAD] == 123).all() and (self.buffer[self.buffer.size - self.PAD :] == 123).all(), "written outside"
        return self.array


def scattered(values: np.ndarray, extra: int = 3) -> np.ndarray:
    """The same values with padded strides (last dimension contiguous), NaN or -1 between them: a view of a packed projection."""
    shape = tuple(n + extra for n in values.shape)
    fill = np.nan if values.dtype.kind == "f" else -1
    outer = np.full(shape, fill, values.dtype)
    view = outer[tuple(slice(1, 1 + n) for n in values.shape)]
    view[...] = values
    return view
