"""Making sure that a model's kernels are there: reports, real compiles, failures, interrupts."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import helpers_store as h
import pytest
from helpers_cli import VALUES, Command, copy_package, tiny, write_site

from tileops import catalog, compiler, models
from tileops.cli import _wanted
from tileops.cli._gpus import Place
from tileops.driver import DeviceInfo

compiles = pytest.mark.skipif(compiler.toolchain.find()[0] is None, reason="needs the extra `jit`")

#: The two kernels that compile fastest: what a real compile is tried with.
FAST = ("--only", "state_passing")


def test_check_reports_and_writes_nothing(tileops, site, tmp_path):
    done = tileops("warm", "--check", *VALUES, "--json")
    assert done.status == 1
    assert {each["key"] for each in done.json["missing"]} == {config.key for config in tiny()} and done.json["here"] == 0
    assert done.json["commands"] == ["tileops warm --chunk-size 16 --head-dim 16 --d-state 16 --arch sm_80"]
    half = write_site(tmp_path / "half", [c for c in tiny() if c.kernel != "recurrent"])
    done = tileops("warm", "--check", *VALUES, TILEOPS_ARTIFACT_PATH=str(half))
    assert done.status == 1 and f"{len(tiny()) - 6} of {len(tiny())} are there" in done.out and "Run: tileops warm" in done.out
    assert sum(line.startswith("missing  recurrent") for line in done.out.splitlines()) == 6
    done = tileops("warm", "--check", *VALUES, "--json", TILEOPS_ARTIFACT_PATH=str(site))
    assert done.status == 0
    assert done.json["by_root"] == {f"site {site}": {"kernels": len(tiny()), "bytes": 3000 * len(tiny())}}
    assert not tileops.cache.exists()


def test_nothing_is_compiled_where_everything_is_there(tileops, site):
    done = tileops("warm", *VALUES, TILEOPS_ARTIFACT_PATH=str(site))
    assert done.status == 0 and not done.err and not tileops.cache.exists()


def test_several_models_and_archs_share_their_kernels(tileops):
    names = ("mamba2-130m", "codestral-mamba-7b", "nemotron-h-8b")
    arguments = [word for name in names for word in ("--model", name)]
    done = tileops("warm", "--check", *arguments, "--arch", "sm_80,sm_100a", "--json")
    wanted = {c.key for name in names for c in models.preset(name).kernels(["sm_80", "sm_100a"])}
    assert done.status == 1 and {each["key"] for each in done.json["missing"]} == wanted and done.json["kernels"] == len(wanted)
    only = tileops(
        "warm", "--check", *arguments, "--arch", "all", "--only", "recurrent P=64 state_dtype=float32 arch=sm_9*", "--json"
    ).json["missing"]
    assert {(each["kernel"], each["arch"]) for each in only} == {("recurrent", "sm_90a")} and len(only) == 2


def test_a_preset_that_no_config_confirmed_says_so(tileops):
    assert models.preset("nemotron-h-47b").unconfirmed == ("chunk_size",)
    assert "chunk_size not confirmed" in tileops("warm", "--check", "--model", "nemotron-h-47b", "--arch", "sm_80").err
    assert not tileops("warm", "--check", "--model", "mamba2-130m", "--arch", "sm_80").err


CONFIGS = {
    "mamba2": (
        {
            "model_type": "mamba2",
            "num_heads": 24,
            "head_dim": 64,
            "state_size": 128,
            "n_groups": 1,
            "chunk_size": 256,
            "torch_dtype": "float16",
        },
        {"chunk_size": 256, "head_dim": 64, "d_state": 128, "dtype": "float16"},
    ),
    "nemotron_h": (
        {
            "model_type": "nemotron_h",
            "mamba_num_heads": 96,
            "mamba_head_dim": 80,
            "ssm_state_size": 128,
            "n_groups": 8,
            "chunk_size": 128,
            "expand": 2,
            "hidden_size": 3136,
            "dtype": "bfloat16",
        },
        {"chunk_size": 128, "head_dim": 80, "d_state": 128, "dtype": "bfloat16"},
    ),
}


@pytest.mark.parametrize("family", CONFIGS)
def test_a_config_json_is_read_with_its_own_dtype(tileops, tmp_path, family):
    data, values = CONFIGS[family]
    (tmp_path / "config.json").write_text(json.dumps(data))
    wanted = {config.key for config in catalog.for_model(**values, archs=["sm_80"])}
    for path in (tmp_path / "config.json", tmp_path):
        done = tileops("warm", "--check", "--config", path, "--arch", "sm_80", "--json")
        assert done.status == 1 and {each["key"] for each in done.json["missing"]} == wanted
    done = tileops("warm", "--check", "--config", tmp_path, "--arch", "sm_80", "--dtype", "bf16", "--json")
    assert {each["config"]["dtype"] for each in done.json["missing"] if "dtype" in each["config"]} == {"bfloat16"}
    assert done.json["commands"] == [f"tileops warm --config {tmp_path} --dtype bfloat16 --arch sm_80"]


@pytest.mark.parametrize("text", ["{", "[]", '{"model_type": "llama"}', '{"model_type": "mamba2", "head_dim": "64"}'])
def test_a_config_json_that_is_none_is_a_usage_error(tileops, tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    done = tileops("warm", "--check", "--config", tmp_path / "config.json", "--arch", "sm_80")
    assert done.status == 2 and "config.json" in done.err and len(done.err.splitlines()) == 1


def test_the_policy_decides_which_roots_count(tileops, monkeypatch):
    from tileops.store import publish

    monkeypatch.setenv("TILEOPS_CACHE_DIR", str(tileops.cache))
    for config in tiny():
        assert publish(h.artifact(config, compiler=compiler.toolchain_name() or h.COMPILER)).stored
    assert tileops("warm", "--check", *VALUES, TILEOPS_POLICY="cached").status == 0
    done = tileops("warm", *VALUES, TILEOPS_POLICY="packaged")
    assert done.status == 1 and "the policy is 'packaged'" in done.out and "TILEOPS_POLICY=cached" in done.out


@pytest.mark.parametrize("mode, reason", [(0o777, "can be written by other users"), (0o755, None)])
def test_nothing_is_compiled_for_a_cache_that_cannot_keep_it(tileops, mode, reason):
    if reason is None:  # a file lies where the folder should be
        tileops.cache.write_text("not a folder")
        reason = "Not a directory"
    else:
        tileops.cache.mkdir()
        tileops.cache.chmod(mode)
    done = tileops("warm", *VALUES, *FAST)
    assert done.status == 1 and "could not be stored" in done.out and reason in done.out and "TILEOPS_CACHE_DIR" in done.out
    assert "compiling" not in done.err


def test_without_a_compiler_it_says_what_to_install(tileops, tmp_path):
    # An installed package's metadata is what says that TileLang is there: a Python without site-packages has none.
    import filelock
    import platformdirs

    for module in (filelock, platformdirs):
        folder = Path(module.__file__).parent
        shutil.copytree(folder, tmp_path / "lib" / folder.name, ignore=shutil.ignore_patterns("__pycache__"))
    line = [tileops.line()[0], "-S", *tileops.line("warm", *VALUES)[1:]]
    done = subprocess.run(line, env=tileops.environment(PYTHONPATH=str(tmp_path / "lib")), capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "TileLang is not installed" in done.stdout and "tileops[jit]" in done.stdout, done.stderr
    assert "Traceback" not in done.stderr and not tileops.cache.exists()


def gpu(driver: int, smem: int = 101376) -> DeviceInfo:
    return DeviceInfo(0, "NVIDIA A40", (8, 6), smem, driver, 84)


def test_a_kernel_of_another_arch_that_runs_on_the_gpu_will_do(monkeypatch, tmp_path):
    h.isolate(monkeypatch, tmp_path)
    place = write_site(tmp_path / "site", tiny("sm_80"), dynamic_smem=90_000)
    monkeypatch.setenv("TILEOPS_ARTIFACT_PATH", str(place))
    (wanted, *_) = _wanted.for_place(tiny("sm_86"), Place(catalog.archs_for(8, 6), gpu(13000)))
    assert wanted.config.arch == "sm_86"
    looked = _wanted.look(wanted)
    assert looked.here and looked.lookup.config.arch == "sm_80"
    for info, words in ((gpu(11080), "this driver supports 11.8"), (gpu(13000, 65536), "this GPU allows 65536")):
        looked = _wanted.look(_wanted.Wanted(wanted.configs, Place(wanted.place.archs, info)))
        assert not looked.here and words in looked.refused
    monkeypatch.setitem(h._ELF_ARCH, "sm_86", (7, 0x560556))
    monkeypatch.setenv("TILEOPS_ARTIFACT_PATH", str(write_site(tmp_path / "both", [*tiny("sm_80"), *tiny("sm_86")])))
    assert _wanted.look(wanted).lookup.config.arch == "sm_86"


@compiles
@pytest.mark.xdist_group("compiler")
def test_missing_kernels_are_compiled_once_and_rebuild_to_the_same_bytes(tileops):
    done = tileops("warm", *VALUES, *FAST, "--json")
    assert done.status == 0, done.err
    assert [each["kernel"] for each in done.json["compiled"]] == ["state_passing"] * 2 and done.json["failed"] == []
    assert "compiling with" in done.err and "2 done, 0 failed, 0 left" in done.err
    assert done.json["bytes"] == sum(each["bytes"] for each in done.json["compiled"]) > 0
    again = tileops("warm", *VALUES, *FAST)
    assert again.status == 0 and "2 of 2 are there" in again.out and f"user cache {tileops.cache}  2" in again.out and not again.err
    assert tileops("warm", "--check", *VALUES, *FAST, TILEOPS_POLICY="cached").status == 0
    done = tileops("verify", "--rebuild", "--only", "state_passing aligned=True", "--json")
    assert done.status == 0 and (done.json["rebuilt"]["kernels"], done.json["rebuilt"]["differing"]) == (1, [])
    # An entry that is whole, and not what the compiler makes of its config: only a rebuild can tell.
    (entry,) = [p for p in (tileops.cache / "v1").iterdir() if p.name.startswith(config_of(True).key)]
    shutil.rmtree(entry)
    made_up = h.artifact(config_of(True), compiler=str(compiler.toolchain_name()))
    site = tileops.cache.parent / "site"
    from tileops.store import write_packaged

    write_packaged(site, [made_up])
    rebuild = ("verify", site, "--rebuild")
    done = tileops(*rebuild)
    assert done.status == 3 and f"{made_up.record.cubin_sha256} on disk" in done.out and "all well" in done.out
    assert tileops(*rebuild[:2]).status == 0


def config_of(aligned: bool):
    return catalog.config("state_passing", "sm_80", aligned=aligned)


@compiles
@pytest.mark.xdist_group("compiler")
def test_a_kernel_that_fails_does_not_lose_the_others(tmp_path):
    package = copy_package(tmp_path / "package")
    kernel = package / "tileops" / "kernels" / "state_passing.py"
    kernel.write_text(
        kernel.read_text() + "\n\n_good = program\n\n\ndef program(*, aligned, **schedule):\n"
        "    if aligned:\n        raise ValueError('half of it is broken')\n"
        "    return _good(aligned=False, **schedule)\n"
    )
    tileops = Command(package, tmp_path)
    done = tileops("warm", *VALUES, *FAST, "--json", TMPDIR=str(tmp_path))
    assert done.status == 1
    assert [each["config"] for each in done.json["compiled"]] == [{"aligned": False}]
    (failed,) = done.json["failed"]
    assert failed["config"] == {"aligned": True} and "half of it is broken" in failed["error"]
    assert done.json["missing"] == [{name: failed[name] for name in ("kernel", "arch", "config", "key")}]
    assert "failed: state_passing[aligned=True; sm_80]" in done.err
    assert tileops("verify").status == 0


@compiles
@pytest.mark.xdist_group("compiler")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_it_and_leaves_nothing_half_published(tileops, number):
    line = tileops.line("warm", *VALUES, "--only", "chunk_scan", "--jobs", "1", "--json")
    child = subprocess.Popen(
        line,
        env=tileops.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored in a shell's background job, which the tests may be
    )
    try:
        # The worker takes its lock when it begins to compile, which then takes seconds.
        deadline = time.monotonic() + 120
        while not list(tileops.cache.glob("v1/.locks/*")):
            assert child.poll() is None and time.monotonic() < deadline, child.communicate(timeout=60)
            time.sleep(0.01)
        os.killpg(child.pid, number) if number == signal.SIGINT else child.send_signal(number)  # Ctrl-C reaches the whole group
        out, err = child.communicate(timeout=60)
    finally:
        child.kill()
    assert child.returncode == 130 and "Traceback" not in err
    answer = json.loads(out)
    assert answer["interrupted"] and answer["status"] == 130 and len(answer["missing"]) + len(answer["compiled"]) == 6
    left = [entry.name for entry in (tileops.cache / "v1").iterdir() if entry.name != ".locks"]
    assert len(left) == len(answer["compiled"]) and not any(name.startswith(".") for name in left)
    assert tileops("verify").status == 0
