"""The benchmark harness, on a CPU with tiny rows: what it computes, what it writes, and that it survives what it runs."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import re
import subprocess

import pytest
import torch

from benchmarks import __main__ as command
from benchmarks import compare, inputs, ours, reference, runner, shapes, table, timing
from benchmarks.shapes import Spec
from tileops import models

pytestmark = pytest.mark.xdist_group("benchmarks")  # one run serves many of these tests

TINY = {suite: shapes.tiny(suite) for suite in ("forward", "decode", "stages", "models")}
ALL_TINY = [spec for specs in TINY.values() for spec in specs]


def ids(spec):
    return f"{spec.op}-{spec.tied}"


# --- what is measured ----------------------------------------------------------------------------------------------


def test_suites_hold_what_the_documentation_says():
    assert {suite: len(shapes.specs(suite)) for suite in ("forward", "decode", "stages")} == {"forward": 15, "decode": 22, "stages": 20}
    rows = [runner.row_of(spec) for suite in ("forward", "decode", "stages") for spec in shapes.specs(suite)]
    assert len({compare.identity(row) for row in rows}) == len(rows)
    names = [spec.name for spec in shapes.specs("forward")]
    assert names[0] == "1x4096x48" and "1x8192x64 float16" in names and "4x4096x128 P=80 G=8" in names
    with pytest.raises(ValueError, match="no suite"):
        shapes.specs("backward")


def test_the_models_suite_has_the_sizes_of_every_preset():
    rows = {(s.n_heads, s.d_head, s.d_state, s.n_groups) for s in shapes.specs("models")}
    assert rows == {(m.n_heads, m.head_dim, m.d_state, m.n_groups) for m in models.PRESETS.values()}


def test_inputs_are_the_same_each_time_and_views_of_one_projection():
    spec = TINY["forward"][0]
    first, again, other = (inputs.make(spec, "cpu", number) for number in (0, 0, 1))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert inputs.digest(first) == inputs.digest(again) != inputs.digest(other)
    storages = {first[name].untyped_storage().data_ptr() for name in ("x", "B", "C")}
    assert len(storages) == 1 and not first["x"].is_contiguous()


def test_tied_decode_has_strides_of_zero_and_counts_its_bytes_once():
    tied, full = (inputs.make(spec, "cpu") for spec in TINY["decode"])
    assert tied["A"].stride()[1:] == (0, 0) and tied["dt"].stride(-1) == 0
    assert full["A"].is_contiguous() and full["dt"].is_contiguous()
    heads = tied["A"].shape[0]
    assert inputs.nbytes(tied["A"]) == heads * 4 and inputs.nbytes(full["A"]) == full["A"].numel() * 4


# --- float64 -------------------------------------------------------------------------------------------------------


def test_chunks_equal_the_recurrence_token_by_token():
    assert reference.selfcheck("cpu") < 1e-13


@pytest.mark.parametrize(("dtype", "low", "high"), [(torch.bfloat16, 5e-4, 3e-3), (torch.float16, 5e-5, 4e-4), (None, 0, 1e-12)])
def test_rounding_of_the_operands_alone_makes_the_error_of_that_dtype(dtype, low, high):
    spec = dataclasses.replace(TINY["forward"][0], dtype="bfloat16", seqlen=300)
    tensors = inputs.make(spec, "cpu")
    wanted, rounded = reference.evaluate(spec, tensors), reference.evaluate(spec, tensors, dtype)
    assert all(low <= reference.error(rounded[name], ref) <= high for name, ref in wanted.items())


@pytest.mark.parametrize("spec", ALL_TINY, ids=ids)
def test_float64_evaluation_equals_the_packages_own_reference(spec):
    spec = dataclasses.replace(spec, dtype="float32")
    tensors = inputs.make(spec, "cpu")
    wanted = reference.evaluate(spec, tensors)
    got = ours.outputs(spec, tensors, ours.build(spec)(tensors)())
    assert set(wanted) == set(got)
    for name, ref in wanted.items():
        assert reference.error(got[name], ref) < 1e-6, name


def test_an_error_of_nan_is_nan():
    ref = torch.ones(3, dtype=torch.float64)
    assert math.isnan(reference.error(torch.tensor([1.0, float("nan"), 1.0]), ref))
    assert reference.error(torch.tensor([1.0, 1.0, 2.0]), ref) == pytest.approx(3**-0.5)


def test_quantiles():
    assert timing.quantiles([5, 1, 2, 4, 3]) == (3, [pytest.approx(1.4), pytest.approx(4.6)])
    assert timing.quantiles([7.0]) == (7.0, [7.0, 7.0])


def test_floor_is_the_larger_of_bytes_and_arithmetic():
    ceilings = {"copy_bytes_per_s": 4e12, "matmul_flop_per_s": 8e14}
    spec = Spec("forward", "Mamba2FwdOp", "", 1, 1000, 10, d_head=64, d_state=128)
    flops = 4 * 64 * 128 * 1000 * 10
    assert runner.floor_us(spec, 8_000_000, ceilings) == pytest.approx(2.0)
    assert runner.floor_us(spec, 1000, ceilings) == pytest.approx(flops / 8e14 * 1e6)
    assert runner.floor_us(dataclasses.replace(spec, op="SSDRecurrentFwdOp"), 4000, ceilings) == pytest.approx(1e-3)
    assert runner.floor_us(spec, None, ceilings) is None and runner.floor_us(spec, 1000, {}) is None


# --- processes -----------------------------------------------------------------------------------------------------


@pytest.fixture
def environment(tmp_path):
    return runner.environment(None, tmp_path)


def test_a_worker_answers_a_line_a_request_and_outlives_bad_ones(environment):
    worker = runner.Worker("ours", "cpu", environment)
    try:
        assert worker.ask({"command": "versions"})["versions"]["torch"] == torch.__version__
        assert worker.ask({"command": "frobnicate", "spec": TINY["decode"][0].to_json()}) == {
            "failed": "ValueError: unknown command 'frobnicate'"
        }
        assert "TypeError" in worker.ask({"command": "measure", "spec": {"size": 3}})["failed"]
        numbers = worker.ask({"command": "measure", "spec": TINY["decode"][0].to_json()})
        assert numbers["gpu_us"] > 0 and numbers["error"] < 1e-6 and set(numbers["errors"]) == {"y", "state"}
        assert numbers["spread"][0] <= numbers["gpu_us"] <= numbers["spread"][1]
        worker.process.kill()
        with pytest.raises(runner.Lost, match="ended with status -9"):
            worker.ask({"command": "versions"})
    finally:
        worker.close()


def test_an_implementation_that_cannot_be_imported_says_why(environment):
    worker = runner.Worker("peer_that_is_not_there", "cpu", environment)
    try:
        assert worker.ask({"command": "versions"}) == {"failed": "ModuleNotFoundError: No module named 'benchmarks.peer_that_is_not_there'"}
    finally:
        worker.close()


def test_an_implementation_that_hangs_is_lost_and_started_again(environment):
    implementation = runner.Implementation("ours", "cpu", environment)
    try:
        assert "no answer within 0 s" in implementation.ask({"command": "versions"}, timeout=0.01)["failed"]
        assert "versions" in implementation.ask({"command": "versions"})
    finally:
        implementation.close()


def test_caches_and_path_of_a_peer(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    made = runner.environment(tmp_path / "peer", tmp_path)
    path = made["PYTHONPATH"].split(":")
    assert path[:2] == [str(tmp_path / "peer"), str(runner.ROOT)] and path[2].endswith("/elsewhere") and path[2].startswith("/")
    assert made["TRITON_CACHE_DIR"].startswith(str(tmp_path)) and made["TILELANG_CACHE_DIR"].startswith(str(tmp_path))


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    """A whole run: ours, ours again in the place of a peer, and a peer that is not installed."""
    place = tmp_path_factory.mktemp("benchmarks")
    for name in ("twin", "absent"):
        (place / "peers" / name).mkdir(parents=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "PEERS", {"twin": ("ours", "rows"), "absent": ("peer_absent", "rows")})
        patch.setattr(runner, "COPYING", ("twin",))
        arguments = ["--device", "cpu", "--jobs", "1", "--peers", str(place / "peers"), "--out", str(place / "result.json")]
        assert command.main(["run", *arguments]) == 0
    return json.loads((place / "result.json").read_text())


def test_a_result_has_the_documented_keys(result):
    assert {"date", "machine", "versions", "ceilings", "rows", "seconds", "reference", "prepare"} <= set(result)
    assert result["versions"]["tileops"] and "peer_absent" in result["versions"]["absent"]
    assert result["reference"]["chunks_against_token_by_token"] < 1e-13
    assert [suite for suite in result["seconds"] if suite in shapes.SUITES] == list(shapes.SUITES)
    for row in result["rows"]:
        assert set(runner.ROW_KEYS) <= set(row) and row["suite"] in shapes.SUITES


def test_rows_set_ours_beside_the_peers(result):
    rows = [row for row in result["rows"] if row["suite"] != "cold"]
    assert len(rows) == len(ALL_TINY)
    for row in rows:
        peers = ["twin", "absent"] if row["suite"] == "decode" else ["twin", "twin_contiguous", "absent"]
        assert list(row["peers_us"]) == list(row["peers_host_us"]) == list(row["peers_error"]) == peers
        assert row["peers_error"]["twin"] == row["error"] < 3e-3
        assert row["peers_us"]["absent"] is None and "ModuleNotFoundError" in row["peers_reason"]["absent"]
        assert row["first_call_ms"] > 0 and row["host_us"] > 0 and row["cpu_us"] > 0 and row["bytes"] > 0
        assert (set(row.get("rounding_errors", ())) == {"y", "state"}) == (row["op"] == "Mamba2FwdOp")
        assert (row.get("in_place_us", 0) > 0) == (row["op"] == "SSDRecurrentFwdOp")
        assert (row.get("negation_us", 0) > 0) == (row["op"] == "SSDChunkCumsumFwdOp")


def test_cold_rows_say_what_a_fresh_process_pays(result):
    rows = {row["quantity"]: row for row in result["rows"] if row["suite"] == "cold"}
    assert {"import", "construct forward", "first forward", "first decode", "first forward of a second shape", "new shape"} <= set(rows)
    assert rows["first forward"]["first_call_ms"] == rows["first forward"]["ms"] > 0
    assert rows["first forward"]["peers_ms"]["twin"] > 0 and rows["first forward"]["peers_ms"]["absent"] is None
    assert rows["host decode"]["host_us"] > 0 and rows["new shape"]["shapes"] > 10
    assert all(row["cpu_us"] > 0 for row in rows.values())


def test_a_process_that_drew_other_inputs_is_not_compared(tmp_path):
    class Stub:
        def __init__(self, digest):
            self.digest = digest

        def ask(self, request, timeout=0):
            return {"gpu_us": 1.0, "host_us": 1.0, "error": 0.0, "digest": self.digest}

    report = runner.Report(tmp_path / "r.json")
    row = runner.measured_row(TINY["decode"][0], Stub(1.0), {"same": Stub(1.0), "other": Stub(2.0)}, {}, report)
    assert row["peers_us"] == {"same": 1.0, "other": None} and row["peers_reason"] == {"other": "drew other inputs than ours"}


# --- reading results -----------------------------------------------------------------------------------------------


def row(name, **numbers):
    made = runner.row_of(Spec("forward", "Mamba2FwdOp", name, 1, 4096, 48))
    return {**made, "spread": [0, 0], "host_spread": [0, 0], "output_dtype": "float32", **numbers}


BEFORE = {
    "date": "2026-01-01",
    "machine": {"gpu": "NVIDIA H200", "driver": "580"},
    "versions": {"tileops": "0.2.0"},
    "ceilings": {"copy_bytes_per_s": 4.2e12, "matmul_flop_per_s": 7.9e14},
    "rows": [
        row("a", gpu_us=100.0, host_us=30.0, error=1e-3, peers_us={"p": 300.0, "q": None}, peers_host_us={"p": 400.0, "q": None},
            peers_error={"p": 2e-3, "q": None}, peers_reason={"q": "ValueError: no"}),
        row("b", gpu_us=50.0, host_us=30.0, error=1e-3, peers_us={"p": 100.0}, peers_host_us={"p": 400.0}, peers_error={"p": 5e-4},
            peers_output_dtype={"p": "bfloat16"}),
    ],
}  # fmt: skip


def changed(**numbers):
    after = copy.deepcopy(BEFORE)
    after["rows"][0].update(numbers)
    return after


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ({}, []),
        ({"gpu_us": 104.0}, []),
        ({"gpu_us": 110.0}, ["WORSE  Mamba2FwdOp a: GPU us 100 -> 110 (x 1.10)"]),
        ({"gpu_us": 80.0}, ["better Mamba2FwdOp a: GPU us 100 -> 80 (x 0.80)"]),
        ({"gpu_us": None}, ["LOST   Mamba2FwdOp a: GPU us 100 -> -"]),
        ({"error": float("nan")}, ["LOST   Mamba2FwdOp a: error 0.001 -> nan (x nan)"]),
        ({"error": 2e-3}, ["WORSE  Mamba2FwdOp a: error 0.001 -> 0.002 (x 2.00)"]),
        ({"host_us": 30.9}, []),
        ({"host_us": 60.0}, ["WORSE  Mamba2FwdOp a: host us 30 -> 60 (x 2.00)"]),
    ],
)
def test_compare_names_what_changed(numbers, expected):
    lines, worse = compare.compare(BEFORE, changed(**numbers))
    assert lines == [*expected, f"2 rows compared, {worse} regressions (threshold 1.05)"]
    assert worse == sum(not line.startswith("better") for line in expected)


def test_compare_leaves_what_both_spreads_cover():
    before, after = changed(spread=[90.0, 120.0]), changed(gpu_us=110.0, spread=[95.0, 130.0])
    assert compare.compare(before, after)[1] == 0
    assert compare.compare(before, changed(gpu_us=110.0, spread=[109.0, 111.0]))[1] == 1


def test_compare_leaves_out_host_times_of_a_cpu_at_another_speed():
    def result(**numbers):
        return {**BEFORE, "rows": [row("a", gpu_us=100.0, error=1e-3, peers_us={}, peers_host_us={}, peers_error={}, **numbers)]}

    slow, fast = result(host_us=30.0, cpu_us=11.0), result(host_us=15.0, cpu_us=5.5)
    lines, worse = compare.compare(fast, slow)
    assert worse == 0 and "1 host times not compared: the CPU had another speed" in lines
    assert compare.compare(fast, result(host_us=30.0, cpu_us=5.6))[1] == 1
    assert compare.compare(result(host_us=15.0), slow)[1] == 1  # where one does not say


def test_compare_names_rows_and_machines_of_one_file_alone():
    after = copy.deepcopy(BEFORE)
    after["rows"][1]["name"] = "c"
    after["machine"]["gpu"] = "another"
    lines, worse = compare.compare(BEFORE, after)
    assert worse == 0 and "only in the second: Mamba2FwdOp c" in lines and "only in the first: Mamba2FwdOp b" in lines
    assert lines[-1] == "different machines: gpu NVIDIA H200 and another"


def test_status_of_the_command(tmp_path, capsys):
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, data in zip(paths, (BEFORE, changed(gpu_us=200.0))):
        path.write_text(json.dumps(data))
    files = [str(path) for path in paths]
    assert command.main(["compare", files[0], files[0]]) == 0
    assert command.main(["compare", *files]) == 1
    assert command.main(["compare", *files, "--threshold", "3"]) == 0
    assert "WORSE  Mamba2FwdOp a: GPU us 100 -> 200 (x 2.00)" in capsys.readouterr().out


def test_table_has_every_figure_and_the_reasons(tmp_path):
    text = table.markdown(BEFORE, shapes.SUITES)
    assert "copy 4.20 TB/s" in text and "### Full forward" in text and "### Decode" not in text
    assert "| a | 100.0 | – | 300.0 | – | 3.00 |" in text
    assert "| a | 30.0 | 400.0 | – | 1.0e-03 | 2.0e-03 | – |" in text
    assert f"geometric mean {6**0.5:.2f}, least 2.00, over 2 rows. Less accurate than the better peer: b." in text
    assert "- not measured: q, a: ValueError: no" in text


def test_table_of_a_whole_result(result):
    text = table.markdown(result, shapes.SUITES)
    assert all(f"### {title}" in text for title in table.TITLES.values())
    for row in result["rows"]:
        if row["gpu_us"] is not None:
            assert f"{row['gpu_us']:.1f}" in text


def test_the_page_of_served_models_is_what_its_command_prints(capsys):
    page = (runner.ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    (words,) = re.findall(r"`python -m benchmarks (table [^`]*)`", page)
    assert command.main([str(runner.ROOT / word) if "/" in word else word for word in words.split()]) == 0
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert printed == [line for line in page.splitlines() if line.startswith("|")]
    assert len(printed) == 2 + len(shapes.specs("models")) and "| – |" not in "".join(printed)


def test_the_help_needs_no_torch():
    code = "import sys; from benchmarks import __main__ as m; m.parser(); assert 'torch' not in sys.modules"
    subprocess.run([command.sys.executable, "-c", code], check=True, cwd=runner.ROOT)


@pytest.mark.parametrize(
    "text", [None, "{bad", "{}", '{"date": "", "machine": {}, "rows": ["x"]}'], ids=["no file", "no JSON", "another file", "no rows"]
)
def test_what_is_no_result_is_said_so(tmp_path, capsys, text):
    path = tmp_path / "file.json"
    if text is not None:
        path.write_text(text)
    assert command.main(["table", str(path)]) == 2
    assert str(path) in capsys.readouterr().err


RECORDED = command.RESULTS / "2026-11-30-h200.json"


@pytest.mark.parametrize("text", ["nan", "inf", "-1", "0.5", "x"])
def test_a_threshold_that_nothing_or_everything_is_beyond_is_refused(capsys, text):
    with pytest.raises(SystemExit) as ended:
        command.main(["compare", str(RECORDED), str(RECORDED), "--threshold", text])
    assert ended.value.code == 2 and "--threshold" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (["run", "--suite", "forward", "--device", "cpu", "--only", "zzz", "--out", "OUT"], "--only zzz selects no row of forward"),
        (["table", str(RECORDED), "--suite", "models"], "has no row of models"),
        (["table", "OUT"], "No such file"),
    ],
    ids=["run", "table", "file"],
)
def test_what_selects_nothing_ends_with_status_2_and_writes_nothing(tmp_path, capsys, line, words):
    out = tmp_path / "out.json"
    assert command.main([str(out) if word == "OUT" else word for word in line]) == 2
    assert words in capsys.readouterr().err and not out.exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("line", [["run", "--suite", "forward", "--out", "OUT"], ["portable", "own=", "--out", "OUT"]], ids=lambda v: v[0])
def test_without_a_gpu_it_says_so(tmp_path, capsys, line):
    assert command.main([str(tmp_path / "out.json") if word == "OUT" else word for word in line]) == 2
    assert "a GPU is needed" in capsys.readouterr().err


def test_results_without_a_row_in_common_are_not_the_same():
    cold = command.RESULTS / "2026-11-30-h200-cold.json"
    assert command.main(["compare", str(RECORDED), str(cold)]) == 1


def test_memory_that_is_given_back_is_waited_for(monkeypatch):
    reserved, slept = iter((60 << 30, 2 << 30)), []
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(timing.torch.cuda, name, lambda: None)
    monkeypatch.setattr(timing.torch.cuda, "memory_reserved", lambda: next(reserved))
    monkeypatch.setattr(timing.time, "sleep", slept.append)
    timing._settle()
    (seconds,) = slept
    assert (58 << 30) / 400e9 < seconds < 1  # cleared at 400 GB/s
