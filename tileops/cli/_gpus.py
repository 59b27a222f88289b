"""The GPUs of this machine, over tileops.driver; no torch. Imports nothing of CUDA until it is asked."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tileops import catalog
from tileops.cli._exit import UsageError
from tileops.errors import DriverError

if TYPE_CHECKING:
    from tileops.driver import DeviceInfo

#: Driver errors that mean «no GPU here», not «something is wrong with it», in few words.
NONE = {
    "IMPORT": "cuda-bindings cannot be imported",
    "NO_DRIVER": "there is no NVIDIA driver (libcuda is not found)",
    "CUDA_ERROR_NO_DEVICE": "no GPU is visible",
}


class Place(NamedTuple):
    """Where kernels are to run: archs that will do, best first, and the GPU whose limits are compared (None: not one of this machine)."""

    archs: tuple[str, ...]
    gpu: DeviceInfo | None


def present() -> tuple[list[DeviceInfo], str]:
    """The visible GPUs; where there are none, the reason. Raises DriverError where the driver is there and refuses."""
    from tileops import driver
    from tileops.driver import _api

    try:
        _api.cuda()  # first: bindings that cannot be imported are another fault than a driver that is not there
        count = driver.device_count()
    except DriverError as error:
        name = error.data.get("name")
        if name not in NONE:
            raise
        return [], NONE[name]
    return [driver.device_info(ordinal) for ordinal in range(count)], "" if count else NONE["CUDA_ERROR_NO_DEVICE"]


def places(chosen: tuple[str, ...] | None) -> list[Place]:
    """The archs of --arch; without it, those of the GPUs present.

    Raises:
        UsageError: no --arch, and no GPU.
        IncompatibleArtifactError: no arch of this package runs on a GPU that is here.
        DriverError: the driver refuses.
    """
    if chosen is not None:
        return [Place((arch,), None) for arch in chosen]
    gpus, reason = present()
    if not gpus:
        raise UsageError(f"Say --arch, of {', '.join(catalog.ARCHS)}: {reason}.")
    found: dict[tuple[object, ...], Place] = {}
    for info in gpus:
        archs = catalog.archs_for(*info.capability)
        if not archs:
            from tileops import driver

            raise driver.unsupported(info)
        found.setdefault((info.capability, info.max_smem), Place(archs, info))
    return list(found.values())
