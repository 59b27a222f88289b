"""Where the user cache is. Creates nothing until asked; has an answer for every process, also one without a home."""

from __future__ import annotations

import os
from typing import NamedTuple

from tileops import env


class Location(NamedTuple):
    """Where the user cache is, or why there is none."""

    path: str | None
    reason: str | None


def location() -> Location:
    """The cache folder by TILEOPS_CACHE_DIR, else the platform's. Creates nothing."""
    chosen = env.cache_dir()
    if chosen is not None:
        path = os.path.expanduser(chosen)
        return (
            Location(None, f"TILEOPS_CACHE_DIR={chosen}: there is no home folder")
            if path.startswith("~")
            else Location(os.path.abspath(path), None)
        )
    import platformdirs

    try:
        path = platformdirs.user_cache_dir("tileops", appauthor=False)
    except (RuntimeError, KeyError, OSError) as error:
        return Location(None, f"there is no home folder ({error}); set TILEOPS_CACHE_DIR")
    # HOME unset and no passwd entry: "~" stays as it is, and a folder of that name would appear wherever the process runs.
    if not os.path.isabs(path):
        return Location(None, "there is no home folder; set TILEOPS_CACHE_DIR")
    return Location(path, None)


def make_private(path: str) -> None:
    """Creates the cache folder with mode 0700 where it is not there. Raises OSError."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        pass
