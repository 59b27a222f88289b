"""What ``tileops doctor`` asks of a machine, each question by itself. Nothing of this package is imported at the top but leaves:
a part that is broken must cost one answer, not the command."""

from __future__ import annotations

import difflib
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from tileops import env
from tileops.cli import _exit

#: Importing torch from a cold network disk takes this long at most, seconds.
_TORCH_WAIT = 120


class Problem(NamedTuple):
    """Something that is not in order. ``status`` 0: worth knowing, and usable all the same."""

    what: str
    remedy: str
    status: int


class Findings:
    """What was found out so far: a later probe uses what an earlier one knows."""

    def __init__(self, verify: bool) -> None:
        self.verify = verify
        self.facts: dict[str, Any] = {}
        self.problems: list[Problem] = []

    def problem(self, what: str, remedy: str, status: int = _exit.FINE) -> None:
        self.problems.append(Problem(what, remedy, status))

    def get(self, section: str, name: str, default: Any) -> Any:
        """A fact of a section, or the default where its probe failed."""
        found = self.facts.get(section)
        return found.get(name, default) if isinstance(found, dict) else default

    @property
    def policy(self) -> str:
        return str(self.get("policy", "policy", "auto"))


def examine(verify: bool) -> tuple[dict[str, Any], list[Problem]]:
    """Every probe's facts by section, and the problems, worst first."""
    findings = Findings(verify)
    torch = _start_torch()  # it takes seconds: meanwhile the rest is asked
    try:
        for section, probe in PROBES.items():
            _ask(findings, section, probe)
        _ask(findings, "torch", partial(_torch, torch))
    finally:
        if torch is not None and torch.poll() is None:
            torch.kill()
            torch.wait()
    _ask(findings, "conclusions", _conclude)
    findings.facts.pop("conclusions", None)
    return findings.facts, sorted(findings.problems, key=lambda p: _exit.WORST_FIRST.index(p.status))


def _ask(findings: Findings, section: str, probe: Callable[[Findings], Any]) -> None:
    findings.facts[section] = None
    try:
        findings.facts[section] = probe(findings)
    except Exception as error:  # whatever a broken installation raises
        what = f"{section} cannot be examined: {type(error).__name__}: {error}"
        findings.problem(what, "tileops itself may be damaged: reinstall it, or report this line", _exit.MISSING)


def _versions(findings: Findings) -> dict[str, Any]:
    from tileops import cli

    found: dict[str, Any] = {
        "tileops": cli.version(),
        "path": str(Path(__file__).resolve().parents[1]),
        "python": sys.version.split()[0],
        "executable": sys.executable,
    }
    from importlib import metadata

    for name in ("torch", "cuda-bindings", "filelock", "platformdirs", "tilelang"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
            if name in ("filelock", "platformdirs", "cuda-bindings"):
                findings.problem(f"The package {name} is not installed.", f"pip install {name}", _exit.MISSING)
    return found


_TORCH = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
facts = {}
try:
    import torch
    facts.update(version=torch.__version__, cuda=torch.version.cuda, gpus=torch.cuda.device_count() if torch.cuda.is_available() else 0)
except BaseException as error:
    facts["error"] = f"cannot be imported: {type(error).__name__}: {error}"
else:
    try:
        import tileops.mamba
    except BaseException as error:
        facts["operators"] = f"{type(error).__name__}: {error}"
print("\\n" + json.dumps(facts))
"""


def _start_torch() -> subprocess.Popen[str] | None:
    """A process of its own imports torch and the operators: a torch that crashes on import must not take the doctor along."""
    line = [sys.executable, "-W", "ignore", "-c", _TORCH, json.dumps(sys.path)]
    try:
        return subprocess.Popen(line, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    except OSError:
        return None


def _torch(child: subprocess.Popen[str] | None, findings: Findings) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    if child is None:
        return {"error": "not asked: no process can be started"}
    try:
        out, _ = child.communicate(timeout=_TORCH_WAIT)
        facts = json.loads(out.splitlines()[-1]) if out.strip() else {"error": f"importing it ends the process (status {child.returncode})"}
    except subprocess.TimeoutExpired:
        facts = {"error": f"importing it takes more than {_TORCH_WAIT} s"}
    if facts.get("error"):
        findings.problem(f"torch: {facts['error']}", "pip install torch (or mend what its message names)", _exit.MISSING)
    elif facts.get("operators"):
        findings.problem(f"tileops.mamba cannot be imported: {facts['operators']}", "reinstall tileops", _exit.MISSING)
    return facts


def _driver(findings: Findings) -> dict[str, Any]:
    facts: dict[str, Any] = {"version": _kernel_module(), "cuda": None, "libcuda": None}
    from tileops.driver import _api
    from tileops.errors import DriverError

    try:
        number = _api.driver_version()
    except DriverError:
        return facts  # the GPU's probe says why
    facts["cuda"], facts["libcuda"] = f"{number // 1000}.{number % 1000 // 10}", _libcuda()
    return facts


def _kernel_module() -> str | None:
    """The version of NVIDIA's kernel module, where it is loaded."""
    try:
        words = Path("/proc/driver/nvidia/version").read_text().split()
    except OSError:
        return None
    return next((word for word in words if word[0].isdigit() and "." in word), "of an unknown version")


def _libcuda() -> str | None:
    """The libcuda that this process has loaded."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    return next((line.split()[-1] for line in lines if "/libcuda.so" in line), None)


def _gpu(findings: Findings) -> dict[str, Any]:
    from tileops import catalog
    from tileops.cli import _gpus
    from tileops.errors import DriverError

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    facts: dict[str, Any] = {"gpus": [], "reason": "", "CUDA_VISIBLE_DEVICES": visible}
    try:
        gpus, facts["reason"] = _gpus.present()
    except DriverError as error:
        facts["reason"] = str(error).rstrip(".")
        findings.problem(str(error), "mend the NVIDIA driver (nvidia-smi must work), then ask again", _exit.INCOMPATIBLE)
        return facts
    if facts["reason"] == _gpus.NONE["IMPORT"] and findings.get("versions", "cuda-bindings", None):
        findings.problem("The package cuda-bindings is installed and cannot be imported.", "reinstall cuda-bindings", _exit.MISSING)
    for info in gpus:
        archs = catalog.archs_for(*info.capability)
        capability = "{}.{}".format(*info.capability)
        facts["gpus"].append(
            {
                "ordinal": info.ordinal,
                "name": info.name,
                "capability": capability,
                "arch": archs[0] if archs else None,
                "archs": list(archs),
                "max_smem": info.max_smem,
                "driver": info.driver,
            }
        )
        if not archs:
            what = f"GPU {info.ordinal}, {info.name} (compute capability {capability}), runs no kernel of this package."
            remedy = f"use a GPU for {', '.join(catalog.ARCHS)}, or target='reference'; hide it with CUDA_VISIBLE_DEVICES"
            findings.problem(what, remedy, _exit.INCOMPATIBLE)
    if not gpus and visible is not None:
        facts["reason"] += f" (CUDA_VISIBLE_DEVICES={visible!r})"
    elif not gpus and _kernel_module() is not None:
        what = f"NVIDIA's kernel module {_kernel_module()} is loaded, but {facts['reason']}."
        remedy = "in a container: start it with --gpus all and NVIDIA_DRIVER_CAPABILITIES=compute,utility"
        findings.problem(what, remedy, _exit.INCOMPATIBLE)
    return facts


_MEANING = {
    "auto": "what is in no root is compiled",
    "cached": "nothing is compiled",
    "packaged": "nothing is compiled, and the user cache is not used",
}


def _policy(findings: Findings) -> dict[str, Any]:
    from tileops import store
    from tileops.errors import SettingError

    source = "TILEOPS_POLICY" if os.environ.get("TILEOPS_POLICY") else "the default"
    try:
        policy = store.current_policy()
    except SettingError as error:
        findings.problem(str(error), "set TILEOPS_POLICY to one of these, or unset it", _exit.USAGE)
        return {"source": source, "meaning": "not understood; below, as if it were auto", "policy": "auto"}
    return {"policy": policy, "source": source, "meaning": _MEANING[policy]}


def _settings(findings: Findings) -> dict[str, str]:
    found = {name: value for name, value in sorted(os.environ.items()) if name.startswith("TILEOPS_")}
    for name in found:
        if name not in env.VARIABLES:
            near = difflib.get_close_matches(name, env.VARIABLES, 1, 0.5)
            remedy = f"did you mean {near[0]}?" if near else f"known: {', '.join(env.VARIABLES)}"
            findings.problem(f"{name} is set, and tileops knows no such variable.", remedy)
    return found


def _compiler(findings: Findings) -> dict[str, Any]:
    from tileops import compiler

    found, reason = compiler.toolchain.find()
    return {"name": found.name if found else None, "reason": reason}


def _cache(findings: Findings) -> dict[str, Any]:
    from tileops.cli import _cache as folder

    state = folder.condition()
    elsewhere = "set TILEOPS_CACHE_DIR to a folder of your own"
    if state.path is None:
        findings.problem(f"There is no user cache: {state.refused}.", elsewhere)
    elif state.refused:
        findings.problem(f"The user cache is not used: {state.refused}.", f"do what the reason says, or {elsewhere}", _exit.MISSING)
    elif state.unwritable:
        findings.problem(f"What is compiled cannot be stored: {state.unwritable}.", f"{elsewhere}, if anything is to be compiled here")
    return state._asdict()


def _roots(findings: Findings) -> list[dict[str, Any]]:
    from tileops import store
    from tileops.store.bundles import is_current

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        used = [root.name for root in store.roots(findings.policy)]
        roots = [root for root in store.roots() if root.kind != "memory"]
    for warning in caught:
        findings.problem(str(warning.message), "reinstall or remove the package that it names", _exit.MISSING)
    shown = []
    for root in roots:
        # Warnings of a bad index would say what the faults below say.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            records = list(root.entries())
            problem = root.problem()
            faults = list(root.verify()) if findings.verify and problem is None else []
        archs: dict[str, int] = {}
        for record in records:
            archs[record.arch] = archs.get(record.arch, 0) + 1
        shown.append(
            {
                "kind": root.kind,
                "name": root.name,
                "path": root.path,
                "kernels": len(records),
                "bytes": sum(record.cubin_size for record in records),
                "archs": dict(sorted(archs.items())),
                "old": sum(not is_current(record) for record in records),
                "problem": problem,
                "faults": len(faults),
                "verified": findings.verify,
                "used": root.name in used,
            }
        )
        _judge(findings, root, problem, faults)
    return shown


def _judge(findings: Findings, root: Any, problem: str | None, faults: list[Any]) -> None:
    if problem is not None and root.kind != "cache":  # the cache's probe has told of its own
        where = "correct TILEOPS_ARTIFACT_PATH, or the folder" if root.kind == "site" else "reinstall the package"
        findings.problem(f"{root.name} is not used: {problem}.", where, _exit.MISSING)
    by_status: dict[int, list[Any]] = {}
    for fault in faults:
        by_status.setdefault(_exit.of_fault(fault.kind), []).append(fault)
    for status, found in by_status.items():
        first = found[0]
        more = f" ({len(found)} such; tileops verify lists them)" if len(found) > 1 else ""
        findings.problem(f"{root.name}: {first.kind}: {first.path}: {first.reason}{more}.", _exit.remedy(root.kind, first.kind), status)


def _models(findings: Findings) -> dict[str, Any]:
    """How many of the kernels that each preset needs are there: for the GPUs present, else for each arch."""
    from tileops import catalog, driver, models, store
    from tileops.cli._wanted import toolchain_name
    from tileops.config import Record
    from tileops.errors import IncompatibleArtifactError

    toolchain = toolchain_name()
    held: dict[str, Record] = {}
    for root in store.roots(findings.policy):
        for record in root.entries():
            # As a look-up does: entries of the user cache made by another compiler are a miss.
            if root.kind != "cache" or toolchain in (None, store.compiler_of(record)):
                held.setdefault(record.key, record)
    gpus = [gpu for gpu in findings.get("gpu", "gpus", []) if gpu["archs"]]
    places: dict[str, tuple[list[str], Any]] = {arch: ([arch], None) for arch in catalog.ARCHS}
    if gpus:
        places = {gpu["arch"]: (gpu["archs"], driver.device_info(gpu["ordinal"])) for gpu in gpus}
    refusals: dict[str, str] = {}

    def there(kernel: str, values: dict[str, Any], archs: list[str], info: Any) -> bool:
        for arch in archs:
            record = held.get(catalog.config(kernel, arch, **values).key)
            if record is None:
                continue
            if info is None:
                return True
            try:
                driver.check(record, info)
            except IncompatibleArtifactError as error:
                refusals.setdefault(archs[0], str(error))
                continue
            return True
        return False

    counted: dict[tuple[Any, ...], dict[str, int]] = {}
    shown: list[dict[str, Any]] = []
    for model in models.PRESETS.values():
        values = (model.chunk_size, model.head_dim, model.d_state)
        coverage = {}
        for name, (archs, info) in places.items():
            if (name, values) not in counted:
                needed = model.kernels([archs[0]])
                found = sum(there(config.kernel, config.fields, archs, info) for config in needed)
                counted[(name, values)] = {"there": found, "needed": len(needed)}
            coverage[name] = counted[(name, values)]
        sizes = {"head_dim": model.head_dim, "d_state": model.d_state, "chunk_size": model.chunk_size}
        shown.append({"model": model.name, **sizes, "coverage": coverage})

    def lacking(each: dict[str, Any]) -> int:
        return sum(count["needed"] - count["there"] for count in each["coverage"].values())

    shown.sort(key=lacking)  # stable: equal ones stay in the table's order
    return {
        "for": ", ".join(places) if gpus else "each arch (no GPU here)",
        "models": shown,
        "any": {name: any(each["coverage"][name]["there"] for each in shown) for name in places},
        "refusals": refusals,
    }


def _conclude(findings: Findings) -> None:
    """Problems that only several answers together show."""
    gpus = [gpu for gpu in findings.get("gpu", "gpus", []) if gpu["archs"]]
    if not gpus:
        return
    torch = findings.facts.get("torch") or {}
    if not torch.get("error") and torch.get("gpus") == 0:
        why = "it was built without CUDA" if not torch.get("cuda") else "it says that CUDA is not available"
        what = f"The driver shows {gpus[0]['name']}, and torch {torch.get('version')} does not: {why}."
        findings.problem(what, "install a CUDA build of torch for this driver", _exit.INCOMPATIBLE)
    compiles = findings.policy == "auto" and findings.get("compiler", "name", None)
    for arch, some in findings.get("models", "any", {}).items():
        refusal = findings.get("models", "refusals", {}).get(arch)
        if refusal and not some:
            findings.problem(refusal, "update the NVIDIA driver", _exit.INCOMPATIBLE)
        elif not some and compiles:
            remedy = f"before serving: tileops warm --model NAME --arch {arch}"
            findings.problem(f"No root holds a kernel for {arch}: first calls compile.", remedy)
        elif not some:
            reason = "no compiler is installed" if findings.policy == "auto" else f"the policy is {findings.policy!r}"
            what = f"No root holds a kernel for {arch}, and none can be compiled: {reason}."
            findings.problem(what, "install a wheel with kernels, tileops import BUNDLE, or pip install 'tileops[jit]'", _exit.MISSING)


#: In this order: a later one uses what an earlier one found out.
PROBES: dict[str, Callable[[Findings], Any]] = {
    "versions": _versions,
    "gpu": _gpu,
    "driver": _driver,
    "policy": _policy,
    "settings": _settings,
    "compiler": _compiler,
    "cache": _cache,
    "roots": _roots,
    "models": _models,
}
