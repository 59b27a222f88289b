"""The user cache's folder: who owns it, how large it is, whether it can be written. Looks only, writes nothing."""

from __future__ import annotations

import os
import stat
from typing import NamedTuple

from tileops.store import location
from tileops.store.cache import LAYOUT, CacheRoot

#: Less free space than this cannot hold one more entry, bytes.
_ROOM = 1 << 20


class Condition(NamedTuple):
    """What the user cache's folder is like."""

    path: str | None
    exists: bool = False
    owner: str = ""
    mode: str = ""
    entries: int = 0
    size: int = 0  # bytes
    refused: str = ""  # why what lies there is not used
    unwritable: str = ""  # why nothing can be put there; empty: it can


def condition() -> Condition:
    """The state of the folder that TILEOPS_CACHE_DIR, or the platform, names. Raises nothing for what is on disk."""
    where = location()
    if where.path is None:
        return Condition(None, refused=where.reason or "there is no cache folder", unwritable=where.reason or "there is no cache folder")
    refused = CacheRoot("cache", "user cache", where.path).problem() or ""
    try:
        status = os.stat(where.path)
    except OSError:
        return Condition(where.path, refused=refused, unwritable=refused or _unwritable(where.path))
    entries, size = _content(os.path.join(where.path, LAYOUT))
    return Condition(
        where.path,
        True,
        _owner(status.st_uid),
        f"{stat.S_IMODE(status.st_mode):04o}",
        entries,
        size,
        refused,
        refused or _unwritable(os.path.join(where.path, LAYOUT)),
    )


def _unwritable(path: str) -> str:
    """Why nothing can be created at or below ``path``, which may not be there yet."""
    place = path
    while not os.path.lexists(place) and os.path.dirname(place) != place:
        place = os.path.dirname(place)
    if not os.path.isdir(place):
        return f"{place} is not a folder"
    effective = os.access in os.supports_effective_ids
    if not os.access(place, os.W_OK | os.X_OK, effective_ids=effective):
        try:
            read_only = os.statvfs(place).f_flag & os.ST_RDONLY
        except OSError:
            read_only = 0
        return f"{place} is on a read-only file system" if read_only else f"{place} cannot be written by uid {os.geteuid()}"
    try:
        space = os.statvfs(place)
    except OSError as error:
        return f"{place}: {error.strerror}"
    free = space.f_bavail * space.f_frsize
    return f"the disk of {place} is full ({free} bytes are free)" if free < _ROOM else ""


def _content(path: str) -> tuple[int, int]:
    entries, size = 0, 0
    try:
        folders = [entry for entry in os.scandir(path) if not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False)]
    except OSError:
        return 0, 0
    for folder in folders:
        try:
            size += sum(file.stat(follow_symlinks=False).st_size for file in os.scandir(folder.path))
        except OSError:
            continue  # pruned meanwhile
        entries += 1
    return entries, size


def _owner(uid: int) -> str:
    try:
        import pwd

        return pwd.getpwuid(uid).pw_name
    except (KeyError, ImportError):
        return f"uid {uid}"
