"""Fixtures of the command-line tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers_cli import Command, copy_package, tiny, write_site


@pytest.fixture(scope="session")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One copy of the package without kernels, whatever artifacts/ of this checkout holds."""
    return copy_package(tmp_path_factory.mktemp("package"))


@pytest.fixture
def tileops(package: Path, tmp_path: Path) -> Command:
    """The command, with a cache folder of this test's own (not made yet)."""
    return Command(package, tmp_path)


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A site root with every kernel of the tiny model for sm_80."""
    return write_site(tmp_path / "site", tiny())
