"""The table of schedules: what it may hold, and that a chosen schedule is part of a config's key and of nothing else's."""

from __future__ import annotations

import dataclasses
import json

import helpers_store as h
import pytest

from tileops import catalog, schedules
from tileops.config import KernelConfig, Record
from tileops.errors import CorruptArtifactError

VALUES = {"Q": 256, "N": 128, "dtype": "bfloat16", "aligned": True, "cb_float32": False}
ROW = {
    "kernel": "chunk_coupling",
    "arch": "sm_90a",
    "config": VALUES,
    "schedule": {"tile": 128},
    "us": [2.0],
    "default_us": [3.0],
    "shapes": [[1, 2, 3]],
    "gpu": "a GPU",
}


@pytest.fixture
def table(tmp_path, monkeypatch):
    path = tmp_path / "schedules.json"
    path.write_text("[]")
    monkeypatch.setattr(schedules, "TABLE", path)
    yield path
    schedules._index.cache_clear()


def test_the_key_follows_the_schedule_of_that_config_only(table):
    def keys():
        configs = [catalog.config("chunk_coupling", arch, **VALUES) for arch in ("sm_90a", "sm_80")]
        configs.append(catalog.config("chunk_coupling", "sm_90a", **{**VALUES, "aligned": False}))
        configs.append(catalog.config("state_passing", "sm_90a", aligned=True))
        return [config.key for config in configs]

    plain = keys()
    schedules.write([ROW], table)
    first = keys()
    assert first[0] != plain[0] and first[1:] == plain[1:]
    schedules.write([{**ROW, "schedule": {"tile": 32}}], table)
    assert keys()[0] not in (plain[0], first[0]) and keys()[1:] == plain[1:]
    schedules.write([], table)
    assert keys() == plain


def test_measured_figures_do_not_change_the_key(table):
    schedules.write([ROW], table)
    before = catalog.config("chunk_coupling", "sm_90a", **VALUES).key
    schedules.write([{**ROW, "us": [1.5], "gpu": "another"}], table)
    assert catalog.config("chunk_coupling", "sm_90a", **VALUES).key == before


def test_order_of_values_and_rows_does_not_count_and_a_row_is_a_line(table):
    other = {**ROW, "arch": "sm_80"}
    schedules.write([ROW, other], table)
    text = table.read_text()
    schedules.write([other, {**ROW, "config": dict(reversed(VALUES.items()))}], table)
    assert schedules.chosen("chunk_coupling", "sm_90a", VALUES) == {"tile": 128}
    assert len(text.splitlines()) == 4 and [row["arch"] for row in schedules.read(table)] == ["sm_80", "sm_90a"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[", "is not JSON"),
        (json.dumps([{**ROW, "more": 1}]), "expected"),
        (json.dumps([{**ROW, "schedule": {}}]), "expected names and integers"),
        (json.dumps([{**ROW, "schedule": {"tile": "64"}}]), "expected names and integers"),
    ],
)
def test_what_is_no_table_is_refused(table, text, message):
    table.write_text(text)
    with pytest.raises(ValueError, match=message):
        schedules.read(table)


def test_the_shipped_table_names_configs_that_exist_once_each():
    rows = schedules.read()
    for row in rows:
        assert catalog.config(row["kernel"], row["arch"], **row["config"]).schedule == tuple(sorted(row["schedule"].items()))
        assert len(row["us"]) == len(row["default_us"]) == len(row["shapes"])
    assert len({json.dumps([row[n] for n in ("kernel", "arch", "config")], sort_keys=True) for row in rows}) == len(rows)


def test_a_record_holds_the_schedule_and_its_key_is_checked_with_it():
    config = KernelConfig.make("chunk_coupling", "sm_90a", VALUES, h.SOURCE, {"tile": 128})
    record = h.artifact(config, schedule={"tile": 128}).record
    data = json.loads(record.to_json())
    assert Record.from_dict(data) == record and record.config_object() == config and "tile=128" in str(config)
    assert "schedule" not in json.loads(h.artifact(dataclasses.replace(config, schedule=())).record.to_json())
    for wrong in ({"tile": 64}, {"tile": True}, {}):
        with pytest.raises(CorruptArtifactError):
            Record.from_dict({**data, "schedule": wrong})
