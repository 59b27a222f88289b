"""The user cache: ``<cache>/v1/<key>-<compiler>/{record.json,kernel.cubin}``, one folder an entry, published by one rename.

``<compiler>`` is eight hex digits of the sha256 of the compiler's name in the record, so that two environments with
different compilers share a cache without rebuilding each other's kernels at every start.

Two files a kernel, and nothing else that grows: at most 256 lock files (locks.py), and hidden folders of writers, which
whoever publishes next removes once their writer is dead. Readers take no lock and write nothing.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tileops.config import Artifact, KernelConfig, Record
from tileops.errors import CorruptArtifactError
from tileops.store import files, notes, places
from tileops.store.files import Unusable
from tileops.store.roots import (
    KEY_NAME,
    RECORD_LIMIT,
    Fault,
    Miss,
    Root,
    check_artifact,
    decode_record,
    deep_fault,
    fault_kind,
    same_config,
)

LAYOUT = "v1"
RECORD = "record.json"
CUBIN = "kernel.cubin"

#: How often an entry is looked at when it is replaced or removed under the reader's hands.
_TRIES = 4

#: Purposes of hidden folders: being written, shadowed by a good entry, pruned.
HIDDEN = ("staging", "bad", "gone")


def compiler_tag(compiler: str) -> str:
    return hashlib.sha256(compiler.encode()).hexdigest()[:8]


def compiler_of(record: Record) -> str:
    return str(record.provenance.get("compiler", ""))


def entry_name(record: Record) -> str:
    return f"{record.key}-{compiler_tag(compiler_of(record))}"


@dataclass(frozen=True)
class CacheRoot(Root):
    """The user cache, or a site root with the same layout (``kind`` site: an administrator's, so its owner may be another user)."""

    _seen: dict[str, tuple[tuple[int, int], Record]] = field(default_factory=dict, compare=False, repr=False)

    @property
    def private(self) -> bool:
        return self.kind == "cache"

    @contextmanager
    def opened(self, create: bool = False) -> Iterator[int]:
        """A descriptor of ``<cache>/v1``, checked. Raises OSError, or Unusable with the reason why it is refused."""
        if create:
            places.make_private(self.path)
        with files.folder(self.path, follow=True) as base:
            self._check(base, self.path)
            if create:
                try:
                    os.mkdir(LAYOUT, 0o700, dir_fd=base)
                    files.flush_folder(base)
                except FileExistsError:
                    pass
            # Checked once and then used through the descriptor: what was checked is what is read, whatever is renamed meanwhile.
            with files.folder(LAYOUT, dir_fd=base) as fd:
                self._check(fd, os.path.join(self.path, LAYOUT))
                yield fd

    def _check(self, fd: int, path: str) -> None:
        if self.private:
            files.owned(fd, path)
        elif os.fstat(fd).st_mode & 0o002:
            raise Unusable(f"any user can write {path}; chmod o-w makes it usable")

    def problem(self) -> str | None:
        try:
            with self.opened():
                return None
        except FileNotFoundError:
            return None if self.private else "the folder does not exist"  # a cache that nobody filled yet is no problem
        except (OSError, Unusable) as error:
            return files.describe(error)

    def get(self, config: KernelConfig, toolchain: str | None = None) -> Artifact:
        """With a ``toolchain`` (the installed compiler's name), entries of other compilers are a miss."""
        for last in (False, True):
            try:
                with self.opened() as fd:
                    return self._get(fd, config, toolchain)
            except FileNotFoundError:
                raise Miss("the cache is empty" if self.private else "the folder does not exist") from None
            except (OSError, Unusable) as error:
                if last or not isinstance(error, OSError) or error.errno not in files.TRANSIENT:
                    self._warn_refused(error)
                    raise Miss(f"refused: {files.describe(error)}") from None
        raise AssertionError("not reached")

    def _get(self, fd: int, config: KernelConfig, toolchain: str | None) -> Artifact:
        others: list[str] = []
        # One open for the common case; a listing only where any compiler will do, or to explain a miss.
        if toolchain is not None:
            names = [f"{config.key}-{compiler_tag(toolchain)}"]
        else:
            names = self._names(fd, config.key)
        reason = Miss("key not present")
        for name in names:
            try:
                artifact = self.read_entry(fd, name)
            except Miss as miss:
                reason = miss
                if miss.bad:
                    notes.count("bad_entries")
                    notes.warn_once((self.path, name), f"A cache entry is not used: {self.path}/{LAYOUT}/{name}: {miss}.")
                continue
            if same_config(artifact.record, config) and toolchain in (None, compiler_of(artifact.record)):
                return artifact
            reason = Miss("record is of another config or compiler", bad=True)
        if toolchain is not None and not reason.bad:
            others = [name for name in self._names(fd, config.key) if name not in names]
        if others:
            raise Miss(f"made by {self._compilers(fd, others)}, installed is {toolchain}")
        raise reason

    def _warn_refused(self, error: Exception) -> None:
        if isinstance(error, Unusable):
            notes.warn_once((self.path,), f"Artifacts in {self.path} are not used: {error}.")

    def _names(self, fd: int, key: str) -> list[str]:
        return sorted(n for n in os.listdir(fd) if n.startswith(f"{key}-"))

    def _compilers(self, fd: int, names: list[str]) -> str:
        made_by = []
        for name in names:
            try:
                made_by.append(compiler_of(self._record(fd, name)) or "an unnamed compiler")
            except Miss:
                made_by.append("a bad entry")
        return "; ".join(made_by)

    def read_entry(self, fd: int, name: str) -> Artifact:
        """The verified artifact of one entry folder. Raises Miss; ``bad`` where something is there that must not be trusted."""
        reason = ""
        for attempt in range(_TRIES):
            try:
                return self._read_once(fd, name)
            except Miss as miss:
                if miss.kind != "missing" or attempt:
                    raise
            except OSError as error:
                if error.errno not in files.TRANSIENT:
                    raise Miss(f"cannot be read: {files.describe(error)}", bad=error.errno not in files.SHORTAGE) from None
                # Once may be the instant between two renames of a writer without exchange.
                if isinstance(error, FileNotFoundError) and error.filename == name and attempt:
                    raise Miss("key not present") from None
                reason = files.describe(error)
        raise Miss(f"cannot be read now: {reason}")

    def _read_once(self, fd: int, name: str) -> Artifact:
        # Both files through one descriptor of the folder: a record never meets the cubin of another writer.
        try:
            with files.folder(name, dir_fd=fd) as entry:
                try:
                    if self.private:
                        files.owned(entry, "the entry")
                    record = decode_record(files.read_at(RECORD, entry, RECORD_LIMIT, self.private), RECORD)
                    cubin = files.read_at(CUBIN, entry, private=self.private)
                except FileNotFoundError as error:
                    # Entries are renamed away before their files go: a file that is missing under the entry's own name was lost.
                    if os.path.samestat(os.fstat(entry), os.stat(name, dir_fd=fd, follow_symlinks=False)):
                        raise Miss(f"{error.filename} is missing", bad=True, kind="missing") from None
                    raise
        except CorruptArtifactError as error:
            raise Miss(f"record: {error.data['reason']}", bad=True, kind=fault_kind(error)) from None
        except Unusable as error:
            raise Miss(str(error), bad=True) from None
        if not name.startswith(".") and name != entry_name(record):
            raise Miss("record is of another config", bad=True)
        return check_artifact(record, cubin)

    def _record(self, fd: int, name: str) -> Record:
        """The record alone, for indexes; remembered while the entry folder stays the same one."""
        try:
            status = os.stat(name, dir_fd=fd, follow_symlinks=False)
            identity = (status.st_ino, status.st_mtime_ns)
            known = self._seen.get(name)
            if known is not None and known[0] == identity:
                return known[1]
            with files.folder(name, dir_fd=fd) as entry:
                record = decode_record(files.read_at(RECORD, entry, RECORD_LIMIT, self.private), RECORD)
        except CorruptArtifactError as error:
            raise Miss(f"record: {error.data['reason']}", bad=True) from None
        except (OSError, Unusable) as error:
            raise Miss(files.describe(error), bad=True) from None
        if name != entry_name(record):
            raise Miss("record is of another config", bad=True)
        self._seen[name] = (identity, record)
        return record

    def names(self, fd: int) -> list[str]:
        """Names of the entries, sorted; not of staging folders and locks."""
        return sorted(n for n in os.listdir(fd) if KEY_NAME.match(n[:64]) and n[64:65] == "-")

    def records(self) -> Iterator[tuple[Record, str]]:
        try:
            with self.opened() as fd:
                for name in self.names(fd):
                    try:
                        yield self._record(fd, name), name
                    except Miss:
                        continue  # verify() reports it
        except (OSError, Unusable):
            return

    def load(self, name: str) -> Artifact:
        try:
            with self.opened() as fd:
                return self.read_entry(fd, name)
        except (OSError, Unusable) as error:
            raise Miss(f"refused: {files.describe(error)}") from None

    def verify(self) -> Iterator[Fault]:
        problem = self.problem()
        if problem is not None:
            yield Fault(self.name, "unusable", "", self.path, problem)
            return
        try:
            with self.opened() as fd:
                for name in self.names(fd):
                    yield from self._verify_one(fd, name)
        except FileNotFoundError:
            return
        except (OSError, Unusable) as error:
            yield Fault(self.name, "unusable", "", self.path, files.describe(error))

    def _verify_one(self, fd: int, name: str) -> Iterator[Fault]:
        path = os.path.join(self.path, LAYOUT, name)
        try:
            artifact = self.read_entry(fd, name)
        except Miss as miss:
            if not miss.bad:
                return  # pruned meanwhile
            yield Fault(self.name, miss.kind, name[:64], path, str(miss))
            return
        deep = deep_fault(artifact)
        if deep is not None:
            yield Fault(self.name, deep[0], name[:64], path, deep[1])
