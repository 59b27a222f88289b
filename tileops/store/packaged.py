"""Read-only roots that a build wrote: ``<root>/<arch>/manifest.json`` (one index) and ``<root>/<arch>/<key>.cubin``.

The index is one file, parsed once per process and version of the file: a warm start does not open hundreds of records.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tileops.config import SCHEMA, Artifact, KernelConfig, Record
from tileops.errors import CorruptArtifactError
from tileops.store import files, notes
from tileops.store.roots import ARCH_NAME, Fault, Miss, Root, check_artifact, deep_fault, fault_kind, make_record, same_config, unseal

MANIFEST = "manifest.json"
_LIMIT = 256 << 20

#: path -> (identity of the file, records as parsed). Replaced whole, so no lock: two threads at most parse it twice.
_parsed: dict[str, tuple[tuple[int, int, int], dict[str, Any]]] = {}


def load_manifest(folder: str) -> dict[str, Any]:
    """The records of ``<folder>/manifest.json`` by key, not yet checked.

    Raises:
        OSError, files.Unusable: not readable.
        CorruptArtifactError: not a manifest of this schema; data reason.
    """
    path = os.path.join(folder, MANIFEST)
    status = os.stat(path)
    identity = (status.st_ino, status.st_mtime_ns, status.st_size)
    known = _parsed.get(path)
    if known is not None and known[0] == identity:
        return known[1]
    data = parse_manifest(files.read(path, _LIMIT), path)
    if data.get("arch") != os.path.basename(folder):
        reason = f"arch {data.get('arch')!r} in the folder of {os.path.basename(folder)}"
        raise CorruptArtifactError(f"{path}: {reason}.", path=path, reason=reason)
    records: dict[str, Any] = data["records"]
    _parsed[path] = (identity, records)
    return records


def parse_manifest(text: bytes, where: str) -> dict[str, Any]:
    """A sealed manifest of this schema, with a table ``records``. Raises CorruptArtifactError."""

    def bad(reason: str) -> CorruptArtifactError:
        return CorruptArtifactError(f"{where}: {reason}.", path=where, reason=reason)

    data = unseal(text, where)
    if not isinstance(data.get("records"), dict):
        raise bad("not a manifest")
    if data.get("schema") != SCHEMA:
        raise bad(f"schema {data.get('schema')!r}, this package reads {SCHEMA}")
    return data


@dataclass(frozen=True)
class PackagedRoot(Root):
    """A packaged root, or a site root in the same layout."""

    _records: dict[str, tuple[Any, Record]] = field(default_factory=dict, compare=False, repr=False)

    def problem(self) -> str | None:
        if not os.path.isdir(self.path):
            return "the folder does not exist" if not os.path.exists(self.path) else "not a folder"
        return shared_writable(self.path) if self.kind == "site" else None

    def get(self, config: KernelConfig, toolchain: str | None = None) -> Artifact:
        """The toolchain is not compared: what a package ships is what it was tested with."""
        problem = self.problem()
        if problem is not None:
            raise Miss(f"refused: {problem}")
        try:
            return self.look(config)
        except Miss as miss:
            if not miss.bad:
                raise
        # A build may have replaced cubin and manifest between our two reads; the second look sees one or the other.
        try:
            return self.look(config)
        except Miss as miss:
            if miss.bad:
                self._warn(config.arch, config.key, str(miss))
            raise

    def look(self, config: KernelConfig) -> Artifact:
        """As ``get``, once and without a warning."""
        folder = os.path.join(self.path, config.arch)
        manifest = self._manifest(config.arch)
        if config.key not in manifest:
            raise Miss("key not present")
        record = self._record(manifest[config.key], config.key, folder)
        if not same_config(record, config):
            raise Miss("record is of another config", bad=True)
        return self._cubin(folder, record)

    def load(self, name: str) -> Artifact:
        arch, key = name.split("/")
        folder = os.path.join(self.path, arch)
        return self._cubin(folder, self._record(self._manifest(arch).get(key), key, folder))

    def _manifest(self, arch: str) -> dict[str, Any]:
        folder = os.path.join(self.path, arch)
        problem = shared_writable(folder) if self.kind == "site" and os.path.isdir(folder) else None
        if problem is not None:
            raise Miss(f"refused: {folder}: {problem}")
        try:
            return load_manifest(folder)
        except FileNotFoundError:
            raise Miss(f"no manifest for {arch}") from None
        except (OSError, files.Unusable) as error:
            raise Miss(f"manifest for {arch} cannot be read: {error}") from None
        except CorruptArtifactError as error:
            reason = f"manifest for {arch} is refused: {error.data['reason']}"
            notes.warn_once((self.name, arch), f"Artifacts of {self.name} for {arch} are ignored: {error}")
            raise Miss(reason) from None

    def _record(self, data: Any, key: str, folder: str) -> Record:
        # Checked at most once per parsed manifest; `is` tells whether the manifest was parsed again since.
        known = self._records.get(key)
        if known is not None and known[0] is data:
            return known[1]
        try:
            record = make_record(data, f"{folder}/{MANIFEST}: {key}")
        except CorruptArtifactError as error:
            raise Miss(f"record: {error.data['reason']}", bad=True) from None
        if record.key != key:
            raise Miss("record is of another config", bad=True)
        self._records[key] = (data, record)
        return record

    def _cubin(self, folder: str, record: Record) -> Artifact:
        path = os.path.join(folder, f"{record.key}.cubin")
        try:
            cubin = files.read(path)
        except FileNotFoundError:
            raise Miss("the manifest names a cubin that is not there", bad=True, kind="missing") from None
        except (OSError, files.Unusable) as error:
            raise Miss(f"cubin cannot be read: {error}", bad=True) from None
        return check_artifact(record, cubin)

    def _warn(self, arch: str, key: str, reason: str) -> None:
        notes.count("bad_entries")
        notes.warn_once((self.name, key), f"An artifact of {self.name} is not used: {self.path}/{arch}/{key}.cubin: {reason}.")

    def archs(self) -> list[str]:
        """The archs that have a manifest, sorted."""
        try:
            names = os.listdir(self.path)
        except OSError:
            return []
        return sorted(n for n in names if ARCH_NAME.match(n) and os.path.exists(os.path.join(self.path, n, MANIFEST)))

    def records(self) -> Iterator[tuple[Record, str]]:
        if self.problem() is not None:
            return
        for arch in self.archs():
            yield from self._records_of(arch)

    def entries(self, arch: str | None = None) -> Iterator[Record]:
        if self.problem() is None:
            for each in self.archs() if arch is None else [arch]:
                yield from (record for record, _ in self._records_of(each))

    def matching(self, kernel: str, arch: str | None, fields: dict[str, Any]) -> Iterator[Record]:
        # Chosen before they are checked: a manifest names hundreds of kernels, an op wants a few.
        if self.problem() is None:
            for each in self.archs() if arch is None else [arch]:
                yield from (record for record, _ in self._records_of(each, kernel, fields))

    def _records_of(self, arch: str, kernel: str | None = None, fields: dict[str, Any] | None = None) -> Iterator[tuple[Record, str]]:
        try:
            manifest = self._manifest(arch)
        except Miss:
            return
        for key, data in manifest.items():
            if kernel is not None and not _has(data, kernel, fields or {}):
                continue
            try:
                yield self._record(data, key, os.path.join(self.path, arch)), f"{arch}/{key}"
            except Miss:
                continue  # verify() reports it

    def verify(self) -> Iterator[Fault]:
        problem = self.problem()
        if problem is not None:
            yield Fault(self.name, "unusable", "", self.path, problem)
            return
        for arch in self.archs():
            folder = os.path.join(self.path, arch)
            where = os.path.join(folder, MANIFEST)
            try:
                manifest = load_manifest(folder)
            except CorruptArtifactError as error:
                yield Fault(self.name, fault_kind(error), "", where, error.data["reason"])
                continue
            except (OSError, files.Unusable) as error:
                yield Fault(self.name, "corrupt", "", where, str(error))
                continue
            for key, data in manifest.items():
                yield from self._verify_one(folder, key, data)

    def _verify_one(self, folder: str, key: str, data: Any) -> Iterator[Fault]:
        path = os.path.join(folder, f"{key}.cubin")
        try:
            record = make_record(data, key)
        except CorruptArtifactError as error:
            yield Fault(self.name, fault_kind(error), key, os.path.join(folder, MANIFEST), error.data["reason"])
            return
        if record.key != key or record.arch != os.path.basename(folder):
            yield Fault(self.name, "corrupt", key, os.path.join(folder, MANIFEST), "record is of another config")
            return
        try:
            artifact = self._cubin(folder, record)
        except Miss as miss:
            yield Fault(self.name, miss.kind, key, path, str(miss))
            return
        deep = deep_fault(artifact)
        if deep is not None:
            yield Fault(self.name, deep[0], key, path, deep[1])


def _has(data: Any, kernel: str, fields: dict[str, Any]) -> bool:
    """Whether an unchecked record is of this kernel and these values; False for what is no record."""
    config = data.get("config") if isinstance(data, dict) and data.get("kernel") == kernel else None
    return isinstance(config, dict) and all(config.get(name) == value for name, value in fields.items())


def shared_writable(path: str) -> str | None:
    """Why a folder shared by an administrator is not trusted, or None: code that anyone can write is anyone's code."""
    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        return str(error)
    return f"any user can write it (mode {mode & 0o7777:04o}); chmod o-w makes it usable" if mode & 0o002 else None
