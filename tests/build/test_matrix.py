"""The matrix: what it stands for, how it is narrowed down, and what is refused before anything is compiled."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from build_kernels import matrix
from build_kernels.__main__ import main
from tileops import catalog, models


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "matrix.toml"
    path.write_text(text)
    return path


def test_the_shipped_matrix_holds_every_kernel_of_every_preset():
    configs = matrix.load()
    keys = {config.key for config in configs}
    assert len(keys) == len(configs)
    for model in models.PRESETS.values():
        for dtype in catalog.DTYPES:
            assert {config.key for config in model.kernels(catalog.ARCHS, dtype)} <= keys, model.name


def test_blocks_archs_and_shared_kernels(tmp_path):
    path = write(
        tmp_path,
        """
        archs = ["sm_80", "sm_90a"]
        [[block]]
        models = ["mamba2-130m"]
        [[block]]
        models = ["mamba2-2.7b"]
        dtype = ["bfloat16", "float16"]
        archs = ["sm_90a"]
        [[block]]
        kernel = "state_passing"
        archs = ["sm_120a"]
        """,
    )
    small, large = models.preset("mamba2-130m"), models.preset("mamba2-2.7b")
    expected = {c.key for c in [*small.kernels(["sm_80", "sm_90a"]), *large.kernels(["sm_90a"], "float16")]}
    expected |= {catalog.config("state_passing", "sm_120a", aligned=value).key for value in (False, True)}
    assert {c.key for c in matrix.load(path)} == expected
    assert {c.arch for c in matrix.load(path, archs=["sm_89"])} == {"sm_89"}


def test_a_kernel_that_some_archs_lack_is_built_for_the_others(tmp_path):
    path = write(tmp_path, 'archs = ["sm_80", "sm_90a"]\n[[block]]\nkernel = "fused_clear"')
    assert [(c.kernel, c.arch) for c in matrix.load(path)] == [("fused_clear", "sm_90a")]


def test_names_stand_in_place_of_the_blocks():
    assert matrix.load(archs=["sm_90a"], names=["plamo-2-8b"]) == models.preset("plamo-2-8b").kernels(["sm_90a"])


def test_select():
    configs = matrix.load(archs=["sm_80", "sm_90a"], names=["mamba2-130m"])
    assert matrix.select(configs, []) == configs
    chosen = matrix.select(configs, ["chunk_s* aligned=True arch=sm_90a", "recurrent tied=False"])
    assert {(c.kernel, c.arch) for c in chosen} == {
        ("chunk_state", "sm_90a"),
        ("chunk_scan", "sm_90a"),
        ("recurrent", "sm_80"),
        ("recurrent", "sm_90a"),
    }
    assert all(c.fields.get("aligned", True) is True and c.fields.get("tied", False) is False for c in chosen)


@pytest.mark.parametrize("pattern", ["chunk", "", "chunk_scan Q=128", "recurrent Q=256", "aligned=true"])
def test_a_pattern_that_selects_nothing_is_refused(pattern):
    with pytest.raises(matrix.MatrixError, match="selects no kernel"):
        matrix.select(matrix.load(archs=["sm_90a"], names=["mamba2-130m"]), [pattern])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("archs = [", "is not TOML"),
        ("", "expected at least one"),
        ("block = 3", "expected at least one"),
        ('extra = 1\n[[block]]\nmodels = ["mamba2-130m"]', "extra not understood"),
        ('archs = ["sm_70"]\n[[block]]\nmodels = ["mamba2-130m"]', "sm_70"),
        ("archs = []\n[[block]]\nkernel = 'state_passing'", "archs are"),
        ('[[block]]\nmodels = ["gpt-2"]', "no preset 'gpt-2'"),
        ("[[block]]\nmodels = []", "models is"),
        ('[[block]]\nkernel = "conv"', "kernel is 'conv'"),
        ('[[block]]\nkernel = "state_passing"\nQ = [64]', "Q not understood"),
        ('[[block]]\nkernel = "recurrent"\nP = [60]', "does not support P=60"),
        ('archs = ["sm_80"]\n[[block]]\nkernel = "fused_clear"', "fused_clear exists for sm_90a only"),
        ('[[block]]\nkernel = "recurrent"\nP = 64', "P is 64; expected a list"),
        ('[[block]]\nkernel = "recurrent"\nP = [[64]]', "does not support P"),
        ('[[block]]\nchunk_size = [100]\nhead_dim_and_d_state = [[64, 128]]\ndtype = ["bfloat16"]', "does not support Q=100"),
        ('[[block]]\nchunk_size = [64]\nhead_dim_and_d_state = [64, 128]\ndtype = ["bfloat16"]', "pairs like"),
        ('[[block]]\nchunk_size = [64]\nhead_dim_and_d_state = [[64, 128]]\ndtype = ["float32"]', "does not support dtype='float32'"),
        ("[[block]]\nchunk_size = [64]\nhead_dim_and_d_state = [[64, 128]]", "dtype is missing"),
    ],
)
def test_a_wrong_matrix_is_refused_as_a_whole(tmp_path, capsys, text, message):
    path = write(tmp_path, text)
    with pytest.raises(matrix.MatrixError, match=message):
        matrix.load(path)
    assert main(["--matrix", str(path), "--out", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "args",
    [["--arch", "sm_99"], ["--arch", ""], ["--model", "gpt-2"], ["--only", "nothing"], ["--matrix", "/nonexistent.toml"]],
)
def test_wrong_arguments_end_with_status_2(args, capsys):
    assert main(args) == 2
    assert "build_kernels:" in capsys.readouterr().err


@pytest.mark.parametrize("args", [["--jobs", "0"], ["--jobs", "two"], ["--timeout", "-1"], ["--no-such-option"]])
def test_wrong_options_end_with_status_2(args):
    with pytest.raises(SystemExit) as ended:
        main(args)
    assert ended.value.code == 2


def test_list_prints_keys_and_imports_no_compiler(tmp_path):
    code = (
        "import sys; from build_kernels.__main__ import main;"
        "status = main(['--list', '--model', 'mamba2-130m', '--arch', 'sm_90a', '--only', 'recurrent']);"
        "assert not {'torch', 'tilelang', 'cuda'} & set(sys.modules); sys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == [
        catalog.config("recurrent", "sm_90a", P=64, N=128, dtype="bfloat16", state_dtype=state, tied=tied).key
        for state in ("float32", "float16", "bfloat16")
        for tied in (False, True)
    ]
