"""Packaged roots: what a build writes, resumes and reads back; what is wrong in one is found."""

from __future__ import annotations

import json
import os
import sys

import helpers_store as h
import pytest

from tileops import store
from tileops.errors import CorruptArtifactError
from tileops.store.roots import seal, unseal


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    return h.isolate(monkeypatch, tmp_path)


@pytest.fixture
def root(tmp_path):
    return h.own_root(tmp_path)


def packaged():
    return store.roots()[0]


MIXED = [h.artifact(h.config(P=p, arch=a)) for a in ("sm_90a", "sm_80") for p in (64, 16, 128)]


def test_layout_and_round_trip(root):
    written = store.write_packaged(root, MIXED)
    assert written.kernels == {"sm_80": 3, "sm_90a": 3}
    assert written.size == {"sm_80": 9000, "sm_90a": 9000}
    assert sorted(h.tree(root)) == sorted(
        [f"{a.record.arch}/{a.record.key}.cubin" for a in MIXED] + ["sm_80/manifest.json", "sm_90a/manifest.json"]
    )
    manifest = json.loads((root / "sm_80" / "manifest.json").read_text())
    assert (manifest["schema"], manifest["arch"]) == (1, "sm_80")
    assert list(manifest["records"]) == sorted(manifest["records"])
    for artifact in MIXED:
        found = store.find(artifact.record.config_object())
        assert found.artifact == artifact
        assert packaged().read(artifact.record.key) == artifact
    assert list(packaged().verify()) == []
    assert sum(1 for _ in packaged().entries()) == 6
    assert {r.arch for r in packaged().entries("sm_80")} == {"sm_80"}


def test_the_same_artifacts_give_the_same_bytes(root, tmp_path):
    store.write_packaged(root, MIXED)
    store.write_packaged(tmp_path / "elsewhere", MIXED[::-1])
    for artifact in MIXED[3:]:
        store.write_packaged(tmp_path / "in parts", [artifact])
    store.write_packaged(tmp_path / "in parts", MIXED[:3])
    for place in (root, tmp_path / "elsewhere", tmp_path / "in parts"):
        store.PackagedWriter(place).write_digests()
    assert h.tree(root) == h.tree(tmp_path / "elsewhere") == h.tree(tmp_path / "in parts")


def test_other_users_can_read_it_whatever_the_umask(root):
    before = os.umask(0o077)
    try:
        store.write_packaged(root, MIXED[:1])
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in root.rglob("*") if path.is_file()} == {0o644}
    assert {path.stat().st_mode & 0o777 for path in (root, root / "sm_90a")} == {0o755}


def test_a_build_resumes(root):
    first, second, third = MIXED[:3]
    writer = store.PackagedWriter(root)
    writer.add(first)
    assert writer.has(first.record.config_object())
    assert not writer.has(second.record.config_object())
    assert store.find(first.record.config_object()).artifact is None, "served before the build was finished"
    again = store.PackagedWriter(root)
    assert again.has(first.record.config_object())
    assert again.has(first.record.config_object(), h.COMPILER)
    assert not again.has(first.record.config_object(), "another compiler")
    again.add(second)
    assert again.finish().kernels == {"sm_90a": 2}
    assert store.PackagedWriter(root).has(first.record.config_object())
    store.write_packaged(root, [third])
    assert sum(1 for _ in packaged().entries()) == 3


def test_what_is_staged_but_damaged_is_built_again(root):
    artifact = MIXED[0]
    config = artifact.record.config_object()
    for damage in ("cubin", "json"):
        writer = store.PackagedWriter(root)
        writer.add(artifact)
        path = root / "sm_90a" / ".build" / f"{config.key}.{damage}"
        path.write_bytes(path.read_bytes()[:100])
        assert not writer.has(config)
        assert writer.finish().kernels == {"sm_90a": 0}


def test_a_damaged_finished_artifact_is_dropped_by_the_next_build(root):
    store.write_packaged(root, MIXED[:2])
    bad = MIXED[0].record
    (root / "sm_90a" / f"{bad.key}.cubin").write_bytes(b"")
    assert not store.PackagedWriter(root).has(bad.config_object())
    assert store.PackagedWriter(root).finish().kernels == {"sm_90a": 1}
    assert list(packaged().verify()) == []


def test_a_rebuild_replaces_and_keep_drops(root):
    store.write_packaged(root, MIXED[:3])
    changed = h.artifact(h.config(), seed=9, compiler="newer")
    writer = store.PackagedWriter(root)
    writer.add(changed)
    assert store.find(h.config()).artifact == MIXED[0], "a build under way changed what readers see"
    assert writer.finish(keep=[changed.record.key, "0" * 64]).kernels == {"sm_90a": 1}
    assert store.find(h.config()).artifact == changed
    assert sorted(h.tree(root)) == sorted([f"sm_90a/{changed.record.key}.cubin", "sm_90a/manifest.json"])


def test_digests(root):
    store.write_packaged(root, MIXED)
    path = store.PackagedWriter(root).write_digests()
    assert store.read_digests(root) == {a.record.key: a.record.cubin_sha256 for a in MIXED}
    text = open(path).read()
    assert text.endswith("}\n") and text.count("\n") == 8  # a line a key: changes can be read in a diff
    for broken in ("[]", "{", '{"a": 1}'):
        open(path, "w").write(broken)
        with pytest.raises(CorruptArtifactError):
            store.read_digests(root)


def test_the_writer_refuses_artifacts_that_do_not_match_their_record(root):
    good = h.artifact()
    for bad in (
        h.artifact(cubin_size=1),
        h.artifact(cubin_sha256="0" * 64),
        h.artifact(key="0" * 64),
        h.artifact(h.config(arch="sm_90a"), arch="../sm_90a"),
    ):
        with pytest.raises(CorruptArtifactError):
            store.PackagedWriter(root).add(bad)
    assert not root.exists()
    store.PackagedWriter(root).add(good)


def test_the_manifest_is_parsed_once_until_it_changes(root, monkeypatch):
    store.write_packaged(root, MIXED)
    parsed = []
    real = store.packaged.parse_manifest
    monkeypatch.setattr(store.packaged, "parse_manifest", lambda *a: parsed.append(a[1]) or real(*a))
    for _ in range(3):
        for artifact in MIXED:
            assert store.find(artifact.record.config_object()).artifact
    assert len(parsed) == 2
    more = h.artifact(h.config(P=256))
    store.write_packaged(root, [more])
    parsed.clear()
    assert store.find(more.record.config_object()).artifact == more
    assert len(parsed) == 1


def edit(root, change):
    path = root / "sm_90a" / "manifest.json"
    data = unseal(path.read_bytes(), "")
    change(data)
    path.write_bytes(seal(data))


CONFIG = h.config()
KEY = CONFIG.key


def with_map(record, **changes):
    """A record that reads a tensor through a tensor map with these changes."""
    made = {"dtype": 9, "dims": ["64", "H"], "strides": ["y.stride0 * 2"], "box": [64, 1], "swizzle": 3, "promotion": 2}
    record["params"].append({"name": "y_desc", "kind": "tensormap", "bind": "y"})
    record["tensormaps"] = {"y_desc": {**made, **changes}}


@pytest.mark.parametrize(
    ("change", "kind", "reason"),
    [
        (lambda m: m.update(schema=2), "schema", "schema 2, this package reads 1"),
        (lambda m: m.update(arch="sm_80"), "corrupt", "arch 'sm_80' in the folder of sm_90a"),
        (lambda m: m.pop("records"), "corrupt", "not a manifest"),
        (lambda m: m["records"].update({KEY: None}), "corrupt", "not a JSON object"),
        (lambda m: m["records"][KEY].pop("symbol"), "corrupt", "symbol"),
        (lambda m: m["records"][KEY].update(schema=2), "schema", "schema 2"),
        (lambda m: m["records"][KEY]["config"].update(P=128), "corrupt", "key does not match"),
        (lambda m: m["records"][KEY].update(grid=["open('x')", "1", "1"]), "schema", "outside the record's grammar"),
        (lambda m: m["records"][KEY].update(grid=["+".join("1" * 9000), "1", "1"]), "schema", "record"),
        (lambda m: with_map(m["records"][KEY], dims=["open('x')", "H"]), "schema", "outside the record's grammar"),
        (lambda m: with_map(m["records"][KEY], strides=["H ** 9"]), "schema", "outside the record's grammar"),
        (lambda m: m["records"][KEY].update(cubin_size=1), "corrupt", "3000 bytes, the record says 1"),
        (lambda m: m["records"][KEY].update(cubin_sha256="0" * 64), "corrupt", "sha256 differs"),
        (lambda m: m.update(records={KEY: m["records"][h.config(P=128).key]}), "corrupt", "of another config"),
    ],
)
def test_faults_of_a_manifest_are_found(root, change, kind, reason):
    store.write_packaged(root, [h.artifact(), h.artifact(h.config(P=128))])
    edit(root, change)
    faults = list(packaged().verify())
    assert {f.kind for f in faults} == {kind}
    assert reason in faults[0].reason
    assert faults[0].root == "packaged (tileops)"
    if kind == "corrupt" or "schema 2" in reason:
        with pytest.warns(store.StoreWarning, match="tileops"):
            assert store.find(CONFIG).artifact is None


@pytest.mark.parametrize("text", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b'{"schema": 1, "arch": "sm_90a", "records": []}', b"NaN"])
def test_a_manifest_that_is_none_is_ignored_with_one_warning(root, text):
    store.write_packaged(root, [h.artifact()])
    (root / "sm_90a" / "manifest.json").write_bytes(text)
    with pytest.warns(store.StoreWarning, match=r"packaged \(tileops\).*sm_90a") as seen:
        assert store.find(CONFIG).artifact is None
        assert store.find(h.config(P=128)).artifact is None
    assert len(seen) == 1
    assert [f.kind for f in packaged().verify()] == ["corrupt"]
    assert list(packaged().entries()) == []


def test_faults_of_cubins_are_found_and_told_apart(root):
    artifacts = [h.artifact(h.config(P=p)) for p in (16, 32, 48, 64)]
    store.write_packaged(root, artifacts)
    paths = [root / "sm_90a" / f"{a.record.key}.cubin" for a in artifacts]
    paths[0].unlink()
    paths[1].write_bytes(paths[1].read_bytes()[:-1])
    paths[2].write_bytes(paths[2].read_bytes()[:-1] + b"\0")
    found = {f.key: f.kind for f in packaged().verify()}
    assert found == {artifacts[0].record.key: "missing", artifacts[1].record.key: "corrupt", artifacts[2].record.key: "corrupt"}


def test_a_cubin_for_another_arch_is_found(root):
    wrong = h.artifact(h.config(arch="sm_90a"))
    other = h.artifact(h.config(arch="sm_80"))
    lying = h.artifact(h.config(arch="sm_90a"), cubin_sha256=other.record.cubin_sha256)
    assert wrong.record.key == lying.record.key
    store.write_packaged(root, [type(other)(lying.record, other.cubin)])
    [fault] = packaged().verify()
    assert (fault.kind, fault.reason) == ("arch", "the cubin is code for sm_80, its record says sm_90a")


def test_a_root_that_is_not_there_is_said_to_be_so():
    assert [(f.kind, f.reason) for f in packaged().verify()] == [("unusable", "the folder does not exist")]


def test_a_site_root_that_anyone_can_write_is_refused(tmp_path, monkeypatch):
    place = tmp_path / "site"
    store.write_packaged(place, [h.artifact()])
    monkeypatch.setenv("TILEOPS_ARTIFACT_PATH", str(place))
    assert store.find(CONFIG).kind == "site"
    for folder in (place, place / "sm_90a"):
        folder.chmod(0o777)
        lookup = store.find(CONFIG)
        assert lookup.artifact is None
        assert "any user can write it" in lookup.trace[1].reason
        folder.chmod(0o755)
    assert store.find(CONFIG).kind == "site"


def test_links_in_a_packaged_root_are_followed(root, tmp_path):
    # Some installers link packages out of one store instead of copying them.
    store.write_packaged(tmp_path / "real", [h.artifact()])
    (root / "sm_90a").mkdir(parents=True)
    for path in (tmp_path / "real" / "sm_90a").iterdir():
        (root / "sm_90a" / path.name).symlink_to(path)
    assert store.find(CONFIG).artifact == h.artifact()


INSTALLED = """
import sys
sys.path.insert(0, sys.argv[1])
discovery._scanned = None
lookups = [store.find(config()) for _ in range(2)]
report(root=lookups[1].root, roots=[r.name for r in store.roots() if r.kind == "packaged"], trace=lookups[0].trace)
"""


def distribution(place, name, module, files=(), artifacts=()):
    """What an installer leaves in site-packages for a distribution that declares tileops.artifacts."""
    info = place / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[tileops.artifacts]\nkernels = {module}\n")
    for path, text in files:
        (place / path).parent.mkdir(parents=True, exist_ok=True)
        (place / path).write_text(text)
    if artifacts:
        store.write_packaged(place / module, artifacts)


def installed(tmp_path):
    return h.run(INSTALLED, str(tmp_path / "more"), env=h.environment(tmp_path / "cache"))


def test_an_installed_package_serves_its_artifacts(tmp_path):
    distribution(tmp_path / "more", "acme-kernels", "acme_kernels", artifacts=[h.artifact()])
    seen = installed(tmp_path)
    assert seen["root"] == "packaged (acme-kernels 1.0)"
    assert seen["warnings"] == []


@pytest.mark.parametrize(
    ("module", "files", "says"),
    [
        ("gone", [], "there is no module gone"),
        ("plain", [("plain/__init__.py", "")], "holds no <arch>/manifest.json"),
        ("parent.child", [("parent/__init__.py", "raise RuntimeError('broken inside')"), ("parent/child/x", "")], "broken inside"),
        ("parent.child", [("parent/__init__.py", "raise SystemExit")], "SystemExit"),
        ("not a module!", [], ""),
        ("", [], ""),
    ],
)
def test_a_broken_package_is_ignored_with_one_warning_that_names_it(tmp_path, module, files, says):
    distribution(tmp_path / "more", "acme-kernels", module, files)
    distribution(tmp_path / "more", "good-kernels", "good_kernels", artifacts=[h.artifact()])
    seen = installed(tmp_path)
    assert seen["root"] == "packaged (good-kernels 1.0)"
    [warning] = seen["warnings"]
    assert "acme-kernels" in warning and says in warning


def test_a_package_of_another_schema_is_ignored_with_one_warning_that_names_it(tmp_path):
    distribution(tmp_path / "more", "acme-kernels", "acme_kernels", artifacts=[h.artifact()])
    path = tmp_path / "more" / "acme_kernels" / "sm_90a" / "manifest.json"
    path.write_bytes(seal({**unseal(path.read_bytes(), ""), "schema": 7}))
    seen = installed(tmp_path)
    assert seen["root"] is None
    [warning] = seen["warnings"]
    assert "acme-kernels 1.0" in warning and "schema 7, this package reads 1" in warning
    assert any("schema 7" in reason for _, _, reason in seen["trace"])


def test_a_source_checkout_has_its_artifacts_beside_the_package(tmp_path, monkeypatch):
    checkout = tmp_path / "checkout"
    monkeypatch.setattr(store.discovery, "_package", checkout / "tileops")
    store.write_packaged(checkout / "artifacts", [h.artifact()])
    assert store.find(CONFIG).artifact is None, "a folder of that name beside an installed package is not ours"
    (checkout / "artifacts" / "__init__.py").write_text("")
    assert store.find(CONFIG).kind == "packaged"
    assert sys.modules.get("artifacts") is None
