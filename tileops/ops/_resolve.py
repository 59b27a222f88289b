"""Load, compile or refuse: how a kernel that a call needs becomes a loaded kernel. The one place of that decision.

memory -> roots that the policy allows (tileops.store) -> JIT where the policy allows -> MissingKernelError.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from tileops import catalog, compiler, driver, store
from tileops.config import Artifact, Value
from tileops.errors import DriverError, IncompatibleArtifactError

if TYPE_CHECKING:
    from tileops.ops._base import Op

_loaded: dict[tuple[Any, ...], driver.Kernel] = {}


def obtain(kernel: str, values: dict[str, Value], device: int) -> driver.Kernel:
    """The kernel for these compile-time values, loaded on CUDA ordinal ``device``.

    Raises:
        IncompatibleArtifactError: no arch of this package runs on the GPU, or its driver is too old.
        MissingKernelError: no root holds it and the policy forbids compiling it.
        CompileError, OutOfMemoryError, DriverError.
    """
    key = (kernel, *sorted(values.items()), device, os.getpid())
    found = _loaded.get(key)
    if found is None:
        info = driver.device_info(device)
        archs = archs_of(kernel, info)
        if not archs:
            raise driver.unsupported(info)
        found = _loaded[key] = driver.load(_artifact(kernel, values, archs, info), device)
    return found


@contextlib.contextmanager
def pinned(artifact: Artifact, device: int) -> Iterator[None]:
    """While active, ops that are built run this artifact for its config on ``device`` (the tuning command compares some)."""
    record = artifact.record
    key = (record.kernel, *sorted(record.config.items()), device, os.getpid())
    before = _loaded.get(key)
    _loaded[key] = driver.load(artifact, device)
    try:
        yield
    finally:
        del _loaded[key]
        if before is not None:
            _loaded[key] = before


def archs_of(kernel: str, info: driver.DeviceInfo) -> tuple[str, ...]:
    """The archs that this package has ``kernel`` for and whose cubins the device runs, best first."""
    return tuple(arch for arch in catalog.archs_for(*info.capability) if catalog.exists(kernel, arch))


def _artifact(kernel: str, values: dict[str, Value], archs: tuple[str, ...], info: driver.DeviceInfo) -> Artifact:
    """The best artifact that the roots hold for this device, else a compiled one, else an error with every reason."""
    lookups = []
    refused: IncompatibleArtifactError | None = None
    for arch in archs:
        lookup = store.find(catalog.config(kernel, arch, **values), toolchain=compiler.toolchain_name)
        lookups.append(lookup)
        if lookup.artifact is None:
            continue
        try:
            driver.check(lookup.artifact.record, info)
        except IncompatibleArtifactError as error:
            refused = refused or error
            continue
        return lookup.artifact
    if refused is None and store.current_policy() == "auto" and compiler.toolchain_name() is not None:
        built = store.find_or_build(lookups[0].config, compiler.jit, toolchain=compiler.toolchain_name).artifact
        assert built is not None
        return built
    raise refused or store.missing_error(lookups[0])


@dataclass(frozen=True)
class Preloaded:
    """What ``preload`` loaded on one device."""

    device: torch.device
    count: int  # kernels
    bytes: int  # of their cubins
    milliseconds: float


#: Names that preload's callers use for kernels' compile-time fields.
_FIELD_NAMES = {"d_head": "P", "d_state": "N", "chunk_size": "Q", "chunk_len": "Q"}


def stats() -> dict[str, int]:
    """What this process did for its kernels, as ``tileops.stats()``: ``hits_packaged``, ``hits_site``, ``hits_cache``, ``misses``,
    ``compiles``, ``compile_ms``, ``bytes_read`` and the rest of the store's counters, then ``loads`` and ``load_ms`` on the GPU."""
    return {**store.stats(), **driver.stats()}


def preload(
    model: str | None = None,
    *,
    chunk_size: int | None = None,
    d_head: int | None = None,
    d_state: int | None = None,
    dtype: str | torch.dtype = torch.bfloat16,
    device: int | str | torch.device | None = None,
) -> Preloaded:
    """Loads every kernel that the seven ops can ask for when they run one model, as ``tileops.preload(...)``.

    Args:
        model: name of a preset (``tileops warm --help`` lists them); or
        chunk_size, d_head, d_state: the model's values.
        dtype: of x, B and C.
        device: a CUDA device (default: the current one).

    Returns:
        What was loaded: device, count, bytes of cubins, milliseconds.

    Raises:
        ValueError: no such preset, or values missing.
        MissingKernelError: a kernel is in no root and the policy forbids compiling it; under ``auto`` it is compiled.
        DriverError: torch sees no GPU. IncompatibleArtifactError: no arch of this package runs on it.
    """
    if model is not None:
        from tileops import models

        preset = models.preset(model)
        chunk_size, d_head, d_state = preset.chunk_size, preset.head_dim, preset.d_state
    if chunk_size is None or d_head is None or d_state is None:
        raise ValueError("preload: give a model's name, or chunk_size, d_head and d_state.")
    values: dict[str, Value] = {"Q": chunk_size, "P": d_head, "N": d_state, "dtype": str(dtype).removeprefix("torch.")}
    kernels = [(kernel, {k: v for k, v in values.items() if k in fields}) for kernel, fields in catalog.KERNELS.items()]
    return load_all(kernels, device, required=True)


def preload_ops(ops: Iterable[Op], *, device: int | str | torch.device | None = None, **values: Any) -> Preloaded:
    """Loads the kernels of ``ops`` that the roots hold for ``device``; see ``Op.preload``."""
    wanted = {
        _FIELD_NAMES.get(name, name): str(v).removeprefix("torch.") if isinstance(v, torch.dtype) else v for name, v in values.items()
    }
    names = {field for fields in catalog.KERNELS.values() for field in fields}
    for name in wanted:
        if name not in names:
            raise ValueError(f"preload: {name!r} is no compile-time value; expected some of {', '.join(sorted({*_FIELD_NAMES, *names}))}.")
    kernels = [
        (kernel, {**{k: v for k, v in wanted.items() if k in catalog.KERNELS[kernel]}, **fixed})
        for op in ops
        for kernel, fixed in op.kernels()
    ]
    required = {"P", "N", "dtype"} <= set(wanted)
    return load_all(kernels, device, required=required)


def load_all(kernels: Iterable[tuple[str, dict[str, Value]]], device: int | str | torch.device | None, *, required: bool) -> Preloaded:
    """Loads every kernel that matches one of the partial configs. With ``required``, one that is nowhere raises MissingKernelError."""
    if not torch.cuda.is_available():
        raise DriverError(
            "preload needs a CUDA GPU, and torch sees none (run `tileops doctor`).", call="preload", code=None, name="NO_DEVICE"
        )
    import_module("tileops.ops._planner")  # the first call needs it too
    place = torch.device("cuda" if device is None else f"cuda:{device}" if isinstance(device, int) else device)
    index = torch.cuda.current_device() if place.index is None else place.index
    start = time.perf_counter()
    with torch.cuda.device(index):
        torch.empty(1, device="cuda")  # makes the primary context current, which a load needs
        archs = catalog.archs_for(*driver.device_info(index).capability)
        if not archs:
            raise driver.unsupported(driver.device_info(index))
        chosen: dict[tuple[Any, ...], tuple[str, dict[str, Value]]] = {}
        for kernel, partial in kernels:
            if required:
                found = catalog.expand(kernel, partial) if any(catalog.exists(kernel, arch) for arch in archs) else []
            else:
                found = [record.config for arch in archs for record in store.matching(kernel, arch, policy=None, current=True, **partial)]
            for full in found:
                identity = (kernel, *sorted(full.items()))
                chosen[identity] = (kernel, full)
        loaded = [obtain(kernel, full, index) for kernel, full in chosen.values()]
    return Preloaded(
        device=torch.device("cuda", index),
        count=len(loaded),
        bytes=sum(kernel.record.cubin_size for kernel in loaded),
        milliseconds=(time.perf_counter() - start) * 1e3,
    )
