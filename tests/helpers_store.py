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
    base = {"P": 64, "N": 128, "dtype": "bfloat16", "state_dtype": "float32", "tied": True} if kernel == "recurrent" else {}
    return KernelConfig.make(kernel, arch, {**base, **values}, source)


def cubin(arch: str, size: int = 3000, seed: object = 0) -> bytes:
    """Bytes with the ELF header of a cubin for ``arch`` (as NVRTC 12.9 writes it), the rest random."""
    abi, flags = _ELF_ARCH[arch]
    identity = b"\x7fELF\x02\x01\x01" + (b"\x33" if abi == 7 else b"\x41") + bytes([abi]) + bytes(7)
    header = struct.pack("<16sHHIQQQIHHHHHH", identity, 2, 190, 1, 0, 0, 0, flags, 64, 56, 0, 64, 0, 0)
    return header + random.Random(f"{arch} {seed}").randbytes(size - len(header))


def artifact(of: KernelConfig | None = None, *, size: int = 3000, seed: int = 0, compiler: str = COMPILER, **changes: Any) -> Artifact:
    """An artifact of ``of``; ``changes`` are fields of the record set to other values afterwards."""
    of = of or config()
    data = cubin(of.arch, size, (of.key, seed))
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
caught_warnings = caught.__enter__()
warnings.simplefilter("always")
def report(**facts):
    print(json.dumps({**facts, "warnings": [str(w.message) for w in caught_warnings]}))
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


def gather(children: list[subprocess.Popen[str]]) -> list[Any]:
    """What children that run at the same time report; none outlives a failure of another."""
    try:
        return [finish(child) for child in children]
    finally:
        for child in children:
            child.kill()
            child.wait()


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


#: Calls that the kernel can be told to refuse, by machine.
_CALLS = {
    "x86_64": {"flock": 73, "fsync": 74, "mkdirat": 258, "renameat": 264, "renameat2": 316, "openat": 257, "audit": 0xC000003E},
    "aarch64": {"flock": 32, "fsync": 82, "mkdirat": 34, "renameat": 38, "renameat2": 276, "openat": 56, "audit": 0xC00000B7},
}


def refuse(call: str, error: int) -> None:
    """From now on the kernel answers ``call`` with ``error`` in this process: a seccomp filter, not a mock. Raises OSError."""
    import ctypes
    import platform

    number = _CALLS[platform.machine()][call]
    program = [
        (0x20, 0, 0, 0),  # load the call's number
        (0x15, 0, 1, number),  # skip one unless it is ours
        (0x06, 0, 0, 0x00050000 | error),  # SECCOMP_RET_ERRNO
        (0x06, 0, 0, 0x7FFF0000),  # SECCOMP_RET_ALLOW
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))

    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]

    libc = ctypes.CDLL(None, use_errno=True)
    filled = Program(len(program), ctypes.addressof(code))
    if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, ctypes.byref(filled), 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


_WRITES = ("open", "write", "fsync", "close", "mkdir", "rename", "unlink", "rmdir", "chmod")


def kill_at_every_call(folder: Path, prepare: Any, action: Any, check: Any) -> dict[str, int]:
    """Runs ``action`` again and again in children that SIGKILL themselves before, in or after their n-th call of the file system.

    After each kill ``check`` looks at what is left. Returns how often each kind of call was the last one. For a process without threads.
    """
    import shutil
    import signal

    seen: dict[str, int] = {}
    for when in ("before", "in", "after"):
        for number in range(1, 1000):
            shutil.rmtree(folder, ignore_errors=True)
            prepare()
            told, tells = os.pipe()
            child = os.fork()
            if child == 0:
                _die_at(number, when, tells)
                action()
                os._exit(0)
            os.close(tells)
            status = os.waitpid(child, 0)[1]
            last = os.read(told, 100).decode()
            os.close(told)
            if os.WIFEXITED(status):
                assert os.WEXITSTATUS(status) == 0, f"the child failed: {status}"
                assert number > 1
                break
            assert os.WTERMSIG(status) == signal.SIGKILL
            seen[f"{when} {last}"] = seen.get(f"{when} {last}", 0) + 1
            try:
                check()
            except Exception as error:
                raise AssertionError(f"killed {when} call {number} ({last})") from error
    return seen


def _die_at(number: int, when: str, tells: int) -> None:
    import signal

    from tileops.store import files

    left = [number]

    def wrap(name: str, real: Any) -> Any:
        def call(*arguments: Any, **keywords: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                real_write(tells, name.encode())
                if when == "in" and name == "write":
                    real_write(arguments[0], bytes(arguments[1])[: len(arguments[1]) // 2])
                try:
                    if when == "after":
                        real(*arguments, **keywords)
                finally:
                    os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **keywords)

        return call

    real_write = os.write
    for name in _WRITES:
        setattr(os, name, wrap(name, getattr(os, name)))
    files.exchange = wrap("exchange", files.exchange)  # type: ignore[assignment]
