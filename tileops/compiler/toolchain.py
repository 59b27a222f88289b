"""Where the CUDA compiler parts are: NVRTC, nvJitLink and the headers, from pip's NVIDIA packages. Imports nothing heavy.

Any NVRTC major works; where several are installed the one that the build step pins (12) wins, since its cubins load on
the widest range of drivers (docs/compiler.md).
"""

from __future__ import annotations

import functools
import re
import sys
from dataclasses import dataclass
from pathlib import Path

#: Prefer these majors, in order; a later one is used where an earlier one is not installed.
MAJORS = (12, 13)


@dataclass(frozen=True)
class Toolchain:
    """The compiler parts that one build uses."""

    nvrtc: Path
    nvjitlink: Path
    version: str  # NVRTC's, "12.9.86"
    includes: tuple[Path, ...]
    tilelang: str  # version

    @property
    def name(self) -> str:
        """What records call this compiler; two with the same name give the same bytes."""
        return f"tilelang {self.tilelang}, nvrtc {self.version}"

    @property
    def major(self) -> int:
        return int(self.version.split(".")[0])


@functools.lru_cache(maxsize=1)
def find() -> tuple[Toolchain | None, str]:
    """The toolchain, or None and the reason in words (what is missing, how to install it)."""
    from importlib import metadata  # here and below: a hit in a packaged root needs no compiler

    remedy = "install the extra: pip install 'tileops[jit]'"
    try:
        tilelang = metadata.version("tilelang")
    except metadata.PackageNotFoundError:
        return None, f"TileLang is not installed; {remedy}"
    missing = []
    for major in MAJORS:
        found = _of_major(major, tilelang)
        if isinstance(found, Toolchain):
            return found, f"found {found.name}"
        missing.append(f"CUDA {major}: no {found}")
    return None, f"{'; '.join(missing)}; {remedy}"


def _of_major(major: int, tilelang: str) -> Toolchain | str:
    folders = _nvidia_folders()
    nvrtc = _first(folders, f"*/lib/libnvrtc.so.{major}")
    if nvrtc is None:
        return "libnvrtc"
    nvjitlink = _first(folders, f"*/lib/libnvJitLink.so.{major}")
    if nvjitlink is None:
        return "libnvJitLink"
    headers = _headers(folders, major)
    if isinstance(headers, str):
        return headers
    from importlib import util

    spec = util.find_spec("tilelang")
    if spec is None or not spec.submodule_search_locations:
        return "tilelang package folder"
    package = Path(next(iter(spec.submodule_search_locations)))
    includes = (package / "src", package / "3rdparty" / "cutlass" / "include", *headers)
    return Toolchain(nvrtc, nvjitlink, _version(major), includes, tilelang)


def _nvidia_folders() -> list[Path]:
    # Not through the import system: some wheels make ``nvidia`` a regular package, which hides the parts that others
    # put into the ``nvidia`` folder of another sys.path entry.
    return [folder for folder in (Path(entry or ".", "nvidia") for entry in sys.path) if folder.is_dir()]


def _first(folders: list[Path], pattern: str) -> Path | None:
    for folder in folders:
        for path in sorted(folder.glob(pattern)):
            return path
    return None


def _headers(folders: list[Path], major: int) -> tuple[Path, ...] | str:
    # CUDA 13's packages share one folder (cu13/include); CUDA 12's have one each.
    runtime = f"cu{major}/include" if major >= 13 else "cuda_runtime/include"
    cccl = f"cu{major}/include/cccl" if major >= 13 else "cuda_cccl/include"
    found = []
    for folder, probe, package in ((runtime, "cuda_bf16.h", "CUDA runtime headers"), (cccl, "cuda/std/cassert", "CCCL headers")):
        path = _first(folders, f"{folder}/{probe}")
        if path is None:
            return package
        found.append(path.parents[len(Path(probe).parts) - 1])
    # CUTLASS includes CUDA 13's CCCL as <cccl/cuda/std/...> in some places and as <cuda/std/...> in others.
    return (*found, found[1].parent) if major >= 13 and found[1].parent != found[0] else tuple(found)


def _version(major: int) -> str:
    from importlib import metadata

    for name in (f"nvidia-cuda-nvrtc-cu{major}", "nvidia-cuda-nvrtc"):
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        if version.startswith(f"{major}."):
            return re.match(r"[\d.]+", version).group(0)  # type: ignore[union-attr]
    return f"{major}.0"
