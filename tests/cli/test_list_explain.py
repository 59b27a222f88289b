"""What is there, and why something is not."""

from __future__ import annotations

import helpers_store as h
import pytest
from helpers_cli import VALUES, tiny, write_site

from tileops import compiler
from tileops.store import publish

FIELDS = ("P=16", "N=16", "dtype=bf16", "state_dtype=float32", "tied=true")


def test_list_shows_every_root_with_totals(tileops, site):
    done = tileops("list", "--json", TILEOPS_ARTIFACT_PATH=str(site))
    assert done.status == 0
    roots = {root["kind"]: root for root in done.json["roots"]}
    assert list(roots) == ["packaged", "site", "cache"]
    assert roots["packaged"]["kernels"] == roots["cache"]["kernels"] == []
    assert {kernel["key"] for kernel in roots["site"]["kernels"]} == {config.key for config in tiny()}
    assert done.json["total"] == {"kernels": len(tiny()), "bytes": 3000 * len(tiny()), "archs": {"sm_80": len(tiny())}}
    text = tileops("list", TILEOPS_ARTIFACT_PATH=str(site)).out
    assert f"site {site}: {len(tiny())} kernels" in text and h.COMPILER in text and "P=16" in text
    assert max(map(len, text.splitlines())) < 200


def test_list_filters(tileops, tmp_path):
    old = h.config(arch="sm_90a")  # made from other sources than this package's
    place = write_site(tmp_path / "site", [*tiny(), *tiny("sm_90a"), old])

    def keys(*arguments: str) -> list[str]:
        data = tileops("list", "--json", "--root", "site", *arguments, TILEOPS_ARTIFACT_PATH=str(place)).json
        return [kernel["key"] for root in data["roots"] for kernel in root["kernels"]]

    assert set(keys("--arch", "sm_80")) == {c.key for c in tiny()}
    assert set(keys("--arch", "sm_90a")) == {c.key for c in tiny("sm_90a")} | {old.key}
    wanted = {c.key for c in tiny() if c.kernel.startswith("chunk_") and c.fields.get("aligned") is True}
    assert wanted and set(keys("--arch", "sm_80", "--kernel", "chunk_* aligned=True")) == wanted
    text = tileops("list", "--arch", "sm_90a", "--kernel", "recurrent P=64", TILEOPS_ARTIFACT_PATH=str(place)).out
    assert [line.split()[-1] for line in text.splitlines() if line.startswith("  recurrent")] == ["old"]
    assert "recurrent" not in tileops("list", "--totals", TILEOPS_ARTIFACT_PATH=str(place)).out


def test_explain_a_hit(tileops, site):
    done = tileops("explain", "recurrent", *FIELDS, "--arch", "sm_80", TILEOPS_ARTIFACT_PATH=str(site))
    assert done.status == 0
    lines = done.out.splitlines()
    assert lines[0] == "recurrent[N=16, P=16, dtype=bfloat16, state_dtype=float32, tied=True; sm_80]"
    steps = [line.split()[:2] for line in lines[3:6]]
    assert steps == [["miss", "packaged"], ["hit", "site"], ["-", "user"]]
    assert f"Found in site {site}." in done.out


def test_explain_a_miss_names_nearest_difference_and_command(tileops, site):
    words = ("P=32", *FIELDS[1:])
    done = tileops("explain", "recurrent", *words, "--arch", "sm_80", TILEOPS_ARTIFACT_PATH=str(site), TILEOPS_POLICY="cached")
    assert done.status == 1
    assert "miss  site" in done.out and "key not present" in done.out
    assert "P  wanted 32  has 16" in done.out
    assert "MissingKernelError: the policy is 'cached'" in done.out
    command = "tileops warm --chunk-size 256 --head-dim 32 --d-state 16 --dtype bfloat16 --arch sm_80"
    assert done.out.splitlines()[-1] == f"Run: {command}"
    done = tileops("explain", "recurrent", *words, "--arch", "sm_80", "--json", TILEOPS_ARTIFACT_PATH=str(site))
    (kernel,) = done.json["kernels"]
    assert done.status == 1 and done.json["commands"] == [command] == [kernel["command"]]
    assert kernel["found"] is False and kernel["differs"] == {"P": [32, 16]}
    assert {step["outcome"] for step in kernel["trace"]} == {"miss"}
    # The command that it names is one that the command line understands.
    assert tileops(*command.split()[1:], "--check").status == 1


def test_explain_many_in_brief(tileops, site, tmp_path):
    done = tileops("explain", *VALUES, TILEOPS_ARTIFACT_PATH=str(site))
    assert done.status == 0 and f"{len(tiny())} of {len(tiny())} are there" in done.out
    half = write_site(tmp_path / "half", [c for c in tiny() if c.kernel != "recurrent"])
    done = tileops("explain", *VALUES, TILEOPS_ARTIFACT_PATH=str(half))
    assert done.status == 1 and f"{len(tiny()) - 6} of {len(tiny())} are there" in done.out
    assert sorted(line.split()[1] for line in done.out.splitlines() if line.startswith("miss")) == ["recurrent"] * 6
    done = tileops("explain", "recurrent", *FIELDS[:4], "--arch", "sm_80", "--json", TILEOPS_ARTIFACT_PATH=str(half))
    assert done.status == 1 and [kernel["config"]["tied"] for kernel in done.json["kernels"]] == [False, True]


@pytest.mark.parametrize("policy, root", [("auto", "cache"), ("cached", "cache"), ("packaged", None)])
def test_explain_follows_the_policy(tileops, monkeypatch, policy, root):
    monkeypatch.setenv("TILEOPS_CACHE_DIR", str(tileops.cache))
    config = next(c for c in tiny() if c.kernel == "recurrent" and c.fields["tied"] and c.fields["state_dtype"] == "float32")
    # An entry of the cache that another compiler made would be a miss here.
    assert publish(h.artifact(config, compiler=compiler.toolchain_name() or h.COMPILER)).stored
    done = tileops("explain", "recurrent", *FIELDS, "--arch", "sm_80", "--json", TILEOPS_POLICY=policy)
    (kernel,) = done.json["kernels"]
    if root is None:
        assert done.status == 1 and kernel["trace"][-1]["reason"] == "not asked: the policy is packaged"
    else:
        assert done.status == 0 and kernel["root"] == f"user cache {tileops.cache}"
