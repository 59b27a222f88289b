"""One sdist and one wheel of these sources, with two artifacts in them, made once; and a virtual environment that has the wheel."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import helpers_store
import pytest
from helpers_packaging import TOP, build

from tileops import catalog
from tileops.store import PackagedWriter

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout, so that building leaves nothing in it, with two artifacts; and litter that must not be shipped."""
    copy = tmp_path_factory.mktemp("source") / "tileops-checkout"
    copy.mkdir()
    for name in TOP:
        place = ROOT / name
        if place.is_dir():
            shutil.copytree(place, copy / name, ignore=shutil.ignore_patterns("__pycache__", "sm_*", ".build*"))
        elif place.exists():
            shutil.copy(place, copy / name)
    writer = PackagedWriter(copy / "artifacts")
    for tied in (False, True):
        writer.add(
            helpers_store.artifact(catalog.config("recurrent", "sm_90a", P=64, N=128, dtype="bfloat16", state_dtype="float32", tied=tied))
        )
    writer.finish()
    for litter in (
        "artifacts/.build.lock",
        "artifacts/sm_90a/notes.txt",
        "tileops/store/core.dump",
        "tileops/__pycache__/env.pyc",
        ".env",
        "notes/a.md",
        ".venv/bin/python",
    ):
        (copy / litter).parent.mkdir(parents=True, exist_ok=True)
        (copy / litter).write_text("litter")
    return copy


@pytest.fixture(scope="session")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", source, tmp_path_factory.mktemp("wheel") / "dist")


@pytest.fixture(scope="session")
def sdist(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("sdist", source, tmp_path_factory.mktemp("sdist") / "dist")


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel and what it says it needs at run time: no TileLang, no compiler, no test tools."""
    venv = tmp_path_factory.mktemp("installed") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True, timeout=120)
    site = next((venv / "lib").glob("python*/site-packages"))
    for distribution in needed("tileops"):
        link(distribution, site)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(venv / "bin" / "python")]
    done = subprocess.run([*pip, "install", "--quiet", "--no-index", "--no-deps", str(wheel)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return venv


def needed(name: str) -> list[metadata.Distribution]:
    """The run-time dependencies of tileops as pyproject.toml declares them, and theirs, as installed here."""
    from packaging.requirements import Requirement

    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    waiting = [Requirement(r) for r in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]]
    found: dict[str, metadata.Distribution] = {}
    while waiting:
        requirement = waiting.pop()
        key = re.sub(r"[-_.]+", "-", requirement.name).lower()
        if key in found or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        found[key] = metadata.distribution(requirement.name)
        waiting += [Requirement(r) for r in found[key].requires or []]
    return list(found.values())


def link(distribution: metadata.Distribution, site: Path) -> None:
    """Puts an installed distribution into another site-packages, by links to its top-level files and folders."""
    for top in {file.parts[0] for file in distribution.files or () if file.parts[0] not in ("..", "__pycache__")}:
        target = Path(str(distribution.locate_file(top)))
        if not (site / top).exists() and target.exists():
            os.symlink(target, site / top)
