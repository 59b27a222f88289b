"""Carrying kernels to another machine: export, import, and using a bundle as it is."""

from __future__ import annotations

import helpers_store as h
import pytest
from helpers_cli import VALUES, Command, tiny, write_site

from tileops import compiler


@pytest.fixture
def other(package, tmp_path) -> Command:
    """The machine that the bundle is carried to: nothing there yet."""
    return Command(package, tmp_path / "other")


def test_a_bundle_serves_as_a_root_and_is_imported_into_a_folder(tileops, other, site, tmp_path):
    bundle = tmp_path / "kernels.bundle"
    done = tileops("export", bundle, *VALUES, "--json", TILEOPS_ARTIFACT_PATH=str(site))
    assert done.status == 0 and done.json["kernels"] == len(tiny()) and done.json["archs"] == {"sm_80": len(tiny())}
    assert done.json["bytes"] == bundle.stat().st_size
    assert other("warm", "--check", *VALUES).status == 1
    assert other("warm", "--check", *VALUES, TILEOPS_ARTIFACT_PATH=str(bundle)).status == 0
    place = tmp_path / "root"
    done = other("import", bundle, "--into", place)
    assert done.status == 0 and f"TILEOPS_ARTIFACT_PATH={place}" in done.out
    assert other("warm", "--check", *VALUES, TILEOPS_ARTIFACT_PATH=str(place)).status == 0
    assert not other.cache.exists()


def test_import_fills_the_user_cache(tileops, other, site, tmp_path):
    bundle = tmp_path / "kernels.bundle"
    assert tileops("export", bundle, TILEOPS_ARTIFACT_PATH=str(site)).status == 0
    done = other("import", bundle, "--json")
    assert done.status == 0 and (done.json["kernels"], done.json["destination"]) == (len(tiny()), str(other.cache))
    # A compiler of another name is installed here or none is: the first makes imported entries a miss, and import says so.
    assert bool(done.json["notes"]) == (compiler.toolchain_name() not in (None, h.COMPILER))
    assert other("verify").status == 0
    listed = other("list", "--root", "cache", "--json").json["roots"][0]["kernels"]
    assert {kernel["key"] for kernel in listed} == {config.key for config in tiny()}


def test_export_is_the_same_every_time_and_takes_the_archs_asked_for(tileops, tmp_path):
    place = write_site(tmp_path / "site", [*tiny(), *tiny("sm_90a")])
    files = [tmp_path / name for name in ("one", "two")]
    for file in files:
        assert tileops("export", file, "--arch", "sm_90a", TILEOPS_ARTIFACT_PATH=str(place)).status == 0
    assert files[0].read_bytes() == files[1].read_bytes()
    done = tileops("export", tmp_path / "all", "--json", TILEOPS_ARTIFACT_PATH=str(place))
    assert done.json["archs"] == {"sm_80": len(tiny()), "sm_90a": len(tiny("sm_90a"))}
    done = tileops("import", tmp_path / "all", "--arch", "sm_80", "--into", tmp_path / "root", "--json")
    assert done.status == 0 and done.json["kernels"] == len(tiny()) and not (tmp_path / "root" / "sm_90a").exists()
    assert tileops("import", tmp_path / "one", "--arch", "sm_80").status == 1


def test_export_of_what_is_not_there_writes_nothing(tileops, tmp_path):
    kept = [c for c in tiny() if c.kernel != "recurrent"]
    half = write_site(tmp_path / "half", kept)
    done = tileops("export", tmp_path / "bundle", *VALUES, TILEOPS_ARTIFACT_PATH=str(half))
    assert (
        done.status == 1
        and f"{len(tiny()) - len(kept)} of {len(tiny())} kernels are in no root" in done.err
        and "tileops warm --chunk-size 16" in done.err
    )
    assert tileops("export", tmp_path / "bundle").status == 1
    assert tileops("export", tmp_path / "bundle", "--arch", "sm_80,sm_90a", TILEOPS_ARTIFACT_PATH=str(half)).status == 1
    assert not (tmp_path / "bundle").exists()


def test_export_to_where_nothing_can_be_written(tileops, site, tmp_path):
    for where, words in (
        (tmp_path / "no" / "bundle", "no is not a folder"),
        (tmp_path, "is a folder"),
        ("/proc/bundle", "cannot be written"),
    ):
        done = tileops("export", where, TILEOPS_ARTIFACT_PATH=str(site))
        assert done.status == 2 and words in done.err


@pytest.mark.parametrize("at", [0, 700, -2000])
def test_a_damaged_bundle_stores_nothing(tileops, other, site, tmp_path, at):
    bundle = tmp_path / "kernels.bundle"
    assert tileops("export", bundle, TILEOPS_ARTIFACT_PATH=str(site)).status == 0
    data = bytearray(bundle.read_bytes())
    data[at] ^= 1
    bundle.write_bytes(data)
    for extra in ([], ["--into", tmp_path / "root"]):
        done = other("import", bundle, *extra, "--json")
        assert done.status == 3 and done.json["kind"] == "CorruptArtifactError"
    assert not other.cache.exists() and not (tmp_path / "root").exists()


def test_import_into_a_cache_that_cannot_be_used(tileops, other, site, tmp_path):
    bundle = tmp_path / "kernels.bundle"
    assert tileops("export", bundle, TILEOPS_ARTIFACT_PATH=str(site)).status == 0
    other.cache.mkdir()
    other.cache.chmod(0o777)
    done = other("import", bundle)
    assert done.status == 1 and "can be written by other users" in done.err
