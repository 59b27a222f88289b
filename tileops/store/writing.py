"""Writing packaged roots: what ``build_kernels`` and ``tileops import --into`` use.

Artifacts are staged one by one in ``<root>/<arch>/.build/`` as they are made, so that a killed build resumes; ``finish``
moves the cubins into place and then puts the manifest there in one replace. The same artifacts give the same bytes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from typing import NamedTuple

from tileops.config import SCHEMA, Artifact, KernelConfig, Record
from tileops.errors import CorruptArtifactError
from tileops.store import files
from tileops.store.cache import compiler_of
from tileops.store.packaged import MANIFEST, PackagedRoot, load_manifest
from tileops.store.roots import Miss, check_artifact, decode_record, make_record, same_config, seal

STAGING = ".build"
DIGESTS = "digests.json"


class Written(NamedTuple):
    """What a finished root holds: kernels and bytes by arch."""

    kernels: dict[str, int]
    size: dict[str, int]


class PackagedWriter:
    """Fills one packaged root. ``add`` may be called from several processes; one ``finish`` at a time.

    Args:
        root: folder; created when the first artifact comes.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = os.path.abspath(os.fspath(root))

    def has(self, config: KernelConfig, toolchain: str | None = None) -> bool:
        """Whether a valid artifact of ``config`` (made by ``toolchain``) is there already, staged or finished."""
        return self._find(config, toolchain) is not None

    def add(self, artifact: Artifact) -> None:
        """Stages one artifact, flushed. Raises CorruptArtifactError, OSError."""
        record = artifact.check().record
        make_record(json.loads(record.to_json()), record.key)
        staging = self._staging(record.arch)
        files.make_shared(staging)
        # The record last: a cubin without one is not there, so a build killed in between makes it again.
        files.replace(os.path.join(staging, f"{record.key}.cubin"), artifact.cubin)
        files.replace(os.path.join(staging, f"{record.key}.json"), seal(record.to_dict()))

    def finish(self, keep: Iterable[str] | None = None) -> Written:
        """Publishes what is staged together with what the manifests name already.

        Args:
            keep: keys; the finished root holds these only. None: nothing is dropped.

        Raises:
            OSError.
        """
        wanted = None if keep is None else set(keep)
        written = Written({}, {})
        for arch in self._archs():
            records = self._merge(arch, wanted)
            written.kernels[arch] = len(records)
            written.size[arch] = sum(record.cubin_size for record in records.values())
        return written

    def digests(self) -> dict[str, str]:
        """key -> cubin sha256 of everything the manifests name, sorted by key."""
        return {r.key: r.cubin_sha256 for r in sorted(PackagedRoot("packaged", self.root, self.root).entries(), key=lambda r: r.key)}

    def write_digests(self) -> str:
        """Writes ``<root>/digests.json`` and returns its path."""
        path = os.path.join(self.root, DIGESTS)
        files.replace(path, (json.dumps(self.digests(), indent=1, sort_keys=True) + "\n").encode())
        files.sweep(self.root, DIGESTS)
        return path

    def _merge(self, arch: str, wanted: set[str] | None) -> dict[str, Record]:
        folder, staging = os.path.join(self.root, arch), self._staging(arch)
        records = self._manifest_records(folder)
        for name in _names(staging, ".json"):
            found = self._staged(arch, name)
            if found is not None:
                records[name] = found.record
        if wanted is not None:
            records = {key: record for key, record in records.items() if key in wanted}
        # Cubins first, manifest last: a manifest never names a cubin that is not there yet. A reader between the two finds
        # a digest that differs where a kernel was rebuilt with other bytes: a miss, until the manifest follows.
        for key in records:
            try:
                os.rename(os.path.join(staging, f"{key}.cubin"), os.path.join(folder, f"{key}.cubin"))
            except FileNotFoundError:
                pass  # it is in place already: from an earlier build, or one killed right here
        manifest = {"schema": SCHEMA, "arch": arch, "records": {key: records[key].to_dict() for key in sorted(records)}}
        files.replace(os.path.join(folder, MANIFEST), seal(manifest))
        files.remove(staging)
        files.sweep(folder, MANIFEST)
        for key in _names(folder, ".cubin"):
            if key not in records:
                files.remove(os.path.join(folder, f"{key}.cubin"))
        return records

    def _manifest_records(self, folder: str) -> dict[str, Record]:
        try:
            manifest = load_manifest(folder)
        except (OSError, files.Unusable, CorruptArtifactError):
            return {}  # nothing yet, or nothing that can be kept
        records = {}
        for key, data in manifest.items():
            try:
                record = make_record(data, key)
                check_artifact(record, files.read(os.path.join(folder, f"{key}.cubin")))
            except (OSError, files.Unusable, CorruptArtifactError, Miss):
                continue
            records[record.key] = record
        return records

    def _staged(self, arch: str, key: str) -> Artifact | None:
        """The staged artifact, if it is whole; its cubin may have been moved into place by a finish that was killed."""
        try:
            record = decode_record(files.read(os.path.join(self._staging(arch), f"{key}.json")), key)
        except (OSError, files.Unusable, CorruptArtifactError):
            return None
        if record.key != key or record.arch != arch:
            return None
        for folder in (self._staging(arch), os.path.join(self.root, arch)):
            try:
                return check_artifact(record, files.read(os.path.join(folder, f"{key}.cubin")))
            except (OSError, files.Unusable, Miss):
                continue
        return None

    def _find(self, config: KernelConfig, toolchain: str | None) -> Artifact | None:
        staged = self._staged(config.arch, config.key)
        candidates: list[Callable[[], Artifact]] = [] if staged is None else [lambda: staged]
        candidates.append(lambda: PackagedRoot("packaged", self.root, self.root).look(config))
        for candidate in candidates:
            try:
                artifact = candidate()
            except Miss:
                continue
            if same_config(artifact.record, config) and toolchain in (None, compiler_of(artifact.record)):
                return artifact
        return None

    def _archs(self) -> list[str]:
        try:
            names = os.listdir(self.root)
        except FileNotFoundError:
            return []
        return sorted(n for n in names if os.path.isdir(self._staging(n)) or os.path.isfile(os.path.join(self.root, n, MANIFEST)))

    def _staging(self, arch: str) -> str:
        return os.path.join(self.root, arch, STAGING)


def write_packaged(root: str | os.PathLike[str], artifacts: Iterable[Artifact]) -> Written:
    """Adds artifacts to a packaged root and finishes it. Raises CorruptArtifactError, OSError."""
    writer = PackagedWriter(root)
    for artifact in artifacts:
        writer.add(artifact)
    return writer.finish()


def read_digests(root: str | os.PathLike[str]) -> dict[str, str]:
    """``<root>/digests.json``: key -> cubin sha256 of the last full build. Raises OSError, CorruptArtifactError."""
    path = os.path.join(root, DIGESTS)
    try:
        data = json.loads(files.read(path))
    except (ValueError, files.Unusable) as error:
        raise CorruptArtifactError(f"{path}: {error}.", path=path, reason=str(error)) from None
    if not isinstance(data, dict) or not all(isinstance(v, str) for v in data.values()):
        raise CorruptArtifactError(f"{path}: not a table of digests.", path=path, reason="not a table of digests")
    return data


def _names(folder: str, suffix: str) -> list[str]:
    try:
        return sorted(name[: -len(suffix)] for name in os.listdir(folder) if name.endswith(suffix) and not name.startswith("."))
    except FileNotFoundError:
        return []
