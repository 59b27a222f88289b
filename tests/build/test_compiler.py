"""The compiler with the real TileLang and CUDA compiler parts, on a machine without a GPU."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tileops import catalog, compiler
from tileops.compiler import nvrtc, shared, toolchain
from tileops.compiler.lower import lower
from tileops.errors import CompileError

CONFIG = {"aligned": True}


@pytest.fixture(scope="module")
def artifact():
    return compiler.build(catalog.config("state_passing", "sm_90a", **CONFIG)).check()


def test_record_says_what_a_loader_needs(artifact):
    record = artifact.record
    assert record.key == catalog.config("state_passing", "sm_90a", **CONFIG).key
    assert {p.bind for p in record.params if p.kind == "pointer"} == {"states", "dA_chunk", "initial_states", "prev_states", "final_states"}
    assert record.alignment.keys() == {p.name for p in record.params if p.kind == "pointer"}
    assert record.spills == 0 and 0 < record.registers <= 255
    assert record.min_driver == 12000
    assert record.provenance["compiler"] == compiler.toolchain_name()


def test_cubin_is_small_because_unused_globals_are_pruned(artifact):
    names = artifact.cubin.count(b"cutlass") + artifact.cubin.count(b"_ZN4cuda3std")
    assert names == 0, "names of CUTLASS or CCCL constants are left in the cubin"


def test_bytes_do_not_depend_on_process_folder_or_environment(artifact, tmp_path):
    code = (
        "from tileops import catalog, compiler; import hashlib;"
        "print(hashlib.sha256(compiler.build(catalog.config('state_passing', 'sm_90a', aligned=True)).cubin).hexdigest())"
    )
    root = str(Path(__file__).parents[2])
    env = {
        "PATH": "/usr/bin:/bin",
        "PYTHONPATH": root,
        "HOME": str(tmp_path),
        "TMPDIR": str(tmp_path),
        "PYTHONHASHSEED": "7",
        "LC_ALL": "C",
    }
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split()[-1] == artifact.record.cubin_sha256


def test_without_a_home_it_compiles_all_the_same(artifact, tmp_path):
    """TileLang makes a cache folder in HOME when it is imported; where there is no HOME it gets a private one."""
    code = (
        "from tileops import catalog, compiler; import os;"
        "print(compiler.build(catalog.config('state_passing', 'sm_90a', aligned=True)).record.cubin_sha256);"
        "assert not os.path.exists('/nonexistent')"
    )
    env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(Path(__file__).parents[2]), "HOME": "/nonexistent", "TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split()[-1] == artifact.record.cubin_sha256
    assert not list(tmp_path.iterdir()), "the private folder is left behind"


def test_prune_keeps_what_is_used():
    ptx = "\n".join(
        [
            ".visible .global .align 4 .u32 used = 7;",
            ".global .align 1 .b8 unused[16];",
            ".global .align 8 .u64 also_unused = 12;",
            ".extern .shared .align 1024 .b8 buf_dyn_shmem[];",
            "ld.global.u32 %r1, [used];",
        ]
    )
    kept = nvrtc.prune_globals(ptx)
    assert "used = 7" in kept and "buf_dyn_shmem" in kept and "unused" not in kept


def test_compile_error_keeps_source_and_log(monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr(nvrtc.flags, "NVRTC_FLAGS", ("-default-device", "-std=c++17", "-DB=syntax error("))
    with pytest.raises(CompileError) as caught:
        compiler.build(catalog.config("state_passing", "sm_90a", **CONFIG))
    folder = Path(caught.value.folder)
    assert folder.is_relative_to(tmp_path) and str(folder) in str(caught.value)
    assert "state_passing_kernel" in (folder / "kernel.cu").read_text()
    assert "error" in (folder / "log.txt").read_text()


def test_report_52_too_much_shared_memory_fails_the_build(monkeypatch):
    monkeypatch.setitem(catalog.MAX_SMEM, "sm_90a", 16)
    with pytest.raises(CompileError, match="shared memory"):
        compiler.build(catalog.config("chunk_coupling", "sm_90a", Q=64, N=64, dtype="bfloat16", aligned=True, cb_float32=True))


def test_a_kernel_that_spills_is_never_shipped_but_serves_sizes_that_no_package_has():
    config = catalog.config("recurrent", "sm_90a", P=208, N=48, dtype="float16", state_dtype="float16", tied=True)
    with pytest.raises(CompileError, match="spilled registers"):
        compiler.build(config)
    assert compiler.jit(config).check().record.spills > 0


def test_without_a_compiler_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(toolchain, "find", lambda: (None, "TileLang is not installed; install the extra: pip install 'tileops[jit]'"))
    with pytest.raises(CompileError, match=r"tileops\[jit\]"):
        compiler.build(catalog.config("state_passing", "sm_90a", **CONFIG))


OVERLAPPING = {
    "chunk_cumsum": {"Q": 256, "out_dtype": "float32"},
    "recurrent": {"P": 64, "N": 128, "dtype": "bfloat16", "state_dtype": "float32", "tied": False},
    "fused_main": {"P": 64, "N": 128, "dtype": "float16", "y_float32": True},
    "fused_clear": {},
}


@pytest.mark.parametrize("kernel", sorted(catalog.OVERLAPPING))
def test_a_kernel_that_may_be_launched_early_waits_and_takes_no_memory_for_constant(kernel):
    found, _ = toolchain.find()
    lowered = lower(catalog.config(kernel, "sm_90a", **OVERLAPPING[kernel]))
    ptx = nvrtc._to_ptx(lowered.source, "sm_90a", found)
    assert "griddepcontrol.wait" in ptx and "griddepcontrol.launch_dependents" in ptx
    assert "ld.global.nc" not in ptx and "ldu." not in ptx
    before = ptx[ptx.index(".entry") : ptx.index("griddepcontrol.wait")]
    assert not re.search(r"\b(ld|st|atom|red)\.(global|relaxed|acquire)|cp\.async\.bulk\.tensor", before)


@pytest.mark.parametrize(
    ("kernel", "values"),
    [
        ("chunk_scan", {"Q": 64, "P": 32, "N": 64, "dtype": "bfloat16", "dt_dtype": "float32", "aligned": True, "cb_float32": True}),
        ("chunk_state", {"Q": 64, "P": 32, "N": 64, "dtype": "float16", "dt_dtype": "float32", "aligned": False}),
        ("recurrent", {"P": 32, "N": 64, "dtype": "bfloat16", "state_dtype": "float32", "tied": True}),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_archs_that_are_lowered_as_another_have_its_source(monkeypatch, kernel, values):
    configs = [catalog.config(kernel, arch, **values) for arch in (*shared.LOWERED_AS, *set(shared.LOWERED_AS.values()))]
    together = [lower(config) for config in configs]
    monkeypatch.setattr(shared, "LOWERED_AS", {})
    apart = [lower(config) for config in configs]
    assert together == apart and len({lowered.source for lowered in apart}) == 1
