"""One screen that says what will happen on this machine: GPU, driver, policy, roots, coverage, compiler, cache, and what is wrong.

Works when the package is half broken, and without a GPU, driver or torch: each question is asked by itself, and one
that fails becomes a problem. Status: 0 nothing is wrong, 1 something is missing or degraded, 3 a root is corrupt, 4 the
GPU or its driver cannot be used.
"""

from __future__ import annotations

import argparse
import os
import stat
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tileops.cli import CORRUPT, INCOMPATIBLE, MISSING, OK, _output

HELP = "what will happen on this machine, and what is wrong"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--arch", metavar="A,B", help="judge coverage for these archs (default: those of the GPUs present, else all)")


@dataclass
class Report:
    """What was found out: lines by section for people, data for --json, and what is wrong."""

    sections: dict[str, list[str]] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    problems: list[dict[str, Any]] = field(default_factory=list)

    def say(self, section: str, text: str) -> None:
        self.sections.setdefault(section, []).append(text)

    def problem(self, text: str, remedy: str, status: int = MISSING) -> None:
        self.problems.append({"problem": text, "remedy": remedy, "status": status})


def run(args: argparse.Namespace) -> int:
    report = Report()
    for name, probe in PROBES.items():
        try:
            probe(report, args)
        except Exception as error:  # this command is for broken installations: what one probe meets must not hide the others
            report.problem(f"{name}: {type(error).__name__}: {error}", "reinstall tileops, or report this line")
    lines = []
    for section, texts in report.sections.items():
        lines += [f"{section:10} {texts[0]}", *(f"{'':10} {text}" for text in texts[1:])]
    if report.problems:
        lines.append("")
        for entry in report.problems:
            lines += [f"PROBLEM    {entry['problem']}", f"           -> {entry['remedy']}"]
    else:
        lines.append("\nnothing is wrong")
    _output.emit(args.json, {**report.data, "problems": report.problems}, "\n".join(lines))
    statuses = {entry["status"] for entry in report.problems}
    return next((status for status in (INCOMPATIBLE, CORRUPT, MISSING) if status in statuses), OK)


def _versions(report: Report, args: argparse.Namespace) -> None:
    from importlib import metadata

    found = {"python": sys.version.split()[0], "tileops": _output.version()}
    for name in ("torch", "cuda-bindings", "filelock", "platformdirs"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "missing"
            remedy = "CPU tensors work without it; for a GPU: pip install cuda-bindings" if name == "cuda-bindings" else f"pip install {name}"
            report.problem(f"the package {name} is not installed", remedy)
    report.data["versions"] = found
    report.say("versions", ", ".join(f"{name} {version}" for name, version in found.items()))


def _gpus(report: Report, args: argparse.Namespace) -> None:
    from tileops import catalog, driver
    from tileops.errors import DriverError

    report.data["gpus"] = []
    try:
        count = driver.device_count()
    except DriverError as error:
        report.data["driver"] = None
        report.say("gpu", f"none usable: {error}")
        report.say("gpu", "CPU tensors run on the reference target")
        if error.data.get("name") not in ("NO_DRIVER", "CUDA_ERROR_NO_DEVICE", "IMPORT"):
            report.problem(str(error), "fix the driver, then run this again", INCOMPATIBLE)
        return
    for index in range(count):
        info = driver.device_info(index)
        archs = catalog.archs_for(*info.capability)
        capability = ".".join(map(str, info.capability))
        report.data["driver"] = info.driver
        report.data["gpus"].append({"name": info.name, "capability": capability, "archs": archs, "max_smem": info.max_smem})
        version = f"{info.driver // 1000}.{info.driver % 1000 // 10}"
        report.say("gpu", f"{index}: {info.name}, capability {capability}, driver for CUDA {version}, runs {', '.join(archs) or 'nothing'}")
        if not archs:
            text = f"GPU {index}, a {info.name} (capability {capability}), runs none of {', '.join(catalog.ARCHS)}"
            report.problem(text, "use another GPU, or target='reference'", INCOMPATIBLE)


def _settings(report: Report, args: argparse.Namespace) -> None:
    from tileops import env, store
    from tileops.errors import SettingError

    values = {name: os.environ[name] for name in sorted(os.environ) if name.startswith("TILEOPS_")}
    try:
        policy = store.current_policy()
    except SettingError as error:
        policy = "unknown"
        report.problem(str(error), f"export TILEOPS_POLICY to one of {', '.join(env.POLICIES)}")
    report.data.update(policy=policy, environment=values)
    report.say("policy", f"{policy} ({'TILEOPS_POLICY' if 'TILEOPS_POLICY' in values else 'default'})")
    for name, value in values.items():
        report.say("policy", f"{name}={value}" + ("" if name in env.VARIABLES else "  (unknown)"))
        if name not in env.VARIABLES:
            report.problem(f"{name} is no variable of tileops", f"known: {', '.join(env.VARIABLES)}")


def _roots(report: Report, args: argparse.Namespace) -> None:
    from tileops import store
    from tileops.store.bundles import is_current

    report.data["roots"] = []
    for root in store.roots():
        records = list(root.entries())
        archs = sorted({r.arch for r in records})
        problem = root.problem()
        faults = list(root.verify())
        report.data["roots"].append(
            {"root": root.name, "kind": root.kind, "artifacts": len(records), "archs": archs, "problem": problem, "faults": len(faults)}
        )
        if root.kind == "memory":
            continue
        stale = sum(not is_current(r) for r in records)
        text = f"{root.name}: {len(records)} kernels, {_output.size(sum(r.cubin_size for r in records))}"
        text += f", {', '.join(archs)}" if archs else ""
        text += f", {stale} of them from other kernel sources than this package's" if stale else ""
        report.say("roots", text + (f" ({problem})" if problem else ""))
        bad = [fault for fault in faults if fault.kind != "unusable"]
        if bad:
            remedy = "tileops verify tells all; remove the folder of a bad entry, it is made anew" if root.kind == "cache" else "reinstall it"
            report.problem(f"{root.name}: {len(bad)} faults, the first: {bad[0].reason} ({bad[0].path})", remedy, CORRUPT)
        elif problem and root.kind == "site":
            report.problem(f"{root.name}: {problem}", "correct TILEOPS_ARTIFACT_PATH")


def _coverage(report: Report, args: argparse.Namespace) -> None:
    from tileops import catalog, models, store

    present = [archs[0] for gpu in report.data.get("gpus", ()) if (archs := gpu["archs"])]
    asked = args.arch.split(",") if args.arch else list(dict.fromkeys(present)) or list(catalog.ARCHS)
    policy = report.data.get("policy", "auto")
    keys = {r.key for root in store.roots(policy if policy != "unknown" else "auto") for r in root.entries()}
    coverage: dict[str, dict[str, str]] = {}
    cache: dict[tuple[Any, ...], str] = {}
    for model in models.PRESETS.values():
        for arch in asked:
            values = (model.chunk_size, model.head_dim, model.d_state, model.dtype, arch)
            if values not in cache:
                needed = model.kernels([arch])
                cache[values] = f"{sum(c.key in keys for c in needed)}/{len(needed)}"
            coverage.setdefault(model.name, {})[arch] = cache[values]
    report.data["coverage"] = coverage

    def whole(text: str) -> bool:
        return text.split("/")[0] == text.split("/")[1]

    for arch in asked:
        full = [name for name, by_arch in coverage.items() if whole(by_arch[arch])]
        partly = [
            f"{name} {by_arch[arch]}" for name, by_arch in coverage.items() if not whole(by_arch[arch]) and by_arch[arch][:2] != "0/"
        ]
        if full or present or args.arch:
            report.say("coverage", f"{arch}: {', '.join(full) if full else 'no preset wholly'}" + (" (all)" if len(full) == len(coverage) else ""))
            if partly:
                report.say("coverage", f"  in part: {', '.join(partly)}")
    if "coverage" not in report.sections:
        report.say("coverage", "no preset has kernels for any arch")
    nothing = [arch for arch in present if not any(whole(by_arch[arch]) for by_arch in coverage.values())]
    if nothing and report.data.get("compiler") is None:
        report.problem(
            f"no preset is covered for {', '.join(nothing)}, and nothing can be compiled here",
            "install a wheel with kernels, import a bundle, or pip install 'tileops[jit]' and run tileops warm",
        )


def _compiler(report: Report, args: argparse.Namespace) -> None:
    from tileops import compiler

    found, reason = compiler.toolchain.find()
    report.data["compiler"] = found.name if found else None
    report.say("compiler", found.name if found else f"none: {reason}")


def _cache(report: Report, args: argparse.Namespace) -> None:
    from tileops import store
    from tileops.store.cache import CacheRoot

    where = store.location()
    facts: dict[str, Any] = {"path": where.path, "reason": where.reason}
    report.data["cache"] = facts
    if where.path is None:
        report.say("cache", f"none: {where.reason}")
        report.problem(f"there is no user cache: {where.reason}", "set TILEOPS_CACHE_DIR to a folder that you own")
        return
    try:
        status = os.stat(where.path)
    except FileNotFoundError:
        facts["exists"] = False
        parent = where.path
        while not os.path.exists(parent):
            parent = os.path.dirname(parent)
        writable = os.access(parent, os.W_OK | os.X_OK)
        report.say("cache", f"{where.path}: not made yet" + ("" if writable else f", and {parent} cannot be written"))
        if not writable:
            report.problem(f"{where.path} cannot be made: {parent} is not writable", "set TILEOPS_CACHE_DIR to a folder that you own")
        return
    root = CacheRoot("cache", "user cache", where.path)
    problem = root.problem()
    total = sum(r.cubin_size for r in root.entries())
    mode = oct(stat.S_IMODE(status.st_mode))[2:]
    writable = os.access(where.path, os.W_OK | os.X_OK) and not _read_only(where.path)
    facts.update(exists=True, owner=_owner(status.st_uid), mode=mode, bytes=total, writable=writable, problem=problem)
    text = f"{where.path}: owner {facts['owner']}, mode {mode}, {_output.size(total)}"
    report.say("cache", text + ("" if writable else ", not writable") + (f" ({problem})" if problem else ""))
    if problem:
        report.problem(f"the user cache is not used: {problem}", "give it to this user, chmod 700, or set TILEOPS_CACHE_DIR elsewhere")
    elif not writable:
        report.problem("the user cache cannot be written: what is compiled is lost when the process ends", "set TILEOPS_CACHE_DIR elsewhere")


def _read_only(path: str) -> bool:
    # os.access asks about permissions, which root always has; a read-only mount is told by the file system.
    return bool(os.statvfs(path).f_flag & os.ST_RDONLY)


def _owner(uid: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


#: In this order: a later one uses what an earlier one found out.
PROBES: dict[str, Callable[[Report, argparse.Namespace], None]] = {
    "versions": _versions,
    "gpu": _gpus,
    "settings": _settings,
    "compiler": _compiler,
    "roots": _roots,
    "coverage": _coverage,
    "cache": _cache,
}
