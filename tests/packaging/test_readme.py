"""README.md says nothing that is not so: its example runs, and the commands, files and folders it names exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXTS = {name: (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "CONTRIBUTING.md", "artifacts/README.md")}


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


def test_the_example_runs():
    (code,) = blocks(TEXTS["README.md"], "python")
    check = "\nassert y.shape == x.shape and y_t.shape == x[:, -1].shape and y.isfinite().all() and y_t.isfinite().all()\n"
    done = subprocess.run([sys.executable, "-c", code + check], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_the_operators_of_torch_are_those_it_names():
    names = set(re.findall(r"`(?:torch\.ops\.tileops\.)?(\w+_fwd)`", TEXTS["README.md"]))
    code = "import tileops.mamba as m, sys; sys.exit({getattr(m, n).library_name for n in m.__all__} != set(sys.argv[1:]))"
    assert subprocess.run([sys.executable, "-c", code, *names], cwd=ROOT, timeout=120).returncode == 0


@pytest.mark.parametrize("name", TEXTS)
def test_make_targets_exist(name):
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    named = set(re.findall(r"(?:`|\$ )make ([a-z-]+)", TEXTS[name]))
    assert named <= targets


@pytest.mark.parametrize("name", TEXTS)
def test_files_and_folders_exist(name):
    named = re.findall(r"`((?:tileops|build_kernels|tests|examples|benchmarks|docs|artifacts|\.ci)/[\w./*]*)`", TEXTS[name])
    # `tileops/artifacts` is where a wheel has what the repository has in artifacts/.
    assert [path for path in named if path != "tileops/artifacts" and not list(ROOT.glob(path.rstrip("/")))] == []


def test_commands_are_understood():
    verbs = {
        line.split()[2]
        for block in blocks(TEXTS["README.md"], "console")
        for line in block.splitlines()
        if re.match(r"\$ tileops [a-z]", line)
    }
    assert {"doctor", "warm", "list"} <= verbs
    for verb in sorted(verbs):
        line = [sys.executable, "-c", "import sys; from tileops.cli import main; sys.exit(main(sys.argv[1:]))", verb, "--help"]
        done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0 and f"tileops {verb}" in done.stdout, f"{verb}: {done.stdout}{done.stderr}"
