"""cubin + record -> launchable, over cuda-python. No torch.

``load``        an Artifact made launchable on one device: arch, driver and shared memory checked first
``Kernel``      what load returns: a function handle with its launch description
``Launch``      one prepared launch: fixed grid and scalars, addresses filled in at each call
``check``       whether a record can run on a device, before anything is loaded
``corrupt``     the error for a record that no call can be launched with
``stats``       how many kernels were loaded, in how many milliseconds
``device_info`` name, capability, memory and driver of a device, for messages and ``tileops doctor``

Handles belong to the process that made them: the table is tagged with the pid, so a forked child never uses its
parent's. Nothing is unloaded on garbage collection: a kernel may still be running, or be part of a captured graph.
"""

from __future__ import annotations

import ctypes
import functools
import os
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tileops import catalog, expr
from tileops.config import Artifact, Record, TensorMap
from tileops.driver import _api
from tileops.errors import CorruptArtifactError, IncompatibleArtifactError

__all__ = ["DeviceInfo", "Kernel", "Launch", "check", "corrupt", "device_count", "device_info", "load", "stats", "unsupported"]

_MAX_GRID = (2**31 - 1, 65535, 65535)


@dataclass(frozen=True)
class DeviceInfo:
    """What decides whether an artifact can run on a device."""

    ordinal: int
    name: str
    capability: tuple[int, int]
    max_smem: int  # bytes of shared memory a CTA may opt in to
    driver: int  # CUDA version the driver supports, 1000 * major + 10 * minor
    multiprocessors: int


@dataclass(frozen=True)
class Kernel:
    """A kernel that is loaded and ready on one device."""

    record: Record
    device: int
    function: int  # CUfunction holding a CUkernel handle, valid in this device's primary context

    @functools.cached_property
    def form(self) -> _Form:
        return _Form(self.record)

    @functools.cached_property
    def overlaps(self) -> bool:
        """Whether a launch may begin before what is before it in the stream has ended: the kernel waits itself."""
        program = self.record.provenance.get("program", self.record.arch)
        return catalog.overlaps(self.record.kernel, program) and device_info(self.device).driver >= _OVERLAP_DRIVER


class _Table:
    """Loaded libraries of one process."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.lock = threading.Lock()
        self.key_locks: dict[tuple[str, str], threading.Lock] = {}
        self.handles: dict[tuple[str, str], Any] = {}  # key, cubin's sha256 -> CUkernel
        self.ready: dict[tuple[str, str, int], Kernel] = {}
        self.devices: dict[int, DeviceInfo] = {}
        self.loads = 0
        self.load_seconds = 0.0


_table = _Table()


def _current_table() -> _Table:
    global _table
    if _table.pid != os.getpid():  # a fork: the parent's handles mean nothing here
        _table = _Table()
    return _table


def device_info(device: int) -> DeviceInfo:
    """Facts about a device ordinal, asked once per process. Makes no context. Raises DriverError."""
    table = _current_table()
    info = table.devices.get(device)
    if info is None:
        handle = _api.ordinal(device)
        name = _api.call("cuDeviceGetName", 256, handle)
        info = table.devices[device] = DeviceInfo(
            ordinal=device,
            name=name.split(b"\0")[0].decode() if isinstance(name, bytes) else str(name),
            capability=(_api.attribute("COMPUTE_CAPABILITY_MAJOR", device), _api.attribute("COMPUTE_CAPABILITY_MINOR", device)),
            max_smem=_api.attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN", device),
            driver=_api.driver_version(),
            multiprocessors=_api.attribute("MULTIPROCESSOR_COUNT", device),
        )
    return info


def unsupported(info: DeviceInfo) -> IncompatibleArtifactError:
    """The error for a GPU that no arch of this package runs on."""
    major, minor = info.capability
    return IncompatibleArtifactError(
        f"Device {info.ordinal} is a {info.name} (compute capability {major}.{minor}), and kernels exist for "
        f"{', '.join(catalog.ARCHS)} only; run on a supported GPU, or pass target='reference'.",
        key=None,
        arch=None,
        gpu=info.name,
        capability=info.capability,
        driver=info.driver,
        needs="a supported arch",
    )


def corrupt(record: Record, reason: str) -> CorruptArtifactError:
    """The error for a record that no call can be launched with."""
    return CorruptArtifactError(
        f"{record.config_object()}: {reason}; remove the artifact and get it again.", path=record.key, reason=reason
    )


def device_count() -> int:
    """CUDA devices that this process may use. Makes no context. Raises DriverError where there is no driver."""
    _api.call("cuInit", 0)
    return int(_api.call("cuDeviceGetCount"))


def check(record: Record, info: DeviceInfo) -> None:
    """Raises IncompatibleArtifactError where ``record`` cannot run on the device, before anything is loaded."""
    needs = record.dynamic_smem + record.static_smem
    major, minor = info.capability
    if record.arch not in catalog.archs_for(major, minor):
        reason, remedy = (
            f"is built for {record.arch}",
            f"use artifacts for {', '.join(catalog.archs_for(major, minor)) or 'a supported GPU'}",
        )
    elif record.min_driver > info.driver:
        reason = f"needs a driver for CUDA {_version(record.min_driver)}"
        remedy = f"this driver supports {_version(info.driver)}: update it"
    elif needs > info.max_smem:
        reason, remedy = f"needs {needs} bytes of shared memory", f"this GPU allows {info.max_smem}"
    else:
        return
    raise IncompatibleArtifactError(
        f"{record.config_object()} {reason}, and device {info.ordinal} is a {info.name} (compute capability {major}.{minor}); {remedy}.",
        key=record.key,
        arch=record.arch,
        gpu=info.name,
        capability=info.capability,
        driver=info.driver,
        needs=reason,
    )


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def stats() -> dict[str, int]:
    """What this process loaded: ``loads`` (kernels, counted per device) and ``load_ms``."""
    table = _current_table()
    return {"loads": table.loads, "load_ms": round(table.load_seconds * 1000)}


def load(artifact: Artifact, device: int) -> Kernel:
    """Makes ``artifact`` launchable on ``device`` (once per process; concurrent callers share one load).

    The caller has made the device's primary context current (torch does). Works during CUDA graph capture.

    Raises:
        IncompatibleArtifactError: wrong arch, driver too old, too much shared memory.
        OutOfMemoryError, DriverError: the driver refused.
    """
    table = _current_table()
    record = artifact.record
    name = record.key, record.cubin_sha256  # a key may be compiled anew, or from another arch's program
    kernel = table.ready.get((name[0], name[1], device))
    if kernel is not None:
        return kernel
    check(record, device_info(device))
    with table.lock:
        lock = table.key_locks.setdefault(name, threading.Lock())
    with lock:
        kernel = table.ready.get((name[0], name[1], device))
        if kernel is None:
            about = f"loading {record.config_object()}"
            start = time.perf_counter()
            handle = table.handles.get(name)
            if handle is None:
                library = _api.call("cuLibraryLoadData", artifact.cubin, [], [], 0, [], [], 0, about=about)
                handle = table.handles[name] = _api.call("cuLibraryGetKernel", library, record.symbol.encode(), about=about)
            driver = _api.cuda()
            if record.dynamic_smem > 48 * 1024 - record.static_smem:
                # The opt-in above 48 KB is per device, hence not part of the shared handle.
                opt_in = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                _api.call("cuKernelSetAttribute", opt_in, record.dynamic_smem, handle, _api.ordinal(device), about=about)
            # Resolving the function now, not at the first launch, keeps the driver's lazy module load out of it.
            function = _api.call("cuKernelGetFunction", handle, about=about)
            kernel = table.ready[name[0], name[1], device] = Kernel(record, device, int(function))
            with table.lock:
                table.loads += 1
                table.load_seconds += time.perf_counter() - start
    return kernel


#: Size and alignment of a tensor map (CUtensorMap), bytes.
_MAP_BYTES = 128

#: CUlaunchConfig: grid, block, shared memory; stream, attributes, their number (32 bits, and what follows is not read).
_CONFIG = struct.Struct("<7I4xQQQ")
_STREAM_AT = 32

#: CUlaunchAttribute: programmatic stream serialization, allowed. Drivers before CUDA 12.3 do not capture it into graphs.
_OVERLAP = ctypes.create_string_buffer(struct.pack("<I4xI60x", 6, 1), 72)
_OVERLAP_DRIVER = 12030


class _MapForm:
    """What all launches of a kernel share of a tensor map: the driver's functions, where the map and its sizes lie from a launch's start,
    and the arguments but for address and sizes."""

    def __init__(self, form: TensorMap, at: int, sizes_at: int) -> None:
        rank = len(form.dims)
        numbers = ctypes.c_uint32 * rank
        self.at = at
        self.sizes_at = sizes_at  # its dimensions, then strides, one less
        self.strides_at = sizes_at + 8 * rank
        self.head = (form.dtype, rank)
        # Elements of a box one by one; no interleaving; zeros outside.
        self.tail = (numbers(*form.box), numbers(*[1] * rank), 0, form.swizzle, form.promotion, 0)
        self.encode = _api.function("cuTensorMapEncodeTiled", 12000)
        self.replace = _api.function("cuTensorMapReplaceAddress", 12000)


class _Map:
    """A tensor map of a launch that starts at ``start``. It is encoded for the first address; then only the address is replaced, and only
    by another."""

    __slots__ = ("_about", "_address", "_form", "_slot", "_start")

    def __init__(self, form: _MapForm, start: int, about: str) -> None:
        self._form = form
        self._start = start
        self._slot = ctypes.c_void_p(start + form.at)
        self._about = about
        self._address: int | None = None

    def point_to(self, address: int) -> None:
        """Raises DriverError."""
        if address == self._address:
            return
        to, form = ctypes.c_void_p(address), self._form
        if self._address is None:
            name = "cuTensorMapEncodeTiled"
            sizes, strides = ctypes.c_void_p(self._start + form.sizes_at), ctypes.c_void_p(self._start + form.strides_at)
            status = form.encode(self._slot, *form.head, to, sizes, strides, *form.tail)
        else:
            name = "cuTensorMapReplaceAddress"
            status = form.replace(self._slot, to)
        if status:
            raise _api.failure(name, status, self._about)
        self._address = address


#: How a scalar parameter lies in its 8-byte slot.
_PACKED = {"float32": "f4x", "int32": "i4x", "int64": "q"}


class _Binding(NamedTuple):
    """What a kernel's launches take of one tensor."""

    name: str
    optional: bool
    alignment: int  # bytes that its start must be a multiple of
    strides: tuple[tuple[str, int], ...]  # names and dimensions of those that matter


class _Form:
    """What all launches of a kernel share: where each parameter lies in the buffer, and how its value is computed.

    Tensor maps come first, then the launch's description (_CONFIG), then an 8-byte slot for every other parameter, pointers before
    scalars: what changes from call to call lies together. Then the maps' sizes, and the addresses of all parameters.
    """

    def __init__(self, record: Record) -> None:
        kinds = {kind: [p for p in record.params if p.kind == kind] for kind in ("pointer", "tensormap")}
        scalars = [p for p in record.params if p.kind not in kinds]
        self.about = f"launching {record.config_object()}"
        self.tensors = tuple(p.bind for p in (*kinds["pointer"], *kinds["tensormap"]))
        self.pointers = len(kinds["pointer"])
        self.config_at = _MAP_BYTES * len(kinds["tensormap"])
        slots_at = self.config_at + _CONFIG.size
        sizes_at = slots_at + 8 * (self.pointers + len(scalars))
        places = {p.name: _MAP_BYTES * i for i, p in enumerate(kinds["tensormap"])}
        places.update({p.name: slots_at + 8 * i for i, p in enumerate((*kinds["pointer"], *scalars))})
        self.places = tuple(places[p.name] for p in record.params)
        forms = []
        maps = [record.tensormaps[p.name] for p in kinds["tensormap"]]
        for of, p in zip(maps, kinds["tensormap"]):
            forms.append(_MapForm(of, places[p.name], sizes_at))
            sizes_at += 8 * (2 * len(of.dims) - 1)
        self.maps = tuple(forms)
        self.addresses_at = sizes_at
        self.bytes = sizes_at + 8 * len(self.places)
        # All that is computed of a call's sizes, by one function: the grid, the scalars (0 for those that come as they are), the maps.
        texts = [*record.grid, *("0" if p.kind == "float32" else p.bind for p in scalars)]
        texts += [text for of in maps for text in (*of.dims, *of.strides)]
        self.compute = expr.function(texts)
        self.floats = tuple((i, p.bind) for i, p in enumerate(scalars) if p.kind == "float32")
        self.int32 = tuple((i, p.bind) for i, p in enumerate(scalars) if p.kind == "int32")
        sizes = len(texts) - len(record.grid) - len(scalars)
        packed = f"{8 * self.pointers}x{''.join([_PACKED[p.kind] for p in scalars])}{sizes}Q{len(self.places)}Q"
        #: Packs a launch's description, scalars, maps' sizes and parameters' addresses, from ``config_at`` on.
        self.pack = struct.Struct(_CONFIG.format + packed).pack_into
        strides: dict[str, list[tuple[str, int]]] = {}
        for name in sorted(expr.names(texts)):
            tensor, _, stride = name.partition(".stride")
            if stride.isdecimal():
                strides.setdefault(tensor, []).append((name, int(stride)))
        self.bindings = tuple(
            [_Binding(name, name in record.optional, record.alignment.get(name, 1), tuple(strides.get(name, ()))) for name in self.tensors]
        )
        self._given: dict[tuple[str, ...], tuple[tuple[str, ...], int, Any]] = {}

    def given(self, absent: tuple[str, ...]) -> tuple[tuple[str, ...], int, Any]:
        """Without the tensors in ``absent``: names of the tensors in order, how many are pointers, and what packs a launch's stream,
        attributes, their number and those pointers."""
        found = self._given.get(absent)
        if found is None:
            tensors = tuple([name for name in self.tensors if name not in absent])
            pointers = ["8x" if name in absent else "Q" for name in self.tensors[: self.pointers]]
            found = self._given[absent] = tensors, pointers.count("Q"), struct.Struct(f"<QQQ{''.join(pointers)}").pack_into
        return found


class Launch:
    """One launch of a kernel with fixed grid and scalars. ``fire`` fills in the addresses and launches.

    The driver copies the parameters' values during the call. The buffer that holds them is shared between threads, so
    ``fire`` holds a lock from filling it until the driver has returned.
    """

    def __init__(self, kernel: Kernel, sizes: Mapping[str, int], floats: Mapping[str, float], absent: tuple[str, ...] = ()) -> None:
        """Evaluates grid and scalar parameters over ``sizes`` (dimension and ``tensor.stride`` names). Tensors in ``absent`` are not
        given: their address is 0. Raises ValueError for a grid or an int32 parameter that does not fit, CorruptArtifactError for a
        record whose expressions have no value for this kernel's calls."""
        record, form = kernel.record, kernel.form
        try:
            computed = form.compute(sizes)
            axes = len(record.grid)
            grid, values = computed[:axes], [*computed[axes:]]  # values: the scalars, then the maps' sizes
            for i, bind in form.floats:
                values[i] = floats[bind]  # type: ignore[call-overload]
        except (KeyError, ZeroDivisionError) as error:
            raise corrupt(record, f"sizes in its record have no value ({type(error).__name__}: {error})") from None
        self.empty = 0 in grid
        for extent, limit, axis in zip(grid, _MAX_GRID, "xyz"):
            if not 0 <= extent <= limit:
                raise ValueError(
                    f"{record.kernel}: grid {axis} would be {extent}, CUDA allows {limit}: the input is too large for one launch."
                )
        self.kernel = kernel
        #: Names of the tensors whose addresses ``fire`` takes, in its order.
        self.tensors, self._pointers, self._fill = form.given(absent)
        self._buffer = ctypes.create_string_buffer(form.bytes + _MAP_BYTES)
        base = ctypes.addressof(self._buffer)
        offset = -base % _MAP_BYTES  # from the buffer's start: places in it are packed into; addresses are what the driver gets
        start = base + offset
        config = offset + form.config_at
        addresses = map(start.__add__, form.places)
        try:
            form.pack(self._buffer, config, *grid, *record.block, record.dynamic_smem, 0, 0, 0, *values, *addresses)
        except struct.error:
            for i, bind in form.int32:
                if not -(2**31) <= values[i] < 2**31:
                    raise ValueError(f"{record.kernel}: {bind} = {values[i]} does not fit the kernel's 32-bit parameter.") from None
            raise corrupt(record, "sizes in its record are beyond 64 bits or below 0") from None
        self._maps = tuple([_Map(of, start, form.about) for of in form.maps])
        self._lock = threading.Lock()
        self._first = config + _STREAM_AT
        self._attributes = (ctypes.addressof(_OVERLAP), 1) if kernel.overlaps else (0, 0)
        self._arguments = (
            ctypes.c_void_p(start + form.config_at),
            ctypes.c_void_p(kernel.function),
            ctypes.c_void_p(start + form.addresses_at),
            None,
        )
        self._launch = _api.function("cuLaunchKernelEx", 11080)

    def fire(self, addresses: Sequence[int], stream: int) -> None:
        """Launches on ``stream`` (its address) with ``addresses`` in the order of ``tensors``. Raises DriverError."""
        with self._lock:
            if self._maps:
                for tensor_map, address in zip(self._maps, addresses[self._pointers :]):
                    tensor_map.point_to(address)
                addresses = addresses[: self._pointers]
            self._fill(self._buffer, self._first, stream, *self._attributes, *addresses)
            status = self._launch(*self._arguments)
        if status:
            self._failed(status)

    def written(self, addresses: str, stream: str) -> tuple[str, dict[str, object]] | None:
        """``fire`` as statements, and the names in them, for expressions of its addresses and of the stream; None with tensor maps."""
        if self._maps:
            return None
        names = {"launch_lock": self._lock, "fill": self._fill, "launch": self._launch, "launch_arguments": self._arguments}
        names.update(fill_arguments=(self._buffer, self._first), launch_attributes=self._attributes, launch_failed=self._failed)
        return _FIRE.format(addresses=addresses, stream=stream), names

    def _failed(self, status: int) -> None:
        info = device_info(self.kernel.device)
        raise _api.failure("cuLaunchKernelEx", status, f"launching {self.kernel.record.config_object()} on {info.name}")


_FIRE = """
with launch_lock:
    fill(*fill_arguments, {stream}, *launch_attributes, {addresses})
    status = launch(*launch_arguments)
if status:
    launch_failed(status)
"""
