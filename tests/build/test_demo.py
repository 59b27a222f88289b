"""`make demo` on a machine without a GPU: builds, verifies, computes, compares; and says no when something is wrong."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from build_kernels import matrix
from tileops import catalog, compiler

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.skipif(compiler.toolchain.find()[0] is None, reason="needs the extra `jit`"),
    pytest.mark.xdist_group("build_kernels"),
]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    copy = tmp_path_factory.mktemp("demo") / "checkout"
    for name in ("tileops", "build_kernels", "examples"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "artifacts").mkdir()
    shutil.copy(ROOT / "artifacts" / "__init__.py", copy / "artifacts")
    (copy / "README.md").write_bytes((ROOT / "README.md").read_bytes()[:1100])  # a shorter prompt: four chunks and a tail, then 64 steps
    return copy


def demo(checkout: Path) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "examples/mamba2_block.py", "--device", "cpu"]
    # Not the user's cache: a kernel there stands in for one that is damaged.
    env = {**os.environ, "PYTHONPATH": str(checkout), "TILEOPS_CACHE_DIR": str(checkout / "cache"), "OMP_NUM_THREADS": "1"}
    return subprocess.run(line, cwd=checkout, env=env, capture_output=True, text=True, timeout=500)


def test_demo_builds_verifies_and_agrees(checkout):
    done = demo(checkout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("packaged ") == 3 and done.stdout.count(", verified") == 3
    assert done.stdout.count("  ok") == 4 and "All is well." in done.stdout
    assert len(list((checkout / "artifacts" / "sm_90a").glob("*.cubin"))) == 3


def test_demo_says_no_to_wrong_numbers_and_damaged_kernels(checkout):
    step = checkout / "tileops" / "reference" / "recurrent.py"
    text = step.read_text()
    assert "= new.to(state.dtype)" in text
    step.write_text(text.replace("= new.to(state.dtype)", "= (new * 1.01).to(state.dtype)"))
    done = demo(checkout)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "TOO LARGE" in done.stdout and "Something is wrong" in done.stdout
    step.write_text(text)
    # Damage that a rebuild would mend at once, so the compiler is taken away.
    cubin = next((checkout / "artifacts" / "sm_90a").glob("*.cubin"))
    cubin.write_bytes(cubin.read_bytes()[:-1])
    finder = checkout / "tileops" / "compiler" / "toolchain.py"
    finder.write_text(finder.read_text() + "\n\ndef find():\n    return None, 'no compiler'\n")
    done = demo(checkout)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "MISSING" in done.stdout and "nothing can be compiled here" in done.stdout


@pytest.mark.parametrize("arch", catalog.ARCHS)
def test_what_the_demo_builds_is_in_the_matrix_of_every_arch(arch, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import mamba2_block as block

    kernels = block.MODEL.kernels([arch])
    main = block.ONE_KERNEL if catalog.exists("fused_main", arch) else block.STAGES
    assert len(matrix.select(kernels, (*main, *block.DECODE))) == len(main) + 1
