"""Order of roots, policies, traces, nearest artifacts, and the error of a miss."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading

import helpers_store as h
import pytest

from tileops import catalog, store
from tileops.errors import MissingKernelError, SettingError


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    return h.isolate(monkeypatch, tmp_path)


@pytest.fixture
def sources(monkeypatch):
    """The kernels' source texts count as those that helpers_store names."""
    monkeypatch.setattr("tileops.config.source_digest", lambda kernel: h.SOURCE)


def outcomes(lookup):
    return [(step.outcome, step.reason) for step in lookup.trace]


def test_the_first_root_that_has_it_serves_it(tmp_path, monkeypatch):
    config = h.config()
    assert store.publish(h.artifact(config, seed=3)).stored
    assert store.find(config).kind == "cache"
    store.write_packaged(tmp_path / "site", [h.artifact(config, seed=2)])
    monkeypatch.setenv("TILEOPS_ARTIFACT_PATH", os.pathsep.join([str(tmp_path / "none"), str(tmp_path / "site")]))
    found = store.find(config)
    assert (found.kind, found.artifact) == ("site", h.artifact(config, seed=2))
    store.write_packaged(h.own_root(tmp_path), [h.artifact(config, seed=1)])
    found = store.find(config)
    assert (found.kind, found.root, found.artifact) == ("packaged", "packaged (tileops)", h.artifact(config, seed=1))
    assert [root.kind for root in store.roots()] == ["packaged", "site", "site", "cache", "memory"]


def test_a_bad_artifact_in_one_root_does_not_hide_a_good_one_in_the_next(tmp_path):
    config = h.config()
    root = h.own_root(tmp_path)
    store.write_packaged(root, [h.artifact(config, seed=1)])
    path = root / "sm_90a" / f"{config.key}.cubin"
    path.write_bytes(path.read_bytes()[:-1])
    store.publish(h.artifact(config, seed=2))
    with pytest.warns(store.StoreWarning, match=r"packaged \(tileops\)"):
        found = store.find(config)
    assert found.artifact == h.artifact(config, seed=2)
    assert found.trace[0].reason == "cubin has 2999 bytes, the record says 3000"


def test_a_site_root_may_have_the_layout_of_a_user_cache(tmp_path, monkeypatch, cache):
    config = h.config()
    store.publish(h.artifact(config))
    cache.rename(tmp_path / "shared")
    monkeypatch.setenv("TILEOPS_ARTIFACT_PATH", str(tmp_path / "shared"))
    found = store.find(config, toolchain="another compiler")
    assert (found.kind, found.artifact) == ("site", h.artifact(config))
    before = h.tree(tmp_path / "shared")
    store.publish(h.artifact(h.config(P=128)))
    assert h.tree(tmp_path / "shared") == before


def test_every_root_says_why_it_missed(tmp_path, monkeypatch, cache):
    config = h.config()
    store.write_packaged(h.own_root(tmp_path), [h.artifact(h.config(arch="sm_80"))])
    store.write_packaged(tmp_path / "site", [h.artifact(h.config(P=128))])
    monkeypatch.setenv("TILEOPS_ARTIFACT_PATH", f"{tmp_path / 'site'}{os.pathsep}{tmp_path / 'gone'}")
    assert outcomes(store.find(config)) == [
        ("miss", "no manifest for sm_90a"),
        ("miss", "key not present"),
        ("miss", "refused: the folder does not exist"),
        ("miss", "the cache is empty"),
        ("miss", "key not present"),
    ]
    assert not cache.exists(), "a look-up made the cache folder"


def test_policies_choose_the_roots(tmp_path):
    config = h.config()
    store.publish(h.artifact(config))
    assert store.find(config, policy="auto").artifact
    assert store.find(config, policy="cached").artifact
    missed = store.find(config, policy="packaged")
    assert missed.artifact is None
    assert missed.trace[-1] == ("user cache", "miss", "not asked: the policy is packaged")


def test_strength_of_policies(monkeypatch):
    assert store.current_policy() == "auto"
    monkeypatch.setenv("TILEOPS_POLICY", "cached")
    assert store.current_policy() == "cached"
    store.policy("packaged")
    assert store.current_policy() == "packaged"
    with store.policy("auto"):
        assert store.current_policy() == "auto"
        with store.policy("cached"):
            assert store.current_policy() == "cached"
            assert store.current_policy("packaged") == "packaged"
        assert store.current_policy() == "auto"
    assert store.current_policy() == "packaged"


def test_a_with_block_holds_in_its_own_thread_only():
    inside, done = threading.Event(), threading.Event()

    def other():
        with store.policy("packaged"):
            inside.set()
            done.wait(30)

    thread = threading.Thread(target=other)
    thread.start()
    assert inside.wait(30)
    seen = store.current_policy()
    done.set()
    thread.join()
    assert seen == "auto"
    assert store.current_policy() == "auto"


def test_a_with_block_ends_with_an_error_too():
    reused = store.policy("packaged")
    for _ in range(2):
        with pytest.raises(RuntimeError), reused:
            assert store.current_policy() == "packaged"
            raise RuntimeError
    with reused, reused:
        pass
    assert store.current_policy() == "auto"


def test_freeze_is_final(monkeypatch):
    config = h.config()
    with store.policy("auto"):
        store.freeze()
        assert store.current_policy() == "cached"
    assert store.frozen()
    monkeypatch.setenv("TILEOPS_POLICY", "auto")
    assert store.find(config).policy == "cached"
    for attempt in (lambda: store.policy("auto"), lambda: store.find(config, policy="auto")):
        with pytest.raises(SettingError, match="freeze"):
            attempt()
    with store.policy("packaged"):
        assert store.current_policy() == "packaged"
    with pytest.raises(MissingKernelError):
        store.find_or_build(config, lambda _: pytest.fail("compiled after freeze()"))


def test_a_policy_that_is_none_is_refused(monkeypatch):
    for attempt in (lambda: store.policy("never"), lambda: store.find(h.config(), policy="never")):
        with pytest.raises(SettingError, match="auto, cached, packaged"):
            attempt()
    monkeypatch.setenv("TILEOPS_POLICY", "Auto")
    with pytest.raises(SettingError, match="TILEOPS_POLICY"):
        store.find(h.config())


def test_the_nearest_artifact_has_the_fewest_differing_fields(tmp_path):
    asked = h.config(P=64, N=128)
    store.write_packaged(
        h.own_root(tmp_path),
        [h.artifact(h.config(P=128, N=64)), h.artifact(h.config(kernel="state_passing")), h.artifact(h.config(arch="sm_80"))],
    )
    lookup = store.find(asked)
    assert lookup.nearest.arch == "sm_80"
    assert lookup.differs == {"arch": ("sm_90a", "sm_80")}
    # At equal distance the same arch is nearer; the user cache counts although the policy forbids it.
    store.publish(h.artifact(h.config(N=64)))
    lookup = store.find(asked, policy="packaged")
    assert lookup.differs == {"N": (128, 64)}
    store.publish(h.artifact(h.config(P=64, N=128, source="cd" * 32)))
    assert set(store.find(h.config(P=64, N=128)).differs) in ({"N"}, {"source"})


def test_no_artifact_at_all_has_no_nearest():
    lookup = store.find(h.config())
    assert lookup.nearest is None
    assert lookup.differs == {}
    assert "No root holds any recurrent kernel" in str(store.missing_error(lookup))


def test_the_error_names_all_there_is_to_know(tmp_path, sources):
    store.write_packaged(h.own_root(tmp_path), [h.artifact(h.config(P=128))])
    lookup = store.find(h.config(), policy="cached")
    error = store.missing_error(lookup)
    text = str(error)
    assert "recurrent[N=128, P=64, dtype=bfloat16, state_dtype=float32, tied=True; sm_90a]" in text
    assert "'cached' forbids compiling" in text
    assert "P (128, not 64)" in text
    for step in lookup.trace:
        assert f"{step.root}: {step.reason}" in text
    assert error.command == "tileops warm --chunk-size 256 --head-dim 64 --d-state 128 --dtype bfloat16 --arch sm_90a"
    assert text.endswith(error.command)
    assert error.key == h.config().key
    assert error.nearest == h.config(P=128).key
    assert error.differs == {"P": (64, 128)}
    assert [tuple(step) for step in lookup.trace] == error.roots
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.data) == (MissingKernelError, text, error.data)


def test_an_artifact_that_is_there_but_bad_is_not_called_missing_by_fields(tmp_path):
    config = h.config()
    store.write_packaged(h.own_root(tmp_path), [h.artifact(config)])
    os.unlink(h.own_root(tmp_path) / "sm_90a" / f"{config.key}.cubin")
    with pytest.warns(store.StoreWarning):
        text = str(store.missing_error(store.find(config)))
    assert "there but cannot be used" in text
    assert "the manifest names a cubin that is not there" in text


@pytest.mark.parametrize("kernel", list(catalog.KERNELS))
def test_the_command_builds_the_kernel(kernel, sources):
    # Every kernel that an op asks for is among those that the command's model values name.
    values = {name: allowed[-1] for name, allowed in catalog.KERNELS[kernel].items()}
    values.update({"dt_dtype": "float32" if values.get("cb_float32") else values["dtype"]} if "dt_dtype" in values else {})
    config = catalog.config(kernel, "sm_90a", **values)
    words = store.fix_command(config).split()
    assert words[:2] == ["tileops", "warm"]
    options = dict(zip(words[2::2], words[3::2]))
    built = catalog.for_model(
        chunk_size=int(options["--chunk-size"]),
        head_dim=int(options["--head-dim"]),
        d_state=int(options["--d-state"]),
        dtype=options["--dtype"],
        archs=[options["--arch"]],
    )
    assert config in built


def test_an_unknown_kernel_gets_the_build_step_as_its_command(sources):
    command = store.fix_command(h.config(kernel="another"))
    assert command == "python -m build_kernels --arch sm_90a --only another"


def test_matching_reads_indexes_only(tmp_path):
    root = h.own_root(tmp_path)
    artifacts = [h.artifact(h.config(P=p, arch=a)) for p in (64, 128) for a in ("sm_80", "sm_90a")]
    store.write_packaged(root, artifacts)
    for path in root.glob("*/*.cubin"):
        path.unlink()
    store.publish(h.artifact(h.config(P=128, tied=False)))
    store.publish(h.artifact(h.config(P=64)))  # in the packaged root too: named once
    found = store.matching("recurrent", "sm_90a", current=False)
    assert [r.config["P"] for r in found if r.config["tied"]].count(64) == 1
    assert len(found) == 3
    assert len(store.matching("recurrent", "sm_90a", current=False, policy="packaged")) == 2
    assert {r.config["P"] for r in store.matching("recurrent", "sm_80", current=False, P=128)} == {128}
    assert len(store.matching("recurrent", current=False)) == 5
    assert store.matching("chunk_scan", current=False) == []


def test_matching_leaves_out_kernels_of_other_sources(tmp_path, monkeypatch):
    store.write_packaged(h.own_root(tmp_path), [h.artifact(h.config()), h.artifact(h.config(source="cd" * 32))])
    monkeypatch.setattr("tileops.store.lookup.source_digest", lambda kernel: "cd" * 32)
    assert [r.source for r in store.matching("recurrent")] == ["cd" * 32]


def test_stats_count_what_happened(tmp_path):
    config, other = h.config(), h.config(P=128)
    store.write_packaged(h.own_root(tmp_path), [h.artifact(config)])
    store.reset_stats()
    store.publish(h.artifact(other))
    store.find(config)
    store.find(other)
    store.find(h.config(P=256))
    counted = store.stats()
    assert (counted["hits_packaged"], counted["hits_cache"], counted["hits_site"], counted["misses"]) == (1, 1, 0, 1)
    assert counted["published"] == 1
    assert counted["bytes_read"] >= 6000
    store.reset_stats()
    assert set(store.stats().values()) == {0}


def test_find_or_build_compiles_once_and_then_hits(caplog):
    config, calls = h.config(), []

    def build(of):
        calls.append(of)
        return h.artifact(of)

    with caplog.at_level("INFO", logger="tileops"):
        first = store.find_or_build(config, build)
    assert (first.kind, first.root, first.artifact) == ("jit", "compiler", h.artifact(config))
    assert first.trace[-1].outcome == "hit"
    assert len(caplog.records) == 1 and "compiled recurrent" in caplog.text
    assert store.find_or_build(config, build).kind == "cache"
    assert calls == [config]
    assert store.stats()["compiles"] == 1


@pytest.mark.parametrize("name", ["cached", "packaged"])
def test_find_or_build_obeys_the_policy(name):
    with pytest.raises(MissingKernelError):
        store.find_or_build(h.config(), lambda _: pytest.fail("compiled"), policy=name)


def test_an_error_of_the_compiler_leaves_lock_and_cache_usable():
    def fails(of):
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        store.find_or_build(h.config(), fails)
    assert store.find_or_build(h.config(), h.artifact).artifact == h.artifact()


def test_entries_of_another_compiler_are_a_miss_where_one_is_installed():
    config = h.config()
    store.publish(h.artifact(config, compiler="nvrtc 12"))
    assert store.find(config, toolchain=None).artifact
    assert store.find(config, toolchain="nvrtc 12").artifact
    missed = store.find(config, toolchain="nvrtc 13")
    assert missed.artifact is None
    assert ("miss", "made by nvrtc 12, installed is nvrtc 13") in outcomes(missed)
    # Both live side by side: two environments that share a cache do not rebuild each other's kernels for ever.
    store.publish(h.artifact(config, compiler="nvrtc 13", seed=1))
    assert store.find(config, toolchain="nvrtc 13").artifact == h.artifact(config, compiler="nvrtc 13", seed=1)
    assert store.find(config, toolchain="nvrtc 12").artifact == h.artifact(config, compiler="nvrtc 12")


def test_the_compiler_is_looked_for_only_where_its_name_is_needed(tmp_path):
    config = h.config()
    store.write_packaged(h.own_root(tmp_path), [h.artifact(config)])
    assert store.find(config, toolchain=lambda: pytest.fail("asked")).artifact
    assert store.find(h.config(P=128), toolchain=lambda: None).artifact is None


def test_import_and_lookup_write_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    env = h.environment(tmp_path / "cache", HOME=str(tmp_path / "home"))
    h.run("store.find(config()); store.matching('recurrent'); [list(r.verify()) for r in store.roots()]; report()", env=env, cwd=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_importing_the_store_is_cheap():
    heavy = ("torch", "tilelang", "cuda", "filelock", "platformdirs", "tarfile", "importlib.metadata", "ctypes", "tileops.store.bundles")
    code = f"import sys, tileops.store; print([name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], env=h.environment(), capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
