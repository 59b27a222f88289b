"""The build step with the real compiler: real processes, kills and files, on kernels that compile in a second or two."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tileops import catalog, compiler, store
from tileops.store.packaged import PackagedRoot

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.skipif(compiler.toolchain.find()[0] is None, reason="needs the extra `jit`"),
    pytest.mark.xdist_group("build_kernels"),  # one after the other: each keeps both cores busy
]

TWO = """
archs = ["sm_90a"]
[[block]]
kernel = "state_passing"
aligned = [false]
[[block]]
kernel = "chunk_cumsum"
Q = [64]
out_dtype = ["float32"]
"""
KEYS = {
    catalog.config("state_passing", "sm_90a", aligned=False).key,
    catalog.config("chunk_cumsum", "sm_90a", Q=64, out_dtype="float32").key,
}


def command(*args: object, tree: Path = ROOT) -> tuple[list[str], dict[str, object]]:
    env = {**os.environ, "PYTHONPATH": str(tree), "CUDA_VISIBLE_DEVICES": "0"}
    return [sys.executable, "-m", "build_kernels", *map(str, args)], {"cwd": tree, "env": env}


def run(*args: object, tree: Path = ROOT) -> subprocess.CompletedProcess[str]:
    line, where = command(*args, tree=tree)
    return subprocess.run(line, **where, capture_output=True, text=True, timeout=300)  # type: ignore[call-overload]


def table(done: subprocess.CompletedProcess[str]) -> dict[str, int]:
    """The summary's row for all archs."""
    lines = [line.split() for line in done.stdout.splitlines()]
    head = next(i for i, words in enumerate(lines) if words[:2] == ["arch", "kernels"])
    row = [words for words in lines[head + 1 :] if words and words[0].startswith(("sm_", "all"))][-1]
    return dict(zip(("kernels", "built", "present", "failed", "bytes"), map(int, row[1:6])))


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file() and not p.name.startswith(".")}


def staged(out: Path) -> list[Path]:
    return list(out.glob("*/.build/*.json"))


@pytest.fixture(scope="module")
def matrix(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("matrix") / "two.toml"
    path.write_text(TWO)
    return path


@pytest.fixture(scope="module")
def long_matrix(tmp_path_factory) -> Path:
    """Enough work that a build of it is still running when its first kernel is staged; no test waits for its end."""
    path = tmp_path_factory.mktemp("matrix") / "long.toml"
    path.write_text('archs = ["sm_90a"]\n[[block]]\nmodels = ["mamba2-130m"]\n')
    return path


@pytest.fixture(scope="module")
def built(tmp_path_factory, matrix) -> Path:
    """A finished build of both kernels, with two processes. Tests copy it before they change it."""
    out = tmp_path_factory.mktemp("built") / "out"
    done = run("--matrix", matrix, "--out", out, "--jobs", 2)
    assert done.returncode == 0, done.stdout + done.stderr
    assert table(done) == {
        "kernels": 2,
        "built": 2,
        "present": 0,
        "failed": 0,
        "bytes": sum(p.stat().st_size for p in out.glob("*/*.cubin")),
    }
    assert "2/2 kernels, 0 failed" in done.stderr
    return out


@pytest.fixture
def tree(tmp_path) -> Path:
    """The sources in another folder, where a test may edit them; its matrix is the two kernels."""
    copy = tmp_path / "elsewhere" / "checkout"
    for name in ("tileops", "build_kernels"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "build_kernels" / "matrix.toml").write_text(TWO)
    return copy


def test_what_is_built_is_found_and_valid(built):
    root = PackagedRoot("packaged", "built", str(built))
    assert {record.key for record in root.entries()} == KEYS
    assert list(root.verify()) == []
    for name in KEYS:
        assert root.read(name).record.provenance["compiler"] == compiler.toolchain_name()
    assert sorted(files(built)) == sorted(["sm_90a/manifest.json", *(f"sm_90a/{key}.cubin" for key in KEYS)])
    assert staged(built) == []


def test_a_second_build_compiles_nothing_and_changes_no_byte(built, matrix):
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in built.rglob("*.cubin")}
    done = run("--matrix", matrix, "--out", built)
    assert done.returncode == 0
    assert table(done)["built"] == 0 and table(done)["present"] == 2
    assert {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in built.rglob("*.cubin")} == before


def test_the_program_of_another_arch_is_compiled_for_this_one(tmp_path):
    one = ("--arch", "sm_90a", "--model", "mamba2-130m", "--only", "chunk_coupling aligned=True cb_float32=False")
    own, portable = tmp_path / "own", tmp_path / "portable"
    assert run(*one, "--out", own).returncode == 0
    done = run(*one, "--program-of", "sm_80", "--out", portable)
    assert done.returncode == 0, done.stderr
    (mine,), (theirs,) = (list(PackagedRoot("site", str(out), str(out)).entries()) for out in (own, portable))
    assert mine.key == theirs.key and mine.arch == theirs.arch == "sm_90a"
    assert theirs.provenance["program"] == "sm_80" and "program" not in mine.provenance
    assert mine.cubin_sha256 != theirs.cubin_sha256  # mma.sync where sm_90a has wgmma
    assert run(*one, "--program-of", "sm_80").returncode == 2  # never into artifacts/


def test_a_damaged_kernel_is_found_by_check_and_built_again(built, matrix, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(built, out)
    assert run("--matrix", matrix, "--out", out, "--check", "--only", "state_passing").returncode == 0
    damaged = out / "sm_90a" / f"{catalog.config('state_passing', 'sm_90a', aligned=False).key}.cubin"
    good = damaged.read_bytes()
    damaged.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    content = files(out)
    checked = run("--matrix", matrix, "--out", out, "--check", "--only", "state_passing")
    assert checked.returncode == 3
    assert f"DIFFERS {catalog.config('state_passing', 'sm_90a', aligned=False)}" in checked.stdout
    assert files(out) == content
    again = run("--matrix", matrix, "--out", out)
    assert again.returncode == 0 and table(again)["built"] == 1 and table(again)["present"] == 1
    assert files(out) == files(built)


def test_check_needs_something_to_compare_with(matrix, tmp_path):
    done = run("--matrix", matrix, "--out", tmp_path / "none", "--check")
    assert done.returncode == 1
    assert done.stdout.count("MISSING") == 2
    assert not (tmp_path / "none").exists()


def test_another_folder_another_number_of_processes_and_a_local_gpu_change_no_byte(built, tree):
    # Fails in the worker, should the machine's GPU be visible to TileLang (the command's own environment names one).
    common = tree / "tileops" / "compiler" / "lower.py"
    common.write_text(
        common.read_text() + "\n\nimport os\n\nif os.environ['CUDA_VISIBLE_DEVICES'] != '':\n    raise RuntimeError('a GPU is visible')\n"
    )
    done = run("--jobs", 1, tree=tree)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {k: v for k, v in files(tree / "artifacts").items() if k != "digests.json"} == files(built)
    # The whole default matrix was built without a failure, so its digests are recorded: what a clone without cubins checks against.
    digests = json.loads((tree / "artifacts" / "digests.json").read_text())
    assert set(digests) == KEYS
    shutil.rmtree(tree / "artifacts" / "sm_90a")
    assert run("--check", "--only", "state_passing", tree=tree).returncode == 0


def test_an_edited_kernel_is_built_again_and_its_old_artifact_removed(built, tree):
    out = tree / "artifacts"
    shutil.copytree(built, out)
    kernel = tree / "tileops" / "kernels" / "state_passing.py"
    kernel.write_text(kernel.read_text() + "\n# edited\n")
    done = run("--only", "state_passing", tree=tree)
    assert done.returncode == 0 and table(done)["built"] == 1
    names = {path.stem for path in out.glob("*/*.cubin")}
    assert len(names) == 2 and len(names & KEYS) == 1
    assert not (out / "digests.json").exists()  # a part of the matrix is no full build


def test_a_kernel_that_fails_and_a_worker_that_dies_lose_no_other_kernel(tree):
    kernels = tree / "tileops" / "kernels"
    broken = kernels / "chunk_coupling.py"
    broken.write_text(broken.read_text() + "\n\ndef program(**fields):\n    raise RuntimeError('no such layout')\n")
    deadly = kernels / "recurrent.py"
    deadly.write_text(deadly.read_text() + "\n\nimport os\n\ndef program(**fields):\n    os.kill(os.getpid(), 9)\n")
    only = [
        "chunk_coupling Q=64 N=64 dtype=bfloat16 aligned=True cb_float32=True",
        "recurrent P=64 N=64 dtype=bfloat16 state_dtype=float32 tied=True",
        "state_passing",
    ]
    shutil.copy(ROOT / "build_kernels" / "matrix.toml", tree / "build_kernels" / "matrix.toml")
    done = run("--arch", "sm_90a", *(word for pattern in only for word in ("--only", pattern)), "--jobs", 1, tree=tree)
    assert done.returncode == 1
    assert table(done) | {"bytes": 0} == {"kernels": 4, "built": 2, "present": 0, "failed": 2, "bytes": 0}
    assert "no such layout" in done.stdout and "killed by SIGKILL" in done.stdout
    assert {record.kernel for record in PackagedRoot("packaged", "out", str(tree / "artifacts")).entries()} == {"state_passing"}


def start(*args: object) -> subprocess.Popen[str]:
    line, where = command(*args)
    return subprocess.Popen(  # type: ignore[call-overload]
        line, **where, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, preexec_fn=interruptible
    )


def interruptible() -> None:
    """A shell's background job, which the tests may be, starts with Ctrl-C ignored, and so do its children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def wait_for_staged(process: subprocess.Popen[str], out: Path) -> None:
    end = time.monotonic() + 120
    while not staged(out):
        assert process.poll() is None and time.monotonic() < end, "nothing was staged"
        time.sleep(0.02)


def group_members(group: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[2]) == group and fields[0] != "Z":
                found.append(int(entry.name))
    return found


def wait_for_no_process(group: int) -> None:
    end = time.monotonic() + 60
    while group_members(group):
        assert time.monotonic() < end, f"left running: {group_members(group)}"
        time.sleep(0.05)


def test_a_killed_build_goes_on_where_it_was(built, matrix, tmp_path):
    out = tmp_path / "out"
    process = start("--matrix", matrix, "--out", out, "--jobs", 1)
    wait_for_staged(process, out)
    process.kill()
    process.communicate()
    wait_for_no_process(process.pid)  # the worker sees the end of its pipe and ends, too
    done = run("--matrix", matrix, "--out", out)
    assert done.returncode == 0
    assert table(done)["present"] >= 1 and table(done)["present"] + table(done)["built"] == 2
    assert files(out) == files(built)
    assert staged(out) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_build_keeps_what_it_finished_and_leaves_no_process(long_matrix, tmp_path, number):
    out = tmp_path / "out"
    process = start("--matrix", long_matrix, "--out", out, "--jobs", 1)
    wait_for_staged(process, out)
    os.killpg(process.pid, number)  # Ctrl-C reaches the whole group
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 130, output + errors
    assert "Traceback" not in output + errors
    assert "interrupted" in output
    wait_for_no_process(process.pid)
    root = PackagedRoot("packaged", "out", str(out))
    assert list(root.entries()) and list(root.verify()) == []


def test_two_builds_do_not_write_one_folder_at_once(matrix, long_matrix, tmp_path):
    out = tmp_path / "out"
    process = start("--matrix", long_matrix, "--out", out, "--jobs", 1)
    try:
        wait_for_staged(process, out)
        second = run("--matrix", matrix, "--out", out)
    finally:
        process.kill()
        process.communicate()
    assert second.returncode == 1
    assert "another build is writing there" in second.stderr


def test_a_folder_that_cannot_be_written_is_said_so(matrix, tmp_path):
    (tmp_path / "file").write_text("")
    done = run("--matrix", matrix, "--out", tmp_path / "file" / "out")
    assert done.returncode == 1
    assert "cannot be written" in done.stderr and "Traceback" not in done.stderr


def test_writer_agrees_with_the_lookup_of_a_site_root(built, monkeypatch):
    monkeypatch.setenv("TILEOPS_ARTIFACT_PATH", str(built))
    lookup = store.find(catalog.config("state_passing", "sm_90a", aligned=False), policy="packaged")
    assert lookup.kind in ("packaged", "site") and lookup.artifact is not None
