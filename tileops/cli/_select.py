"""Which kernels a verb is about: a preset, a config.json, or explicit values; and for which archs."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from tileops.cli import Usage

if TYPE_CHECKING:
    from tileops.config import KernelConfig
    from tileops.models import Model

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "bfloat16": "bfloat16", "float16": "float16"}


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("which model (one of --model, --config, or the explicit values)")
    group.add_argument("--model", metavar="NAME", help="a preset; `tileops list --models` names them")
    group.add_argument("--config", metavar="FILE", help="a Hugging Face config.json, or the folder it lies in")
    group.add_argument("--chunk-size", metavar="Q", type=int)
    group.add_argument("--head-dim", metavar="P", type=int)
    group.add_argument("--d-state", metavar="N", type=int)
    group.add_argument("--dtype", metavar="TYPE", help="bfloat16 or float16 (default: the model's, else bfloat16)")
    add_arch_argument(parser)


def add_arch_argument(parser: argparse.ArgumentParser) -> None:
    from tileops import catalog

    parser.add_argument("--arch", metavar="A,B", help=f"of {', '.join(catalog.ARCHS)} (default: those of the GPUs present)")


def has_model(args: argparse.Namespace) -> bool:
    """Whether the arguments name a model at all."""
    return any(v is not None for v in (args.model, args.config, args.chunk_size, args.head_dim, args.d_state))


def model(args: argparse.Namespace) -> Model:
    """The model that the arguments name. Raises Usage."""
    from tileops import models

    explicit = {"--chunk-size": args.chunk_size, "--head-dim": args.head_dim, "--d-state": args.d_state}
    given = [name for name, value in explicit.items() if value is not None]
    if sum((args.model is not None, args.config is not None, bool(given))) != 1:
        raise Usage("give one of --model NAME, --config FILE, or --chunk-size, --head-dim and --d-state together")
    try:
        if args.model is not None:
            return models.preset(args.model)
        if args.config is not None:
            return models.read_config(args.config)
    except ValueError as error:
        raise Usage(str(error)) from None
    if len(given) != len(explicit):
        raise Usage(f"missing: {', '.join(sorted(set(explicit) - set(given)))}")
    return models.Model("explicit values", head_dim=args.head_dim, d_state=args.d_state, chunk_size=args.chunk_size)


def dtype(args: argparse.Namespace) -> str | None:
    """--dtype in full, or None. Raises Usage."""
    if args.dtype is None:
        return None
    if args.dtype not in DTYPES:
        raise Usage(f"--dtype {args.dtype}: expected bfloat16 or float16")
    return DTYPES[args.dtype]


def kernels(args: argparse.Namespace, archs: list[str]) -> list[KernelConfig]:
    """Every kernel of the chosen model. Raises Usage for values that kernels do not support."""
    chosen = model(args)
    try:
        # A config.json without a dtype means a model that is loaded as one of these two; bfloat16 is what they are trained in.
        return chosen.kernels(archs, dtype(args) or (None if chosen.dtype else "bfloat16"))
    except ValueError as error:
        raise Usage(str(error)) from None


def archs(args: argparse.Namespace) -> list[str]:
    """--arch, else the archs of the GPUs present. Raises Usage where there is neither, DriverError for a GPU nothing runs on."""
    from tileops import catalog

    if args.arch is not None:
        found = [a for a in args.arch.split(",") if a]
        unknown = [a for a in found if a not in catalog.ARCHS]
        if unknown or not found:
            raise Usage(f"--arch {args.arch}: expected some of {', '.join(catalog.ARCHS)}")
        return list(dict.fromkeys(found))
    present = present_archs()
    if not present:
        raise Usage(f"no GPU is visible here: say which archs, --arch A,B of {', '.join(catalog.ARCHS)}")
    return present


def present_archs() -> list[str]:
    """The best arch of each GPU that the driver sees, once each; empty without a driver or GPU.

    Raises:
        IncompatibleArtifactError: a GPU is there and no arch runs on it.
    """
    from tileops import catalog, driver
    from tileops.errors import DriverError, IncompatibleArtifactError

    try:
        count = driver.device_count()
    except DriverError:
        return []
    found: dict[str, None] = {}
    for index in range(count):
        info = driver.device_info(index)
        archs = catalog.archs_for(*info.capability)
        if not archs:
            raise IncompatibleArtifactError(
                f"Device {index} is a {info.name} (compute capability {'.'.join(map(str, info.capability))}); "
                f"kernels exist for {', '.join(catalog.ARCHS)}.",
                gpu=info.name,
                capability=info.capability,
            )
        found[archs[0]] = None
    return list(found)
