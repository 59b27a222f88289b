"""Keeping the user cache small, beside readers and writers that do not know of it."""

from __future__ import annotations

import os
import time
from typing import NamedTuple

from tileops.store import files, places
from tileops.store.cache import CUBIN, HIDDEN, LAYOUT, CacheRoot
from tileops.store.files import Unusable


class Pruned(NamedTuple):
    """What prune did: entries and bytes removed and kept, hidden folders of dead writers swept; ``reason`` where it could not."""

    removed: int
    removed_bytes: int
    kept: int
    kept_bytes: int
    swept: int
    reason: str | None = None


def prune(max_bytes: int | None = None, older_than_seconds: float | None = None) -> Pruned:
    """Removes entries of the user cache, longest unused first, and what killed writers left.

    Args:
        max_bytes: entries are removed until the rest has at most this many bytes.
        older_than_seconds: entries not used for this long are removed. Used: the later of written and last read, as far as
            the file system keeps the latter (``relatime`` does, to a day).
    """
    where = places.location()
    if where.path is None:
        return Pruned(0, 0, 0, 0, 0, where.reason)
    root = CacheRoot("cache", "cache", where.path)
    try:
        with root.opened() as fd:
            path = os.path.join(where.path, LAYOUT)
            swept = files.sweep(path, *HIDDEN)
            removed, kept = _choose(_entries(root, fd), max_bytes, older_than_seconds)
            gone = [(size, name) for size, name in removed if _remove(fd, path, name)]
            return Pruned(len(gone), sum(size for size, _ in gone), len(kept), sum(size for size, _ in kept), swept)
    except FileNotFoundError:
        return Pruned(0, 0, 0, 0, 0)
    except (OSError, Unusable) as error:
        return Pruned(0, 0, 0, 0, 0, files.describe(error))


def _entries(root: CacheRoot, fd: int) -> list[tuple[float, int, str]]:
    """(last used, bytes, name) of every entry, longest unused first."""
    found = []
    for name in root.names(fd):
        try:
            status = os.stat(name, dir_fd=fd, follow_symlinks=False)
            used, size = status.st_mtime, 0
            with files.folder(name, dir_fd=fd) as entry:
                for file in os.listdir(entry):
                    status = os.stat(file, dir_fd=entry, follow_symlinks=False)
                    size += status.st_size
                    used = max(used, status.st_atime if file == CUBIN else used)
        except FileNotFoundError:
            continue
        except OSError:
            size = 0  # no entry folder at all: counts nothing, ages like the rest
        found.append((used, size, name))
    return sorted(found)


def _choose(
    entries: list[tuple[float, int, str]], max_bytes: int | None, older_than: float | None
) -> tuple[list[tuple[int, str]], list[tuple[int, str]]]:
    removed, kept = [], []
    left = sum(size for _, size, _ in entries)
    oldest = -1.0 if older_than is None else time.time() - older_than
    for used, size, name in entries:
        if used < oldest or (max_bytes is not None and left > max_bytes):
            removed.append((size, name))
            left -= size
        else:
            kept.append((size, name))
    return removed, kept


def _remove(fd: int, path: str, name: str) -> bool:
    # Renamed away first: a reader finds the whole entry or none, never one that lost a file.
    hidden = files.private_name("gone")
    try:
        os.rename(name, hidden, src_dir_fd=fd, dst_dir_fd=fd)
    except FileNotFoundError:
        return False  # another prune took it
    files.remove(os.path.join(path, hidden))
    return True
