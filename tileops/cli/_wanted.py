"""Kernels that must be there, and whether they are: what warm, explain and export ask of the store."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tileops import catalog, store
from tileops.cli import _arguments, _gpus
from tileops.cli._gpus import Place
from tileops.config import KernelConfig
from tileops.errors import IncompatibleArtifactError


@dataclass(frozen=True)
class Wanted:
    """One kernel for one place: any of ``configs`` (the same but for the arch, best first) will do."""

    configs: tuple[KernelConfig, ...]
    place: Place

    @property
    def config(self) -> KernelConfig:
        return self.configs[0]


@dataclass(frozen=True)
class Looked:
    """What the store said to a wanted kernel. ``refused``: it is there, and the GPU or driver of this machine cannot run it."""

    wanted: Wanted
    lookup: store.Lookup  # the hit, else the look-up of the best arch
    refused: str = ""

    @property
    def here(self) -> bool:
        return self.lookup.artifact is not None and not self.refused


def for_place(configs: Iterable[KernelConfig], place: Place) -> list[Wanted]:
    """Each config, made for ``place.archs[0]``, with its equivalents for the other archs that will do."""
    return [
        Wanted(
            (
                config,
                *(catalog.config(config.kernel, arch, **config.fields) for arch in place.archs[1:] if catalog.exists(config.kernel, arch)),
            ),
            place,
        )
        for config in configs
    ]


def of_models(args: argparse.Namespace) -> list[Wanted]:
    """Every kernel that the models of the command line need, once each, in the order of the stages.

    Raises UsageError, IncompatibleArtifactError, DriverError.
    """
    found: dict[str, Wanted] = {}
    models = _arguments.models_of(args)
    for place in _gpus.places(args.arch):
        for model in models:
            for wanted in for_place(_arguments.kernels_of(model, [place.archs[0]], args.dtype), place):
                found.setdefault(wanted.config.key, wanted)
    order = {name: at for at, name in enumerate(catalog.KERNELS)}
    return sorted(found.values(), key=lambda w: (w.config.arch, order[w.config.kernel]))  # stable: same kernels stay in the model's order


def toolchain_name() -> str | None:
    """The installed compiler's name, as the ops ask it: entries of the user cache made by another one are a miss."""
    from tileops import compiler

    return compiler.toolchain_name()


def look(wanted: Wanted, policy: str | None = None) -> Looked:
    """Looks a kernel up as an op of this machine would: first arch that is there and that GPU and driver can run."""
    first, refused = None, None
    for config in wanted.configs:
        lookup = store.find(config, policy, toolchain=toolchain_name)
        first = first or lookup
        if lookup.artifact is None:
            continue
        reason = _refusal(lookup, wanted)
        if not reason:
            return Looked(wanted, lookup)
        refused = refused or Looked(wanted, lookup, reason)
    assert first is not None
    return refused or Looked(wanted, first)


def _refusal(lookup: store.Lookup, wanted: Wanted) -> str:
    if wanted.place.gpu is None or lookup.artifact is None:
        return ""
    from tileops import driver

    try:
        driver.check(lookup.artifact.record, wanted.place.gpu)
    except IncompatibleArtifactError as error:
        return str(error)
    return ""


def fixes(args: argparse.Namespace, missing: Sequence[Looked]) -> list[str]:
    """The commands that make what is missing: for the models that were named, else kernel by kernel, once each."""
    named = _arguments.model_words(args)
    if not named or not missing:
        return list(dict.fromkeys(store.fix_command(looked.wanted.config) for looked in missing))
    archs = ",".join(dict.fromkeys(looked.wanted.config.arch for looked in missing))
    return [f"tileops warm {shlex.join([*named, '--arch', archs])}"]
