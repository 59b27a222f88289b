"""The command on a machine with an NVIDIA GPU: which archs are meant when none is given, and what doctor says."""

from __future__ import annotations

import pytest
from helpers_cli import TINY, write_site

from tileops import catalog, driver

pytestmark = pytest.mark.gpu

VALUES = ("--chunk-size", "16", "--head-dim", "16", "--d-state", "16")


@pytest.fixture
def seen(tileops, monkeypatch):
    """The command with the GPUs visible. HOME is not the watched folder: NVIDIA's driver makes ``.nv`` there."""
    hidden = tileops.environment

    def shown(**more):
        env = {**hidden(**more), "HOME": str(tileops.cwd.parent / "home")}
        del env["CUDA_VISIBLE_DEVICES"]
        return env

    monkeypatch.setattr(tileops, "environment", shown)
    return tileops


def test_the_arch_of_the_gpu_is_meant(seen, tmp_path):
    arch = catalog.archs_for(*driver.device_info(0).capability)[0]
    wanted = catalog.for_model(**TINY, archs=[arch])
    done = seen("warm", "--check", *VALUES, "--json")
    assert done.status == 1 and {each["key"] for each in done.json["missing"]} == {config.key for config in wanted}
    place = write_site(tmp_path / "site", wanted)
    assert seen("warm", "--check", *VALUES, TILEOPS_ARTIFACT_PATH=str(place)).status == 0
    assert seen("explain", *VALUES, TILEOPS_ARTIFACT_PATH=str(place)).status == 0
    assert seen("export", tmp_path / "bundle", *VALUES, TILEOPS_ARTIFACT_PATH=str(place)).status == 0


@pytest.mark.parametrize("change, words", [({"min_driver": 99000}, "CUDA 99.0"), ({"dynamic_smem": 1 << 20}, "bytes of shared memory")])
def test_what_the_driver_or_gpu_cannot_run_is_status_4(seen, tmp_path, change, words):
    arch = catalog.archs_for(*driver.device_info(0).capability)[0]
    place = write_site(tmp_path / "site", catalog.for_model(**TINY, archs=[arch]), **change)
    for verb in (["warm", "--check"], ["explain"]):
        done = seen(*verb, *VALUES, TILEOPS_ARTIFACT_PATH=str(place))
        assert done.status == 4 and words in done.out


def test_doctor_names_gpu_driver_and_arch(seen, tmp_path):
    info = driver.device_info(0)
    place = write_site(tmp_path / "site", catalog.for_model(**TINY, archs=[catalog.archs_for(*info.capability)[0]]))
    done = seen("doctor", "--json", TILEOPS_ARTIFACT_PATH=str(place))
    gpu = done.json["gpu"]["gpus"][0]
    assert (gpu["name"], gpu["arch"]) == (info.name, catalog.archs_for(*info.capability)[0])
    assert (
        done.json["driver"]["cuda"] == f"{info.driver // 1000}.{info.driver % 1000 // 10}" and "libcuda" in done.json["driver"]["libcuda"]
    )
    assert done.status == 0 and done.json["torch"]["gpus"] >= 1 and list(done.json["models"]["models"][0]["coverage"]) == [gpu["arch"]]
    text = seen("doctor", TILEOPS_ARTIFACT_PATH=str(place))
    assert info.name in text.out and f"with {gpu['arch']} kernels" in text.out
