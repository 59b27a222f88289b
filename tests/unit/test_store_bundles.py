"""Bundles: one deterministic file, verified whole before anything is stored, never writing outside its place."""

from __future__ import annotations

import io
import os
import tarfile

import helpers_store as h
import pytest

from tileops import store
from tileops.errors import CorruptArtifactError, MissingKernelError, TileOpsError
from tileops.store.roots import seal, unseal

ARTIFACTS = [h.artifact(h.config(P=p, arch=a)) for a in ("sm_90a", "sm_80") for p in (64, 128)]
CONFIGS = [a.record.config_object() for a in ARTIFACTS]


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    return h.isolate(monkeypatch, tmp_path)


@pytest.fixture
def bundle(tmp_path):
    store.write_packaged(h.own_root(tmp_path), ARTIFACTS)
    path = tmp_path / "kernels.bundle"
    done = store.export_bundle(path, current=False)
    assert done == (str(path), 4, path.stat().st_size)
    return path


@pytest.fixture
def elsewhere(monkeypatch, tmp_path, bundle):
    """Another machine: no packaged artifacts, an empty cache."""
    place = tmp_path / "machine"
    place.mkdir()
    h.isolate(monkeypatch, place)
    return place


def found():
    return [store.find(config).artifact for config in CONFIGS]


def test_into_the_user_cache(bundle, elsewhere):
    assert found() == [None] * 4
    done = store.import_bundle(bundle)
    assert done == (4, 12000, str(elsewhere / "cache"))
    assert found() == ARTIFACTS
    assert {store.find(config).kind for config in CONFIGS} == {"cache"}
    assert store.import_bundle(bundle).kernels == 4, "twice is once"


def test_into_a_folder(bundle, elsewhere, monkeypatch):
    done = store.import_bundle(bundle, into=elsewhere / "root", archs=["sm_80"])
    assert done == (2, 6000, str(elsewhere / "root"))
    assert sorted(os.listdir(elsewhere / "root")) == ["sm_80"]
    assert not (elsewhere / "cache").exists()
    monkeypatch.setenv("TILEOPS_ARTIFACT_PATH", str(elsewhere / "root"))
    assert found() == [None, None, *ARTIFACTS[2:]]


def test_as_a_root_itself(bundle, elsewhere, monkeypatch):
    monkeypatch.setenv("TILEOPS_ARTIFACT_PATH", str(bundle))
    bundle.chmod(0o444)
    before = h.tree(elsewhere)
    assert found() == ARTIFACTS
    lookup = store.find(h.config(P=256))
    assert lookup.trace[1] == (f"site {bundle}", "miss", "key not present")
    assert store.find(CONFIGS[0], toolchain="another compiler", policy="packaged").kind == "site"
    assert len(store.matching("recurrent", current=False)) == 4
    assert [list(root.verify()) for root in store.roots() if root.path == str(bundle)] == [[]]
    assert h.tree(elsewhere) == before


def test_the_same_artifacts_give_the_same_bytes(bundle, tmp_path, monkeypatch):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1")
    store.import_bundle(bundle)
    again = store.export_bundle(tmp_path / "again", configs=CONFIGS[::-1])
    assert again.kernels == 4
    assert (tmp_path / "again").read_bytes() == bundle.read_bytes()
    with tarfile.open(bundle) as tar:
        members = tar.getmembers()
    assert members[0].name == "manifest.json"
    assert {(m.mtime, m.uid, m.gid, m.uname, m.gname, m.mode, m.type) for m in members} == {(0, 0, 0, "", "", 0o644, tarfile.REGTYPE)}


def test_a_choice_of_archs_and_configs(bundle, tmp_path):
    assert store.export_bundle(tmp_path / "one", archs=["sm_80"], current=False).kernels == 2
    assert store.export_bundle(tmp_path / "two", configs=CONFIGS, archs=["sm_80"]).kernels == 2
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    with pytest.raises(MissingKernelError):
        store.export_bundle(tmp_path / "three", configs=[h.config(P=256)])
    assert not (tmp_path / "three").exists()


def test_only_kernels_of_current_sources_travel_unless_told(bundle, tmp_path, monkeypatch):
    assert store.export_bundle(tmp_path / "none").kernels == 0
    monkeypatch.setattr("tileops.store.lookup.source_digest", lambda kernel: h.SOURCE)
    assert store.export_bundle(tmp_path / "all").kernels == 4


def test_an_artifact_that_is_bad_does_not_travel(tmp_path, bundle):
    path = h.own_root(tmp_path) / "sm_80" / f"{CONFIGS[2].key}.cubin"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CorruptArtifactError, match="damaged"):
        store.export_bundle(tmp_path / "less", current=False)
    assert not (tmp_path / "less").exists()


def nothing_stored(place, outside):
    assert not (place / "cache").exists()
    assert not (place / "root").exists()
    assert h.tree(outside) == {"canary": b"alive"}


@pytest.fixture
def refused(elsewhere, monkeypatch, tmp_path):
    """Shows that a bundle is refused with a reason, as an import and as a root, and that nothing was stored anywhere."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "canary").write_bytes(b"alive")
    monkeypatch.chdir(outside)

    def check(path, reason="."):
        for options in ({}, {"into": elsewhere / "root"}):
            with pytest.raises(CorruptArtifactError, match=reason) as raised:
                store.import_bundle(path, **options)
            assert raised.value.path == str(path)
            nothing_stored(elsewhere, outside)

    return check


def test_a_truncated_or_flipped_bundle(bundle, refused, elsewhere):
    data = bundle.read_bytes()
    used = len(data.rstrip(b"\0"))
    bad = elsewhere / "bad"
    for length in (0, 1, 511, 512, 513, 4096, used // 2, used - 1, used - 600):
        bad.write_bytes(data[:length])
        refused(bad)
    for position in [*range(520), *range(520, used, 97)]:
        bad.write_bytes(data[:position] + bytes([data[position] ^ 0x10]) + data[position + 1 :])
        assert list(store.bundles.BundleRoot("site", "bad", str(bad)).verify()), position


def repack(members, fmt=tarfile.USTAR_FORMAT):
    """A tar of (TarInfo or name, bytes)."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=fmt) as tar:
        for info, data in members:
            if isinstance(info, str):
                info = tarfile.TarInfo(info)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def unpacked(bundle):
    with tarfile.open(bundle) as tar:
        return [(m.name, tar.extractfile(m).read()) for m in tar.getmembers()]


def link(name, kind, target):
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


def attacks(members):
    """name -> the members of a hostile bundle."""
    manifest, first, *rest = members
    name, data = first

    def renamed(new):
        return [manifest, (new, data), *rest]

    long = "x/" * 200 + "k.cubin"
    yield "absolute path", renamed("/tmp/evil.cubin")
    yield "parent folder", renamed("../../canary")
    yield "parent folder inside", renamed(f"sm_80/../../{name}")
    yield "dot", renamed(f"./{name}")
    yield "extra file", [*members, ("sm_80/extra.cubin", b"x")]
    yield "file outside as an extra", [*members, ("../canary", b"dead")]
    yield "same file twice", [*members, first]
    yield "second manifest", [*members, manifest]
    yield "missing cubin", [manifest, *rest]
    yield "manifest last", [first, *rest, manifest]
    yield "no manifest", [first, *rest]
    yield "symbolic link", [manifest, (link(name, tarfile.SYMTYPE, "/etc/passwd"), b""), *rest]
    yield "hard link", [manifest, (link(name, tarfile.LNKTYPE, "../canary"), b""), *rest]
    yield "device", [manifest, (link(name, tarfile.CHRTYPE, ""), b""), *rest]
    yield "fifo", [manifest, (link(name, tarfile.FIFOTYPE, ""), b""), *rest]
    yield "folder", [manifest, (link("sm_80", tarfile.DIRTYPE, ""), b""), first, *rest]
    yield "manifest is a link", [(link("manifest.json", tarfile.SYMTYPE, "/etc/passwd"), b""), first, *rest]
    yield "longer than its record", [manifest, (name, data + b"x"), *rest]
    yield "shorter than its record", [manifest, (name, data[:-1]), *rest]
    yield "other bytes", [manifest, (name, data[:-1] + b"\0"), *rest]
    yield "long name", [manifest, (long, data), *rest]
    for what, change in {
        "arch that is a path": {"arch": "../../outside"},
        "key that is a path": {"key": "../../canary"},
        "record of another schema": {"schema": 9},
        "record with code for a grid": {"grid": ["__import__('os').abort()", "1", "1"]},
        "record of another config": {"config": {"P": 64}},
    }.items():
        table = unseal(manifest[1], "")
        key = sorted(table["records"])[0]
        table["records"][key].update(change)
        yield what, [("manifest.json", seal(table)), first, *rest]
    for what, change in {
        "another bundle format": {"bundle": 2},
        "manifest of another schema": {"schema": 9},
        "manifest without records": {"records": None},
    }.items():
        yield what, [("manifest.json", seal({**unseal(manifest[1], ""), **change})), first, *rest]
    yield "manifest without a digest", [("manifest.json", manifest[1].rpartition(b',"sha256"')[0] + b"}"), first, *rest]
    yield "manifest that is no JSON", [("manifest.json", b"[" * 100_000), first, *rest]


def test_hostile_bundles(bundle, refused, elsewhere):
    bad, seen = elsewhere / "bad", []
    for what, members in attacks(unpacked(bundle)):
        for fmt in (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
            if what == "long name" and fmt == tarfile.USTAR_FORMAT:
                continue  # that format cannot hold it
            bad.write_bytes(repack(members, fmt))
            try:
                refused(bad)
            except BaseException as error:
                raise AssertionError(f"{what} in format {fmt}") from error
        seen.append(what)
    assert len(seen) > 25


def test_headers_that_lie(bundle, refused, elsewhere):
    data, bad = bundle.read_bytes(), elsewhere / "bad"

    def header(**fields):
        block = bytearray(data[:512])
        for at, value in fields.values():
            block[at : at + len(value)] = value
        block[148:156] = b" " * 8
        block[148:156] = b"%06o\0 " % sum(block)
        return bytes(block) + data[512:]

    for fields in (
        {"size": (124, b"77777777777\0")},
        {"size": (124, b"-0000000001\0")},
        {"size": (124, b"\x80" + bytes(10) + b"\x01")},
        {"size": (124, b"not octal!!\0")},
        {"type": (156, b"x")},
        {"type": (156, b"L")},
        {"type": (156, b"S")},
        {"type": (156, b"\0")},
        {"prefix": (345, b"/tmp")},
        {"magic": (257, b"GNUtar")},
    ):
        bad.write_bytes(header(**fields))
        refused(bad)


def test_what_is_no_bundle(refused, elsewhere):
    bad = elsewhere / "bad"
    for data in (b"", b"x" * 5000, bytes(5000), repack([]), repack([("other.json", b"{}")])):
        bad.write_bytes(data)
        refused(bad)
    refused(elsewhere / "gone", "No such file")
    (elsewhere / "folder").mkdir()
    refused(elsewhere / "folder", "not a regular file")
    os.mkfifo(elsewhere / "fifo")
    refused(elsewhere / "fifo", "not a regular file")


def test_a_bundle_that_anyone_can_write(bundle, refused):
    bundle.chmod(0o666)
    refused(bundle, "any user can write it")


def test_a_bundle_with_a_cubin_for_another_arch(refused, elsewhere, monkeypatch):
    other = h.artifact(h.config(arch="sm_80"))
    lying = type(other)(h.artifact(h.config(), cubin_sha256=other.record.cubin_sha256).record, other.cubin)
    store.write_packaged(elsewhere / "liar", [lying])
    monkeypatch.setenv("TILEOPS_ARTIFACT_PATH", str(elsewhere / "liar"))
    store.export_bundle(elsewhere / "bad", current=False)
    monkeypatch.delenv("TILEOPS_ARTIFACT_PATH")
    refused(elsewhere / "bad", "code for sm_80, its record says sm_90a")


def test_a_broken_bundle_as_a_root_is_a_miss_with_one_warning(bundle, elsewhere, monkeypatch):
    bad = elsewhere / "bad"
    bad.write_bytes(bundle.read_bytes()[:5000])
    monkeypatch.setenv("TILEOPS_ARTIFACT_PATH", os.pathsep.join([str(bad), str(bundle)]))
    with pytest.warns(store.StoreWarning, match="bad are ignored: the file is truncated") as seen:
        assert found() == ARTIFACTS
    assert len(seen) == 1
    assert store.find(CONFIGS[0]).trace[1].reason == "refused: the file is truncated"


def test_an_import_that_cannot_be_stored_says_so(bundle, elsewhere):
    (elsewhere / "cache").write_text("in the way")
    with pytest.raises(TileOpsError, match="ENOTDIR"):
        store.import_bundle(bundle)
