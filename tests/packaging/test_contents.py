"""What is in the wheel and the sdist: nothing that should not be there, and everything that should."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from helpers_packaging import build

from build_kernels import matrix, size
from tileops import catalog

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.xdist_group("packaging")

#: Every file of a wheel matches one of these ...
WHEEL = (
    r"tileops/(\w+/)*\w+\.py",
    r"tileops/py\.typed",
    r"tileops/kernels/schedules\.json",
    r"tileops/artifacts/(README\.md|digests\.json)",
    r"tileops/artifacts/sm_\d+a?/(manifest\.json|[0-9a-f]{64}\.cubin)",
    r"tileops-[\w.]+\.dist-info/(METADATA|WHEEL|RECORD|entry_points\.txt|top_level\.txt|licenses/LICENSE)",
)
#: ... and every file of an sdist, below its one folder, one of these.
SDIST = (
    r"(CHANGELOG|CONTRIBUTING|README)\.md|LICENSE|MANIFEST\.in|Makefile|constraints\.txt|pyproject\.toml|PKG-INFO|setup\.cfg",
    r"\.ci/run",
    r"tileops/(\w+/)*(\w+\.py|py\.typed|\w+\.(json|toml))",
    r"tileops\.egg-info/[\w.-]+",
    r"artifacts/(README\.md|__init__\.py|digests\.json)",
    r"artifacts/sm_\d+a?/(manifest\.json|[0-9a-f]{64}\.cubin)",
    r"build_kernels/\w+\.(py|toml)",
    r"(tests|benchmarks|docs|examples)/([\w.-]+/)*[\w.-]+\.(py|md|json|toml|txt|sh|csv|svg)",
)


def outside(names: list[str], patterns: tuple[str, ...]) -> list[str]:
    return [name for name in names if not any(re.fullmatch(pattern, name) for pattern in patterns)]


def python_files(*folders: str) -> set[str]:
    return {str(path.relative_to(ROOT)) for folder in folders for path in (ROOT / folder).rglob("*.py")}


@pytest.fixture(scope="module")
def wheel_names(wheel):
    return zipfile.ZipFile(wheel).namelist()


@pytest.fixture(scope="module")
def sdist_names(sdist):
    with tarfile.open(sdist) as archive:
        return [member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()]


def test_wheel_holds_nothing_else(wheel_names):
    assert outside(wheel_names, WHEEL) == []


def test_wheel_holds_all_of_the_package(wheel_names):
    # A package missing from pyproject.toml's list would show here: its files are in the tree and not in the wheel.
    expected = python_files("tileops") | {"tileops/artifacts/__init__.py", "tileops/artifacts/digests.json", "tileops/py.typed"}
    assert expected <= set(wheel_names)
    # Keys are computed from the kernels' texts: without the sources no artifact is ever found.
    assert {f"tileops/kernels/{kernel}.py" for kernel in catalog.KERNELS} <= set(wheel_names)


def test_both_hold_the_kernels_that_are_built(wheel_names, sdist_names):
    for names, folder in ((wheel_names, "tileops/artifacts"), (sdist_names, "artifacts")):
        assert f"{folder}/sm_90a/manifest.json" in names
        assert sum(re.fullmatch(rf"{folder}/sm_90a/[0-9a-f]{{64}}\.cubin", name) is not None for name in names) == 2


def test_sdist_holds_nothing_else(sdist_names):
    assert outside(sdist_names, SDIST) == []


def test_sdist_holds_all_that_a_developer_needs(sdist_names):
    expected = python_files("tileops", "build_kernels", "tests", "examples", "benchmarks") | {
        "build_kernels/matrix.toml",
        ".ci/run",
        "constraints.txt",
        "Makefile",
        "README.md",
    }
    assert expected <= set(sdist_names)


def test_the_sdist_makes_the_same_wheel(sdist, wheel, tmp_path):
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    (source,) = tmp_path.iterdir()
    again = build("wheel", source, tmp_path / "dist")

    def content(path: Path) -> dict[str, bytes]:
        with zipfile.ZipFile(path) as archive:
            return {name: archive.read(name) for name in archive.namelist()}

    assert content(again) == content(wheel)


def test_size_is_judged_by_what_the_whole_matrix_would_weigh(wheel):
    held, wanted, whole = size.estimate(wheel)
    assert held == 2 and wanted == len(matrix.load())
    # The two cubins are 3000 random bytes each, which do not compress; every record adds its share of the manifest.
    assert 3000 * wanted < whole - wheel.stat().st_size + 2 * 4000 < 4500 * wanted
    line = [sys.executable, "-m", "build_kernels.size", str(wheel)]
    for budget, status in ((whole, 0), (whole - 1, 1)):
        assert subprocess.run([*line, "--budget", str(budget)], cwd=ROOT, capture_output=True, timeout=60).returncode == status
