"""One file that carries verified artifacts to another machine, and serves as a read-only root there.

An uncompressed ustar archive: ``manifest.json`` (records by key, so every digest comes first), then
``<arch>/<key>.cubin``, sorted, all metadata fixed: the same artifacts give the same bytes. The reader here knows plain
files named by the manifest and nothing else of tar, so there is no link, device, long name or path to be unpacked wrongly;
files are named after verified records, never after what the archive says. Digests show that a bundle is whole, not who made it.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from tileops.config import SCHEMA, Artifact, KernelConfig, Record
from tileops.errors import CorruptArtifactError, TileOpsError
from tileops.store import discovery, files, lookup, notes, places, publishing, writing
from tileops.store.packaged import MANIFEST, parse_manifest
from tileops.store.roots import Fault, Miss, Root, check_artifact, deep_fault, fault_kind, make_record, same_config, seal

FORMAT = 1
_BLOCK = 512
_MAX_MANIFEST = 256 << 20
_MAX_MEMBERS = 100_000


class Exported(NamedTuple):
    path: str
    kernels: int
    size: int  # bytes of the file


class Imported(NamedTuple):
    kernels: int
    size: int  # bytes of cubins
    destination: str


class _Member(NamedTuple):
    record: Record
    offset: int


def export_bundle(
    path: str | os.PathLike[str], *, configs: Iterable[KernelConfig] | None = None, archs: Iterable[str] | None = None, current: bool = True
) -> Exported:
    """Writes a bundle, in one replace.

    Args:
        configs: what to carry; None: every artifact of every root.
        archs: only these; None: all.
        current: without ``configs``, only artifacts made from this package's kernel sources.

    Raises:
        MissingKernelError: one of ``configs`` is in no root.
        OSError.
    """
    only = None if archs is None else set(archs)
    if configs is None:
        found = list(_all(only, current))
    else:
        found = [_required(config) for config in configs if only is None or config.arch in only]
    artifacts = {artifact.record.key: artifact for artifact in reversed(found)}
    ordered = sorted(artifacts.values(), key=lambda a: (a.record.arch, a.record.key))
    manifest = {"schema": SCHEMA, "bundle": FORMAT, "records": {a.record.key: a.record.to_dict() for a in ordered}}
    parts = []
    for name, data in [(MANIFEST, seal(manifest)), *((_member_name(a.record), a.cubin) for a in ordered)]:
        parts += [_header(name, len(data)), data, bytes(-len(data) % _BLOCK)]
    parts.append(bytes(2 * _BLOCK))  # how a tar ends
    text = b"".join(parts)
    files.replace(path, text)
    files.sweep(os.path.dirname(os.path.abspath(path)), os.path.basename(path))
    return Exported(os.path.abspath(os.fspath(path)), len(ordered), len(text))


def import_bundle(
    path: str | os.PathLike[str], *, into: str | os.PathLike[str] | None = None, archs: Iterable[str] | None = None
) -> Imported:
    """Verifies a whole bundle, then stores its artifacts: in the user cache, or as a packaged root at ``into``.

    On a machine with another compiler, imported entries of the user cache are a miss (see ``find``); a root made with
    ``into``, or the bundle itself in TILEOPS_ARTIFACT_PATH, is used there as well.

    Raises:
        CorruptArtifactError: anything at all is wrong with the bundle; nothing was stored. Data: path, reason.
        TileOpsError: the user cache cannot be written; OSError: ``into`` cannot.
    """
    source = BundleRoot("site", f"bundle {os.fspath(path)}", os.path.abspath(os.fspath(path)))
    faults = list(source.verify())
    if faults:
        first = faults[0]
        raise CorruptArtifactError(f"{first.path} is not imported: {first.reason}.", path=first.path, reason=first.reason)
    only = None if archs is None else set(archs)
    names = [(record, name) for record, name in source.records() if only is None or record.arch in only]
    if into is not None:
        writing.write_packaged(into, (source.load(name) for _, name in names))
        destination = os.path.abspath(os.fspath(into))
    else:
        destination = places.location().path or ""
        for _, name in names:
            answer = publishing.publish(source.load(name), keep=False)
            if not answer.stored:
                raise TileOpsError(
                    f"The bundle cannot be imported into the user cache {destination}: {answer.reason}.",
                    path=destination,
                    reason=answer.reason,
                )
    return Imported(len(names), sum(record.cubin_size for record, _ in names), destination)


@dataclass(frozen=True)
class BundleRoot(Root):
    """A bundle file as a read-only root; indexed once per version of the file."""

    _index: dict[tuple[int, int, int], dict[str, _Member]] = field(default_factory=dict, compare=False, repr=False)

    def problem(self) -> str | None:
        try:
            with self._opened():
                return None
        except CorruptArtifactError as error:
            return str(error.data["reason"])

    def get(self, config: KernelConfig, toolchain: str | None = None) -> Artifact:
        try:
            artifact = self.load(config.key)
        except Miss as miss:
            if miss.bad:
                notes.warn_once((self.path, config.key), f"An artifact of {self.name} is not used: {config.key}: {miss}.")
            raise
        if not same_config(artifact.record, config):
            raise Miss("record is of another config", bad=True)
        return artifact

    def load(self, name: str) -> Artifact:
        try:
            with self._opened() as (fd, members):
                if name not in members:
                    raise Miss("key not present")
                record, offset = members[name]
                return check_artifact(record, os.pread(fd, record.cubin_size, offset))
        except CorruptArtifactError as error:
            notes.warn_once((self.path,), f"Artifacts of {self.name} are ignored: {error.data['reason']}.")
            raise Miss(f"refused: {error.data['reason']}") from None

    def records(self) -> Iterator[tuple[Record, str]]:
        try:
            with self._opened() as (_, members):
                found = [(member.record, key) for key, member in members.items()]
        except CorruptArtifactError:
            return iter(())
        return iter(found)

    def verify(self) -> Iterator[Fault]:
        try:
            with self._opened() as (fd, members):
                for key, (record, offset) in members.items():
                    try:
                        deep = deep_fault(check_artifact(record, os.pread(fd, record.cubin_size, offset)))
                    except Miss as miss:
                        deep = ("corrupt", str(miss))
                    if deep is not None:
                        yield Fault(self.name, deep[0], key, self.path, f"{_member_name(record)}: {deep[1]}")
        except CorruptArtifactError as error:
            yield Fault(self.name, fault_kind(error), "", self.path, str(error.data["reason"]))

    @contextmanager
    def _opened(self) -> Iterator[tuple[int, dict[str, _Member]]]:
        """A descriptor of the file, and its index. Raises CorruptArtifactError for whatever is no bundle of ours."""
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise _bad(self.path, f"cannot be opened: {error.strerror}") from None
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise _bad(self.path, "not a regular file")
            if status.st_mode & 0o002:
                raise _bad(self.path, "any user can write it; chmod o-w makes it usable")
            identity = (status.st_ino, status.st_mtime_ns, status.st_size)
            if identity not in self._index:
                self._index.clear()
                self._index[identity] = _read_index(fd, self.path, status.st_size)
            yield fd, self._index[identity]
        finally:
            os.close(fd)


def _read_index(fd: int, path: str, size: int) -> dict[str, _Member]:
    members = _members(fd, path, size)
    name, offset, length = next(members, ("", 0, 0))
    if name != MANIFEST:
        raise _bad(path, f"the first member is {name!r}, not {MANIFEST}")
    if length > _MAX_MANIFEST:
        raise _bad(path, f"the manifest has {length} bytes, more than the {_MAX_MANIFEST} allowed")
    records: dict[str, Record] = {}
    manifest = parse_manifest(os.pread(fd, length, offset), path)
    if manifest.get("bundle") != FORMAT:
        raise _bad(path, f"bundle format {manifest.get('bundle')!r}, this package reads {FORMAT}")
    for key, data in manifest["records"].items():
        record = make_record(data, f"{path}: {key}")
        if record.key != key:
            raise _bad(path, f"the record of {key} is of another config")
        records[_member_name(record)] = record
    found: dict[str, _Member] = {}
    for name, offset, length in members:
        if name not in records:
            raise _bad(path, f"member {name!r} is not one that the manifest names, or is there twice")
        record = records.pop(name)
        if length != record.cubin_size or length > files.MAX_FILE:
            raise _bad(path, f"member {name!r} has {length} bytes, the record says {record.cubin_size}")
        found[record.key] = _Member(record, offset)
    if records:
        raise _bad(path, f"{len(records)} cubins that the manifest names are not there, the first is {min(records)}")
    return found


def _members(fd: int, path: str, size: int) -> Iterator[tuple[str, int, int]]:
    """(name, offset, bytes) of every member. Raises CorruptArtifactError for any tar feature beyond a plain file."""
    offset = 0
    for _ in range(_MAX_MEMBERS):
        header = os.pread(fd, _BLOCK, offset)
        if len(header) < _BLOCK:
            raise _bad(path, "the file is truncated")
        if header == bytes(_BLOCK):
            if size != offset + 2 * _BLOCK or os.pread(fd, _BLOCK, offset + _BLOCK) != header:
                raise _bad(path, "its end is not that of a bundle (cut off, or something follows)")
            return
        name = header[:100].rstrip(b"\0").decode("ascii", "backslashreplace")
        digits = header[124:135]
        length = int(digits, 8) if digits.isdigit() and not set(digits) & set(b"89") else -1
        # One spelling only: whatever else a tar header can say (links, devices, owners, long names) differs from this.
        if length < 0 or header != _header(name, length):
            raise _bad(path, f"member {name!r} is not a plain file as a bundle holds them")
        padding = -length % _BLOCK
        if offset + _BLOCK + length + padding > size:
            raise _bad(path, "the file is truncated")
        if os.pread(fd, padding, offset + _BLOCK + length) != bytes(padding):
            raise _bad(path, f"member {name!r} is followed by something")
        yield name, offset + _BLOCK, length
        offset += _BLOCK + length + padding
    raise _bad(path, f"more than {_MAX_MEMBERS} members")


def _header(name: str, length: int) -> bytes:
    """The ustar header of a plain file with mode 0644, no owner and no time."""
    block = bytearray(_BLOCK)
    for at, text in ((0, name), (100, "0000644"), (108, "0000000"), (116, "0000000"), (124, f"{length:011o}"), (136, "0" * 11)):
        block[at : at + len(text)] = text.encode("ascii")
    block[156:157], block[257:265] = b"0", b"ustar\x0000"
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block[:_BLOCK])


def _bad(path: str, reason: str) -> CorruptArtifactError:
    return CorruptArtifactError(f"{path}: {reason}.", path=path, reason=reason)


def _member_name(record: Record) -> str:
    return f"{record.arch}/{record.key}.cubin"


def _required(config: KernelConfig) -> Artifact:
    found = lookup.find(config)
    if found.artifact is None:
        raise lookup.missing_error(found)
    return found.artifact


def _all(archs: set[str] | None, current: bool) -> Iterator[Artifact]:
    """Every good artifact. Raises CorruptArtifactError for one that is damaged in every root that has it: leaving it out
    would be found out on the machine that the bundle goes to."""
    taken: set[str] = set()
    damaged: dict[str, CorruptArtifactError] = {}
    for root in discovery.roots():
        for record, name in root.records():
            if record.key in taken or (archs is not None and record.arch not in archs) or (current and not is_current(record)):
                continue
            try:
                artifact = root.load(name)
            except Miss as miss:
                if miss.bad:
                    reason = f"{record.config_object()} is damaged ({miss}); remove it and warm it again, or export without it"
                    damaged[record.key] = CorruptArtifactError(f"{root.name}: {reason}.", path=root.path, reason=reason)
                continue
            taken.add(record.key)
            yield artifact
    for key, error in damaged.items():
        if key not in taken:
            raise error


def is_current(record: Record) -> bool:
    """Whether this package's own sources of the kernel are those that the record was made from."""
    return record.source == lookup.current_source(record.kernel)
