"""What the tests of the command line share: the command in a fresh process, and roots with made-up artifacts."""

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

from tileops import catalog
from tileops.config import KernelConfig
from tileops.store import PackagedWriter

#: A model so small that its real kernels compile in seconds; how the command is told of it.
TINY = {"chunk_size": 16, "head_dim": 16, "d_state": 16, "dtype": "bfloat16"}
VALUES = ("--chunk-size", "16", "--head-dim", "16", "--d-state", "16", "--arch", "sm_80")


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


class Command:
    """Runs ``python -m tileops`` of the package in folder ``package`` with a cache, a HOME and a working folder in ``place``."""

    def __init__(self, package: Path, place: Path) -> None:
        self.package, self.cache, self.cwd = package, place / "cache", place / "cwd"
        self.cwd.mkdir(parents=True)

    def environment(self, **more: str) -> dict[str, str]:
        """No GPU is visible, whatever the machine has. TileLang makes folders when it is imported: not in HOME, which is watched."""
        own = {"HOME": str(self.cwd), "CUDA_VISIBLE_DEVICES": "", "TILELANG_CACHE_DIR": str(self.cwd.parent / "tilelang")}
        env = helpers_store.environment(self.cache, **{**own, **more})
        before = [more["PYTHONPATH"]] if "PYTHONPATH" in more else []
        return {**env, "PYTHONPATH": os.pathsep.join([*before, str(self.package)])}

    def line(self, *arguments: str | Path) -> list[str]:
        return [sys.executable, "-m", "tileops", *map(str, arguments)]

    def __call__(self, *arguments: str | Path, drop: Sequence[str] = (), timeout: float = 300, **env: str) -> Done:
        """Runs to the end. ``env``: added variables; ``drop``: variables left out. A traceback, or a file in HOME, fails the test."""
        variables = {name: value for name, value in self.environment(**env).items() if name not in drop}
        done = subprocess.run(self.line(*arguments), env=variables, cwd=self.cwd, capture_output=True, text=True, timeout=timeout)
        assert "Traceback" not in done.stderr, done.stderr
        assert not list(self.cwd.iterdir()), "something was written to the working folder or to HOME"
        return Done(done.returncode, done.stdout, done.stderr)


def copy_package(place: Path) -> Path:
    """A copy of tileops whose packaged root is empty; returns the folder for PYTHONPATH."""
    shutil.copytree(helpers_store.REPOSITORY / "tileops", place / "tileops", ignore=shutil.ignore_patterns("__pycache__"))
    (place / "tileops" / "artifacts").mkdir()
    (place / "tileops" / "artifacts" / "__init__.py").touch()
    return place


def tiny(arch: str = "sm_80") -> list[KernelConfig]:
    """Every kernel of the tiny model."""
    return catalog.for_model(**TINY, archs=[arch])  # type: ignore[arg-type]


def write_site(place: Path, wanted: Sequence[KernelConfig], **changes: Any) -> Path:
    """A root with a made-up artifact of every config."""
    writer = PackagedWriter(place)
    for config in wanted:
        writer.add(helpers_store.artifact(config, **changes))
    writer.finish()
    return place
