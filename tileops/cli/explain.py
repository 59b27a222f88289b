"""Looks kernels up as an op would, and tells root by root why each was found or not; compiles nothing.

A kernel with all its FIELD=VALUE words is told in full; with fewer, every variant in brief; with a model, all its kernels.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tileops import catalog
from tileops.cli import _arguments, _exit, _output

if TYPE_CHECKING:
    from tileops.cli._wanted import Looked, Wanted
    from tileops.config import Value

HELP = "why a kernel is found or not, root by root"

#: A partial config that leaves more open than this was not meant.
_MOST = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kernel", nargs="?", metavar="KERNEL", help=f"one of {', '.join(catalog.KERNELS)}")
    parser.add_argument("fields", nargs="*", metavar="FIELD=VALUE", help="its compile-time values")
    _arguments.add_model(parser)
    _arguments.add_arch(parser, "those of the GPUs present")
    parser.usage = (
        "tileops explain KERNEL [FIELD=VALUE ...] [--arch A,B] [--json]\n"
        "       tileops explain (--model NAME | --config FILE | values) [--arch A,B] [--json]\n"
        "example: tileops explain recurrent P=64 N=128 dtype=bf16 state_dtype=float32 tied=true --arch sm_90a"
    )


def run(args: argparse.Namespace) -> int:
    from tileops import compiler
    from tileops.cli import _wanted

    if (args.kernel is None) == (not _arguments.models_of(args)):
        raise _exit.UsageError("Say either a kernel with FIELD=VALUE words, or a model (--model, --config, or explicit values).")
    wanted = _wanted.of_models(args) if args.kernel is None else _of_kernel(args)
    looked = [_wanted.look(one) for one in wanted]
    missing = [one for one in looked if one.lookup.artifact is None]
    refused = any(one.refused for one in looked)
    status = _exit.worst([_exit.INCOMPATIBLE if refused else _exit.FINE, _exit.MISSING if missing else _exit.FINE])
    found, reason = compiler.toolchain.find()
    commands = _wanted.fixes(args, missing)
    then = _then(looked[0].lookup.policy, found.name if found else None, reason)
    data = {
        "status": status,
        "policy": looked[0].lookup.policy,
        "kernels": [_data(one) for one in looked],
        "a_miss_would": then,
        "commands": commands,
    }
    _output.emit(args, data, _one(looked[0], then) if len(looked) == 1 else _brief(looked, commands, then))
    return status


def _of_kernel(args: argparse.Namespace) -> list[Wanted]:
    from tileops.cli import _gpus, _wanted

    known = catalog.KERNELS.get(args.kernel)
    if known is None:
        raise _exit.UsageError(f"Kernel {args.kernel!r} does not exist; expected one of {', '.join(catalog.KERNELS)}.")
    partial: dict[str, Value] = {}
    for word in args.fields:
        name, value = _field(args.kernel, known, word)
        if name in partial:
            raise _exit.UsageError(f"{name} is given twice.")
        partial[name] = value
    combinations = catalog.expand(args.kernel, partial)
    if len(combinations) > _MOST:
        left = ", ".join(name for name in known if name not in partial)
        raise _exit.UsageError(f"{len(combinations)} kernels are meant; say more of {left}.")
    found = []
    for place in _gpus.places(args.arch):
        if not catalog.exists(args.kernel, place.archs[0]):
            only = ", ".join(catalog.ONLY_ON[args.kernel])
            raise _exit.UsageError(f"{args.kernel} exists for {only} only, not for {place.archs[0]}: an op there runs other kernels.")
        configs = [catalog.config(args.kernel, place.archs[0], **values) for values in combinations]
        found += _wanted.for_place(configs, place)
    return found


def _field(kernel: str, known: dict[str, tuple[Value, ...]], word: str) -> tuple[str, Value]:
    name, is_value, text = word.partition("=")
    if not is_value or name not in known:
        raise _exit.UsageError(f"{word!r} is not understood; {kernel} takes {', '.join(f'{n}=...' for n in known)}.")
    spelled = {str(value).lower(): value for value in known[name]}
    value = text.lower()
    if value not in spelled:
        try:
            value = _arguments.dtype(text)
        except argparse.ArgumentTypeError:
            pass
    if value not in spelled:
        raise _exit.UsageError(f"{kernel} does not support {word}; supported: {catalog.describe(known[name])}.")
    return name, spelled[value]


def _then(policy: str, compiler: str | None, reason: str) -> str:
    """What an op does on a miss here."""
    if policy != "auto":
        return f"raise MissingKernelError: the policy is {policy!r}"
    return f"compile it: {compiler}" if compiler else f"raise MissingKernelError: {reason}"


def _data(one: Looked) -> dict[str, Any]:
    from tileops import store

    lookup = one.lookup
    data: dict[str, Any] = {
        **_output.described(lookup.config),
        "found": one.here,
        "root": lookup.root,
        "trace": [step._asdict() for step in _trace(one)],
    }
    if one.refused:
        data["refused"] = one.refused
    if lookup.artifact is None:
        error = store.missing_error(lookup)
        data.update({name: error.data[name] for name in ("nearest", "differs", "command")})
    return data


def _trace(one: Looked) -> list[Any]:
    """The look-up's steps, then the roots that were not reached."""
    from tileops import store

    asked = {step.root for step in one.lookup.trace}
    later = [root.name for root in store.roots(one.lookup.policy) if root.name not in asked and root.kind != "memory"]
    steps = [step for step in one.lookup.trace if not step.root.startswith("memory")]
    return [*steps, *(store.Step(name, "-", "not asked: found before") for name in later)]


def _one(one: Looked, then: str) -> Iterator[str]:
    lookup = one.lookup
    yield str(lookup.config)
    yield f"key     {lookup.config.key}"
    yield f"policy  {lookup.policy}"
    yield from _output.table([(step.outcome, step.root, step.reason) for step in _trace(one)])
    if one.refused:
        yield f"Refused: {one.refused}"
    elif lookup.artifact is not None:
        yield f"Found in {lookup.root}."
    else:
        yield from _miss(one, then)


def _miss(one: Looked, then: str) -> Iterator[str]:
    from tileops import store

    lookup = one.lookup
    nearest = lookup.nearest
    if nearest is None:
        yield f"Nearest: none; no root holds any {lookup.config.kernel} kernel."
    elif not lookup.differs:
        yield "Nearest: this very kernel, which cannot be used (tileops verify)."
    else:
        yield f"Nearest: {nearest.config_object()}"
        rows = [(name, f"wanted {_value(name, wanted)}", f"has {_value(name, has)}") for name, (wanted, has) in lookup.differs.items()]
        yield from _output.table(rows)
    yield f"An op would {then}."
    yield f"Run: {store.fix_command(lookup.config)}"


def _value(name: str, value: object) -> str:
    """A field's value; the source's digest is too long to be read, and only its being another one says something."""
    return str(value)[:12] if name == "source" else "nothing" if value is None else str(value)


def _brief(looked: Sequence[Looked], commands: Sequence[str], then: str) -> Iterator[str]:
    rows = []
    for one in looked:
        config = one.lookup.config
        outcome, why = ("refused", "") if one.refused else ("hit", str(one.lookup.root)) if one.here else ("miss", _last_words(one))
        rows.append((outcome, config.kernel, config.arch, _output.fields(config.fields), why))
    yield from _output.table(rows, indent="")
    for reason in dict.fromkeys(one.refused for one in looked if one.refused):
        yield f"Refused: {reason}"
    yield f"{sum(one.here for one in looked)} of {len(looked)} are there (policy {looked[0].lookup.policy})."
    if commands:
        yield f"For one that is missing an op would {then}."
    for command in commands:
        yield f"Run: {command}"


def _last_words(one: Looked) -> str:
    """The most telling reason of a miss: one that is not just «not there»."""
    reasons = [step.reason for step in one.lookup.trace]
    plain = ("key not present", "the cache is empty", "no manifest for")
    return next((reason for reason in reasons if not reason.startswith(plain)), "in no root")
