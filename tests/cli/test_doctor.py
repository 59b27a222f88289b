"""What doctor says of sound, bare and broken installations. What it says of a GPU is in test_cli_gpu.py."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import helpers_store as h
import pytest
from helpers_cli import Command, copy_package, tiny, write_site

from tileops import catalog, compiler, models
from tileops.cli import doctor
from tileops.store import write_packaged

SECTIONS = {"versions", "gpu", "driver", "policy", "settings", "compiler", "cache", "roots", "models", "torch"}

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="giving a folder to another user needs root")


def only_problem(done) -> dict:
    (problem,) = done.json["problems"]
    return problem


def test_a_sound_machine_without_a_gpu(tileops, site):
    done = tileops("doctor", "--json", TILEOPS_ARTIFACT_PATH=str(site))
    facts = done.json
    assert done.status == 0 and facts["problems"] == [] and SECTIONS <= set(facts)
    assert facts["gpu"]["gpus"] == [] and facts["gpu"]["reason"]
    assert facts["policy"]["policy"] == "auto" and facts["settings"]["TILEOPS_ARTIFACT_PATH"] == str(site)
    assert facts["cache"]["path"] == str(tileops.cache) and (facts["cache"]["exists"], facts["cache"]["unwritable"]) == (False, "")
    assert {root["kind"]: root["kernels"] for root in facts["roots"]} == {"packaged": 0, "site": len(tiny()), "cache": 0}
    assert facts["compiler"]["name"] == compiler.toolchain_name()
    assert facts["torch"]["version"]
    text = tileops("doctor", TILEOPS_ARTIFACT_PATH=str(site))
    assert text.status == 0 and text.out.rstrip().endswith("nothing is wrong.")
    assert "not known" not in text.out and max(map(len, text.out.splitlines())) <= 120
    for section in ("versions", "torch", "gpu", "driver", "policy", "settings", "compiler", "cache", "roots", "models"):
        assert re.search(rf"^{section} ", text.out, re.MULTILINE), section
    assert not tileops.cache.exists()


def test_coverage_counts_what_each_model_needs(tileops, tmp_path):
    whole = models.preset("zamba2-7b").kernels(["sm_80"])
    place = write_site(tmp_path / "site", whole)
    done = tileops("doctor", "--json", TILEOPS_ARTIFACT_PATH=str(place))
    listed = done.json["models"]["models"]
    assert listed[0]["model"] == "zamba2-7b" and {model["model"] for model in listed} == set(models.PRESETS)
    assert listed[0]["coverage"]["sm_80"] == {"there": len(whole), "needed": len(whole)}
    assert listed[0]["coverage"]["sm_90a"]["there"] == 0
    held = {config.key for config in whole}
    for model in listed:
        wanted = models.preset(model["model"]).kernels(["sm_80"])
        assert model["coverage"]["sm_80"] == {"there": sum(c.key in held for c in wanted), "needed": len(wanted)}
    line = next(line for line in tileops("doctor", TILEOPS_ARTIFACT_PATH=str(place)).out.splitlines() if "zamba2-7b" in line)
    assert line.split()[0] == f"{len(whole)}/{len(whole)}"
    # A policy without the user cache, and kernels that lie only there.
    bundle = tmp_path / "bundle"
    assert tileops("export", bundle, TILEOPS_ARTIFACT_PATH=str(place)).status == 0
    if compiler.toolchain_name() is None:
        assert tileops("import", bundle).status == 0
        done = tileops("doctor", "--json", TILEOPS_POLICY="packaged")
        assert all(count["there"] == 0 for model in done.json["models"]["models"] for count in model["coverage"].values())


@pytest.mark.parametrize(
    ("models_there", "policy", "name", "words"),
    [
        (2, "auto", "nvrtc", "Usable: CUDA tensors run on GPU with sm_80 kernels; nothing is wrong."),
        (
            1,
            "auto",
            "nvrtc",
            "Usable: .*; 1 of the 2 models above have all of theirs, what the others lack is compiled at their first calls; ",
        ),
        (
            1,
            "auto",
            None,
            "Usable in part: .*; 1 of the 2 models above have all of theirs, calls of the others can raise MissingKernelError; ",
        ),
        (0, "cached", "nvrtc", "Usable in part: .*; 0 of the 2 models above .* can raise MissingKernelError; "),
    ],
)
def test_the_last_line_says_what_becomes_of_models_without_all_kernels(tileops, models_there, policy, name, words):
    facts = tileops("doctor", "--json").json
    gpu = {"ordinal": 0, "name": "GPU", "capability": "8.0", "archs": ["sm_80"], "arch": "sm_80"}
    shown = [
        {**m, "coverage": {"sm_80": {"there": 34 - (i >= models_there), "needed": 34}}} for i, m in enumerate(facts["models"]["models"][:2])
    ]
    facts |= {"gpu": {"gpus": [gpu]}, "policy": {**facts["policy"], "policy": policy}, "compiler": {"name": name, "reason": "none"}}
    facts["models"]["models"] = shown
    *_, last = doctor._lines(facts, [], 0)
    assert re.match(words, last)


def test_without_home_and_without_a_cache_setting(tileops):
    done = tileops("doctor", "--json", drop=("HOME", "TILEOPS_CACHE_DIR"))
    assert done.status == 0 and done.json["cache"]["path"].endswith("/tileops")


@root_only
def test_without_home_for_a_user_without_a_passwd_entry(package, tmp_path):
    place = Path(os.path.realpath(tmp_path))
    code = (
        "import sys, os, argparse; from tileops.cli import main, _probes, _cache, doctor; import tileops.store, platformdirs, json\n"
        "from tileops.cli import _wanted; import tileops.models, tileops.driver, tileops.compiler\n"
        "os.chdir('/'); os.setgid(54321); os.setuid(54321); sys.exit(main(['doctor', '--json', '--no-verify']))"
    )
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(package), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", code], env=env, cwd=place, capture_output=True, text=True, timeout=120)
    assert "Traceback" not in done.stderr
    import json

    facts = json.loads(done.stdout)
    assert facts["cache"]["path"] is None and "no home folder" in facts["cache"]["refused"]
    assert any("There is no user cache" in each["what"] and "TILEOPS_CACHE_DIR" in each["remedy"] for each in facts["problems"])


def test_a_cache_that_anyone_can_write(tileops):
    tileops.cache.mkdir()
    tileops.cache.chmod(0o777)
    done = tileops("doctor", "--json")
    assert done.status == 1 and done.json["cache"]["mode"] == "0777"
    assert "can be written by other users" in only_problem(done)["what"] and "TILEOPS_CACHE_DIR" in only_problem(done)["remedy"]
    assert "refused" in tileops("doctor").out


@root_only
def test_a_cache_of_another_owner(tileops):
    tileops.cache.mkdir(mode=0o700)
    os.chown(tileops.cache, 54321, 54321)
    done = tileops("doctor", "--json")
    assert done.status == 1 and done.json["cache"]["owner"] == "uid 54321" and "belongs to uid 54321" in only_problem(done)["what"]


@pytest.mark.skipif(shutil.which("mount") is None or os.geteuid() != 0, reason="a read-only mount needs root")
def test_a_cache_on_a_read_only_disk(tileops):
    tileops.cache.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "ro,mode=700", "tmpfs", str(tileops.cache)], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"mounting a tmpfs is not possible here: {made.stderr.strip()}")
    try:
        done = tileops("doctor", "--json")
        # It can be read, which is how a fleet may share it: worth knowing, and no fault.
        assert done.status == 0 and "read-only file system" in only_problem(done)["what"]
        assert "not writable" in tileops("doctor").out
    finally:
        subprocess.run(["umount", "-l", str(tileops.cache)], check=True)


def test_a_cache_folder_that_is_a_file(tileops):
    tileops.cache.write_text("")
    done = tileops("doctor", "--json")
    assert done.status == 1 and "Not a directory" in only_problem(done)["what"]


def test_a_corrupt_root(tileops, site):
    cubin = next((site / "sm_80").glob("*.cubin"))
    cubin.write_bytes(cubin.read_bytes()[:-1])
    done = tileops("doctor", "--json", TILEOPS_ARTIFACT_PATH=str(site))
    assert done.status == 3 and str(cubin) in only_problem(done)["what"] and only_problem(done)["remedy"] == "copy or import it again"
    assert tileops("doctor", "--no-verify", TILEOPS_ARTIFACT_PATH=str(site)).status == 0


def test_roots_that_are_not_there_or_refused(tileops, site):
    done = tileops("doctor", "--json", TILEOPS_ARTIFACT_PATH=str(site.parent / "nowhere"))
    assert done.status == 1 and "the folder does not exist" in only_problem(done)["what"]
    site.chmod(0o777)
    done = tileops("doctor", "--json", TILEOPS_ARTIFACT_PATH=str(site))
    assert done.status == 1 and "any user can write it" in only_problem(done)["what"]


def test_settings_that_are_not_understood(tileops):
    done = tileops("doctor", "--json", TILEOPS_POLICY="sometimes")
    assert done.status == 2 and "'sometimes'" in only_problem(done)["what"] and SECTIONS <= set(done.json)
    done = tileops("doctor", "--json", TILEOPS_CACHEDIR="/x")
    assert done.status == 0 and only_problem(done)["remedy"] == "did you mean TILEOPS_CACHE_DIR?"


def test_a_policy_says_where_it_comes_from(tileops):
    policy = tileops("doctor", "--json", TILEOPS_POLICY="packaged").json["policy"]
    assert policy == {
        "policy": "packaged",
        "source": "TILEOPS_POLICY",
        "meaning": "nothing is compiled, and the user cache is not used",
    }


@pytest.mark.parametrize(
    "text, words", [("raise ImportError('libcudart is not here')", "libcudart is not here"), ("import os; os._exit(9)", "status 9")]
)
def test_torch_that_cannot_be_imported(tileops, tmp_path, text, words):
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "torch.py").write_text(text + "\n")
    done = tileops("doctor", "--json", PYTHONPATH=str(tmp_path / "lib"))
    assert done.status == 1 and words in only_problem(done)["what"] and SECTIONS <= set(done.json)


def test_cuda_bindings_that_cannot_be_imported(tileops, tmp_path):
    (tmp_path / "lib" / "cuda").mkdir(parents=True)
    (tmp_path / "lib" / "cuda" / "__init__.py").write_text("raise ImportError('broken')\n")
    done = tileops("doctor", "--json", PYTHONPATH=str(tmp_path / "lib"))
    assert done.status == 1 and done.json["gpu"]["reason"].startswith("cuda-bindings cannot be imported")
    assert "cuda-bindings" in only_problem(done)["what"]


#: what is broken -> (file, its new text, a section that still stands)
BROKEN = {
    "models": ("models.py", "raise ImportError('half an installation')\n", "roots"),
    "the store": ("store/lookup.py", "def broken(:\n", "gpu"),
    "the driver": ("driver/__init__.py", "raise RuntimeError('no driver module')\n", "roots"),
    "the compiler": ("compiler/toolchain.py", "import missing_module_of_tileops\n", "gpu"),
    "the operators": ("mamba.py", "raise ImportError('no operators')\n", "roots"),
    "a kernel's source": ("kernels/recurrent.py", None, "cache"),
}


@pytest.mark.parametrize("part", BROKEN)
def test_a_half_broken_package(tmp_path, part):
    package = copy_package(tmp_path / "package")
    name, text, stands = BROKEN[part]
    path = package / "tileops" / name
    path.unlink() if text is None else path.write_text(text)
    tileops = Command(package, tmp_path)
    done = tileops("doctor", "--json")
    assert done.status == 1 and done.json[stands] and len(done.json["problems"]) >= 1
    text_form = tileops("doctor")
    assert text_form.status == 1 and "Traceback" not in text_form.out and "problem 1" in text_form.out


def test_a_broken_artifact_package_is_named(tileops, tmp_path):
    info = tmp_path / "lib" / "kernels_of_acme-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kernels-of-acme\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[tileops.artifacts]\nacme = acme_kernels\n")
    done = tileops("doctor", "--json", PYTHONPATH=str(tmp_path / "lib"))
    assert done.status == 1 and "kernels-of-acme 1.0" in only_problem(done)["what"]
    (tmp_path / "lib" / "acme_kernels").mkdir()
    (tmp_path / "lib" / "acme_kernels" / "__init__.py").touch()
    write_packaged(tmp_path / "lib" / "acme_kernels", [h.artifact(catalog.config("state_passing", "sm_80", aligned=True))])
    done = tileops("doctor", "--json", PYTHONPATH=str(tmp_path / "lib"))
    assert done.status == 0 and [r["kernels"] for r in done.json["roots"] if "acme" in r["name"]] == [1]
