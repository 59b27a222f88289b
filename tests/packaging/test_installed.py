"""The wheel, installed with its declared run-time dependencies and nothing else: no TileLang, no compiler, no network, no HOME,
and site-packages that cannot be written."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.xdist_group("packaging")

MAY_ISOLATE = os.name == "posix" and os.geteuid() == 0 and shutil.which("unshare") is not None


def run(venv: Path, *args: str) -> subprocess.CompletedProcess[str]:
    """Runs a program of the environment, cut off: a network and a mount namespace of its own where this user may have them."""
    env = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"}  # no HOME, no PYTHONPATH, no TILEOPS_*
    line = [str(venv / "bin" / args[0]), *args[1:]]
    if MAY_ISOLATE:
        # Root writes through permission bits; only a read-only mount stops it.
        script = 'mount --bind "$0" "$0" && mount -o remount,bind,ro "$0" && exec "$@"'
        line = ["unshare", "--net", "--mount", "sh", "-c", script, str(venv), *line]
    return subprocess.run(line, cwd="/", env=env, capture_output=True, text=True, timeout=300)


@pytest.fixture(autouse=True)
def nothing_is_written(installed):
    """For users who cannot mount: whatever happened, no file of the environment is new, gone or changed."""
    before = snapshot(installed)
    yield
    assert snapshot(installed) == before


def snapshot(folder: Path) -> set[tuple[str, int, int]]:
    return {(str(path), path.lstat().st_mtime_ns, path.lstat().st_size) for path in folder.rglob("*")}


def test_the_environment_has_no_compiler(installed):
    done = run(installed, "python", "-c", "from tileops.compiler import toolchain; print(toolchain.find())")
    assert done.returncode == 0, done.stderr
    assert "TileLang is not installed" in done.stdout


@pytest.mark.skipif(not MAY_ISOLATE, reason="a network namespace and a read-only mount need root and unshare")
def test_the_isolation_isolates(installed):
    code = f"""
import socket
for attempt in (lambda: open({str(installed / "x")!r}, "w"), lambda: socket.create_connection(("192.0.2.1", 80), 5)):
    try:
        attempt()
    except OSError as error:
        print(error.errno)
"""
    assert len(run(installed, "python", "-c", code).stdout.split()) == 2


def test_all_seven_ops_run_on_the_cpu(installed):
    code = """
import sys
for name in ("tilelang", "tvm"):
    sys.modules[name] = None  # an import would raise
import torch, warnings
warnings.simplefilter("error")  # from here on: torch itself warns of a missing numpy
import tileops, tileops.mamba as m
torch.manual_seed(0)
b, s, h, p, g, n, q = 1, 40, 4, 16, 2, 16, 16
x = torch.randn(b, s, h, p, dtype=torch.bfloat16)
B, C = (torch.randn(b, s, g, n, dtype=torch.bfloat16) for _ in range(2))
dt, A = torch.rand(b, s, h), -torch.rand(h)
y, final = m.Mamba2FwdOp(chunk_size=q, dt_softplus=False)(x, dt, A, B, C)
dt_out, sums = m.SSDChunkCumsumFwdOp(q)(dt, A)
cb = m.SSDChunkCouplingFwdOp(q)(C, B)
states = m.SSDChunkStateFwdOp()(x, B, dt_out, sums)
previous, last = m.SSDStatePassingFwdOp()(states.flatten(-2), sums[..., -1].contiguous())
staged = m.SSDChunkScanFwdOp()(x, cb, sums, C, previous.view(states.shape), dt_out.to(x.dtype))
assert (staged - y).norm() < 1e-2 * y.norm()
state = torch.zeros(b, h, p, n)
step = m.SSDRecurrentFwdOp()
for t in range(s):
    step(A.view(h, 1, 1).expand(h, p, n), dt[:, t, :, None].expand(b, h, p), x[:, t], B[:, t], C[:, t], state)
assert (state - final).norm() < 1e-3 * final.norm()
print("ran", tileops.__file__)
"""
    done = run(installed, "python", "-c", code)
    assert done.returncode == 0, done.stderr
    assert str(installed) in done.stdout


def test_packaged_kernels_are_found_where_they_were_installed(installed):
    code = """
from tileops import catalog, store
for tied in (False, True):
    config = catalog.config("recurrent", "sm_90a", P=64, N=128, dtype="bfloat16", state_dtype="float32", tied=tied)
    found = store.find(config, policy="packaged")
    assert found.kind == "packaged" and found.artifact is not None, found.trace
root = next(r for r in store.roots() if r.kind == "packaged")
print(root.path, len(list(root.entries())), len(list(root.verify())))
"""
    done = run(installed, "python", "-c", code)
    assert done.returncode == 0, done.stderr
    path, count, faults = done.stdout.rsplit(maxsplit=2)
    assert path.endswith("site-packages/tileops/artifacts") and (count, faults) == ("2", "0")


def test_a_miss_says_what_to_do_and_compiles_nothing(installed):
    code = """
from tileops import catalog, store
config = catalog.config("recurrent", "sm_90a", P=128, N=128, dtype="bfloat16", state_dtype="float32", tied=True)
print(store.missing_error(store.find(config)))
"""
    done = run(installed, "python", "-c", code)
    assert done.returncode == 0, done.stderr
    assert "P" in done.stdout and "Run: tileops warm" in done.stdout


@pytest.mark.parametrize("verb", [["--help"], ["doctor", "--json"], ["list", "--json"]])
def test_the_command_runs(installed, verb):
    done = run(installed, "tileops", *verb)
    assert "Traceback" not in done.stderr, done.stderr
    assert done.stdout.strip()
