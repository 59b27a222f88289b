"""Kernels before the first call: preload of an op and of a model, what it reports, and what a miss says."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

import tileops  # noqa: E402
from tileops import mamba  # noqa: E402


def inputs(d_head=64, d_state=128):
    x = torch.randn(1, 300, 4, d_head, device="cuda").bfloat16()
    dt = torch.randn(1, 300, 4, device="cuda")
    A = -torch.rand(4, device="cuda")
    B = torch.randn(1, 300, 1, d_state, device="cuda").bfloat16()
    return x, dt, A, B, B


def test_an_op_preloads_what_a_call_then_uses():
    op = mamba.Mamba2FwdOp(128)
    loaded = op.preload(dtype=torch.bfloat16, d_head=64, d_state=128)
    assert loaded.device == torch.device("cuda", torch.cuda.current_device())
    assert loaded.count >= 5 and loaded.bytes > loaded.count * 1000 and loaded.milliseconds > 0
    before = tileops.stats()
    op(*inputs())
    after = tileops.stats()
    assert after["loads"] == before["loads"] and after["misses"] == before["misses"], "the call still had to look for a kernel"


def test_a_model_is_preloaded_by_its_name():
    first = tileops.preload("mamba2-130m")
    again = tileops.preload(chunk_size=256, d_head=64, d_state=128)
    assert first.count == again.count > 10 and first.bytes == again.bytes


def test_preload_of_a_model_that_is_not_there_names_the_command():
    with tileops.policy("cached"), pytest.raises(tileops.errors.MissingKernelError) as caught:
        tileops.preload(chunk_size=16, d_head=256, d_state=256, dtype="float16")
    error = caught.value
    assert "tileops warm" in error.command and "--d-state 256" in error.command and error.command in str(error)
    assert error.roots and error.nearest and error.differs


def test_a_call_whose_kernel_is_missing_is_refused_before_any_launch():
    x, _, _, B, _ = inputs(d_head=240, d_state=240)
    with tileops.policy("cached"), pytest.raises(tileops.errors.MissingKernelError, match="P=240"):
        mamba.SSDChunkStateFwdOp()(x, B, torch.rand(1, 4, 3, 128, device="cuda"), -torch.rand(1, 4, 3, 128, device="cuda"))
    torch.cuda.synchronize()


def test_preload_refuses_names_that_are_no_compile_time_values():
    with pytest.raises(ValueError, match="batch"):
        mamba.Mamba2FwdOp(256).preload(batch=3)
    with pytest.raises(ValueError, match="chunk_size"):
        tileops.preload(d_head=64)


def test_a_driver_that_is_too_old_is_told_before_a_load():
    from dataclasses import replace

    from tileops import catalog, driver, store

    index = torch.cuda.current_device()
    info = driver.device_info(index)
    arch = catalog.archs_for(*info.capability)[0]
    record = store.matching("state_passing", arch)[0]
    driver.check(record, info)
    with pytest.raises(tileops.errors.IncompatibleArtifactError, match=r"needs a driver for CUDA 99\.1.*update it"):
        driver.check(replace(record, min_driver=99010), info)
    with pytest.raises(tileops.errors.IncompatibleArtifactError, match="shared memory"):
        driver.check(replace(record, dynamic_smem=1 << 20), info)
    other = "sm_80" if info.capability[0] != 8 else "sm_90a"
    with pytest.raises(tileops.errors.IncompatibleArtifactError, match=f"is built for {other}.*{info.name}"):
        driver.check(replace(record, arch=other), info)


def test_bytes_that_are_no_cubin_become_our_error():
    from dataclasses import replace

    from tileops import catalog, driver, store
    from tileops.config import Artifact

    index = torch.cuda.current_device()
    arch = catalog.archs_for(*driver.device_info(index).capability)[0]
    record = replace(store.matching("state_passing", arch)[0], key="0" * 64)
    with pytest.raises(tileops.errors.DriverError, match="state_passing") as caught:
        driver.load(Artifact(record, b"\x7fELF" + bytes(5000)), index)
    assert not isinstance(caught.value, tileops.errors.OutOfMemoryError)
    torch.zeros(1, device="cuda").add_(1)  # the context is unharmed
    torch.cuda.synchronize()


@pytest.mark.parametrize(
    ("code", "kind", "words"),
    [
        (2, tileops.errors.OutOfMemoryError, "the artifact is fine"),
        (200, tileops.errors.DriverError, "tileops verify"),
        (209, tileops.errors.DriverError, "built for another GPU"),
        (222, tileops.errors.DriverError, "needs a newer driver"),
        (700, tileops.errors.DriverError, "must be restarted"),
        (719, tileops.errors.DriverError, "CUDA_ERROR_LAUNCH_FAILED"),
        (987654, tileops.errors.DriverError, "987654"),
    ],
)
def test_driver_errors_come_in_plain_words(code, kind, words):
    from tileops.driver import _api

    error = _api.failure("cuLibraryLoadData", code, "loading chunk_scan")
    assert type(error) is kind and not isinstance(error, tileops.errors.CorruptArtifactError)
    assert words in str(error) and "while loading chunk_scan" in str(error)
