"""Presets, and config.json files in each family's own key names."""

import json

import pytest

from tileops import catalog
from tileops.models import FAMILIES, PRESETS, preset, read_config

#: model_type -> (config as the family writes it, (P, N, Q, H, G))
CONFIGS = {
    "mamba2": (
        {"num_heads": 128, "head_dim": 64, "state_size": 128, "n_groups": 8, "chunk_size": 256, "expand": 2, "hidden_size": 4096},
        (64, 128, 256, 128, 8),
    ),
    # expand * hidden_size = 6272 is not H * P: expand is inert in this family.
    "nemotron_h": (
        {
            "mamba_num_heads": 96,
            "mamba_head_dim": 80,
            "ssm_state_size": 128,
            "n_groups": 8,
            "chunk_size": 128,
            "expand": 2,
            "hidden_size": 3136,
        },
        (80, 128, 128, 96, 8),
    ),
    "falcon_h1": (
        {
            "mamba_n_heads": 32,
            "mamba_d_head": 128,
            "mamba_d_state": 256,
            "mamba_n_groups": 2,
            "mamba_chunk_size": 256,
            "mamba_d_ssm": 4096,
            "mamba_expand": 2,
            "hidden_size": 5120,
        },
        (128, 256, 256, 32, 2),
    ),
    "granitemoehybrid": (
        {
            "mamba_n_heads": 48,
            "mamba_d_head": 32,
            "mamba_d_state": 128,
            "mamba_n_groups": 1,
            "mamba_chunk_size": 256,
            "mamba_expand": 2,
            "hidden_size": 768,
        },
        (32, 128, 256, 48, 1),
    ),
    "bamba": (
        {
            "mamba_n_heads": 128,
            "mamba_d_head": "auto",
            "mamba_d_state": 128,
            "mamba_n_groups": 1,
            "mamba_chunk_size": 256,
            "mamba_expand": 2,
            "hidden_size": 4096,
        },
        (64, 128, 256, 128, 1),
    ),
    "zamba2": (
        {
            "n_mamba_heads": 112,
            "mamba_headdim": 64,
            "mamba_d_state": 64,
            "mamba_ngroups": 2,
            "chunk_size": 256,
            "mamba_expand": 2,
            "hidden_size": 3584,
        },
        (64, 64, 256, 112, 2),
    ),
    "plamo2": (
        {"mamba_num_heads": 64, "hidden_size_per_head": 128, "mamba_d_state": 64, "mamba_chunk_size": 256, "hidden_size": 4096},
        (128, 64, 256, 64, 1),
    ),
}


def write(tmp_path, data):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(data))
    return path


def values(model):
    return (model.head_dim, model.d_state, model.chunk_size, model.n_heads, model.n_groups)


def test_every_family_has_a_config_here():
    assert set(CONFIGS) == set(FAMILIES)


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("dtype_key", ["torch_dtype", "dtype"])
def test_reads_each_family(tmp_path, kind, dtype_key):
    data, expected = CONFIGS[kind]
    model = read_config(write(tmp_path, {"model_type": kind, dtype_key: "float16", **data}))
    assert values(model) == expected
    assert model.dtype == "float16"
    assert model.name == tmp_path.name


@pytest.mark.parametrize("kind", CONFIGS)
def test_names_the_key_that_is_missing_or_malformed(tmp_path, kind):
    data, _ = CONFIGS[kind]
    family = FAMILIES[kind]
    for key in filter(None, (family.n_heads, family.d_state, family.n_groups, family.chunk_size)):
        without = {k: v for k, v in data.items() if k != key}
        with pytest.raises(ValueError, match=f"{key} is missing"):
            read_config(write(tmp_path, {"model_type": kind, **without}))
        for bad in (0, -1, "256", True, 64.0, None):
            with pytest.raises(ValueError, match=f"{key} is "):
                read_config(write(tmp_path, {"model_type": kind, **data, key: bad}))


@pytest.mark.parametrize("kind", ["mamba2", "nemotron_h", "plamo2"])
def test_head_dim_is_never_derived_where_expand_may_be_inert(tmp_path, kind):
    data = {k: v for k, v in CONFIGS[kind][0].items() if k != FAMILIES[kind].head_dim}
    with pytest.raises(ValueError, match=f"{FAMILIES[kind].head_dim} is missing"):
        read_config(write(tmp_path, {"model_type": kind, **data}))


@pytest.mark.parametrize("kind", ["falcon_h1", "granitemoehybrid", "bamba", "zamba2"])
@pytest.mark.parametrize("given", ["auto", None])
def test_automatic_head_dim(tmp_path, kind, given):
    data, expected = CONFIGS[kind]
    assert read_config(write(tmp_path, {"model_type": kind, **data, FAMILIES[kind].head_dim: given})).head_dim == expected[0]


def test_automatic_head_dim_without_mamba_d_ssm_and_with_a_remainder(tmp_path):
    data = {**CONFIGS["falcon_h1"][0], "mamba_d_head": "auto", "mamba_d_ssm": None}
    assert read_config(write(tmp_path, {"model_type": "falcon_h1", **data})).head_dim == 2 * 5120 // 32
    with pytest.raises(ValueError, match="is not a multiple of mamba_n_heads"):
        read_config(write(tmp_path, {"model_type": "falcon_h1", **data, "mamba_n_heads": 33}))


def test_original_format_with_and_without_its_defaults(tmp_path):
    model = read_config(write(tmp_path, {"d_model": 2560, "n_layer": 64, "ssm_cfg": {"layer": "Mamba2"}}))
    assert values(model) == (64, 128, 256, 80, 1)
    assert model.dtype is None
    cfg = {"layer": "Mamba2", "headdim": 128, "d_state": 64, "ngroups": 2, "chunk_size": 128, "expand": 4}
    assert values(read_config(write(tmp_path, {"d_model": 1024, "ssm_cfg": cfg}))) == (128, 64, 128, 32, 2)
    assert read_config(write(tmp_path, {"d_model": 1024, "ssm_cfg": {**cfg, "d_ssm": 1024}})).n_heads == 8
    with pytest.raises(ValueError, match="only Mamba2"):
        read_config(write(tmp_path, {"d_model": 768, "ssm_cfg": {}}))


def test_a_file_that_is_not_called_config_json_gives_its_own_name(tmp_path):
    data, _ = CONFIGS["nemotron_h"]
    (tmp_path / "mine.json").write_text(json.dumps({"model_type": "nemotron_h", **data}))
    assert read_config(tmp_path / "mine.json").name == "mine.json"


def test_folder_text_config_and_name(tmp_path):
    data, expected = CONFIGS["nemotron_h"]
    write(
        tmp_path,
        {
            "model_type": "wrapper",
            "torch_dtype": "bfloat16",
            "text_config": {"model_type": "nemotron_h", "_name_or_path": "org/model", **data},
        },
    )
    model = read_config(tmp_path)
    assert (values(model), model.dtype, model.name) == (expected, "bfloat16", "org/model")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "expected a JSON object"),
        ("{}", "model_type is None"),
        ('{"model_type": "llama"}', "model_type is 'llama'"),
        ('{"model_type": []}', "model_type"),
    ],
)
def test_refuses_what_is_no_mamba2_config(tmp_path, text, message):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_config(path)


def test_a_missing_file_is_an_oserror(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_config(tmp_path / "config.json")


def test_presets():
    assert values(preset("Mamba2-130M")) == (64, 128, 256, 24, 1)
    assert values(preset("plamo-2-8b")) == (128, 64, 256, 64, 1)
    assert preset("nemotron-h-47b").unconfirmed == ("chunk_size",)
    with pytest.raises(ValueError, match=r"mamba2-2\.7b"):
        preset("gpt-2")
    for name, model in PRESETS.items():
        assert model.name == name
        assert model.chunk_size in catalog.CHUNK_LENGTHS and model.head_dim in catalog.HEAD_DIMS and model.d_state in catalog.STATE_DIMS


def test_kernels_of_a_model():
    model = preset("mamba2-130m")
    wanted = model.kernels(["sm_90a"])
    assert wanted == catalog.for_model(chunk_size=256, head_dim=64, d_state=128, dtype="bfloat16", archs=["sm_90a"])
    assert {c.fields.get("dtype", "bfloat16") for c in wanted} == {"bfloat16"}
    assert {c.fields.get("dtype", "float16") for c in model.kernels(["sm_90a"], dtype="float16")} == {"float16"}


@pytest.mark.parametrize(("dtype", "message"), [("float32", "its dtype is float32"), (None, "names no dtype")])
def test_kernels_need_a_supported_dtype(tmp_path, dtype, message):
    data, _ = CONFIGS["bamba"]
    model = read_config(write(tmp_path, {"model_type": "bamba", "dtype": dtype, **data}))
    with pytest.raises(ValueError, match=message):
        model.kernels(["sm_90a"])
    assert model.kernels(["sm_90a"], dtype="bfloat16")
