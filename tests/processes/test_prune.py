"""prune: what it removes and keeps, and that readers and writers beside it never notice more than a miss."""

from __future__ import annotations

import os
import subprocess
import time

import helpers_store as h
import pytest

from tileops import store
from tileops.store import files, publishing


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    return h.isolate(monkeypatch, tmp_path)


def entries(count):
    """Entries last used count, count-1, ... 1 hours ago."""
    made = []
    for number in range(count):
        artifact = h.artifact(h.config(P=16 * (number + 1)))
        path = h.Path(store.publish(artifact).path)
        hours = time.time() - 3600 * (count - number)
        for file in (path / "kernel.cubin", path / "record.json", path):
            os.utime(file, (hours, hours))
        made.append(artifact)
    return made


def present(artifacts):
    return [store.find(a.record.config_object()).artifact == a for a in artifacts]


def test_by_age():
    made = entries(4)
    done = store.prune(older_than_seconds=2.5 * 3600)
    assert (done.removed, done.kept) == (2, 2)
    assert done.removed_bytes > 6000 and done.kept_bytes > 6000
    assert present(made) == [False, False, True, True]


def test_by_size_removes_what_was_used_longest_ago():
    made = entries(4)
    size = store.prune().kept_bytes // 4
    assert store.prune().removed == 0, "without limits nothing is removed"
    done = store.prune(max_bytes=2 * size + 100)
    assert (done.removed, done.kept) == (2, 2)
    assert done.kept_bytes <= 2 * size + 100
    assert present(made) == [False, False, True, True]
    assert store.prune(max_bytes=0).kept == 0
    assert present(made) == [False] * 4


def test_an_entry_that_was_read_counts_as_used(cache):
    made = entries(2)
    path = cache / "v1" / store.cache.entry_name(made[0].record) / "kernel.cubin"
    os.utime(path, (time.time(), path.stat().st_mtime))  # what the file system notes when it is read
    store.prune(older_than_seconds=1800)
    assert present(made) == [True, False]


def test_without_a_cache(cache, monkeypatch):
    assert store.prune(max_bytes=0) == (0, 0, 0, 0, 0, None)
    assert not cache.exists()
    cache.mkdir(0o777)
    cache.chmod(0o777)
    assert "chmod go-w" in store.prune(max_bytes=0).reason
    monkeypatch.setenv("TILEOPS_CACHE_DIR", "~nobody-of-that-name/x")
    assert "no home folder" in store.prune(max_bytes=0).reason


def test_things_that_are_no_entries_are_not_touched(cache):
    made = entries(1)
    (cache / "v1" / "notes.txt").write_text("mine")
    (cache / "v1" / ".staging-of-mine").mkdir()
    (cache / "v1" / ".hidden-00000000-1-00000000").mkdir()
    (cache / "v1" / ".locks").mkdir(exist_ok=True)
    done = store.prune(max_bytes=0)
    assert (done.removed, done.swept) == (1, 0)
    assert sorted(os.listdir(cache / "v1")) == [".hidden-00000000-1-00000000", ".locks", ".staging-of-mine", "notes.txt"]
    assert present(made) == [False]


def test_a_bad_entry_is_pruned_too(cache):
    made = entries(2)
    bad = cache / "v1" / store.cache.entry_name(made[0].record)
    for file in list(bad.iterdir()):
        file.unlink()
    bad.rmdir()
    bad.write_text("no folder")
    assert store.prune(older_than_seconds=-10).removed == 2
    assert os.listdir(cache / "v1") == []


def dead_pid():
    child = subprocess.Popen(["true"])
    child.wait()
    return child.pid


@pytest.mark.parametrize("sweeper", ["prune", "publish"])
def test_leftovers_of_the_dead_are_swept_and_those_of_the_living_stay(cache, sweeper, fault):
    entries(1)
    v1, host = cache / "v1", files._host_tag()
    living = subprocess.Popen(["sleep", "60"])
    try:
        gone = [f".{purpose}-{host}-{dead_pid()}-0000000{n}" for n, purpose in enumerate(("staging", "bad", "gone"))]
        old = [f".staging-{host}-{living.pid}-aaaaaaaa", ".staging-ffffffff-1-aaaaaaaa"]
        kept = [f".staging-{host}-{living.pid}-bbbbbbbb", f".staging-{host}-{os.getpid()}-bbbbbbbb", ".staging-ffffffff-1-bbbbbbbb"]
        for name in (*gone, *old, *kept):
            (v1 / name).mkdir()
            (v1 / name / "kernel.cubin").write_bytes(b"x")
        for name in old:
            os.utime(v1 / name, (time.time() - 2 * files.ORPHAN_AGE,) * 2)
        if sweeper == "prune":
            assert store.prune().swept == len(gone) + len(old)
        else:
            publishing.publish(h.artifact(h.config(P=256)))
        assert sorted(n for n in os.listdir(v1) if n.startswith(".")) == sorted(kept)
    finally:
        living.kill()
        living.wait()
    fault(
        f"staging folders left by killed writers, met by {sweeper}",
        "removed at once where the writer was of this host and is dead, after a day otherwise; those of the living stay",
    )


READS = """
import time
configs = [config(P=16 * (n + 1)) for n in range(4)]
right = {c.key: artifact(c) for c in configs}
hits = misses = 0
until = time.monotonic() + float(sys.argv[1])
while time.monotonic() < until:
    for c in configs:
        found = store.find(c)
        assert found.artifact in (None, right[c.key])
        reason = found.trace[-2][2]
        assert found.artifact or reason.startswith(("key not present", "the cache is empty", "cannot be read now"%s)), reason
        hits += found.artifact is not None
        misses += found.artifact is None
report(hits=hits, misses=misses)
"""

WRITES = """
import time
configs = [config(P=16 * (n + 1)) for n in range(4)]
until = time.monotonic() + float(sys.argv[1])
stored = 0
while time.monotonic() < until:
    for c in configs:
        answer = store.publish(artifact(c))
        assert answer.stored, answer
        stored += 1
report(stored=stored)
"""

PRUNES = """
import time
until = time.monotonic() + float(sys.argv[1])
removed = 0
while time.monotonic() < until:
    done = store.prune(max_bytes=5000)
    assert done.reason is None, done
    removed += done.removed
report(removed=removed)
"""


def test_beside_readers_and_writers(memory_disk, fault):
    env = h.environment(memory_disk / "cache")
    children = [h.start(text, "2", env=env) for text in (READS % "", READS % "", WRITES, WRITES, PRUNES, PRUNES)]
    answers = h.gather(children)
    assert [w for answer in answers for w in answer["warnings"]] == []
    hits = sum(a["hits"] for a in answers[:2])
    assert hits > 0 and sum(a["misses"] for a in answers[:2]) > 0
    assert all(a["stored"] > 0 for a in answers[2:4])
    assert sum(a["removed"] for a in answers[4:]) > 0
    left = [n for n in os.listdir(memory_disk / "cache" / "v1") if n.startswith(".")]
    assert left == []
    fault(
        "2 readers, 2 writers and 2 prunes on the same keys for 2 s",
        "hits with the right bytes or plain misses; no error, no warning, nothing left over",
    )


def test_writers_that_replace_under_readers(memory_disk, fault):
    env = h.environment(memory_disk / "cache")
    damages = """
import time
from tileops.store.cache import entry_name
configs = [config(P=16 * (n + 1)) for n in range(4)]
until = time.monotonic() + float(sys.argv[1])
replaced = 0
while time.monotonic() < until:
    for c in configs:
        made = artifact(c)
        answer = store.publish(made)
        assert answer.stored, answer
        replaced += answer.reason == "replaced a bad entry"
        path = os.path.join(os.environ["TILEOPS_CACHE_DIR"], "v1", entry_name(made.record), "kernel.cubin")
        with open(path, "r+b") as file:
            file.truncate(len(made.cubin) - 1)
report(replaced=replaced)
"""
    reads = READS % ', "cubin has 2999 bytes"'
    children = [h.start(text, "2", env=env) for text in (reads, reads, damages)]
    answers = h.gather(children)
    assert answers[2]["replaced"] > 0
    assert sum(a["hits"] for a in answers[:2]) > 0
    assert all(len(a["warnings"]) <= 4 for a in answers[:2]), "each bad entry is warned of once"
    fault("bad entries replaced under readers", "readers see the good entry or a miss; record and cubin are never of two writers")
