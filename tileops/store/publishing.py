"""Putting an artifact into the user cache, so that a reader sees nothing or all of it whenever the writer dies.

Stage in a private folder of the cache, flush both files and the folder, read back what was written with the readers' own
code, rename the folder to its name, flush the parent. A file-system fault is a reason in the answer, never an exception:
the caller has the bytes in memory and goes on with them.
"""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass

from tileops.config import Artifact
from tileops.store import files, memory, notes, places
from tileops.store.cache import CUBIN, HIDDEN, LAYOUT, RECORD, CacheRoot, entry_name
from tileops.store.files import Unusable
from tileops.store.roots import Miss, same_config, seal


@dataclass(frozen=True)
class Published:
    """What became of an artifact: ``stored`` on disk at ``path``, or why not (this process then keeps it in memory)."""

    stored: bool
    path: str | None
    reason: str


def publish(artifact: Artifact, keep: bool = True) -> Published:
    """Stores an artifact in the user cache.

    A good entry that is there already stays (whoever loses a race uses its own bytes); a bad one is replaced in one step.
    With ``keep``, what cannot be stored stays in this process's memory, with one warning.

    Raises:
        CorruptArtifactError: the artifact's bytes do not match its record. Nothing else: the file system's faults are in
            the answer, warned of once each.
    """
    artifact.check(str(artifact.record.config_object()))
    where = places.location()
    if where.path is None:
        return _kept(artifact, where.reason or "there is no cache folder", "", keep)
    root = CacheRoot("cache", f"cache {where.path}", where.path)
    try:
        with root.opened(create=True) as fd:
            files.sweep(os.path.join(where.path, LAYOUT), *HIDDEN)
            reason = _publish(root, fd, artifact)
    except (OSError, Unusable) as error:
        return _kept(artifact, files.describe(error), where.path, keep)
    notes.count("published")
    memory.forget(artifact.record.key)
    return Published(True, os.path.join(where.path, LAYOUT, entry_name(artifact.record)), reason)


def _kept(artifact: Artifact, reason: str, path: str, keep: bool) -> Published:
    if not keep:
        return Published(False, None, reason)
    memory.keep(artifact)
    notes.count("publish_failures")
    notes.warn_once(
        ("publish", path, reason.split(":")[0]),
        f"Compiled kernels are kept in memory only and will be compiled again by the next process: {path or 'no cache'}: {reason}.",
    )
    return Published(False, None, reason)


def _publish(root: CacheRoot, fd: int, artifact: Artifact) -> str:
    name = entry_name(artifact.record)
    if _is_good(root, fd, name, artifact):
        return "already there"
    # In the cache itself: a rename from a temporary folder elsewhere fails with EXDEV, or is a copy that can be seen half done.
    staging = files.private_name("staging")
    leftovers = [staging]
    os.mkdir(staging, 0o700, dir_fd=fd)
    try:
        with files.folder(staging, dir_fd=fd) as entry:
            files.write(CUBIN, artifact.cubin, dir_fd=entry)
            files.write(RECORD, seal(artifact.record.to_dict()), dir_fd=entry)
            # Flushed before the rename: after a power cut the name must not lead to files without their bytes.
            files.flush_folder(entry)
        try:
            root.read_entry(fd, staging)
        except Miss as miss:
            raise Unusable(f"what was written does not read back: {miss}") from None
        reason = _rename(root, fd, staging, name, artifact, leftovers)
        files.flush_folder(fd)
        return reason
    finally:
        # The staging folder is gone where the rename moved it, the old bad entry where it was exchanged, all of it after a fault.
        for leftover in leftovers:
            files.remove(os.path.join(root.path, LAYOUT, leftover))


def _rename(root: CacheRoot, fd: int, staging: str, name: str, artifact: Artifact, shadows: list[str]) -> str:
    for _ in range(8):
        try:
            # Onto an existing entry this fails (it is not empty), so a good entry is never overwritten.
            os.rename(staging, name, src_dir_fd=fd, dst_dir_fd=fd)
            return "published"
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                raise
        if _is_good(root, fd, name, artifact):
            return "another process published it first"
        if files.exchange(staging, name, fd):
            return "replaced a bad entry"
        # No exchange here (NFS, say): shadow the bad entry under a hidden name instead of unlinking it under its readers.
        shadow = files.private_name("bad")
        try:
            os.rename(name, shadow, src_dir_fd=fd, dst_dir_fd=fd)
        except FileNotFoundError:
            continue
        shadows.append(shadow)
    raise Unusable("the entry is being replaced by other processes")


def _is_good(root: CacheRoot, fd: int, name: str, artifact: Artifact) -> bool:
    try:
        return same_config(root.read_entry(fd, name).record, artifact.record.config_object())
    except Miss:
        return False
