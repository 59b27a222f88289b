"""Every TILEOPS_* environment variable: name, meaning, default. A leaf: stdlib only.

Read when used, never at import, so that a test or a launcher can set them after ``import tileops``.
"""

from __future__ import annotations

import os

from tileops.errors import SettingError

POLICIES = ("auto", "cached", "packaged")

#: name -> (default as shown to users, meaning)
VARIABLES = {
    "TILEOPS_CACHE_DIR": ("the platform's user cache folder", "folder of the user cache; its parent must exist or be creatable"),
    "TILEOPS_ARTIFACT_PATH": ("empty", f"read-only artifact roots, searched after the packaged ones, separated by {os.pathsep!r}"),
    "TILEOPS_POLICY": ("auto", "where kernels may come from: auto (all), cached (never compile), packaged (no user cache either)"),
}


def cache_dir() -> str | None:
    """TILEOPS_CACHE_DIR, or None where it is unset or empty."""
    return os.environ.get("TILEOPS_CACHE_DIR") or None


def artifact_path() -> tuple[str, ...]:
    """The folders of TILEOPS_ARTIFACT_PATH, in order, without empty parts."""
    return tuple(p for p in os.environ.get("TILEOPS_ARTIFACT_PATH", "").split(os.pathsep) if p)


def policy() -> str:
    """TILEOPS_POLICY. Raises SettingError for a value that is not a policy."""
    value = os.environ.get("TILEOPS_POLICY") or "auto"
    if value not in POLICIES:
        raise SettingError(
            f"TILEOPS_POLICY is {value!r}; expected one of {', '.join(POLICIES)}.",
            name="TILEOPS_POLICY",
            value=value,
            expected=POLICIES,
        )
    return value
