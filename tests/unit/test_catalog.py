"""Kernels that exist for some archs only: nobody makes a config of them for another arch."""

from __future__ import annotations

import pytest

from tileops import catalog

MODEL = {"chunk_size": 256, "head_dim": 64, "d_state": 128, "dtype": "bfloat16"}


def test_a_config_for_an_arch_that_lacks_the_kernel_is_refused():
    assert catalog.config("fused_clear", "sm_90a").arch == "sm_90a"
    with pytest.raises(ValueError, match="fused_clear exists for sm_90a only, not for sm_80"):
        catalog.config("fused_clear", "sm_80")


def test_a_model_needs_on_each_arch_what_exists_there():
    found = {arch: {config.kernel for config in catalog.for_model(**MODEL, archs=[arch])} for arch in catalog.ARCHS}
    assert found["sm_90a"] == set(catalog.KERNELS)
    assert found["sm_80"] == found["sm_120a"] == set(catalog.KERNELS) - set(catalog.ONLY_ON)
    everywhere = catalog.for_model(**MODEL, archs=catalog.ARCHS)
    assert {config.arch for config in everywhere if config.kernel == "fused_main"} == {"sm_90a"}


def test_cb_is_float32_where_dt_is_too():
    def found(**partial):
        return {(values["dt_dtype"], values["cb_float32"]) for values in catalog.expand("chunk_scan", {"dtype": "float16", **partial})}

    assert found() == {("float32", False), ("float16", False), ("float32", True)}
    assert found(cb_float32=True) == {("float32", True)} and found(dt_dtype="float16") == {("float16", False)}
    assert found(dt_dtype="float16", cb_float32=True) == {("float16", True)}
    assert {values["cb_float32"] for values in catalog.expand("chunk_coupling", {"Q": 64})} == {False, True}


def test_only_on_names_kernels_and_archs_that_exist():
    for kernel, archs in catalog.ONLY_ON.items():
        assert kernel in catalog.KERNELS and archs and set(archs) <= set(catalog.ARCHS)
