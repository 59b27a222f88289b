"""One screen that says what will happen on this machine, and what is wrong with the remedy.

Works when the package is half broken, and without a GPU, driver or torch: each question is asked by itself, and one that
cannot be answered becomes a problem. Nothing is written. Models that no root covers are a fact, not a problem; the last line says
what becomes of them.

Exit status: 0 usable; 1 something that is needed is missing or not served (torch, a refused root or cache, every kernel for
this GPU where nothing can be compiled); 2 a TILEOPS_* variable is not understood; 3 a root is corrupt; 4 the GPU or its driver
cannot be used. Of several, the first of 3, 4, 2, 1.
"""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

from tileops.cli import _exit, _output

HELP = "what will happen on this machine, and what is wrong"

_WIDTH = 110


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--no-verify", action="store_true", help="read the indexes of the roots only, not every kernel")


def run(args: argparse.Namespace) -> int:
    from tileops.cli import _probes

    facts, problems = _probes.examine(verify=not args.no_verify)
    status = _exit.worst(problem.status for problem in problems)
    data = {"status": status, **facts, "problems": [problem._asdict() for problem in problems]}
    _output.emit(args, data, _lines(facts, data["problems"], status))
    return status


def _lines(facts: dict[str, Any], problems: list[dict[str, Any]], status: int) -> Iterator[str]:
    for section, show in _SECTIONS.items():
        # A probe that failed left nothing; half a section must not end the command either.
        try:
            texts = list(show(facts[section]))
        except Exception:
            texts = ["not known, see below"]
        for at, text in enumerate(texts):
            yield from _wrapped("" if at else section, text)
    yield ""
    for number, problem in enumerate(problems, 1):
        yield from _wrapped(f"problem {number}", " ".join(problem["what"].split()))
        yield from _wrapped("", f"-> {problem['remedy']}")
    yield _verdict(facts, status, len(problems))


def _wrapped(label: str, text: str) -> list[str]:
    words = text.lstrip(" ")
    indent = len(text) - len(words)
    first, rest = f"{label:10} " + " " * indent, " " * (13 + indent)
    return textwrap.wrap(words, _WIDTH, initial_indent=first, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False)


def _verdict(facts: dict[str, Any], status: int, count: int) -> str:
    gpus = [gpu for gpu in (facts.get("gpu") or {}).get("gpus", ()) if gpu["archs"]]
    if status == _exit.FINE:
        usable, where = "Usable", "CPU tensors run on the reference target"
        if gpus:
            usable, models = _models_served(facts, gpus[0]["arch"])
            where = f"CUDA tensors run on {gpus[0]['name']} with {gpus[0]['arch']} kernels{models}"
        return f"{usable}: {where}{'; see the notes above' if count else '; nothing is wrong'}."
    word = {_exit.MISSING: "something is missing", _exit.USAGE: "a setting is not understood", _exit.CORRUPT: "something is corrupt"}
    return f"Not in order: {word.get(status, 'the GPU or its driver cannot be used')} (exit status {status})."


def _models_served(facts: dict[str, Any], arch: str) -> tuple[str, str]:
    """How usable the kernels make a GPU, and what becomes of the models that lack some."""
    counts = [model["coverage"][arch] for model in facts["models"]["models"]]
    whole = sum(each["there"] == each["needed"] for each in counts)
    if whole == len(counts):
        return "Usable", ""
    served = f"; {whole} of the {len(counts)} models above have all of theirs"
    if facts["policy"]["policy"] == "auto" and facts["compiler"]["name"]:
        return "Usable", f"{served}, what the others lack is compiled at their first calls"
    return "Usable in part", f"{served}, calls of the others can raise MissingKernelError"


def _show_versions(v: dict[str, Any]) -> Iterator[str]:
    yield f"tileops {v['tileops']}, Python {v['python']}, torch {v['torch'] or 'none'}, cuda-bindings {v['cuda-bindings'] or 'none'}"
    yield f"in {v['path']}"


def _show_torch(t: dict[str, Any]) -> Iterator[str]:
    if t.get("error"):
        yield t["error"]
        return
    built = f"built for CUDA {t['cuda']}" if t["cuda"] else "built without CUDA"
    yield f"{t['version']}, {built}, sees {_output.many(t['gpus'], 'GPU')}"


def _show_gpu(g: dict[str, Any]) -> Iterator[str]:
    for gpu in g["gpus"]:
        also = f" (or {', '.join(gpu['archs'][1:])})" if len(gpu["archs"]) > 1 else ""
        runs = f"runs {gpu['arch']} kernels{also}" if gpu["archs"] else "is not supported"
        yield f"{gpu['ordinal']}: {gpu['name']}, compute capability {gpu['capability']}, {runs}"
    if not g["gpus"]:
        yield f"none: {g['reason']}"


def _show_driver(d: dict[str, Any]) -> Iterator[str]:
    if d["cuda"] is None:
        yield "none" + (f"; kernel module {d['version']}" if d["version"] else "")
    else:
        parts = (d["version"], f"supports CUDA {d['cuda']}", f"libcuda {d['libcuda']}" if d["libcuda"] else None)
        yield ", ".join(part for part in parts if part)


def _show_policy(p: dict[str, Any]) -> Iterator[str]:
    yield f"{p['policy']} (from {p['source']}): {p['meaning']}"


def _show_settings(s: dict[str, str]) -> Iterator[str]:
    yield from (f"{name}={value}" for name, value in s.items())
    if not s:
        yield "no TILEOPS_* variable is set"


def _show_compiler(c: dict[str, Any]) -> Iterator[str]:
    yield c["name"] or f"none: {c['reason']}"


def _show_cache(c: dict[str, Any]) -> Iterator[str]:
    if c["path"] is None:
        yield f"none: {c['refused']}"
        return
    yield f"{c['path']}"
    state = "not made yet"
    if c["exists"]:
        state = f"owner {c['owner']}, mode {c['mode']}, {_output.many(c['entries'], 'kernel')}, {_output.size(c['size'])}"
    yield f"{state}, {'writable' if not c['unwritable'] else 'refused' if c['refused'] else 'not writable'}"


def _show_roots(roots: list[dict[str, Any]]) -> Iterator[str]:
    for root in roots:
        archs = ", ".join(f"{arch} {count}" for arch, count in root["archs"].items())
        what = f"{_output.many(root['kernels'], 'kernel')}, {_output.size(root['bytes'])}" + (f" ({archs})" if archs else "")
        if root["old"]:
            what += f", {root['old']} of other sources"
        if root["problem"]:
            what = f"refused: {root['problem']}"
        elif root["faults"]:
            what += f", {_output.many(root['faults'], 'fault')}"
        elif root["verified"] and root["kernels"]:
            what += ", verified"
        if not root["used"]:
            what += ", not used under this policy"
        yield f"{root['name']}: {what}"
        if root["path"] not in root["name"]:
            yield f"  {root['path']}"


def _show_models(coverage: dict[str, Any]) -> Iterator[str]:
    yield f"kernels there of those needed, bfloat16, for {coverage['for']}"
    groups: dict[tuple[tuple[int, ...], tuple[int, int, int]], list[str]] = {}
    for model in coverage["models"]:
        counts = tuple(each["there"] for each in model["coverage"].values())
        groups.setdefault((counts, (model["head_dim"], model["d_state"], model["chunk_size"])), []).append(model["model"])
    first = coverage["models"][0]["coverage"]
    if len(first) > 1:
        yield "".join(f"{arch:>8}" for arch in first)
    for (counts, (p, n, q)), names in groups.items():
        row = "".join(f"{count}/{each['needed']}".rjust(8) for count, each in zip(counts, first.values()))
        yield f"{row}  P={p} N={n} Q={q}: {', '.join(names)}"


_SECTIONS: dict[str, Callable[[Any], Iterator[str]]] = {
    "versions": _show_versions,
    "torch": _show_torch,
    "gpu": _show_gpu,
    "driver": _show_driver,
    "policy": _show_policy,
    "settings": _show_settings,
    "compiler": _show_compiler,
    "cache": _show_cache,
    "roots": _show_roots,
    "models": _show_models,
}
