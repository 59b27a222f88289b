"""Processes without a usable home: the op still gets its kernel, and nothing is written where nobody asked for it."""

from __future__ import annotations

import os

import helpers_store as h
import pytest

WANTS = """
where = store.location()
found = [store.find_or_build(config(), artifact) for _ in range(2)]
report(path=where.path, reason=where.reason, kinds=[f.kind for f in found], right=all(f.artifact == artifact() for f in found),
       trace=store.find(config(P=256)).trace)
"""

LOCATION = "where = store.location(); found = store.find(config()); report(path=where.path, reason=where.reason, kind=found.kind)"


@pytest.fixture
def nowhere(tmp_path):
    """A working folder in which nothing may appear."""
    place = tmp_path / "cwd"
    place.mkdir()
    yield place
    assert list(place.iterdir()) == []


def test_home_unset_uses_the_passwd_entry(nowhere):
    import pwd

    seen = h.run(LOCATION, env=h.environment(), cwd=nowhere)
    assert seen["path"] == os.path.join(pwd.getpwuid(os.geteuid()).pw_dir, ".cache", "tileops")


def no_passwd_entry(uid):
    import pwd

    try:
        pwd.getpwuid(uid)
    except KeyError:
        return
    pytest.skip(f"uid {uid} has a passwd entry here")


def test_no_home_and_no_passwd_entry(public, fault):
    no_passwd_entry(54321)
    place = public / "cwd"
    place.mkdir(0o777)
    place.chmod(0o777)
    seen = h.run(WANTS, env=h.environment(), uid=54321, cwd=place)
    assert (seen["path"], seen["kinds"], seen["right"]) == (None, ["jit", "memory"], True)
    assert "no home folder" in seen["reason"] and "TILEOPS_CACHE_DIR" in seen["reason"]
    assert len(seen["warnings"]) == 1 and "no home folder" in seen["warnings"][0]
    assert list(place.iterdir()) == [], "a folder named ~ appeared"
    fault(
        "HOME unset and a uid without a passwd entry",
        "the kernel from memory, one warning names TILEOPS_CACHE_DIR; nothing written to the working folder",
    )
    (public / "cache").mkdir(0o700)
    os.chown(public / "cache", 54321, 54321)
    seen = h.run(WANTS, env=h.environment(public / "cache"), uid=54321, cwd=place)
    assert (seen["kinds"], seen["warnings"]) == (["jit", "cache"], [])
    fault("a uid without a passwd entry, TILEOPS_CACHE_DIR set", "stored and hit there")


def test_home_is_the_root_folder(public, fault):
    no_passwd_entry(54321)
    before = sorted(os.listdir("/"))
    seen = h.run(WANTS, env=h.environment(HOME="/"), uid=54321, cwd=public)
    assert (seen["path"], seen["kinds"], seen["right"]) == ("/.cache/tileops", ["jit", "memory"], True)
    assert len(seen["warnings"]) == 1 and "Permission denied (EACCES)" in seen["warnings"][0]
    assert sorted(os.listdir("/")) == before
    fault("HOME=/", "the kernel from memory, one warning; nothing written to /")


@pytest.mark.parametrize("home", ["/nonexistent/home", "/dev/null", "/proc/self"])
def test_home_that_cannot_hold_files(public, fault, home):
    seen = h.run(WANTS, env=h.environment(HOME=home), uid=54321, cwd=public)
    assert (seen["kinds"], seen["right"]) == (["jit", "memory"], True)
    assert len(seen["warnings"]) == 1
    fault(f"HOME={home}", "the kernel from memory, one warning")


@pytest.mark.parametrize("home", ["", "relative/home", "."])
def test_home_that_is_no_path(nowhere, home):
    seen = h.run(LOCATION, env=h.environment(HOME=home), cwd=nowhere)
    assert seen["path"] is None or os.path.isabs(seen["path"])


def test_home_is_used_where_it_is_good(tmp_path):
    for variable, path in (("HOME", ".cache/tileops"), ("XDG_CACHE_HOME", "tileops")):
        home = tmp_path / variable
        home.mkdir()
        seen = h.run(WANTS, env=h.environment(**{"HOME": str(tmp_path / "other"), variable: str(home)}))
        assert (seen["path"], seen["kinds"], seen["warnings"]) == (str(home / path), ["jit", "cache"], [])
        assert (home / path).stat().st_mode & 0o777 == 0o700


def test_a_relative_cache_dir_is_relative_to_the_working_folder(tmp_path):
    seen = h.run(WANTS, env=h.environment("here"), cwd=tmp_path)
    assert seen["path"] == str(tmp_path / "here")
    assert seen["kinds"] == ["jit", "cache"]


def test_a_cache_dir_below_a_home_that_is_not_there(nowhere):
    seen = h.run(WANTS, env={**h.environment("~someone-unknown/cache")}, cwd=nowhere)
    assert (seen["path"], seen["kinds"]) == (None, ["jit", "memory"])
    assert "no home folder" in seen["reason"]
