"""The lock that spares duplicate compiles. Only that: what is right does not depend on it.

Released by the kernel when its holder dies, so a killed process stops nobody. The wait is bounded; whoever does not get
the lock compiles for itself. At most 256 lock files a cache (a key's first two hex digits choose one): two kernels that
share one compile one after the other.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tileops.store import files, notes, places
from tileops.store.cache import LAYOUT, CacheRoot

FOLDER = ".locks"

#: A kernel compiles in seconds; sixteen that queue for one slot on a busy machine still fit.
WAIT_SECONDS = 60.0


@contextmanager
def compile_lock(key: str, timeout: float = WAIT_SECONDS) -> Iterator[bool]:
    """Held while ``key`` is compiled. Gives whether it was got; look the key up again either way, then compile.

    Never raises for the file system: without a usable cache folder, or where it has no locks, it gives False at once.
    Not to be nested.
    """
    lock = None
    try:
        lock = _acquire(key, timeout)
        yield lock is not None
    finally:
        if lock is not None:
            try:
                lock.release()
            except OSError:
                pass


def _acquire(key: str, timeout: float) -> Any:
    where = places.location()
    if where.path is None:
        return None
    import filelock  # here: it costs more to import than the rest of the store, and a packaged hit needs none

    try:
        with CacheRoot("cache", "cache", where.path).opened(create=True) as fd:
            try:
                os.mkdir(FOLDER, 0o700, dir_fd=fd)
            except FileExistsError:
                pass
        path = os.path.join(where.path, LAYOUT, FOLDER, f"{key[:2]}.lock")
        lock = _make(filelock, path)
        lock.acquire(timeout=timeout, poll_interval=0.05)
        return lock
    except filelock.Timeout:
        notes.warn_once(
            ("lock", key), f"Waited {timeout:.0f} s for another process to compile {key[:12]} (lock {path}); compiling it here as well."
        )
    except (OSError, NotImplementedError, RuntimeError, files.Unusable) as error:
        # ENOLCK, ENOTSUP, ENOSYS, a read-only or refused cache: duplicate work at worst.
        notes.logger.debug("no compile lock: %s", files.describe(error))
    return None


def _make(filelock: Any, path: str) -> Any:
    # An existing lock file that is no plain file (a FIFO, a folder) must not be opened.
    try:
        if not stat.S_ISREG(os.lstat(path).st_mode):
            raise files.Unusable(f"{path} is not a regular file")
    except FileNotFoundError:
        pass
    try:
        # Newer filelock falls back to marker files where flock is missing; a killed process would leave its marker behind.
        return filelock.FileLock(path, mode=0o600, fallback_to_soft=False)
    except TypeError:
        return filelock.FileLock(path, mode=0o600)
