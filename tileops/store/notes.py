"""What the store tells people: the logger ``tileops``, one warning per fault, and counters. Imports nothing of the store."""

from __future__ import annotations

import logging
import os
import threading
import warnings
from collections import Counter

#: Quiet by default: a library's log belongs to whoever configures logging.
logger = logging.getLogger("tileops")
logger.addHandler(logging.NullHandler())


class StoreWarning(UserWarning):
    """Something is wrong with a place where artifacts are kept; the call that met it went on without."""


_NAMES = (
    *("hits_packaged", "hits_site", "hits_cache", "hits_memory", "misses", "bytes_read"),
    *("published", "publish_failures", "bad_entries", "compiles", "compile_ms"),
)

_lock = threading.Lock()
_counts: Counter[str] = Counter()
_warned: set[tuple[str, ...]] = set()


def _renew_lock() -> None:
    # A thread may hold the lock at the instant of a fork; the child would wait for it for ever.
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)


def warn_once(subject: tuple[str, ...], message: str) -> None:
    """Warns of one fault of one thing once in this process. Never raises, not even under ``-W error``."""
    with _lock:
        if subject in _warned:
            return
        _warned.add(subject)
    logger.warning(message)
    try:
        warnings.warn(message, StoreWarning, stacklevel=3)
    except StoreWarning:
        pass  # A bad cache entry must not become a crash because warnings were made errors; the log has it.


def count(name: str, amount: int = 1) -> None:
    """Adds to a counter of stats()."""
    with _lock:
        _counts[name] += amount


def stats() -> dict[str, int]:
    """Counters of this process: ``hits_packaged``, ``hits_site``, ``hits_cache``, ``hits_memory``, ``misses``, ``bytes_read``,
    ``published``, ``publish_failures``, ``bad_entries``, ``compiles``, ``compile_ms``. A counter that never moved is 0."""
    with _lock:
        return {name: _counts[name] for name in _NAMES}


def reset_stats() -> None:
    """Sets every counter to 0."""
    with _lock:
        _counts.clear()
