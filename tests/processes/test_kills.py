"""A writer that is killed at any point of its work leaves nothing that a reader trusts wrongly, and nothing that stays."""

from __future__ import annotations

import errno

import helpers_store as h
import pytest

#: What every scenario starts with: a cache at argv[1] whose other entry must survive everything.
START = """
from pathlib import Path
from helpers_store import artifact, config, kill_at_every_call, refuse
from tileops.store import files, notes
import tileops.store.cache as cache
place = Path(sys.argv[1])
v1 = place / "v1"
other, mine = artifact(config(P=128)), artifact()
def hidden():
    return [n for n in os.listdir(v1) if n.startswith(".") and n != ".locks"] if v1.exists() else []
def healthy():
    return [f for r in store.roots() if r.kind == "cache" for f in r.verify()] == []
def fill():
    assert store.publish(other).stored
    assert store.find(other.record.config_object()).kind == "cache"
def afterwards():
    assert store.find(other.record.config_object()).artifact == other, "the good entry was lost"
    assert store.publish(mine).stored
    found = store.find(mine.record.config_object())
    assert (found.kind, found.artifact) == ("cache", mine)
    assert hidden() == [], hidden()
    assert sorted(n for n in os.listdir(v1) if not n.startswith(".")) == sorted(cache.entry_name(a.record) for a in (mine, other))
    assert healthy()
"""


def scenario(place, text, *arguments):
    return h.run(START + text, str(place / "cache"), *arguments, env=h.environment(place / "cache"))


def test_killed_while_publishing(memory_disk, fault):
    seen = scenario(
        memory_disk,
        """
def check():
    found = store.find(mine.record.config_object())
    assert found.artifact in (None, mine)
    assert healthy()
    afterwards()
seen = kill_at_every_call(place, fill, lambda: store.publish(mine), check)
report(seen=seen)
""",
    )
    kinds = {name.split()[1] for name in seen["seen"]}
    assert {"mkdir", "open", "write", "fsync", "rename", "close"} <= kinds
    assert seen["warnings"] == []
    fault(
        f"writer killed (SIGKILL) at each of its {sum(seen['seen'].values())} file-system calls",
        "a hit or a miss; other entries kept; the next publish stores it and sweeps the leftovers",
    )


def test_killed_in_an_empty_place(memory_disk):
    seen = scenario(
        memory_disk,
        """
def check():
    assert store.find(mine.record.config_object()).artifact in (None, mine)
    assert store.publish(mine).stored and store.find(mine.record.config_object()).artifact == mine
    assert hidden() == [] and healthy()
report(seen=kill_at_every_call(place, lambda: None, lambda: store.publish(mine), check))
""",
    )
    assert any(name.endswith("mkdir") for name in seen["seen"])
    assert seen["warnings"] == []


@pytest.mark.parametrize("exchange", [True, False], ids=["with exchange", "without exchange"])
def test_killed_while_replacing_a_bad_entry(memory_disk, fault, exchange):
    # Without: the kernel refuses renameat2, as for NFS.
    seen = scenario(
        memory_disk,
        """
if sys.argv[2] == "False":
    refuse("renameat2", int(sys.argv[3]))
def spoil():
    fill()
    assert store.publish(mine).stored
    (v1 / cache.entry_name(mine.record) / "kernel.cubin").write_bytes(mine.cubin[:-1])
def check():
    assert store.find(mine.record.config_object()).artifact in (None, mine)
    afterwards()
report(seen=kill_at_every_call(place, spoil, lambda: store.publish(mine), check))
""",
        str(exchange),
        str(errno.EINVAL),
    )
    assert any(name.endswith("exchange") for name in seen["seen"])
    assert any(name.endswith("rename") for name in seen["seen"])
    assert len(seen["warnings"]) == 1, "a bad entry is warned of once"
    fault(
        f"writer killed at each call while it replaces a bad entry ({'renameat2 exchange' if exchange else 'no exchange, as on NFS'})",
        "the bad entry is never served; the next publish replaces it; nothing is left behind",
    )


def test_killed_while_pruning(memory_disk, fault):
    seen = scenario(
        memory_disk,
        """
def both():
    fill(); assert store.publish(mine).stored
def check():
    for one in (mine, other):
        assert store.find(one.record.config_object()).artifact in (None, one)
    assert healthy()
    done = store.prune(max_bytes=0)
    assert (done.kept, done.reason) == (0, None)
    assert os.listdir(v1) == []
    fill(); afterwards()
report(seen=kill_at_every_call(place, both, lambda: store.prune(max_bytes=0), check))
""",
    )
    assert any(name.endswith("rename") for name in seen["seen"])
    assert any(name.endswith("unlink") for name in seen["seen"])
    assert seen["warnings"] == []
    fault("`prune` killed at each of its calls", "entries are whole or gone; the next prune removes what was left half removed")


def test_killed_while_building_a_packaged_root(memory_disk, fault):
    seen = scenario(
        memory_disk,
        """
root = place / "packaged"
os.environ["TILEOPS_ARTIFACT_PATH"] = str(root)
remade = artifact(seed=5, compiler="newer")
def first():
    store.write_packaged(root, [other, mine])
def build():
    writer = store.PackagedWriter(root)
    writer.add(remade)
    writer.finish()
    writer.write_digests()
def check():
    assert store.find(other.record.config_object()).artifact == other, "a good artifact was lost"
    assert store.find(mine.record.config_object()).artifact in (None, mine, remade)
    writer = store.PackagedWriter(root)
    made_again = not writer.has(config(), "newer")
    build() if made_again else (writer.finish(), writer.write_digests())
    assert store.find(mine.record.config_object()).artifact == remade
    assert store.read_digests(root)[remade.record.key] == remade.record.cubin_sha256
    left = sorted(str(p.relative_to(root)) for p in root.rglob("*") if p.is_file())
    assert left == sorted(["digests.json", "sm_90a/manifest.json"] + ["sm_90a/%s.cubin" % a.record.key for a in (other, mine)]), left
report(seen=kill_at_every_call(place, first, build, check))
""",
    )
    assert {"open", "write", "fsync", "rename", "unlink"} <= {name.split()[1] for name in seen["seen"]}
    fault("build step killed at each of its calls", "the old root or the new one is served; the next run resumes and gives the same files")


def test_killed_while_exporting_a_bundle(memory_disk, fault):
    seen = scenario(
        memory_disk,
        """
bundle = place / "b.tileops"
def first():
    fill(); store.export_bundle(bundle, configs=[other.record.config_object()]); store.publish(mine)
def export():
    return store.export_bundle(bundle, configs=[other.record.config_object(), config()])
def check():
    assert store.import_bundle(bundle).kernels in (1, 2)
    assert export().kernels == 2
    assert not [n for n in os.listdir(place) if n.startswith(".b")], os.listdir(place)
report(seen=kill_at_every_call(place, first, export, check))
""",
    )
    assert any(name.endswith("rename") for name in seen["seen"])
    fault("`export` killed at each of its calls", "the old bundle or the new one, whole; the next export sweeps the temporary file")
