"""Which roots there are, in the order in which they are asked. Reads the environment when called, imports nothing of CUDA."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tileops import env
from tileops.store import notes, places
from tileops.store.cache import LAYOUT, CacheRoot
from tileops.store.memory import MemoryRoot
from tileops.store.packaged import PackagedRoot
from tileops.store.roots import Root

ENTRY_POINTS = "tileops.artifacts"

_package = Path(__file__).resolve().parents[1]

#: Root objects by what they stand for: they remember what they parsed, and compare it with the file's identity.
_known: dict[tuple[str, ...], Root] = {}

_scanned: tuple[tuple[str, ...], tuple[Root, ...]] | None = None


def roots(policy: str = "auto") -> list[Root]:
    """Every root that this policy allows, in the order of look-up."""
    return list(iterate(policy))


def iterate(policy: str) -> Iterator[Root]:
    """As ``roots``, one at a time: a hit in this package's own root costs no scan of the installed distributions."""
    yield own_root()
    yield from installed_roots()
    for path in env.artifact_path():
        yield site_root(path)
    if policy != "packaged":
        where = places.location()
        if where.path is not None:
            yield _once(CacheRoot, "cache", f"user cache {where.path}", where.path)
        yield _once(MemoryRoot, "memory", "memory of this process", "")


def own_root() -> Root:
    """This package's artifacts: ``tileops/artifacts`` as installed, ``artifacts`` beside the package in a source checkout."""
    folder = _package / "artifacts"
    checkout = _package.parent / "artifacts"
    # Beside an installed package lie other people's folders; one called `artifacts` is ours only with our files in it.
    if not folder.is_dir() and ((checkout / "digests.json").is_file() or (checkout / "__init__.py").is_file()):
        folder = checkout
    return _once(PackagedRoot, "packaged", "packaged (tileops)", str(folder))


def site_root(path: str) -> Root:
    """One part of TILEOPS_ARTIFACT_PATH: a bundle file, a folder with the user cache's layout, or one with the packaged layout."""
    path = os.path.abspath(os.path.expanduser(path))
    name = f"site {path}"
    if os.path.isfile(path):
        from tileops.store.bundles import BundleRoot

        return _once(BundleRoot, "site", name, path)
    return _once(CacheRoot if os.path.isdir(os.path.join(path, LAYOUT)) else PackagedRoot, "site", name, path)


def installed_roots() -> tuple[Root, ...]:
    """Roots of distributions that declare ``tileops.artifacts``; scanned once for each sys.path. A broken one is warned of and left out."""
    global _scanned
    path = tuple(sys.path)
    if _scanned is None or _scanned[0] != path:
        _scanned = (path, tuple(_scan()))
    return _scanned[1]


def _scan() -> Iterator[Root]:
    from importlib import metadata

    try:
        points = sorted(metadata.entry_points(group=ENTRY_POINTS), key=lambda point: (_distribution(point), point.name))
    except Exception as error:  # broken metadata of any distribution in the environment
        notes.warn_once((ENTRY_POINTS,), f"Installed artifact packages cannot be listed: {type(error).__name__}: {error}.")
        return
    for point in points:
        name = _distribution(point)
        try:
            folder = _module_folder(point.value.partition(":")[0].strip())
        except (Exception, SystemExit) as error:  # finding a module imports its parents, which may raise anything
            reason = str(error) if isinstance(error, _Broken) else f"{type(error).__name__}: {error}"
            notes.warn_once((ENTRY_POINTS, name), f"The artifacts of the installed package {name} are ignored: {reason}.")
            continue
        yield _once(PackagedRoot, "packaged", f"packaged ({name})", folder)


class _Broken(Exception):
    pass


def _module_folder(module: str) -> str:
    from importlib import util

    spec = util.find_spec(module)
    if spec is None:
        raise _Broken(f"there is no module {module}")
    places = list(spec.submodule_search_locations or ()) or ([os.path.dirname(spec.origin)] if spec.origin else [])
    folder = next((place for place in places if os.path.isdir(place)), None)
    if folder is None:
        raise _Broken(f"module {module} has no folder")
    if not PackagedRoot("packaged", module, folder).archs():
        raise _Broken(f"{folder} holds no <arch>/manifest.json")
    return folder


def _distribution(point: Any) -> str:
    dist = getattr(point, "dist", None)
    return f"{dist.name} {dist.version}" if dist is not None else str(point.name)


def _once(make: Callable[[str, str, str], Root], kind: str, name: str, path: str) -> Root:
    key = (make.__name__, kind, name, path)
    found = _known.get(key)
    if found is None:
        found = _known[key] = make(kind, name, path)
    return found
