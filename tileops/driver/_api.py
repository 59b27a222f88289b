"""CUDA driver calls with this package's errors. No torch; cuda-bindings is imported at the first call, never before."""

from __future__ import annotations

import ctypes
import functools
from types import ModuleType
from typing import Any

from tileops.errors import DriverError, OutOfMemoryError

#: What a user can do about a driver error, by name; anything else gets the driver's own words.
_REMEDIES = {
    "CUDA_ERROR_NO_BINARY_FOR_GPU": "the cubin was built for another GPU; run `tileops doctor`",
    "CUDA_ERROR_INVALID_IMAGE": "the cubin is damaged or newer than this driver; run `tileops verify`",
    "CUDA_ERROR_UNSUPPORTED_PTX_VERSION": "the artifact needs a newer driver; update it or use artifacts of an older CUDA",
    "CUDA_ERROR_OUT_OF_MEMORY": "the GPU has no memory left; the artifact is fine: free memory and call again",
    "CUDA_ERROR_ILLEGAL_ADDRESS": "an earlier kernel of this process read or wrote out of bounds; the process must be restarted",
    "CUDA_ERROR_NOT_INITIALIZED": "CUDA is not initialised in this process; after a fork, start workers with the spawn method",
    "CUDA_ERROR_NO_DEVICE": "no CUDA GPU is visible (CUDA_VISIBLE_DEVICES?)",
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": "the driver and libcuda differ in version; reboot or reinstall the driver",
    "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES": "the kernel asks for more than the GPU has; report it with `tileops doctor`",
}


@functools.lru_cache(maxsize=1)
def cuda() -> ModuleType:
    """The cuda-bindings driver module. Raises DriverError where it or libcuda is missing."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise DriverError(
            f"The package cuda-bindings cannot be imported ({error}); install tileops with its dependencies.",
            call="import",
            code=None,
            name="IMPORT",
        ) from error
    return driver  # type: ignore[no-any-return]


def call(name: str, *args: Any, about: str = "") -> Any:
    """Calls driver function ``name``; returns its value, values or None. Raises DriverError or OutOfMemoryError.

    ``about`` says what was being done ("loading chunk_scan[...]"), for the message.
    """
    driver = cuda()  # outside: bindings that cannot be imported are another fault than a driver that is not there
    try:
        result = getattr(driver, name)(*args)
    except RuntimeError as error:  # cuda-bindings raises this where libcuda is not found
        raise DriverError(f"{name} cannot be called: {error} (no NVIDIA driver?).", call=name, code=None, name="NO_DRIVER") from error
    code = int(result[0])
    if code:
        raise failure(name, code, about)
    return None if len(result) == 1 else result[1] if len(result) == 2 else result[1:]


@functools.lru_cache(maxsize=8)
def function(name: str, version: int) -> Any:
    """Driver function ``name`` as CUDA ``version`` (1000 * major + 10 * minor) has it, for the hot path: takes ctypes objects, returns the
    status, and costs half of what the bindings' function of that name does. Raises DriverError."""
    address, _ = call("cuGetProcAddress", name.encode(), version, cuda().CUdriverProcAddress_flags.CU_GET_PROC_ADDRESS_LEGACY_STREAM)
    if not address:
        raise DriverError(f"This driver has no {name}; update it.", call="cuGetProcAddress", code=None, name="NOT_FOUND")
    return ctypes.CFUNCTYPE(ctypes.c_int)(address)


def failure(call_name: str, code: int, about: str = "") -> DriverError:
    """The error for a driver status that is not success."""
    driver = cuda()
    try:
        name = driver.CUresult(code).name
        words = driver.cuGetErrorString(driver.CUresult(code))[1]
        words = words.decode() if isinstance(words, bytes) else str(words)
    except ValueError:
        name, words = f"CUDA error {code}", "unknown to this cuda-bindings"
    kind = OutOfMemoryError if name == "CUDA_ERROR_OUT_OF_MEMORY" else DriverError
    remedy = _REMEDIES.get(name, words)
    where = f" while {about}" if about else ""
    return kind(f"{call_name} failed{where}: {name} ({words}); {remedy}.", call=call_name, code=code, name=name)


def attribute(name: str, device: int) -> int:
    """Device attribute ``CU_DEVICE_ATTRIBUTE_<name>`` of ordinal ``device``."""
    return int(call("cuDeviceGetAttribute", getattr(cuda().CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}"), ordinal(device)))


def ordinal(device: int) -> Any:
    """The driver's handle of a device ordinal. Initialises the driver API, makes no context."""
    call("cuInit", 0)
    return call("cuDeviceGet", device)


def driver_version() -> int:
    """The CUDA version that the driver supports, as 1000 * major + 10 * minor."""
    return int(call("cuDriverGetVersion"))
