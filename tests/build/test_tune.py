"""The tuning command without a GPU: what it compiles, that it goes on where it was, and which row it writes."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

from build_kernels import tune
from build_kernels.__main__ import main
from tileops import catalog, compiler, schedules
from tileops.config import Record

pytestmark = [
    pytest.mark.skipif(compiler.toolchain.find()[0] is None, reason="needs the extra `jit`"),
    pytest.mark.xdist_group("build_kernels"),
]

MATRIX = 'archs = ["sm_90a"]\n[[block]]\nkernel = "state_passing"\naligned = [false]\n'


@pytest.fixture
def candidates(monkeypatch):
    """Two candidates, the second of which cannot be built."""
    module = importlib.import_module("tileops.kernels.state_passing")
    monkeypatch.setattr(module, "candidates", lambda arch, **fields: [{"per": 1}, {"unknown": 1}])


@pytest.fixture
def in_this_process(monkeypatch):
    """Compiles here instead of in workers, which would not see the fixture above."""

    def run(configs, jobs, make, timeout):
        for config in configs:
            try:
                record = make(config).record
                yield tune.pool.Outcome(config, 0.0, record.cubin_size, record.cubin_sha256)
            except Exception as error:
                yield tune.pool.Outcome(config, 0.0, error=str(error))

    monkeypatch.setattr(tune.pool, "run", run)


@pytest.fixture
def work(tmp_path, candidates, in_this_process, capsys) -> Path:
    (tmp_path / "matrix.toml").write_text(MATRIX)
    assert compile_in(tmp_path, capsys) == "2 candidates compiled, 1 refused"
    return tmp_path / "work"


def compile_in(folder: Path, capsys) -> str:
    line = ["tune", "--compile", "--arch", "sm_90a", "--matrix", str(folder / "matrix.toml"), "--work", str(folder / "work")]
    assert main(line) == 0
    return capsys.readouterr().out.partition(";")[0]


def records(work: Path) -> dict[str, Record]:
    """By the schedule's names."""
    found = [Record.from_dict(json.loads(path.read_text())) for path in work.glob("*.json")]
    return {" ".join(record.schedule): record for record in found}


def measured(work: Path, **us: list[float]) -> None:
    for name, record in records(work).items():
        times = us[name or "default"]
        result = {"us": times, "shapes": [[1, 1, 1]] * len(times), "gpu": "a GPU", "error": "" if times else "wrong"}
        (work / f"{record.key}.measured").write_text(json.dumps(result))


def decided(work: Path) -> list[dict]:
    return tune.decide(work, {tune._title(catalog.config("state_passing", "sm_90a", aligned=False))})


def test_the_default_and_the_candidates_are_compiled_and_a_refusal_is_kept(work):
    found = records(work)
    assert set(found) == {"", "per"}
    assert found["per"].grid != found[""].grid and found["per"].key != found[""].key
    (failed,) = work.glob("*.failed")
    assert "unknown" in failed.read_text()


def test_it_goes_on_where_it_was(work, capsys):
    assert compile_in(work.parent, capsys) == "0 candidates compiled, 0 refused"
    before = {path: path.read_bytes() for path in work.iterdir()}
    (work / f"{records(work)['per'].key}.json").unlink()
    assert compile_in(work.parent, capsys) == "1 candidates compiled, 0 refused"
    assert {path: path.read_bytes() for path in work.iterdir()} == before


def test_what_another_source_made_is_not_measured(work, monkeypatch):
    wanted = {tune._title(record) for record in records(work).values()}
    assert len(list(tune.compiled(work, wanted))) == 2
    monkeypatch.setattr(tune, "source_digest", lambda kernel: "ab" * 32)
    assert list(tune.compiled(work, wanted)) == []


@pytest.mark.parametrize(
    ("default", "per", "schedule"),
    [([4.0, 4.0], [2.0, 4.0], {"per": 1}), ([4.0, 4.0], [1.0, 20.0], {}), ([4.0], [3.99], {}), ([4.0], [], {})],
    ids=["faster", "slower on the whole", "no gain to speak of", "wrong result"],
)
def test_the_fastest_right_candidate_gets_a_row(work, default, per, schedule):
    measured(work, default=default, per=per)
    (row,) = decided(work)
    assert row["schedule"] == schedule and row["default_us"] == default
    table = work.parent / "table.json"
    schedules.write([{**row, "arch": "sm_80", "schedule": {"per": 2}}, {**row, "schedule": {"per": 8}}], table)
    tune.update(table, [row])
    assert [r["schedule"] for r in schedules.read(table)] == [{"per": 2}, *([schedule] if schedule else [])]


def test_nothing_is_decided_without_the_default_to_compare_with(work):
    measured(work, default=[4.0], per=[1.0])
    (work / f"{records(work)[''].key}.measured").unlink()
    assert decided(work) == []


def test_measurements_of_two_gpus_are_not_compared(work):
    measured(work, default=[4.0], per=[1.0])
    path = work / f"{records(work)['per'].key}.measured"
    path.write_text(json.dumps({**json.loads(path.read_text()), "gpu": "another of the same arch"}))
    (row,) = decided(work)
    assert row["schedule"] == {}


def test_no_gpu_and_no_arch_is_said_so(tmp_path, monkeypatch, capsys):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["tune", "--work", str(tmp_path)]) == 2
    assert "--arch" in capsys.readouterr().err


@pytest.mark.parametrize("kernel", tune.KERNELS)
def test_candidates_name_what_the_kernel_has(kernel):
    module = importlib.import_module(f"tileops.kernels.{kernel}")
    fields = {"Q": 256, "P": 64, "N": 128, "dtype": "bfloat16", "dt_dtype": "float32", "aligned": True, "cb_float32": True}
    for arch in catalog.ARCHS:
        default = module.schedule(arch, **fields)
        for candidate in module.candidates(arch, **fields):
            assert candidate and set(candidate) <= set(default) and {**default, **candidate} != default


def test_every_row_of_the_table_names_what_its_kernel_has():
    for row in schedules.read():
        module = importlib.import_module(f"tileops.kernels.{row['kernel']}")
        assert set(row["schedule"]) <= set(module.schedule(row["arch"], **row["config"]))
