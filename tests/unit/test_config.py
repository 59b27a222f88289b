"""Keys and records: pinned values, every field counts, what is no record is refused."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import helpers_store as h
import pytest

import tileops.config
from tileops.config import Artifact, KernelConfig, Param, Record, TensorMap
from tileops.errors import CorruptArtifactError

#: Keys of these configs with this source text digest, for ever (or until config.SCHEMA is raised).
GOLDEN = [
    (
        ("chunk_cumsum", "sm_80", {"Q": 256, "out_dtype": "float32"}),
        "a004c8f843018be8fc94e07b0724a1f9d9df8f27c016e78a61915ded7cb7c7b9",
    ),
    (
        ("chunk_coupling", "sm_90a", {"Q": 256, "N": 128, "dtype": "bfloat16", "aligned": True}),
        "684a7f22eed2ace1b0d671d9c1440cccb497b126ce7f87b452ab4d4bc32ab2f1",
    ),
    (
        (
            "chunk_state",
            "sm_90a",
            {"Q": 128, "P": 64, "N": 128, "dtype": "float16", "dt_dtype": "float32", "aligned": False},
        ),
        "c00186647b45933e5804a40099ac170814a59df0030882b67142dea282284a5c",
    ),
    (("state_passing", "sm_120a", {"aligned": True}), "e32819bc56a45e2f936220006b3da7ad1bb83c7d53908f3153aedb106fc0f655"),
    (
        ("chunk_scan", "sm_100a", {"Q": 256, "P": 64, "N": 64, "dtype": "bfloat16", "dt_dtype": "bfloat16", "aligned": True}),
        "be85300e438b5f8594d4a1acff02b3bef76e6b5aa25930466e0c8b6e4d426a13",
    ),
    (
        ("seq_passing", "sm_80", {"packed": False}),
        "1d56e2edcb7d932a7f615432d6fabda7387a927cf55638c293d14af88a4bca64",
    ),
    (
        ("gate", "sm_90a", {"dtype": "bfloat16", "half": True, "aligned": True}),
        "b559ad0dc022e6caab59ca97ebf653cc651d0c980b7ccacf928d01f352337c38",
    ),
    (
        ("recurrent", "sm_89", {"P": 64, "N": 128, "dtype": "bfloat16", "tied": True}),
        "93a5773294b024ff9f571a5ebe701b4b0fdcefdcf268953e83f5c482dc51441f",
    ),
]


@pytest.mark.parametrize(("made_of", "key"), GOLDEN, ids=[g[0][0] for g in GOLDEN])
def test_golden_keys(made_of, key):
    kernel, arch, values = made_of
    assert KernelConfig.make(kernel, arch, values, h.SOURCE).key == key


def test_every_field_is_in_the_key(monkeypatch):
    kernel, arch, values = GOLDEN[2][0]
    base = KernelConfig.make(kernel, arch, values, h.SOURCE)
    changed = [
        KernelConfig.make("chunk_scan", arch, values, h.SOURCE),
        KernelConfig.make(kernel, "sm_90", values, h.SOURCE),
        KernelConfig.make(kernel, arch, values, "cd" * 32),
        KernelConfig.make(kernel, arch, {**values, "another": 1}, h.SOURCE),
    ]
    other = {"Q": 256, "P": 128, "N": 64, "dtype": "bfloat16", "dt_dtype": "float16", "aligned": True}
    assert set(other) == set(values)
    changed += [KernelConfig.make(kernel, arch, {**values, name: value}, h.SOURCE) for name, value in other.items()]
    changed += [KernelConfig.make(kernel, arch, {n: v for n, v in values.items() if n != name}, h.SOURCE) for name in values]
    keys = [base.key, *(config.key for config in changed)]
    monkeypatch.setattr(tileops.config, "SCHEMA", tileops.config.SCHEMA + 1)
    keys.append(KernelConfig.make(kernel, arch, values, h.SOURCE).key)
    assert len(set(keys)) == len(keys)


def test_every_field_of_the_dataclass_is_in_as_dict():
    # A field added to KernelConfig that is forgotten in as_dict would be served by another config's kernel.
    one = KernelConfig.make("recurrent", "sm_90a", {"P": 64}, h.SOURCE)
    for field in dataclasses.fields(KernelConfig):
        other = dataclasses.replace(one, **{field.name: (("P", 128),) if field.name in ("values", "schedule") else "other"})
        assert other.as_dict() != one.as_dict(), field.name
        assert other.key != one.key, field.name


def test_types_of_values_count_and_order_does_not():
    def key(**values):
        return KernelConfig.make("k", "sm_90a", values, h.SOURCE).key

    assert key(a=1, b=2) == key(b=2, a=1)
    assert len({key(a=1), key(a=True), key(a="1")}) == 3


COPIED_KEY = """
import sys
from tileops.config import KernelConfig
print(KernelConfig.make("some_kernel", "sm_90a", {"P": 64}).key)
"""


def copied(place: Path, line_end: bytes = b"\n", **texts: str) -> str:
    """The key that a copy of the package computes, at ``place``, with these texts for its sources."""
    package = place / "tileops"
    for folder in ("", "kernels", "compiler"):
        (package / folder).mkdir(parents=True, exist_ok=True)
        (package / folder / "__init__.py").write_text("")
    for name in ("config.py", "errors.py"):
        shutil.copy(h.REPOSITORY / "tileops" / name, package / name)
    sources = {"kernels/some_kernel.py": "kernel\n", "kernels/_common.py": "common\n", "compiler/flags.py": "flags\n"}
    for name, text in {**sources, **{k: v for k, v in texts.items() if "/" in k}}.items():
        (package / name).write_bytes(text.encode().replace(b"\n", line_end))
        os.utime(package / name, (len(str(place)), len(str(place))))
    env = {"PYTHONPATH": str(place), "TILEOPS_POLICY": "packaged", "WHERE": str(place)}
    return subprocess.run([sys.executable, "-c", COPIED_KEY], env=env, cwd=place, capture_output=True, text=True, check=True).stdout.strip()


def test_keys_know_no_path_mtime_environment_or_line_end(tmp_path):
    keys = {copied(tmp_path / "here"), copied(tmp_path / "there" / "and deeper"), copied(tmp_path / "windows", line_end=b"\r\n")}
    assert len(keys) == 1


def test_the_key_follows_every_source_text(tmp_path):
    keys = {copied(tmp_path / "0")}
    for number, name in enumerate(("kernels/some_kernel.py", *tileops.config.SHARED_SOURCES), 1):
        keys.add(copied(tmp_path / str(number), **{name: "changed\n"}))
    # Text moved from one file to the next is another source.
    keys.add(copied(tmp_path / "moved", **{"kernels/some_kernel.py": "kernel\ncommon\n", "kernels/_common.py": ""}))
    assert len(keys) == 5


def test_record_round_trip():
    record = h.artifact().record
    again = Record.from_dict(json.loads(record.to_json()))
    assert again == record
    assert again.to_json() == record.to_json()
    assert again.config_object() == h.config()


MAP = TensorMap(dtype=9, dims=("64", "H", "S"), strides=("x.stride1 // 8 * 16", "H * 128"), box=(64, 1, 64), swizzle=3, promotion=2)


def mapped() -> Record:
    params = (Param("A", "pointer", "A"), Param("x_desc", "tensormap", "x"), Param("B", "int32", "B"))
    return h.artifact(params=params, tensormaps={"x_desc": MAP}, optional=("A",)).record


def test_record_round_trip_with_tensor_maps():
    record = mapped()
    again = Record.from_dict(json.loads(record.to_json()))
    assert again == record
    assert again.tensormaps["x_desc"] == MAP
    assert again.to_json() == record.to_json()


def test_a_record_without_tensor_maps_or_optional_tensors_does_not_mention_them():
    assert not {"tensormaps", "optional"} & set(json.loads(h.artifact().record.to_json()))


def test_record_round_trip_with_optional_tensors():
    record = h.artifact(optional=("x",)).record
    again = Record.from_dict(json.loads(record.to_json()))
    assert again == record and again.optional == ("x",)
    assert again.to_json() == record.to_json()


@pytest.mark.parametrize("optional", ["x", ["y"], ["B"], [1], None])
def test_optional_tensors_are_those_of_pointers(optional):
    with pytest.raises(CorruptArtifactError, match="optional"):
        Record.from_dict({**json.loads(h.artifact().record.to_json()), "optional": optional})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"surplus": 1}, "fields differ"),
        ({"dims": ["64", "H", 3]}, "dims"),
        ({"dims": "64"}, "dims"),
        ({"strides": ["16"]}, "rank"),
        ({"box": [64, 1]}, "rank"),
        ({"box": [64, 1, True]}, "box"),
        ({"dims": [], "strides": [], "box": []}, "rank"),
        ({"dims": ["1"] * 6, "strides": ["16"] * 5, "box": [1] * 6}, "rank"),
        ({"swizzle": -1}, "swizzle"),
        ({"dtype": "bfloat16"}, "dtype"),
        ({"promotion": True}, "promotion"),
    ],
)
def test_a_malformed_tensor_map_is_refused(change, words):
    data = json.loads(mapped().to_json())
    data["tensormaps"]["x_desc"].update(change)
    with pytest.raises(CorruptArtifactError, match=f"tensormaps: x_desc: .*{words}"):
        Record.from_dict(data)


def test_tensor_maps_are_those_of_the_parameters():
    data = json.loads(mapped().to_json())
    one = data["tensormaps"]["x_desc"]
    for maps in ({}, {"y_desc": one}, {"x_desc": one, "y_desc": one}):
        with pytest.raises(CorruptArtifactError, match="tensormaps"):
            Record.from_dict({**data, "tensormaps": maps})
    with pytest.raises(CorruptArtifactError, match="tensormaps: x_desc"):
        Record.from_dict({**data, "tensormaps": {"x_desc": None}})


@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(Record)])
def test_a_record_lacking_or_mistyping_a_field_is_refused(name):
    good = json.loads(mapped().to_json())
    if name not in ("optional", "schedule"):  # there only where there are some
        with pytest.raises(CorruptArtifactError, match=name):
            Record.from_dict({k: v for k, v in good.items() if k != name})
    for wrong in (None, 1.5, [1]):
        with pytest.raises(CorruptArtifactError):
            Record.from_dict({**good, name: wrong})


@pytest.mark.parametrize("data", [None, 1, "text", [], {}, {"schema": 1}])
def test_what_is_no_record_is_refused(data):
    with pytest.raises(CorruptArtifactError):
        Record.from_dict(data)


def test_a_record_with_more_fields_or_another_schema_is_refused():
    good = json.loads(h.artifact().record.to_json())
    with pytest.raises(CorruptArtifactError, match="surplus"):
        Record.from_dict({**good, "surplus": 1})
    with pytest.raises(CorruptArtifactError, match="schema 2"):
        Record.from_dict({**good, "schema": 2})


@pytest.mark.parametrize("change", [{"kernel": "chunk_scan"}, {"arch": "sm_80"}, {"source": "cd" * 32}, {"config": {"P": 64}}])
def test_a_record_whose_key_is_not_its_own_is_refused(change):
    good = json.loads(h.artifact().record.to_json())
    with pytest.raises(CorruptArtifactError, match="key"):
        Record.from_dict({**good, **change})


def test_an_artifact_checks_length_and_digest():
    good = h.artifact()
    assert good.check() is good
    with pytest.raises(CorruptArtifactError, match="bytes"):
        Artifact(good.record, good.cubin[:-1]).check()
    with pytest.raises(CorruptArtifactError, match="sha256"):
        Artifact(good.record, good.cubin[:-1] + bytes([good.cubin[-1] ^ 1])).check()
