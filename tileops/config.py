"""What a kernel is compiled with (KernelConfig), its key, and what is needed to load and launch it (Record).

A leaf: stdlib only, so that keys and records can be made and read with no GPU, torch or TileLang. One place for each
fact: config -> key -> record -> manifest -> command line are all derived from the two dataclasses below.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeAlias

from tileops.errors import CorruptArtifactError

#: This package's version; pyproject.toml reads it here, and records carry it.
VERSION = "0.2.0"

#: Raise when the meaning of a config or a record changes: every older artifact becomes a miss.
SCHEMA = 1

Value: TypeAlias = "str | int | bool"

_PACKAGE = Path(__file__).resolve().parent

#: Files besides the kernel's own whose text decides what code comes out.
SHARED_SOURCES = ("kernels/_common.py", "compiler/flags.py")


def canonical_json(value: Any) -> str:
    """JSON with one spelling for one value: sorted names, no spaces, ASCII, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


@functools.cache
def source_digest(kernel: str) -> str:
    """sha256 (hex) of the text that defines ``kernel``: its file and SHARED_SOURCES, with \\n line ends."""
    digest = hashlib.sha256()
    for name in (f"kernels/{kernel}.py", *SHARED_SOURCES):
        text = (_PACKAGE / name).read_bytes().replace(b"\r\n", b"\n")
        digest.update(f"{name}\0{len(text)}\0".encode())
        digest.update(text)
    return digest.hexdigest()


@dataclass(frozen=True)
class KernelConfig:
    """The compile-time values of one kernel for one arch. Make them with ``tileops.catalog``, which knows the fields."""

    kernel: str  # kernel name = file name in tileops/kernels
    arch: str  # "sm_90a"
    values: tuple[tuple[str, Value], ...]  # (field, value), sorted by field
    source: str  # digest of the text that defines the kernel
    schedule: tuple[tuple[str, int], ...] = ()  # (name, value), sorted: what was chosen instead of the kernel's default

    @classmethod
    def make(
        cls, kernel: str, arch: str, values: Mapping[str, Value], source: str | None = None, schedule: Mapping[str, int] | None = None
    ) -> KernelConfig:
        digest = source if source is not None else source_digest(kernel)
        return cls(kernel, arch, tuple(sorted(values.items())), digest, tuple(sorted((schedule or {}).items())))

    @property
    def fields(self) -> dict[str, Value]:
        return dict(self.values)

    def as_dict(self) -> dict[str, Any]:
        """Every field that goes into the key, and nothing else. The default schedule is part of the source."""
        data = {"schema": SCHEMA, "kernel": self.kernel, "arch": self.arch, "config": self.fields, "source": self.source}
        return {**data, "schedule": dict(self.schedule)} if self.schedule else data

    @functools.cached_property
    def key(self) -> str:
        """sha256 (hex) over the canonical JSON of as_dict()."""
        return hashlib.sha256(canonical_json(self.as_dict()).encode()).hexdigest()

    def __str__(self) -> str:
        chosen = "; " + ", ".join(f"{k}={v}" for k, v in self.schedule) if self.schedule else ""
        return f"{self.kernel}[{', '.join(f'{k}={v}' for k, v in self.values)}; {self.arch}{chosen}]"


@dataclass(frozen=True)
class Param:
    """One kernel parameter. ``bind`` is a tensor's name for pointers and tensor maps, else an expression (see tileops.expr)."""

    name: str
    kind: str  # of PARAM_KINDS
    bind: str


PARAM_KINDS = ("pointer", "tensormap", "int32", "int64", "float32")


@dataclass(frozen=True)
class TensorMap:
    """What cuTensorMapEncodeTiled is told for a parameter of kind "tensormap", besides the tensor's address.

    Dimensions go innermost first. Element strides are 1, nothing is interleaved, and what lies outside reads as 0.
    """

    dtype: int  # CUtensorMapDataType
    dims: tuple[str, ...]  # elements: expressions
    strides: tuple[str, ...]  # bytes, of every dimension but the innermost: expressions
    box: tuple[int, ...]  # elements
    swizzle: int  # CUtensorMapSwizzle
    promotion: int  # CUtensorMapL2promotion

    @classmethod
    def from_dict(cls, data: Any) -> TensorMap:
        """Raises ValueError with the reason where ``data`` is no tensor map."""
        if not isinstance(data, dict) or set(data) != {f.name for f in fields(cls)}:
            raise ValueError("fields differ from the schema")
        for name, kind in (("dims", str), ("strides", str), ("box", int)):
            if not isinstance(data[name], (list, tuple)) or not all(type(v) is kind for v in data[name]):
                raise ValueError(f"{name} is no list of {kind.__name__}")
        for name in ("dtype", "swizzle", "promotion"):
            if type(data[name]) is not int or data[name] < 0:
                raise ValueError(f"{name} is no number")
        rank = len(data["dims"])
        if not 1 <= rank <= 5 or len(data["strides"]) != rank - 1 or len(data["box"]) != rank:
            raise ValueError("dims, strides and box differ in rank")
        return cls(**{**data, "dims": tuple(data["dims"]), "strides": tuple(data["strides"]), "box": tuple(data["box"])})


@dataclass(frozen=True)
class Record:
    """All that is needed to check, load and launch one cubin, and where it came from. Plain data, stored as JSON."""

    schema: int
    key: str
    kernel: str
    arch: str
    config: dict[str, Value]
    source: str
    cubin_sha256: str
    cubin_size: int
    symbol: str
    params: tuple[Param, ...]
    grid: tuple[str, str, str]  # expressions over dimension names
    block: tuple[int, int, int]
    dynamic_smem: int  # bytes
    static_smem: int  # bytes
    registers: int  # per thread
    spills: int  # bytes of local memory per thread
    alignment: dict[str, int]  # tensor name -> bytes its base address must be a multiple of
    min_driver: int  # lowest CUDA driver API version that can load the cubin, as cuDriverGetVersion counts (12080)
    provenance: dict[str, Any] = field(default_factory=dict)  # versions and flags of tileops, TileLang, compiler
    tensormaps: dict[str, TensorMap] = field(default_factory=dict)  # parameter's name -> how it is encoded
    optional: tuple[str, ...] = ()  # tensors that a launch may leave out: address 0, strides 0
    schedule: dict[str, int] = field(default_factory=dict)  # as in KernelConfig

    def to_dict(self) -> dict[str, Any]:
        """As JSON holds it: ``tensormaps``, ``optional`` and ``schedule`` only where there are some."""
        data = asdict(self)
        for name in ("tensormaps", "optional", "schedule"):
            if not data[name]:
                del data[name]
        return data

    def to_json(self) -> str:
        return canonical_json(self.to_dict())

    def config_object(self) -> KernelConfig:
        return KernelConfig.make(self.kernel, self.arch, self.config, self.source, self.schedule)

    @classmethod
    def from_dict(cls, data: Any, where: str = "record") -> Record:
        """Checks names and types of every field. Raises CorruptArtifactError naming ``where`` and the field."""

        def bad(reason: str) -> CorruptArtifactError:
            return CorruptArtifactError(f"{where}: {reason}.", path=where, reason=reason)

        if not isinstance(data, dict):
            raise bad("not a JSON object")
        names = [f.name for f in fields(cls)]
        data = {"tensormaps": {}, "optional": [], "schedule": {}, **data}
        if set(data) != set(names):
            raise bad(f"fields differ from the schema: {sorted(set(data) ^ set(names))}")
        if data["schema"] != SCHEMA:
            raise bad(f"schema {data['schema']!r}, this package reads {SCHEMA}")
        expected = {
            str: ("key", "kernel", "arch", "source", "cubin_sha256", "symbol"),
            int: ("cubin_size", "dynamic_smem", "static_smem", "registers", "spills", "min_driver"),
            dict: ("config", "alignment", "provenance", "tensormaps", "schedule"),
            list: ("params", "grid", "block", "optional"),
        }
        for kind, keys in expected.items():
            for name in keys:
                value = data[name]
                if kind is list and isinstance(value, tuple):
                    continue
                if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
                    raise bad(f"{name} is {type(value).__name__}, expected {kind.__name__}")
        try:
            params = tuple(Param(**p) for p in data["params"])
        except TypeError as error:
            raise bad(f"params: {error}") from None
        for name in expected[int]:
            if data[name] < 0:
                raise bad(f"{name} is negative")
        if not all(isinstance(v, (str, int, bool)) for v in data["config"].values()):
            raise bad("config holds a value that is neither text nor an integer")
        if not all(type(v) is int for v in data["schedule"].values()):
            raise bad("schedule holds a value that is no integer")
        for p in params:
            if not isinstance(p.name, str) or p.kind not in PARAM_KINDS or not isinstance(p.bind, str):
                raise bad(f"param {p.name!r} has kind {p.kind!r}")
        maps: dict[str, TensorMap] = {}
        for name, value in data["tensormaps"].items():
            try:
                maps[name] = TensorMap.from_dict(value)
            except ValueError as error:
                raise bad(f"tensormaps: {name}: {error}") from None
        if set(maps) != {p.name for p in params if p.kind == "tensormap"}:
            raise bad("tensormaps are not those of the params")
        pointers = {p.bind for p in params if p.kind == "pointer"}
        if not all(isinstance(name, str) and name in pointers for name in data["optional"]):
            raise bad("optional names what is no pointer")
        if len(data["grid"]) != 3 or not all(isinstance(g, str) for g in data["grid"]):
            raise bad("grid is not three expressions")
        if len(data["block"]) != 3 or not all(type(b) is int for b in data["block"]):
            raise bad("block is not three integers")
        lists = {name: tuple(data[name]) for name in ("grid", "block", "optional")}
        record = cls(**{**data, "params": params, "tensormaps": maps, **lists})
        if record.config_object().key != record.key:
            raise bad("key does not match the fields it is the hash of")
        return record


@dataclass(frozen=True)
class Artifact:
    """A cubin and its record: what the compiler returns, the store keeps and the driver loads."""

    record: Record
    cubin: bytes

    def check(self, where: str = "artifact") -> Artifact:
        """Raises CorruptArtifactError where size or digest of the cubin differ from the record; returns self."""
        r = self.record
        if len(self.cubin) != r.cubin_size:
            reason = f"cubin has {len(self.cubin)} bytes, the record says {r.cubin_size}"
        elif hashlib.sha256(self.cubin).hexdigest() != r.cubin_sha256:
            reason = "cubin's sha256 differs from the record"
        else:
            return self
        raise CorruptArtifactError(f"{where}: {reason}.", path=where, reason=reason)
