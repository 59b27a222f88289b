"""Every error this package raises for itself. A leaf: imports nothing, so that any layer may raise any of them.

Bad arguments raise plain ``ValueError`` or ``TypeError``; everything about kernels, artifacts and devices is a
:class:`TileOpsError`. Each class carries its facts as attributes (``error.data``) and survives pickling, so that a
worker process can hand it to its parent. A message is one or two sentences: what, where, what to do.
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "CompileError",
    "CorruptArtifactError",
    "DriverError",
    "IncompatibleArtifactError",
    "MissingKernelError",
    "OutOfMemoryError",
    "SettingError",
    "TargetError",
    "TileOpsError",
]


class TileOpsError(Exception):
    """Base of every error of this package. ``data`` holds the facts of the message, by name."""

    def __init__(self, message: str, **data: Any) -> None:
        super().__init__(message)
        self.data = data

    def __getattr__(self, name: str) -> Any:
        data = self.__dict__.get("data", {})
        if name in data:
            return data[name]
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.args[0] if self.args else "", self.data))


def _rebuild(cls: type[TileOpsError], message: str, data: dict[str, Any]) -> TileOpsError:
    return cls(message, **data)


class MissingKernelError(TileOpsError, LookupError):
    """No root holds the kernel and the policy forbids compiling it. Data: config, key, nearest, differs, roots, command."""


class IncompatibleArtifactError(TileOpsError, RuntimeError):
    """An artifact exists but this GPU or driver cannot load it. Data: key, arch, gpu, capability, driver, needs."""


class CorruptArtifactError(TileOpsError, ValueError):
    """Bytes on disk do not match their record. Data: path, reason."""


class CompileError(TileOpsError, RuntimeError):
    """A kernel did not compile. Data: kernel, arch, log, folder (where source and log were kept)."""


class DriverError(TileOpsError, RuntimeError):
    """The CUDA driver refused a call. Data: call, code, name, gpu, driver."""


class OutOfMemoryError(DriverError, MemoryError):
    """The GPU had no memory left for a module or launch; the artifact itself is fine. Data: as DriverError."""


class TargetError(TileOpsError, ValueError):
    """A target name that is not registered, or a target that does not serve this op. Data: target, op, registered."""


class SettingError(TileOpsError, ValueError):
    """A TILEOPS_* variable or policy value that is not understood. Data: name, value, expected."""
