"""What holds for every verb: help, statuses, usage errors, JSON, a reader that leaves, and what is imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from helpers_cli import VALUES, Command

from tileops import errors
from tileops.cli import VERBS, _arguments, _exit


def modules(command: Command, *arguments: str) -> set[str]:
    """The modules in a process after the command has run in it."""
    code = (
        "import sys; from tileops.cli import main; status = main(sys.argv[1:]); print(); print('modules', *sys.modules); sys.exit(status)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], env=command.environment(), cwd=command.cwd, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split())


def test_help_names_every_verb_and_imports_nothing_heavy(tileops):
    done = tileops("--help")
    assert done.status == 0 and not done.err
    for verb in VERBS:
        assert f"\n  {verb} " in done.out
    loaded = modules(tileops, "--help")
    assert "tileops.cli" in loaded
    assert not {"torch", "tilelang", "tvm", "cuda", "numpy", "tileops.driver", "tileops.store"} & loaded


@pytest.mark.parametrize("arguments", [["list"], ["verify"], ["prune", "--older-than", "1d"], ["warm", *VALUES], ["explain", *VALUES]])
def test_no_verb_imports_torch_or_tilelang_unless_it_compiles(tileops, site, monkeypatch, arguments):
    monkeypatch.setattr(tileops, "environment", lambda real=tileops.environment: real(TILEOPS_ARTIFACT_PATH=str(site)))
    loaded = modules(tileops, *arguments)
    assert "tileops.store" in loaded and not {"torch", "tilelang", "tvm", "numpy"} & loaded


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_a_verb(tileops, verb):
    done = tileops(verb, "--help")
    assert done.status == 0 and "--json" in done.out and "exit status: 0 fine" in done.out


def test_version(tileops):
    done = tileops("--version")
    assert done.status == 0 and done.out.startswith("tileops ")


USAGE = {
    "no verb": ([], "usage: tileops"),
    "unknown verb": (["wram"], "wram"),
    "unknown option": (["list", "--all"], "--all"),
    "no model": (["warm"], "--model NAME"),
    "unknown preset": (["warm", "--model", "mamba3", "--arch", "sm_80"], "mamba2-130m"),
    "unknown arch": (["warm", "--model", "mamba2-130m", "--arch", "sm_75"], "sm_80, sm_86"),
    "values alone": (["warm", "--chunk-size", "64", "--arch", "sm_80"], "--head-dim, --d-state missing"),
    "a value that no kernel has": (["warm", "--chunk-size", "100", "--head-dim", "64", "--d-state", "64", "--arch", "sm_80"], "Q=100"),
    "a dtype that no kernel has": (["warm", *VALUES, "--dtype", "float32"], "float16 and bfloat16"),
    "not a dtype": (["warm", *VALUES, "--dtype", "int7"], "int7"),
    "no GPU and no arch": (["warm", "--model", "mamba2-130m"], "--arch, of sm_80"),
    "--only that chooses nothing": (["warm", *VALUES, "--only", "chunk_sacn"], "chunk_sacn"),
    "no jobs": (["warm", *VALUES, "--jobs", "0"], "positive"),
    "a config that is not there": (["warm", "--config", "missing.json", "--arch", "sm_80"], "missing.json"),
    "explain nothing": (["explain"], "FIELD=VALUE"),
    "explain two things": (["explain", "recurrent", "--model", "mamba2-130m", "--arch", "sm_80"], "either"),
    "unknown kernel": (["explain", "scan", "--arch", "sm_80"], "chunk_scan"),
    "unknown field": (["explain", "recurrent", "Q=64", "--arch", "sm_80"], "tied=..."),
    "a field's value": (["explain", "recurrent", "P=7", "--arch", "sm_80"], "16, 32 ... 256"),
    "a field twice": (["explain", "recurrent", "P=64", "P=64", "--arch", "sm_80"], "P is given twice"),
    "too many kernels": (["explain", "chunk_scan", "--arch", "sm_80"], "say more of"),
    "prune by nothing": (["prune"], "--max-size"),
    "not a size": (["prune", "--max-size", "big"], "500M"),
    "not an age": (["prune", "--older-than", "3 fortnights"], "30d"),
    "no bundle": (["import", "missing.bundle"], "missing.bundle"),
    "no such root": (["list", "--root", "attic"], "packaged (tileops)"),
}


@pytest.mark.parametrize("case", USAGE)
def test_usage_errors_say_what_was_expected(tileops, case):
    arguments, expected = USAGE[case]
    done = tileops(*arguments)
    assert done.status == 2 and not done.out
    assert expected in done.err
    assert not tileops.cache.exists()


@pytest.mark.parametrize(
    "arguments",
    [
        *(["warm"], ["explain", "scan"], ["import", "missing"]),
        # Those that argparse refuses: before, after and without a verb.
        *(["list", "--all"], ["import"], ["warm", "--jobs", "0"], ["warm", "--arch"], ["wram"], ["--all"], []),
    ],
)
def test_a_verb_that_fails_still_prints_one_json_object(tileops, arguments):
    done = tileops(*arguments, "--json")
    assert done.status == 2 and done.json["kind"] == "UsageError"
    assert done.json["error"] in done.err


def test_a_setting_that_is_not_understood(tileops):
    done = tileops("warm", *VALUES, "--check", TILEOPS_POLICY="sometimes")
    assert done.status == 2 and len(done.err.splitlines()) == 1 and "auto, cached, packaged" in done.err


def test_errors_have_the_statuses_that_the_help_names():
    expected = {
        errors.MissingKernelError: 1,
        errors.CompileError: 1,
        errors.TileOpsError: 1,
        OSError: 1,
        errors.SettingError: 2,
        _exit.UsageError: 2,
        errors.CorruptArtifactError: 3,
        errors.IncompatibleArtifactError: 4,
        errors.DriverError: 4,
    }
    assert {kind: _exit.of_error(kind("x")) for kind in expected} == expected
    assert [_exit.worst(s) for s in ([], [0, 1], [1, 4, 2], [1, 4, 3])] == [0, 1, 4, 3]


@pytest.mark.parametrize("arguments", [["list"], ["list", "--json"], ["--help"], ["explain", *VALUES]])
def test_a_reader_that_leaves_early_is_no_error(tileops, arguments):
    reads, writes = os.pipe()
    os.close(reads)
    line, env = tileops.line(*arguments), tileops.environment()
    try:
        done = subprocess.run(line, env=env, stdout=writes, stderr=subprocess.PIPE, text=True, timeout=60)
    finally:
        os.close(writes)
    assert (done.returncode, done.stderr) == (_exit.CLOSED, "")


def test_stdout_may_be_closed(tileops):
    line = ["sh", "-c", 'exec "$@" >&-', "sh", *tileops.line("list")]
    done = subprocess.run(line, env=tileops.environment(), capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_path_that_the_terminal_cannot_show(tileops, tmp_path):
    place = os.fsencode(tmp_path) + b"/caf\xe9"
    for encoding in ("ascii", "utf-8"):
        done = tileops("list", "--totals", TILEOPS_ARTIFACT_PATH=os.fsdecode(place), PYTHONIOENCODING=f"{encoding}:strict")
        assert done.status == 1 and "caf" in done.out
    assert json.loads(tileops("list", "--json", TILEOPS_ARTIFACT_PATH=os.fsdecode(place)).out)["roots"][1]["path"] == os.fsdecode(place)


def test_sizes_and_ages_are_read_as_people_write_them():
    assert [_arguments.size(t) for t in ("0", "500M", "2G", "1.5GiB", "10 kB", "1Ki")] == [0, 500_000_000, 2 * 10**9, 3 << 29, 10_000, 1024]
    assert [_arguments.age(t) for t in ("45s", "90m", "12h", "30d", "2w", "1.5h")] == [45, 5400, 43200, 2592000, 1209600, 5400]
    assert [_arguments.dtype(t) for t in ("bf16", "torch.float16", "half", "BFloat16")] == ["bfloat16", "float16", "float16", "bfloat16"]
