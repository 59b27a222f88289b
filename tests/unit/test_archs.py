"""Which archs serve which GPU, by the capability of the tensors' device."""

from __future__ import annotations

import pytest

from tileops import catalog, driver
from tileops.driver import DeviceInfo
from tileops.errors import IncompatibleArtifactError
from tileops.ops import _resolve


def gpu(ordinal: int, capability: tuple[int, int]) -> DeviceInfo:
    return DeviceInfo(ordinal, f"GPU of {capability}", capability, 101376, 13000, 100)


@pytest.mark.parametrize(
    ("capability", "archs"),
    [
        ((8, 0), ("sm_80",)),
        ((8, 6), ("sm_86", "sm_80")),
        ((8, 9), ("sm_89", "sm_86", "sm_80")),
        ((9, 0), ("sm_90a",)),
        ((10, 0), ("sm_100a",)),
        ((12, 0), ("sm_120a",)),
    ],
)
def test_binary_compatibility(capability, archs):
    assert catalog.archs_for(*capability) == archs


@pytest.mark.parametrize("capability", [(7, 5), (10, 3), (12, 1), (11, 0), (13, 0)])
def test_reports_53_and_54_a_gpu_without_kernels_is_refused_by_name(monkeypatch, capability):
    monkeypatch.setattr(driver, "device_info", lambda device: gpu(device, capability))
    with pytest.raises(
        IncompatibleArtifactError, match=rf"device 0 is a GPU of .*{capability[0]}\.{capability[1]}.*sm_90a".replace("device", "[Dd]evice")
    ):
        _resolve.obtain("state_passing", {"aligned": False}, 0)


def test_reports_50_and_55_the_arch_follows_the_tensors_device(monkeypatch):
    """Two GPUs of different archs: which kernel is looked up depends on the ordinal that the tensors are on, and on nothing else."""
    infos = {0: gpu(0, (8, 0)), 1: gpu(1, (9, 0))}
    asked = []

    def find(config, toolchain=None):
        asked.append(config.arch)
        raise LookupError

    monkeypatch.setattr(driver, "device_info", infos.__getitem__)
    monkeypatch.setattr(_resolve.store, "find", find)
    for ordinal in (1, 0):
        with pytest.raises(LookupError):
            _resolve.obtain("state_passing", {"aligned": True}, ordinal)
    assert asked == ["sm_90a", "sm_80"]
