"""Which configs have the same CUDA source, so that it is made once. Imports nothing heavy: the process that hands out work needs it too."""

from __future__ import annotations

from dataclasses import replace

from tileops.config import KernelConfig

#: Archs for which TileLang makes the source that it makes for another one.
LOWERED_AS = {"sm_86": "sm_80", "sm_89": "sm_80"}


def lowered_like(config: KernelConfig) -> KernelConfig:
    """The config that stands for all those with the source of ``config``."""
    return replace(config, arch=LOWERED_AS.get(config.arch, config.arch))
