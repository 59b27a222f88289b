"""Many processes that miss the same key at once: one compile in the normal case, no error and the same bytes in any case."""

from __future__ import annotations

import errno
import json
import os
import subprocess

import helpers_store as h
import pytest

PROCESSES = 16

#: A process that waits for the start signal, then wants the kernel; its compiler notes each compile and takes its time.
WANTS = """
import time
from helpers_store import refuse
if len(sys.argv) > 2:
    refuse("flock", int(sys.argv[2]))
log = sys.argv[1] + "/compiles"
def build(of):
    with open(log, "a") as file:
        file.write("%d\\n" % os.getpid())
    time.sleep(0.3)
    return artifact(of)
print("ready", flush=True)
sys.stdin.readline()
found = store.find_or_build(config(), build)
again = store.find(config())
report(kind=found.kind, right=found.artifact == artifact(), again=again.kind, right_again=again.artifact == artifact())
"""


def race(place, *arguments, count=PROCESSES, scenario=WANTS):
    env = h.environment(place / "cache")
    command = [h.sys.executable, "-c", h.PROLOGUE + scenario, str(place), *arguments]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    children = [subprocess.Popen(command, env=env, text=True, **pipes) for _ in range(count)]
    for child in children:
        assert child.stdout.readline() == "ready\n"
    for child in children:
        child.stdin.write("go\n")
        child.stdin.flush()
    return h.gather(children)


def compiles(place):
    return len((place / "compiles").read_text().splitlines())


def only_the_entry(place):
    names = [n for n in os.listdir(place / "cache" / "v1") if n != ".locks"]
    return len(names) == 1 and not names[0].startswith(".")


def test_sixteen_processes_one_compile(tmp_path, fault):
    answers = race(tmp_path)
    assert all(a["right"] and a["right_again"] and a["again"] == "cache" for a in answers)
    assert [w for a in answers for w in a["warnings"]] == []
    assert sorted(a["kind"] for a in answers) == ["cache"] * (PROCESSES - 1) + ["jit"]
    assert compiles(tmp_path) == 1
    assert only_the_entry(tmp_path)
    assert len(os.listdir(tmp_path / "cache" / "v1" / ".locks")) <= 1
    fault(
        f"{PROCESSES} processes start cold on one key",
        f"1 compile, {PROCESSES} right answers, 0 errors, 0 warnings, 1 entry, nothing left over",
    )


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS], ids=errno.errorcode.get)
def test_where_the_file_system_has_no_locks(tmp_path, fault, code):
    answers = race(tmp_path, str(code), count=4)
    assert all(a["right"] and a["right_again"] and a["again"] == "cache" for a in answers)
    assert [w for a in answers for w in a["warnings"]] == []
    assert 1 <= compiles(tmp_path) <= 4
    assert only_the_entry(tmp_path)
    fault(
        f"flock refused by the kernel ({errno.errorcode[code]})",
        "processes compile for themselves, the first to publish wins, all are right",
    )


HOLDS = """
with store.compile_lock(config().key) as got:
    report(got=got)
    sys.stdout.flush()
    sys.stdin.readline()
"""


@pytest.fixture
def holder(tmp_path):
    child = subprocess.Popen(
        [h.sys.executable, "-c", h.PROLOGUE + HOLDS],
        env=h.environment(tmp_path / "cache"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert json.loads(child.stdout.readline())["got"] is True
    yield child
    child.kill()
    child.wait()
    child.stdin.close()
    child.stdout.close()


TRIES = """
with store.compile_lock(config().key, timeout=float(sys.argv[1])) as got:
    pass
report(got=got)
"""


def test_a_killed_holder_stops_nobody(tmp_path, holder, fault):
    env = h.environment(tmp_path / "cache")
    assert h.run(TRIES, "0.2", env=env)["got"] is False
    waiting = h.start(TRIES, "60", env=env)
    holder.kill()
    holder.wait()
    assert h.finish(waiting)["got"] is True
    assert h.run(TRIES, "60", env=env)["got"] is True
    fault("the process that holds the compile lock is killed", "the kernel releases its lock; the next one in line gets it")


def test_a_holder_that_hangs_costs_a_bounded_wait(tmp_path, holder, fault):
    seen = h.run(
        """
found = store.find_or_build(config(), artifact, wait=0.2)
again = store.find(config())
report(kind=found.kind, again=again.kind, right=again.artifact == artifact())
""",
        env=h.environment(tmp_path / "cache"),
    )
    assert (seen["kind"], seen["again"], seen["right"]) == ("jit", "cache", True)
    assert len(seen["warnings"]) == 1 and "Waited" in seen["warnings"][0]
    fault("the process that holds the compile lock hangs", "after the bounded wait the others compile for themselves, with one warning")


def test_threads_of_one_process_share_one_compile(tmp_path):
    seen = h.run(
        """
import threading, time
built, found = [], []
def build(of):
    built.append(1); time.sleep(0.2)
    return artifact(of)
threads = [threading.Thread(target=lambda: found.append(store.find_or_build(config(), build))) for _ in range(8)]
[t.start() for t in threads]; [t.join() for t in threads]
report(built=len(built), right=sum(f.artifact == artifact() for f in found))
""",
        env=h.environment(tmp_path / "cache"),
    )
    assert seen == {"built": 1, "right": 8, "warnings": []}


def test_other_keys_do_not_wait(tmp_path, holder):
    other = next(c for c in (h.config(P=p) for p in range(16, 256, 16)) if c.key[:2] != h.config().key[:2])
    seen = h.run(
        "found = store.find_or_build(config(P=int(sys.argv[1])), artifact); report(kind=found.kind)",
        str(other.fields["P"]),
        env=h.environment(tmp_path / "cache"),
    )
    assert seen == {"kind": "jit", "warnings": []}


def test_lock_files_do_not_accumulate(tmp_path):
    seen = h.run(
        """
for p in range(400):
    with store.compile_lock(config(P=p).key) as got:
        assert got
report(files=len(os.listdir(os.path.join(sys.argv[1], "v1", ".locks"))))
""",
        str(tmp_path / "cache"),
        env=h.environment(tmp_path / "cache"),
    )
    assert seen["files"] <= 256


@pytest.mark.parametrize("kind", ["fifo", "folder", "link"])
def test_what_lies_where_a_lock_should_is_not_opened(tmp_path, kind):
    place = tmp_path / "cache" / "v1" / ".locks"
    for folder in (tmp_path / "cache", tmp_path / "cache" / "v1", place):
        folder.mkdir(mode=0o700)
    path = place / f"{h.config().key[:2]}.lock"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(tmp_path / "victim")
    seen = h.run(
        "f = store.find_or_build(config(), artifact); report(kind=f.kind, again=store.find(config()).kind)",
        env=h.environment(tmp_path / "cache"),
    )
    assert (seen["kind"], seen["again"]) == ("jit", "cache")
    assert not [w for w in seen["warnings"] if "Waited" in w], "waited for something that is no lock"
    assert not (tmp_path / "victim").exists()
