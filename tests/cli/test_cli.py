"""The command line as a user meets it: real processes, real folders, exit statuses. GPU answers are in tests/gpu."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import helpers_store as helpers
import pytest

from tileops import catalog
from tileops.store import write_packaged

ARGUMENTS = ["--chunk-size", "16", "--head-dim", "16", "--d-state", "16", "--dtype", "bf16", "--arch", "sm_80"]


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def tileops(*arguments: str, cache: Path | None = None, code: str | None = None, timeout: float = 300, **env: str):
    """Runs the command; ``code`` runs before it in the same interpreter. TILEOPS_ARTIFACT_PATH etc. as keywords."""
    start = f"import sys; {code or ''}\nfrom tileops.cli import main\nsys.exit(main(sys.argv[1:]))"
    return subprocess.run(
        [sys.executable, "-c", start, *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=helpers.environment(cache, **env),
    )


def root_for(tmp_path: Path, name: str = "root") -> Path:
    """A site root with a (fake) artifact of every kernel of ARGUMENTS."""
    configs = catalog.for_model(chunk_size=16, head_dim=16, d_state=16, dtype="bfloat16", archs=["sm_80"])
    write_packaged(tmp_path / name, [helpers.artifact(config) for config in configs])
    return tmp_path / name


def test_help_imports_neither_torch_nor_tilelang():
    done = tileops("--help", code="import atexit; atexit.register(lambda: print({'torch', 'tilelang', 'cuda'} & set(sys.modules)))")
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1] == "set()"
    assert all(verb in done.stdout for verb in ("warm", "list", "explain", "verify", "prune", "export", "import", "doctor"))


def test_module_form_is_the_same_command():
    done = subprocess.run([sys.executable, "-m", "tileops", "--version"], capture_output=True, text=True, env=helpers.environment())
    assert done.returncode == 0 and done.stdout.strip()


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (["warm"], "--model"),
        (["warm", "--model", "mamba2-130m"], "--arch"),
        (["warm", "--model", "no-such-model", "--arch", "sm_80"], "mamba2-130m"),
        (["warm", "--model", "mamba2-130m", "--arch", "sm_75"], "sm_90a"),
        (["warm", "--chunk-size", "16", "--arch", "sm_80"], "--d-state"),
        (["warm", "--chunk-size", "100", "--head-dim", "16", "--d-state", "16", "--arch", "sm_80"], "16, 32, 64, 128, 256"),
        (["warm", "--model", "mamba2-130m", "--arch", "sm_80", "--dtype", "int8"], "bfloat16"),
        (["explain", "chunk_magic", "--arch", "sm_80"], "chunk_scan"),
        (["explain", "chunk_scan", "Q=7", "--arch", "sm_80"], "16, 32"),
        (["prune"], "--max-size"),
        (["prune", "--max-size", "many"], "500M"),
        (["frobnicate"], "invalid choice"),
    ],
)
def test_usage_errors_say_what_to_give(arguments, expected, cache):
    done = tileops(*arguments, cache=cache)
    assert done.returncode == 2, done.stderr
    assert expected in done.stderr and "Traceback" not in done.stderr
    assert not cache.exists(), "a usage error wrote something"


def test_check_reports_what_is_missing_and_what_is_there(tmp_path, cache):
    done = tileops("warm", *ARGUMENTS, "--check", "--json", cache=cache)
    assert done.returncode == 1
    missing = json.loads(done.stdout)["missing"]
    assert len(missing) == json.loads(done.stdout)["kernels"] > 10
    done = tileops("warm", *ARGUMENTS, "--check", "--json", cache=cache, TILEOPS_ARTIFACT_PATH=str(root_for(tmp_path)))
    answer = json.loads(done.stdout)
    assert done.returncode == 0 and answer["missing"] == [] and sum(answer["present"].values()) == answer["kernels"] == len(missing)
    assert not cache.exists(), "--check wrote something"


def test_warm_compiles_what_is_missing_and_the_second_run_finds_it(tmp_path, cache):
    root = root_for(tmp_path)
    # All but one kernel are there: the real compiler makes that one.
    manifest = root / "sm_80" / "manifest.json"
    data = json.loads(manifest.read_text())
    gone = next(key for key, record in data["records"].items() if record["kernel"] == "state_passing")
    (root / "sm_80" / f"{gone}.cubin").unlink()
    del data["records"][gone]
    manifest.write_text(json.dumps(data))
    done = tileops("warm", *ARGUMENTS, "--json", cache=cache, TILEOPS_ARTIFACT_PATH=str(root), HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["compiled"] == 1
    assert "1/1 done" in done.stderr
    done = tileops("warm", *ARGUMENTS, "--json", cache=cache, TILEOPS_ARTIFACT_PATH=str(root), HOME=str(tmp_path))
    answer = json.loads(done.stdout)
    assert done.returncode == 0 and answer["compiled"] == 0 and sum(answer["present"].values()) == answer["kernels"]
    assert any("user cache" in name for name in answer["present"])
    done = tileops("verify", "--root", "user cache", "--rebuild", cache=cache, HOME=str(tmp_path))
    assert done.returncode == 0 and "1 compiled again, 0 differ" in done.stdout, done.stdout


@pytest.mark.parametrize(
    "content",
    [
        {"model_type": "mamba2", "num_heads": 4, "head_dim": 16, "state_size": 16, "n_groups": 1, "chunk_size": 16, "torch_dtype": "bfloat16"},
        {
            "model_type": "nemotron_h",
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "ssm_state_size": 16,
            "n_groups": 1,
            "chunk_size": 16,
            "torch_dtype": "bfloat16",
        },
    ],
    ids=lambda content: content["model_type"],
)
def test_a_config_json_names_the_same_kernels_as_its_values(content, tmp_path, cache):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(content))
    done = tileops("warm", "--config", str(file), "--arch", "sm_80", "--check", "--json", cache=cache)
    explicit = tileops("warm", *ARGUMENTS, "--check", "--json", cache=cache)
    assert done.returncode == 1, done.stderr
    assert [m["key"] for m in json.loads(done.stdout)["missing"]] == [m["key"] for m in json.loads(explicit.stdout)["missing"]]


def test_explain_names_nearest_difference_and_command(tmp_path, cache):
    root = root_for(tmp_path)
    fields = ["N=32", "Q=16", "aligned=true", "dtype=bfloat16"]
    done = tileops("explain", "chunk_coupling", *fields, "--arch", "sm_80", cache=cache, TILEOPS_ARTIFACT_PATH=str(root))
    assert done.returncode == 1
    assert "N: asked for 32, it has 16" in done.stdout and "tileops warm --chunk-size 16" in done.stdout
    assert f"site {root}: key not present" in done.stdout
    fields[0] = "N=16"
    done = tileops("explain", "chunk_coupling", *fields, "--arch", "sm_80", "--json", cache=cache, TILEOPS_ARTIFACT_PATH=str(root))
    (kernel,) = json.loads(done.stdout)["kernels"]
    assert done.returncode == 0 and kernel["found"] and kernel["root"] == f"site {root}"


def test_list_shows_roots_and_filters(tmp_path, cache):
    root = root_for(tmp_path)
    done = tileops("list", "--json", "--root", str(root), "--kernel", "recurrent", cache=cache, TILEOPS_ARTIFACT_PATH=str(root))
    (entry,) = json.loads(done.stdout)["roots"]
    assert done.returncode == 0 and {a["kernel"] for a in entry["artifacts"]} == {"recurrent"} and len(entry["artifacts"]) == 2
    done = tileops("list", "--models", cache=cache)
    assert done.returncode == 0 and "codestral-mamba-7b" in done.stdout


def damage_cut(root: Path) -> None:
    file = next((root / "sm_80").glob("*.cubin"))
    file.write_bytes(file.read_bytes()[:-1])


def damage_remove(root: Path) -> None:
    next((root / "sm_80").glob("*.cubin")).unlink()


def damage_arch(root: Path) -> None:
    """A root whose records say sm_80 and whose cubins are another arch's, digests and all."""
    import hashlib

    manifest = root / "sm_80" / "manifest.json"
    data = json.loads(manifest.read_text())
    key, record = next(iter(data["records"].items()))
    other = helpers.cubin("sm_90a")
    record.update(cubin_sha256=hashlib.sha256(other).hexdigest(), cubin_size=len(other))
    (root / "sm_80" / f"{key}.cubin").write_bytes(other)
    manifest.write_text(json.dumps(data))


@pytest.mark.parametrize("damage, status, kind", [(damage_cut, 3, "corrupt"), (damage_remove, 1, "missing"), (damage_arch, 4, "arch")])
def test_verify_tells_kinds_of_fault_apart(damage, status, kind, tmp_path, cache):
    root = root_for(tmp_path)
    assert tileops("verify", "--root", str(root), cache=cache, TILEOPS_ARTIFACT_PATH=str(root)).returncode == 0
    damage(root)
    done = tileops("verify", "--root", str(root), "--json", cache=cache, TILEOPS_ARTIFACT_PATH=str(root))
    assert done.returncode == status, done.stdout
    assert [fault["kind"] for fault in json.loads(done.stdout)["faults"]] == [kind]


def test_bundle_travels_and_a_damaged_one_stores_nothing(tmp_path, cache):
    root, bundle = root_for(tmp_path), tmp_path / "kernels.bundle"
    done = tileops("export", str(bundle), *ARGUMENTS, cache=cache, TILEOPS_ARTIFACT_PATH=str(root))
    assert done.returncode == 0, done.stderr
    done = tileops("warm", *ARGUMENTS, "--check", cache=cache, TILEOPS_ARTIFACT_PATH=str(bundle))
    assert done.returncode == 0, "the bundle is no root"
    done = tileops("import", str(bundle), "--into", str(tmp_path / "into"), cache=cache)
    assert done.returncode == 0
    assert tileops("warm", *ARGUMENTS, "--check", cache=cache, TILEOPS_ARTIFACT_PATH=str(tmp_path / "into")).returncode == 0
    text = bytearray(bundle.read_bytes())
    text[len(text) // 2] ^= 1
    bundle.write_bytes(text)
    done = tileops("import", str(bundle), cache=cache)
    assert done.returncode == 3 and "Traceback" not in done.stderr
    assert not list(cache.glob("v1/*")), "part of a damaged bundle was stored"
    done = tileops("export", str(tmp_path / "none"), *ARGUMENTS, cache=cache)
    assert done.returncode == 1 and not (tmp_path / "none").exists()


def test_prune_frees_the_cache(tmp_path, cache):
    root, bundle = root_for(tmp_path), tmp_path / "kernels.bundle"
    assert tileops("export", str(bundle), cache=cache, TILEOPS_ARTIFACT_PATH=str(root)).returncode == 0
    assert tileops("import", str(bundle), cache=cache).returncode == 0
    before = len([p for p in (cache / "v1").iterdir() if not p.name.startswith(".")])
    done = tileops("prune", "--max-size", "10k", "--json", cache=cache)
    answer = json.loads(done.stdout)
    assert done.returncode == 0 and answer["removed"] + answer["kept"] == before and answer["kept_bytes"] <= 10_000 < answer["removed_bytes"]


def doctor(cache: Path | None, *arguments: str, **more):
    done = tileops("doctor", "--json", *arguments, cache=cache, **more)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, json.loads(done.stdout)


def test_doctor_on_a_sound_machine_without_gpu(tmp_path, cache):
    root = root_for(tmp_path)
    status, report = doctor(cache, TILEOPS_ARTIFACT_PATH=str(root))
    assert status == 0 and report["problems"] == []
    assert report["policy"] == "auto" and report["cache"]["exists"] is False
    assert any(r["root"] == f"site {root}" and r["artifacts"] > 10 for r in report["roots"])
    assert not cache.exists(), "doctor wrote something"


@pytest.mark.skipif(os.getuid() != 0, reason="giving a folder to another user needs root")
def test_doctor_names_a_cache_of_another_owner(cache):
    cache.mkdir(mode=0o700)
    os.chown(cache, 12345, 12345)
    status, report = doctor(cache)
    assert status == 1 and report["cache"]["owner"] == "12345"
    assert any("owner" in p["problem"] or "12345" in p["problem"] for p in report["problems"]), report["problems"]


def test_doctor_names_a_world_writable_cache(cache):
    cache.mkdir()
    cache.chmod(0o777)
    status, report = doctor(cache)
    assert status == 1 and report["cache"]["mode"] == "777" and "write" in report["problems"][0]["problem"]


def test_doctor_without_home_torch_and_cuda_bindings(tmp_path):
    code = "sys.modules.update(dict.fromkeys(('torch', 'cuda', 'cuda.bindings')))"
    status, report = doctor(None, code=code, HOME="/nonexistent")
    assert status in (0, 1)
    assert report["cache"]["path"].startswith("/nonexistent") and report["gpus"] == []


def test_doctor_with_a_corrupt_root_and_a_bad_policy(tmp_path, cache):
    root = root_for(tmp_path)
    damage_cut(root)
    status, report = doctor(cache, TILEOPS_ARTIFACT_PATH=str(root), TILEOPS_POLICY="sometimes", TILEOPS_CACHE="x")
    assert status == 3
    text = json.dumps(report["problems"])
    assert "sometimes" in text and "TILEOPS_CACHE is no variable" in text and "faults" in text


def test_doctor_of_a_half_broken_package_still_reports_the_rest(tmp_path, cache):
    """A copy of the package without its store's index code and its models: the other sections stand."""
    copy = tmp_path / "broken"
    shutil.copytree(helpers.REPOSITORY / "tileops", copy / "tileops", ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "tileops" / "models.py").write_text("raise ImportError('half an installation')\n")
    env = {**helpers.environment(cache), "PYTHONPATH": str(copy)}
    done = subprocess.run([sys.executable, "-m", "tileops", "doctor", "--json"], capture_output=True, text=True, env=env, cwd=tmp_path)
    report = json.loads(done.stdout)
    assert any("half an installation" in p["problem"] for p in report["problems"])
    assert "roots" in report and "cache" in report


def test_reader_that_leaves_early_is_no_error(tmp_path, cache):
    command = f"{sys.executable} -m tileops list --models | head -n 1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, env=helpers.environment(cache))
    assert "Traceback" not in done.stderr and "BrokenPipe" not in done.stderr
