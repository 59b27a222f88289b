"""The command as a user meets it: a fresh process over a copy of the package that ships no kernels, and a cache folder of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import helpers_store
import pytest

from tileops import catalog
from tileops.store import PackagedWriter

#: A model that no matrix ships, so small that its real kernels compile in seconds.
TINY = {"chunk_size": 16, "head_dim": 16, "d_state": 16, "dtype": "bfloat16"}
ARGUMENTS = ("--chunk-size", "16", "--head-dim", "16", "--d-state", "16", "--arch", "sm_80")


@dataclass
class Done:
    """What a finished command left."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """stdout as the one JSON object that it must be."""
        data = json.loads(self.out)
        assert isinstance(data, dict) and data["status"] == self.status
        return data


def copy_package(place: Path) -> Path:
    """A copy of tileops with an empty packaged root; returns the folder for PYTHONPATH."""
    shutil.copytree(helpers_store.REPOSITORY / "tileops", place / "tileops", ignore=shutil.ignore_patterns("__pycache__"))
    (place / "tileops" / "artifacts").mkdir()
    (place / "tileops" / "artifacts" / "__init__.py").touch()
    return place


class Command:
    """Runs ``python -m tileops`` in a fresh process."""

    def __init__(self, package: Path, place: Path) -> None:
        self.package, self.cache, self.cwd = package, place / "cache", place / "cwd"
        self.cwd.mkdir()

    def environment(self, **more: str) -> dict[str, str]:
        env = helpers_store.environment(self.cache, **{"HOME": str(self.cwd), "CUDA_VISIBLE_DEVICES": "", **more})
        return {**env, "PYTHONPATH": os.pathsep.join([*filter(None, [more.get("PYTHONPATH")]), str(self.package)])}

    def line(self, arguments: Sequence[str]) -> list[str]:
        return [sys.executable, "-m", "tileops", *map(str, arguments)]

    def __call__(self, *arguments: str | Path, drop: Sequence[str] = (), timeout: float = 300, **env: str) -> Done:
        """Runs to the end. ``env``: added variables; ``drop``: variables that are not set. A traceback fails the test."""
        variables = {name: value for name, value in self.environment(**env).items() if name not in drop}
        done = subprocess.run(
            self.line([str(a) for a in arguments]), env=variables, cwd=self.cwd, capture_output=True, text=True, timeout=timeout
        )
        assert "Traceback" not in done.stderr, done.stderr
        assert not list(self.cwd.iterdir()), "something was written to the working folder or to HOME"
        return Done(done.returncode, done.stdout, done.stderr)


@pytest.fixture(scope="session")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_package(tmp_path_factory.mktemp("package"))


@pytest.fixture
def tileops(package: Path, tmp_path: Path) -> Command:
    return Command(package, tmp_path)


def configs(arch: str = "sm_80") -> list[Any]:
    return catalog.for_model(**TINY, archs=[arch])


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A site root with a made-up artifact of every kernel that the tiny model needs, for sm_80."""
    return write_site(tmp_path / "site", configs())


def write_site(place: Path, wanted: Sequence[Any], **changes: Any) -> Path:
    writer = PackagedWriter(place)
    for config in wanted:
        writer.add(helpers_store.artifact(config, **changes))
    writer.finish()
    return place
