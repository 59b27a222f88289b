"""Fixtures of the fault tests: the row they add to docs/fault-matrix.md, and small real file systems."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


@pytest.fixture
def fault(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """``fault(what, outcome)``: this test showed that ``what`` ends in ``outcome``. Called last, after the asserts."""

    def row(what: str, outcome: str) -> None:
        request.node.user_properties.append(("fault", (what, outcome)))

    return row


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """``disk(size)``: a new tmpfs of that size, mounted; skips where this user may not mount."""
    mounted: list[Path] = []

    def make(size: str = "256k", **options: str) -> Path:
        place = tmp_path / f"disk{len(mounted)}"
        place.mkdir()
        extra = "".join(f",{name}={value}" for name, value in options.items())
        if shutil.which("mount") is None:
            pytest.skip("there is no mount command")
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}{extra}", "tmpfs", str(place)], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"mounting a tmpfs needs root: {done.stderr.strip()}")
        mounted.append(place)
        return place

    yield make
    for place in mounted:
        subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.fixture
def memory_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on a tmpfs where there is one: hundreds of flushes to a busy disk would take minutes and show nothing more."""
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else str(tmp_path)
    with tempfile.TemporaryDirectory(prefix="tileops-test-", dir=base) as folder:
        yield Path(folder)


@pytest.fixture
def public(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder that every uid can reach (pytest's own is closed to others)."""
    if os.geteuid() != 0:
        pytest.skip(f"running as another uid needs root, this is uid {os.geteuid()}")
    with tempfile.TemporaryDirectory(prefix="tileops-test-") as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)
