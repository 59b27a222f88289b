"""Faults on disk and what each makes of the exit status; making the cache smaller."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import helpers_store as h
import pytest
from helpers_cli import tiny, write_site

from tileops.config import Artifact
from tileops.store import publish, write_packaged
from tileops.store.roots import seal


def manifest_of(place: Path) -> Path:
    return place / "sm_80" / "manifest.json"


def rewrite(place: Path, change) -> None:
    """The manifest with ``change(data, first record)`` done, sealed anew: a fault that no digest shows."""
    data = json.loads(manifest_of(place).read_bytes())
    del data["sha256"]
    change(data, next(iter(data["records"].values())))
    manifest_of(place).write_bytes(seal(data))


def first_cubin(place: Path) -> Path:
    return min((place / "sm_80").glob("*.cubin"))


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


#: fault -> (how, status, kind)
FAULTS = {
    "a flipped bit": (lambda place: flip(first_cubin(place)), 3, "corrupt"),
    "a truncated cubin": (lambda place: os.truncate(first_cubin(place), 100), 3, "corrupt"),
    "a flipped bit in the manifest": (lambda place: flip(manifest_of(place)), 3, "corrupt"),
    "a cubin that is gone": (lambda place: first_cubin(place).unlink(), 1, "missing"),
    "a manifest of another schema": (lambda place: rewrite(place, lambda data, _: data.update(schema=99)), 4, "schema"),
    "a root that any user can write": (lambda place: place.chmod(0o777), 1, "unusable"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_verify_tells_faults_apart(tileops, site, fault):
    assert tileops("verify", TILEOPS_ARTIFACT_PATH=str(site)).status == 0
    damage, status, kind = FAULTS[fault]
    damage(site)
    done = tileops("verify", "--json", TILEOPS_ARTIFACT_PATH=str(site))
    (root,) = [root for root in done.json["roots"] if root["kind"] == "site"]
    assert done.status == status and {each["kind"] for each in root["faults"]} == {kind}
    text = tileops("verify", TILEOPS_ARTIFACT_PATH=str(site))
    assert text.status == status and kind in text.out and root["faults"][0]["reason"] in text.out and "remedy:" in text.out
    # The other roots are as they were.
    assert tileops("verify", "--root", "cache", TILEOPS_ARTIFACT_PATH=str(site)).status == 0


def test_verify_finds_code_for_another_arch(tileops, tmp_path):
    other = h.cubin("sm_90a")
    record = h.artifact(tiny()[0], cubin_sha256=hashlib.sha256(other).hexdigest(), cubin_size=len(other)).record
    write_packaged(tmp_path / "site", [Artifact(record, other)])
    done = tileops("verify", "--root", "site", "--json", TILEOPS_ARTIFACT_PATH=str(tmp_path / "site"))
    assert done.status == 4 and done.json["roots"][0]["faults"][0]["kind"] == "arch"


def test_the_worst_of_several_faults_counts(tileops, site):
    first_cubin(site).unlink()
    flip(max((site / "sm_80").glob("*.cubin")))
    done = tileops("verify", "--json", TILEOPS_ARTIFACT_PATH=str(site))
    kinds = sorted(fault["kind"] for root in done.json["roots"] for fault in root["faults"])
    assert (done.status, kinds) == (3, ["corrupt", "missing"])


def test_verify_looks_at_folders_and_bundles_that_are_named(tileops, site):
    bundle = site.parent / "bundle"
    assert tileops("export", bundle, TILEOPS_ARTIFACT_PATH=str(site)).status == 0
    done = tileops("verify", site, bundle, "--json")
    assert done.status == 0 and [root["kernels"] for root in done.json["roots"]] == [len(tiny())] * 2
    flip(bundle)
    assert tileops("verify", site, bundle).status == 3
    assert tileops("verify", site.parent / "nowhere").status == 1


@pytest.fixture
def filled(tileops, monkeypatch) -> list[Path]:
    """A user cache with every kernel of the tiny model; the entries, oldest first."""
    monkeypatch.setenv("TILEOPS_CACHE_DIR", str(tileops.cache))
    entries = []
    for age, config in enumerate(tiny()):
        path = publish(h.artifact(config)).path
        assert path is not None
        entries.append(Path(path))
        then = time.time() - 86400 * (len(tiny()) - age)
        for file in (*entries[-1].iterdir(), entries[-1]):
            os.utime(file, (then, then))
    return entries


def test_verify_names_a_bad_cache_entry_and_what_mends_it(tileops, filled):
    flip(filled[3] / "kernel.cubin")
    done = tileops("verify")
    assert done.status == 3 and str(filled[3]) in done.out and "tileops warm replaces it" in done.out


def test_prune_keeps_what_was_used_last(tileops, filled):
    sizes = [sum(file.stat().st_size for file in entry.iterdir()) for entry in filled]
    done = tileops("prune", "--max-size", str(sum(sizes[-3:])), "--json")
    assert done.status == 0
    assert (done.json["removed"], done.json["kept"]) == (len(filled) - 3, 3)
    assert (done.json["removed_bytes"], done.json["kept_bytes"]) == (sum(sizes[:-3]), sum(sizes[-3:]))
    assert [entry.exists() for entry in filled] == [False] * (len(filled) - 3) + [True] * 3


def test_prune_by_age_and_to_nothing(tileops, filled):
    done = tileops("prune", "--older-than", "60h")
    assert done.status == 0 and f"removed  {len(filled) - 2} kernels" in done.out
    assert [entry.exists() for entry in filled[-3:]] == [False, True, True]
    done = tileops("prune", "--max-size", "0")
    assert done.status == 0 and "removed  2 kernels" in done.out and not any(entry.exists() for entry in filled)


def test_prune_sweeps_what_a_killed_writer_left(tileops, filled):
    line = [sys.executable, "-c", "from tileops.store import files; print(files.private_name('staging'))"]
    child = subprocess.run(line, env=tileops.environment(), capture_output=True, text=True, check=True, timeout=60)
    left = filled[0].parent / child.stdout.strip()
    left.mkdir()
    (left / "kernel.cubin").write_bytes(b"half")
    done = tileops("prune", "--max-size", "1G", "--json")
    assert done.status == 0 and (done.json["swept"], done.json["removed"]) == (1, 0) and not left.exists()


def test_prune_of_a_cache_that_is_not_there_or_refused(tileops):
    done = tileops("prune", "--max-size", "1M")
    assert done.status == 0 and not tileops.cache.exists()
    (tileops.cache / "v1").mkdir(parents=True)
    tileops.cache.chmod(0o777)
    done = tileops("prune", "--max-size", "1M")
    assert done.status == 1 and "can be written by other users" in done.out


def test_list_marks_a_refused_root(tileops, tmp_path):
    place = write_site(tmp_path / "open", tiny())
    place.chmod(0o777)
    done = tileops("list", TILEOPS_ARTIFACT_PATH=str(place))
    assert done.status == 1 and f"site {place}: any user can write it" in done.out
