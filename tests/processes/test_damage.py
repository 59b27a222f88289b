"""Entries that were damaged on disk: never served, never a crash, replaced by the next publish, and a good one is still a hit."""

from __future__ import annotations

import json
import os
import shutil

import helpers_store as h
import pytest

from tileops import store
from tileops.store import notes
from tileops.store.roots import seal

CONFIG = h.config()
GOOD = h.artifact(CONFIG)
OTHER = h.artifact(h.config(P=128))


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    return h.isolate(monkeypatch, tmp_path)


@pytest.fixture
def entry(cache):
    """The folder of GOOD's entry; OTHER is there as well."""
    assert store.publish(OTHER).stored
    path = store.publish(GOOD).path
    assert store.find(CONFIG).artifact == GOOD
    return h.Path(path)


def refused_then_replaced(entry, reason=""):
    """The damaged entry is a miss with a reason and one warning; the next publish makes it good; the other entry is untouched."""
    notes._warned.clear()
    with pytest.warns(store.StoreWarning, match="cache entry is not used") as seen:
        lookups = [store.find(CONFIG) for _ in range(3)]
    assert len(seen) == 1, "warned of once an entry"
    assert all(found.artifact is None for found in lookups)
    assert reason in lookups[0].trace[-2].reason
    entry_is_empty = entry.is_dir() and not any(entry.iterdir())
    faults = [f for root in store.roots() if root.kind == "cache" for f in root.verify()]
    assert [f.key for f in faults] == [CONFIG.key]
    assert store.find(OTHER.record.config_object()).artifact == OTHER
    published = store.publish(GOOD)
    assert published.stored
    assert published.reason == ("replaced a bad entry" if not entry_is_empty else "published")
    assert store.find(CONFIG).artifact == GOOD
    assert sorted(os.listdir(entry.parent)) == sorted([entry.name, store.cache.entry_name(OTHER.record)])
    return faults[0].kind


def test_truncated_cubin(entry, fault):
    path = entry / "kernel.cubin"
    size = len(GOOD.cubin)
    boundaries = [0, 1, 4, 16, 63, 64, 65, 511, 512, 1024, size // 2, size - 64, size - 1]
    for length in boundaries:
        path.write_bytes(GOOD.cubin[:length])
        assert refused_then_replaced(entry, f"cubin has {length} bytes, the record says {size}") == "corrupt"
    fault(f"cubin truncated at {len(boundaries)} boundaries", "a miss with both lengths, warned of once, replaced")


def test_record_truncated_at_every_byte(entry, fault):
    path, text = entry / "record.json", (entry / "record.json").read_bytes()
    notes._warned.add((str(entry.parents[1]), entry.name))  # warned of once; shown by the tests around this one
    for length in range(len(text)):
        path.write_bytes(text[:length])
        assert store.find(CONFIG).artifact is None, length
    assert refused_then_replaced(entry) == "corrupt"
    path.write_bytes(text)
    assert store.find(CONFIG).artifact == GOOD
    fault(f"record truncated at each of its {len(text)} bytes", "a miss, warned of once, replaced")


def test_longer_files(entry, fault):
    for name in ("kernel.cubin", "record.json"):
        with open(entry / name, "ab") as file:
            file.write(b"\0")
        assert refused_then_replaced(entry) == "corrupt"
    fault("a byte too many in cubin or record", "a miss, warned of once, replaced")


def test_flipped_bits(entry, fault):
    for position in (0, 7, 63, 64, 1500, len(GOOD.cubin) - 1):
        for bit in (0, 7):
            data = bytearray(GOOD.cubin)
            data[position] ^= 1 << bit
            (entry / "kernel.cubin").write_bytes(data)
            assert refused_then_replaced(entry, "sha256 differs") == "corrupt"
    text = (entry / "record.json").read_bytes()
    for position in range(len(text)):
        notes._warned.add((str(entry.parents[1]), entry.name))
        data = bytearray(text)
        data[position] ^= 1
        (entry / "record.json").write_bytes(data)
        assert store.find(CONFIG).artifact is None, position
    (entry / "record.json").write_bytes(text.replace(b"B * H", b"B + H"))
    assert refused_then_replaced(entry, "do not match its own digest") == "corrupt"
    fault("bits flipped in the cubin, and in each byte of the record", "a miss, warned of once, replaced; launch fields are covered too")


def test_zeroed_files(entry, fault):
    # What a power cut leaves of a file that was renamed into place before it was flushed.
    for name in ("kernel.cubin", "record.json"):
        (entry / name).write_bytes(bytes((entry / name).stat().st_size))
        assert refused_then_replaced(entry) == "corrupt"
    fault("files of the right length full of zeros", "a miss, warned of once, replaced")


def test_swapped_records(entry, fault):
    other = entry.parent / store.cache.entry_name(OTHER.record)
    shutil.copy(other / "record.json", entry / "record.json")
    assert refused_then_replaced(entry, "of another config") == "corrupt"
    shutil.copy(other / "kernel.cubin", entry / "kernel.cubin")
    assert refused_then_replaced(entry, "sha256 differs") == "corrupt"
    for name in ("record.json", "kernel.cubin"):
        shutil.copy(other / name, entry / name)
    assert refused_then_replaced(entry, "of another config") == "corrupt"
    fault("record, cubin or both swapped with another kernel's", "a miss: key, every field and digest are compared")


def test_cubin_of_another_writer_of_the_same_key(entry, fault):
    (entry / "kernel.cubin").write_bytes(h.cubin("sm_90a", seed=77))
    assert refused_then_replaced(entry, "sha256 differs") == "corrupt"
    fault("one writer's cubin with another's record (same key)", "a miss: the digest is in the record")


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"schema": 2}, "schema"),
        ({"arch": "sm_80"}, "corrupt"),
        ({"source": "cd" * 32}, "corrupt"),
        ({"config": {"P": 64}}, "corrupt"),
        ({"config": [1]}, "corrupt"),
        ({"config": {"P": {"deep": float("nan")}}}, "corrupt"),
        ({"key": "../../etc"}, "corrupt"),
        ({"params": [{"name": "x", "kind": "code", "bind": "x"}]}, "corrupt"),
        ({"params": [{"name": "x"}]}, "corrupt"),
        ({"params": [7]}, "corrupt"),
        ({"cubin_size": -1}, "corrupt"),
        ({"extra": "field"}, "corrupt"),
    ],
)
def test_records_with_wrong_fields(entry, change, kind):
    data = {**json.loads(GOOD.record.to_json()), **change}
    (entry / "record.json").write_bytes(seal(data) if "NaN" not in str(json.dumps(data)) else json.dumps(data).encode())
    assert refused_then_replaced(entry) == kind


def test_record_that_is_code(entry, fault):
    for data in (b"\x80\x04\x95cos\nsystem\n", b"__import__('os').abort()", b"[" * 100_000, b"\xff" * 100, b"null", b'"text"'):
        (entry / "record.json").write_bytes(data)
        assert refused_then_replaced(entry) == "corrupt"
    (entry / "record.json").write_bytes(b" " * (2 << 20))
    assert refused_then_replaced(entry, "more than") == "corrupt"
    fault("a record that is a pickle, code, nested 100 000 deep, or 2 MiB of blanks", "read as JSON of bounded size or not at all")


@pytest.mark.parametrize("missing", [("record.json",), ("kernel.cubin",), ("record.json", "kernel.cubin")], ids="+".join)
def test_missing_files(entry, missing):
    for name in missing:
        (entry / name).unlink()
    assert refused_then_replaced(entry, "is missing") == "missing"


THINGS = ["fifo", "link", "dangling link", "socket"]


@pytest.mark.parametrize(
    ("name", "kind"),
    [("", kind) for kind in ("file", *THINGS)] + [(name, kind) for name in ("record.json", "kernel.cubin") for kind in ("folder", *THINGS)],
)
def test_other_things_than_files_in_an_entry(entry, tmp_path, name, kind):
    path = entry / name if name else entry
    moved = tmp_path / "moved"
    path.rename(moved)
    if kind == "file":
        path.write_bytes(b"")
    elif kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to(moved)
    elif kind == "dangling link":
        path.symlink_to(tmp_path / "nowhere")
    else:
        import socket

        with socket.socket(socket.AF_UNIX) as end:
            os.chdir(path.parent)
            end.bind(path.name)
            os.chdir("/")
    refused_then_replaced(entry)
    if kind == "link":
        assert moved.exists(), "what a link pointed to was removed"


def test_entries_that_others_can_write(entry, fault):
    for path in (entry, entry / "record.json", entry / "kernel.cubin"):
        path.chmod(0o777 if path.is_dir() else 0o666)
        refused_then_replaced(entry, "can be written by other users")
    fault("an entry or a file in it that others can write", "a miss, warned of once, replaced")


@pytest.mark.skipif(os.geteuid() != 0, reason="giving files away needs root")
def test_entries_of_another_owner(entry, fault):
    for path in (entry, entry / "record.json", entry / "kernel.cubin"):
        os.chown(path, 12345, 12345)
        refused_then_replaced(entry, "belongs to uid 12345")
    fault("an entry or a file in it that another user owns", "a miss, warned of once, replaced")


def test_a_bad_entry_under_a_policy_that_never_publishes_stays_a_miss(entry):
    (entry / "kernel.cubin").write_bytes(b"")
    with store.policy("cached"), pytest.warns(store.StoreWarning):
        assert store.find(CONFIG).artifact is None
    assert (entry / "kernel.cubin").read_bytes() == b"", "a reader changed the cache"


def test_a_bad_entry_of_one_compiler_does_not_hide_another_compilers(entry):
    (entry / "kernel.cubin").write_bytes(b"")
    newer = h.artifact(CONFIG, compiler="newer", seed=3)
    store.publish(newer)
    with pytest.warns(store.StoreWarning):
        store.find(CONFIG, toolchain=h.COMPILER)
    assert store.find(CONFIG).artifact == newer


def test_a_good_entry_stays_as_it_is(entry):
    before = [(p.stat().st_ino, p.stat().st_mtime_ns) for p in (entry, entry / "record.json", entry / "kernel.cubin")]
    assert store.publish(GOOD).reason == "already there"
    assert store.publish(h.artifact(CONFIG, seed=8)).reason == "already there"
    assert store.find(CONFIG).artifact == GOOD
    assert before == [(p.stat().st_ino, p.stat().st_mtime_ns) for p in (entry, entry / "record.json", entry / "kernel.cubin")]


def test_layout_and_modes(entry, cache):
    assert sorted(h.tree(cache)) == sorted(
        f"v1/{name}/{file}" for name in (entry.name, store.cache.entry_name(OTHER.record)) for file in ("record.json", "kernel.cubin")
    ), "two files a kernel"
    assert {p.stat().st_mode & 0o777 for p in (cache, cache / "v1", entry)} == {0o700}
    assert {p.stat().st_mode & 0o777 for p in entry.iterdir()} == {0o600}
