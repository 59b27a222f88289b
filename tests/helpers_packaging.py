"""What the packaging tests share: the parts of a checkout, and the build frontend."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

#: What a checkout consists of: everything else at its top (virtual environments, builds, notes) is a person's own.
TOP = (
    *(".ci", "artifacts", "benchmarks", "build_kernels", "docs", "examples", "tests", "tileops"),
    *("CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "MANIFEST.in", "Makefile", "README.md", "constraints.txt", "pyproject.toml"),
)


def build(kind: str, source: Path, out: Path) -> Path:
    """Runs the build frontend on ``source`` with this environment's setuptools (no network)."""
    line = [sys.executable, "-m", "build", "--no-isolation", f"--{kind}", "--outdir", str(out), str(source)]
    done = subprocess.run(line, cwd=out.parent, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    (made,) = out.glob("*.whl" if kind == "wheel" else "*.tar.gz")
    return made
