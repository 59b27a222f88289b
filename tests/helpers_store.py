"""What the store's tests share: artifacts without a compiler, and real processes to run things in. Imports no torch."""

from __future__ import annotations

import hashlib
import json
import os
import random
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

from tileops.config import SCHEMA, Artifact, KernelConfig, Param, Record

REPOSITORY = Path(__file__).resolve().parents[1]
COMPILER = "tilelang 0.1.15, nvrtc 12.9.86"
SOURCE = "ab" * 32

_ELF_ARCH = {"sm_80": (7, 0x500550), "sm_90a": (7, 0x5A0D5A), "sm_90": (7, 0x5A055A), "sm_100a": (8, 0x600640A), "sm_120a": (8, 0x600780A)}


def config(arch: str = "sm_90a", source: str = SOURCE, kernel: str = "recurrent", **values: Any) -> KernelConfig:
    """A config of the recurrent kernel; every argument is a difference."""
    base = {"P": 64, "N": 128, "dtype": "bfloat16", "tied": True} if kernel == "recurrent" else {}
    return KernelConfig.make(kernel, arch, {**base, **values}, source)


def cubin(arch: str, size: int = 3000, seed: int = 0) -> bytes:
    """Bytes with the ELF header of a cubin for ``arch`` (as NVRTC 12.9 writes it), the rest random."""
    abi, flags = _ELF_ARCH[arch]
    identity = b"\x7fELF\x02\x01\x01" + (b"\x33" if abi == 7 else b"\x41") + bytes([abi]) + bytes(7)
    header = struct.pack("<16sHHIQQQIHHHHHH", identity, 2, 190, 1, 0, 0, 0, flags, 64, 56, 0, 64, 0, 0)
    return header + random.Random(f"{arch} {seed}").randbytes(size - len(header))


def artifact(of: KernelConfig | None = None, *, size: int = 3000, seed: int = 0, compiler: str = COMPILER, **changes: Any) -> Artifact:
    """An artifact of ``of``; ``changes`` are fields of the record set to other values afterwards."""
    of = of or config()
    data = cubin(of.arch, size, seed)
    fields: dict[str, Any] = {
        "schema": SCHEMA,
        "key": of.key,
        "kernel": of.kernel,
        "arch": of.arch,
        "config": of.fields,
        "source": of.source,
        "cubin_sha256": hashlib.sha256(data).hexdigest(),
        "cubin_size": len(data),
        "symbol": of.kernel,
        "params": (Param("x", "pointer", "x"), Param("x_stride0", "int64", "x.stride0"), Param("B", "int32", "B")),
        "grid": ("B * H", "1", "1"),
        "block": (128, 1, 1),
        "dynamic_smem": 1024,
        "static_smem": 0,
        "registers": 32,
        "spills": 0,
        "alignment": {"x": 16},
        "min_driver": 12000,
        "provenance": {"compiler": compiler, "tileops": "test"},
    }
    return Artifact(Record(**{**fields, **changes}), data)


def environment(cache: Path | str | None = None, **more: str) -> dict[str, str]:
    """The environment of a child: the sources, the cache folder, nothing of the caller's settings."""
    env = {"PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "tests")]), "PATH": os.environ.get("PATH", "")}
    if cache is not None:
        env["TILEOPS_CACHE_DIR"] = str(cache)
    return {**env, **more}


#: Before a scenario: everything that is imported late is imported now, since another uid may not be able to read the interpreter's library.
PROLOGUE = """
import json, os, sys, signal, warnings
from importlib import import_module
for name in ("bundles", "pruning", "writing", "discovery", "locks"):
    import_module("tileops.store." + name)
import platformdirs, filelock, tempfile, pwd, ctypes, tarfile, helpers_store
from tileops import store
from helpers_store import artifact, config
import tileops.store.discovery as discovery
discovery.installed_roots(); platformdirs.user_cache_dir("warm")
with tempfile.TemporaryDirectory() as folder:
    with filelock.FileLock(os.path.join(folder, "warm"), fallback_to_soft=False): pass
caught = warnings.catch_warnings(record=True)
seen = caught.__enter__()
warnings.simplefilter("always")
def report(**facts):
    print(json.dumps({**facts, "warnings": [str(w.message) for w in seen]}))
"""


def start(scenario: str, *arguments: str, env: dict[str, str], uid: int | None = None, cwd: Path | None = None) -> subprocess.Popen[str]:
    """A fresh interpreter that runs ``scenario`` after PROLOGUE, as ``uid`` where one is given."""
    drop = f"os.setgroups([]); os.setgid({uid}); os.setuid({uid})\n" if uid is not None else ""
    code = PROLOGUE + drop + scenario
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments], env=env, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def run(scenario: str, *arguments: str, env: dict[str, str], uid: int | None = None, cwd: Path | None = None) -> Any:
    """Runs a scenario to its end and returns what it reported; a child that fails fails the test with its stderr."""
    return finish(start(scenario, *arguments, env=env, uid=uid, cwd=cwd))


def finish(child: subprocess.Popen[str]) -> Any:
    out, err = child.communicate(timeout=120)
    assert child.returncode == 0, f"exit status {child.returncode}\n{out}\n{err}"
    assert not err, err
    return json.loads(out.splitlines()[-1]) if out.strip() else None


def tree(folder: Path) -> dict[str, bytes]:
    """Every file under a folder, by relative path: to show that nothing changed or that two folders are the same."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def isolate(monkeypatch: Any, place: Path) -> Path:
    """This process as if it were fresh: no settings, no packaged artifacts, a cache folder of its own (returned, not created)."""
    from tileops.store import discovery, memory, notes, policies

    for name in ("TILEOPS_POLICY", "TILEOPS_ARTIFACT_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TILEOPS_CACHE_DIR", str(place / "cache"))
    monkeypatch.setattr(discovery, "_package", place / "site-packages" / "tileops")
    monkeypatch.setattr(discovery, "_scanned", (tuple(sys.path), ()))
    monkeypatch.setattr(policies, "_default", None)
    monkeypatch.setattr(policies, "_frozen", False)
    monkeypatch.setattr(memory, "_kept", {})
    monkeypatch.setattr(notes, "_warned", set())
    notes.reset_stats()
    return place / "cache"


def own_root(place: Path) -> Path:
    """The folder that isolate() made this package's packaged root."""
    return place / "site-packages" / "tileops" / "artifacts"
