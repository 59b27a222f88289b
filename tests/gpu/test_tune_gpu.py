"""The tuning command's second half on a GPU, with a packaged kernel as its own candidate."""

from __future__ import annotations

import dataclasses
import json

import pytest

from build_kernels import tune
from tileops import catalog, schedules, store
from tileops.config import Artifact

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.gpu


def test_candidates_are_checked_timed_and_measured_once(tmp_path, monkeypatch):
    arch = catalog.archs_for(*torch.cuda.get_device_capability())[0]
    config = catalog.config("state_passing", arch, aligned=True)
    found = store.find(config).artifact
    assert found is not None, "the kernel is not packaged"
    work, table = tmp_path / "work", tmp_path / "table.json"
    work.mkdir()
    schedules.write([], table)
    for schedule in ({}, {"per": 1}):
        variant = dataclasses.replace(config, schedule=tuple(schedule.items()))
        record = dataclasses.replace(found.record, key=variant.key, schedule=schedule)
        (work / f"{variant.key}.cubin").write_bytes(Artifact(record, found.cubin).check().cubin)
        (work / f"{variant.key}.json").write_text(record.to_json())
    monkeypatch.setattr(tune, "measure", lambda artifact, real=tune.measure: real(artifact, [(2, 1000, 4)]))
    line = ["--measure", "--arch", arch, "--only", "state_passing aligned=True", "--work", str(work), "--table", str(table)]
    assert tune.main(line) == 0
    results = {path: path.read_bytes() for path in work.glob("*.measured")}
    assert len(results) == 2
    for data in results.values():
        result = json.loads(data)
        assert result["error"] == "" and result["us"][0] > 0
    assert tune.main(line) == 0
    assert {path: path.read_bytes() for path in work.glob("*.measured")} == results


@pytest.mark.parametrize("kernel", ["chunk_coupling", "chunk_scan"])
def test_the_calls_that_are_timed_are_right_with_cb_in_float32_too(kernel):
    values = {"Q": 256, "P": 64, "N": 128, "dtype": "bfloat16", "dt_dtype": "float32", "aligned": True, "cb_float32": True}
    config = {name: values[name] for name in catalog.KERNELS[kernel]}
    assert tune._wrong(*tune._call(kernel, config, 2, 643, 6, 2)) == ""
