"""Artifacts that could not be stored, kept for the rest of the process: no cache folder, a full or read-only disk."""

from __future__ import annotations

from collections.abc import Iterator

from tileops.config import Artifact, KernelConfig, Record
from tileops.store.roots import Fault, Miss, Root, same_config

_kept: dict[str, Artifact] = {}


def keep(artifact: Artifact) -> None:
    _kept[artifact.record.key] = artifact


def forget(key: str) -> None:
    _kept.pop(key, None)


class MemoryRoot(Root):
    """What this process compiled and could not store."""

    def get(self, config: KernelConfig, toolchain: str | None = None) -> Artifact:
        artifact = _kept.get(config.key)
        if artifact is None or not same_config(artifact.record, config):
            raise Miss("key not present")
        return artifact

    def records(self) -> Iterator[tuple[Record, str]]:
        return iter([(artifact.record, key) for key, artifact in list(_kept.items())])

    def load(self, name: str) -> Artifact:
        artifact = _kept.get(name)
        if artifact is None:
            raise Miss("key not present")
        return artifact

    def verify(self) -> Iterator[Fault]:
        return iter(())
