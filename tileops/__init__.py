"""Mamba-2 (state-space dual, SSD) operators for PyTorch whose GPU kernels are already compiled.

    import torch, tileops.mamba
    op = tileops.mamba.Mamba2FwdOp(chunk_size=256)
    y, final_states = op(x, dt, A, B, C)

The map:

- ``tileops.mamba``        the seven operators: what users construct and call
- ``tileops.errors``       every error of this package; ``tileops.env`` every TILEOPS_* variable
- ``tileops.targets``      which implementation serves an op: ``BUILTIN``, ``set_default_target``, ``registered_targets``
- ``tileops.ops``          one file an operator: checks, allocation, launches. ``tileops.reference``: the same in plain PyTorch
- ``tileops.config``       what a kernel is compiled with, its key, its record; ``tileops.catalog``: which kernels exist;
  ``tileops.schedules``: the table of tuned schedules
- ``tileops.store``        where artifacts lie: roots, look-up, publishing; ``policy`` and ``freeze`` say what a miss may do
- ``tileops.driver``       cubin + record -> launch. ``tileops.compiler`` and ``tileops.kernels``: TileLang program -> cubin
- ``tileops.cli``          the command ``tileops``

Names of this module, loaded when first used (importing ``tileops`` imports no torch, no CUDA and no TileLang):

- ``BUILTIN``                  target name of the in-tree CUDA kernels
- ``set_default_target(name)`` the target of ops built with ``target=None``; None restores the choice by device
- ``registered_targets()``     the names that ``target=`` takes
- ``policy(name)``             where kernels may come from, as a call or a context manager
- ``freeze()``                 from now on nothing is compiled in this process
- ``stats()``                  where the kernels of this process came from
- ``preload(...)``             load kernels ahead of the first call
- ``errors``                   the module ``tileops.errors``
"""

from __future__ import annotations

import importlib
from typing import Any

#: public name -> (module, attribute); attribute None: the module itself
_LAZY: dict[str, tuple[str, str | None]] = {
    "BUILTIN": ("tileops.targets", "BUILTIN"),
    "set_default_target": ("tileops.targets", "set_default_target"),
    "registered_targets": ("tileops.targets", "registered_targets"),
    "policy": ("tileops.store", "policy"),
    "freeze": ("tileops.store", "freeze"),
    "stats": ("tileops.ops._resolve", "stats"),
    "preload": ("tileops.ops._resolve", "preload"),
    "errors": ("tileops.errors", None),
    "__version__": ("tileops.config", "VERSION"),
    "mamba": ("tileops.mamba", None),
}

__all__ = list(_LAZY)


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'tileops' has no attribute {name!r}")
    module, attribute = _LAZY[name]
    loaded = importlib.import_module(module)
    value = loaded if attribute is None else getattr(loaded, attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
