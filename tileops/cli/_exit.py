"""Exit statuses of the command ``tileops``, all of them, and which error means which.

===  ==============================================================================================================
  0  fine
  1  missing: a kernel is in no root, did not compile, could not be stored; something that is needed is not installed
  2  usage: an argument, a TILEOPS_* variable or a config.json that is not understood
  3  corrupt: bytes on disk that do not match their record, or other bytes than a rebuild gives
  4  incompatible: the GPU or the driver cannot run what exists; an artifact of another arch or schema
130  interrupted (Ctrl-C, SIGTERM)
141  whoever read the output closed it (``tileops list | head``)
===  ==============================================================================================================
"""

from __future__ import annotations

from collections.abc import Iterable

from tileops import errors

FINE = 0
MISSING = 1
USAGE = 2
CORRUPT = 3
INCOMPATIBLE = 4
INTERRUPTED = 130
CLOSED = 141


class UsageError(Exception):
    """The command line, or a file it names, does not make sense; the text says what was expected."""


_OF_ERROR: tuple[tuple[type[BaseException], int], ...] = (
    (UsageError, USAGE),
    (errors.SettingError, USAGE),
    (errors.TargetError, USAGE),
    (errors.CorruptArtifactError, CORRUPT),
    (errors.IncompatibleArtifactError, INCOMPATIBLE),
    (errors.DriverError, INCOMPATIBLE),
)

#: What the kinds of ``tileops.store.Fault`` mean: a root that is refused, or not there, serves nothing but is not damaged.
_OF_FAULT = {"missing": MISSING, "unusable": MISSING, "corrupt": CORRUPT, "schema": INCOMPATIBLE, "arch": INCOMPATIBLE}

WORST_FIRST = (CORRUPT, INCOMPATIBLE, USAGE, MISSING, FINE)


def of_error(error: BaseException) -> int:
    """The status for an error that ends a verb."""
    return next((status for kind, status in _OF_ERROR if isinstance(error, kind)), MISSING)


def of_fault(kind: str) -> int:
    """The status for one kind of fault of a root."""
    return _OF_FAULT.get(kind, CORRUPT)


def remedy(root_kind: str, fault_kind: str) -> str:
    """What mends a fault of a root: both kinds as the store names them."""
    if fault_kind == "unusable":
        return "make the folder what the reason asks for, or point elsewhere"
    if root_kind == "cache":
        return "tileops warm replaces it; tileops prune --max-size 0 empties the cache"
    return {"packaged": "reinstall the package", "site": "copy or import it again"}.get(root_kind, "make it again")


def worst(statuses: Iterable[int]) -> int:
    """The one status of several findings: corrupt, then incompatible, usage, missing."""
    return min(statuses, key=WORST_FIRST.index, default=FINE)
