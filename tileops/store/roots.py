"""What a place holding artifacts can be asked. The kinds: packaged.PackagedRoot, cache.CacheRoot, bundles.BundleRoot, memory.

Contract of every root: ``get`` returns a verified artifact or raises Miss with the reason; ``entries`` and ``verify`` never
raise for what is on disk; nothing here writes.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from tileops import expr
from tileops.config import Artifact, KernelConfig, Record, canonical_json
from tileops.errors import CorruptArtifactError
from tileops.store import elf, notes

RECORD_LIMIT = 1 << 20
_SEAL = "sha256"
KEY_NAME = re.compile(r"[0-9a-f]{64}\Z")
ARCH_NAME = re.compile(r"sm_\d+[a-z]?\Z")


class Miss(Exception):
    """A root does not serve a config; the text is the reason. ``bad``: something is there, and it must not be trusted.

    ``kind`` of a bad one is a Fault's.
    """

    def __init__(self, reason: str, bad: bool = False, kind: str = "corrupt") -> None:
        super().__init__(reason)
        self.bad = bad
        self.kind = kind


class Fault(NamedTuple):
    """One thing wrong in a root. Kinds: ``missing``, ``corrupt``, ``schema``, ``arch``, ``unusable`` (the whole root)."""

    root: str
    kind: str
    key: str
    path: str
    reason: str


@dataclass(frozen=True)
class Root:
    """A place holding artifacts.

    Attributes:
        kind: ``packaged``, ``site``, ``cache`` or ``memory``.
        name: what messages call it.
        path: folder or file; empty for memory.
    """

    kind: str
    name: str
    path: str

    def get(self, config: KernelConfig, toolchain: str | None = None) -> Artifact:
        """The verified artifact of ``config``. Raises Miss."""
        raise NotImplementedError

    def records(self) -> Iterator[tuple[Record, str]]:
        """Every readable record, with the name under which ``load`` finds its artifact. Reads no cubin."""
        raise NotImplementedError

    def load(self, name: str) -> Artifact:
        """The verified artifact under a name that ``records`` gave. Raises Miss."""
        raise NotImplementedError

    def problem(self) -> str | None:
        """Why nothing can be read here at all, or None."""
        return None

    def verify(self) -> Iterator[Fault]:
        """Everything that is wrong here: indexes, records, lengths, digests, and the arch in each cubin's ELF header."""
        raise NotImplementedError

    def entries(self, arch: str | None = None) -> Iterator[Record]:
        """Every readable record (of one arch)."""
        return (record for record, _ in self.records() if arch is None or record.arch == arch)

    def matching(self, kernel: str, arch: str | None, fields: dict[str, Any]) -> Iterator[Record]:
        """Readable records of one kernel whose config has these values (of one arch)."""
        return (record for record in self.entries(arch) if record.kernel == kernel and fields.items() <= record.config.items())

    def read(self, key: str) -> Artifact:
        """The verified artifact of ``key``. Raises Miss."""
        reason = "key not present"
        for record, name in self.records():
            if record.key == key:
                try:
                    return self.load(name)
                except Miss as miss:
                    reason = str(miss)
        raise Miss(reason)


def seal(data: dict[str, Any]) -> bytes:
    """Canonical JSON with one more field at its end, ``sha256``: the digest of every byte before that field.

    Without it a flipped bit in a launch field (``B * H`` and ``B + H`` are one bit apart) would go unnoticed.
    """
    body = canonical_json(data)[:-1]
    return f'{body},"{_SEAL}":"{hashlib.sha256(body.encode()).hexdigest()}"}}'.encode()


def unseal(text: bytes, where: str) -> dict[str, Any]:
    """What was sealed. Raises CorruptArtifactError for anything else."""
    body, mark, rest = text.rpartition(f',"{_SEAL}":"'.encode())
    if not mark or rest != hashlib.sha256(body).hexdigest().encode() + b'"}':
        raise CorruptArtifactError(
            f"{where}: its bytes do not match its own digest.", path=where, reason="its bytes do not match its own digest"
        )
    try:
        data: dict[str, Any] = json.loads(body + b"}")
    except (ValueError, RecursionError) as error:
        raise CorruptArtifactError(f"{where}: not JSON ({error}).", path=where, reason="not JSON") from None
    return data


def decode_record(text: bytes, where: str) -> Record:
    """A sealed record. Raises CorruptArtifactError for whatever is none of this schema."""
    return make_record(unseal(text, where), where)


def make_record(data: Any, where: str) -> Record:
    """Record.from_dict, and whatever it does not foresee in hostile data is a CorruptArtifactError too."""
    try:
        record = Record.from_dict(data, where)
    except CorruptArtifactError:
        raise
    except Exception as error:
        raise CorruptArtifactError(f"{where}: {type(error).__name__}: {error}.", path=where, reason=f"malformed ({error})") from None
    # Key and arch become file names.
    if not KEY_NAME.match(record.key) or not ARCH_NAME.match(record.arch):
        raise CorruptArtifactError(f"{where}: key or arch is malformed.", path=where, reason="key or arch is malformed")
    return record


def same_config(record: Record, config: KernelConfig) -> bool:
    """Every field compared, not only the key: a mix-up of files, or a collision, is a miss."""
    return record.key == config.key and canonical_json(record.config_object().as_dict()) == canonical_json(config.as_dict())


def check_artifact(record: Record, cubin: bytes) -> Artifact:
    """The verified artifact. Raises Miss(bad) where length or digest differ."""
    try:
        artifact = Artifact(record, cubin).check()
    except CorruptArtifactError as error:
        raise Miss(error.data["reason"], bad=True) from None
    notes.count("bytes_read", len(cubin))
    return artifact


def deep_fault(artifact: Artifact) -> tuple[str, str] | None:
    """(kind, reason) of what digests do not show: expressions outside the grammar, a cubin for another arch. None: nothing."""
    record = artifact.record
    try:
        maps = (text for form in record.tensormaps.values() for text in (*form.dims, *form.strides))
        for text in (*record.grid, *(param.bind for param in record.params if param.kind != "pointer"), *maps):
            expr.check(text)
    except (CorruptArtifactError, RecursionError) as error:
        return "schema", f"record: {error}"
    try:
        found = elf.arch(artifact.cubin)
    except ValueError as error:
        return "arch", f"the cubin's arch cannot be read: {error}"
    return None if found == record.arch else ("arch", f"the cubin is code for {found}, its record says {record.arch}")


def fault_kind(error: CorruptArtifactError) -> str:
    """``schema`` for a record of another version of this package, ``corrupt`` for any other."""
    return "schema" if str(error.data.get("reason", "")).startswith("schema ") else "corrupt"
