"""Arguments that several verbs take, and what they mean: models, archs, kernels, roots, sizes, ages."""

from __future__ import annotations

import argparse
import re
import textwrap
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from tileops import catalog, models
from tileops.cli._exit import UsageError
from tileops.config import KernelConfig

if TYPE_CHECKING:
    from tileops.store import Root

_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32"}


def presets_help() -> str:
    """The names that --model takes, wrapped."""
    names = textwrap.fill(", ".join(models.PRESETS), width=96, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)
    return f"models:\n{names}\nconfig.json: model_type {', '.join(models.FAMILIES)}; or state-spaces' own format"


def add_model(parser: argparse.ArgumentParser) -> None:
    """--model, --config, the explicit values, --dtype."""
    group = parser.add_argument_group("which model", "a preset, a config.json, or the values themselves")
    group.add_argument("--model", metavar="NAME", action="append", default=[], help="a preset (below); may be repeated")
    group.add_argument(
        "--config", metavar="FILE", action="append", default=[], help="a Hugging Face config.json, or its folder; may be repeated"
    )
    group.add_argument("--chunk-size", metavar="Q", type=int, help=f"chunk length: {catalog.describe(catalog.CHUNK_LENGTHS)}")
    group.add_argument("--head-dim", metavar="P", type=int, help=f"size of a head: {catalog.describe(catalog.HEAD_DIMS)}")
    group.add_argument("--d-state", metavar="N", type=int, help=f"size of the state: {catalog.describe(catalog.STATE_DIMS)}")
    group.add_argument("--dtype", type=dtype, metavar="DTYPE", help="bfloat16 or float16 (default: the model's own, else bfloat16)")
    parser.epilog = f"{presets_help()}\n\n{parser.epilog or ''}"


def models_of(args: argparse.Namespace) -> list[models.Model]:
    """The models that the arguments of ``add_model`` name; none where none was given. Raises UsageError."""
    found = []
    try:
        found += [models.preset(name) for name in args.model]
        found += [models.read_config(path) for path in args.config]
    except ValueError as error:
        raise UsageError(str(error)) from None
    except OSError as error:
        raise UsageError(f"--config: {error.filename} cannot be read: {error.strerror}.") from None
    values = {"--chunk-size": args.chunk_size, "--head-dim": args.head_dim, "--d-state": args.d_state}
    absent = [name for name, value in values.items() if value is None]
    if not absent:
        found.append(
            models.Model(
                f"Q={args.chunk_size} P={args.head_dim} N={args.d_state}",
                chunk_size=args.chunk_size,
                head_dim=args.head_dim,
                d_state=args.d_state,
            )
        )
    elif len(absent) < len(values):
        raise UsageError(f"Explicit values come together: {', '.join(absent)} missing.")
    return found


def model_words(args: argparse.Namespace) -> list[str]:
    """The words of the command line that name the models; none where none was named."""
    words = [word for name in args.model for word in ("--model", name)]
    words += [word for path in args.config for word in ("--config", path)]
    values = {"--chunk-size": args.chunk_size, "--head-dim": args.head_dim, "--d-state": args.d_state}
    words += [word for name, value in values.items() if value is not None for word in (name, str(value))]
    return [*words, "--dtype", args.dtype] if words and args.dtype is not None else words


def kernels_of(model: models.Model, archs: Iterable[str], dtype: str | None) -> list[KernelConfig]:
    """Every kernel of a model on these archs. Raises UsageError where the kernels do not support one of its values."""
    try:
        return model.kernels(archs, dtype)
    except ValueError as error:
        raise UsageError(str(error)) from None


def add_arch(parser: argparse.ArgumentParser, default: str) -> None:
    """--arch A,B."""
    parser.add_argument("--arch", metavar="A,B", type=archs, help=f"of {', '.join(catalog.ARCHS)}, or all (default: {default})")


def add_only(parser: argparse.ArgumentParser) -> None:
    """--only PATTERN."""
    parser.add_argument(
        "--only",
        metavar="PATTERN",
        action="append",
        default=[],
        help='only these kernels: words that must all match, a kernel\'s name or field=value ("chunk_* Q=256"); may be repeated',
    )


def add_jobs(parser: argparse.ArgumentParser) -> None:
    """--jobs, --timeout."""
    parser.add_argument("--jobs", metavar="N", type=positive, help="processes that compile (default: what cores and memory allow)")
    parser.add_argument("--timeout", metavar="SECONDS", type=positive, default=600, help="for one kernel (default: 600)")


def add_root(parser: argparse.ArgumentParser) -> None:
    """--root ROOT."""
    parser.add_argument("--root", metavar="ROOT", help="only roots of this kind (packaged, site, cache) or with this in the name")


def matching_roots(roots: Iterable[Root], wanted: str | None) -> list[Root]:
    """The roots on disk that --root chooses. Raises UsageError where none does."""
    known = [root for root in roots if root.kind != "memory"]
    found = [r for r in known if wanted is None or wanted == r.kind or wanted in r.name or wanted in r.path]
    if wanted is not None and not found:
        raise UsageError(f"--root {wanted}: no such root; there are {', '.join(r.name for r in known)}.")
    return found


def select(configs: Sequence[KernelConfig], patterns: Sequence[str]) -> list[KernelConfig]:
    """The configs that one of the patterns of --only chooses; all where there is none. Raises UsageError for one that chooses nothing."""
    chosen: set[str] = set()
    for pattern in patterns:
        hits = {config.key for config in configs if matches(config.kernel, config.arch, config.fields, pattern)}
        if not hits or not pattern.split():
            known = ", ".join(catalog.KERNELS)
            raise UsageError(f"--only {pattern!r} chooses no kernel; expected words like a kernel's name ({known}) or field=value.")
        chosen |= hits
    return [config for config in configs if not patterns or config.key in chosen]


def matches(kernel: str, arch: str, values: dict[str, Any], pattern: str) -> bool:
    """Whether every word of the pattern holds; names and values may have shell wildcards. A kernel without the field does not match."""
    known = {**values, "arch": arch}
    for word in pattern.split():
        name, is_value, wanted = word.partition("=")
        if not fnmatchcase(str(known.get(name)) if is_value else kernel, wanted if is_value else name) or (is_value and name not in known):
            return False
    return True


def archs(text: str) -> tuple[str, ...]:
    """``sm_90a,sm_80`` or ``all``."""
    if text == "all":
        return catalog.ARCHS
    parts = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    for part in parts:
        if part not in catalog.ARCHS:
            raise argparse.ArgumentTypeError(f"{part!r} is no arch of this package; expected some of {', '.join(catalog.ARCHS)}")
    return parts


def dtype(text: str) -> str:
    """A dtype of the kernels, by its name or a usual short one."""
    name = text.removeprefix("torch.").lower()
    name = _DTYPES.get(name, name)
    if name not in ("float32", *catalog.DTYPES):  # float32 is for explain's cumsum; models refuse it in their own words
        raise argparse.ArgumentTypeError(f"{text!r}; expected {' or '.join(catalog.DTYPES)}")
    return name


def positive(text: str) -> int:
    """A whole number from 1 on."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def size(text: str) -> int:
    """Bytes: ``500M``, ``2G``, ``1.5GiB``, ``0``. k, M, G are decimal, Ki, Mi, Gi binary."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?", text.strip().lower())
    if found is None or found[2] not in _UNITS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; expected something like 500M, 2G or 1.5GiB")
    return int(float(found[1]) * _UNITS[found[2]])


def age(text: str) -> float:
    """Seconds: ``30d``, ``12h``, ``90m``, ``2w``, ``45s``."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhdw])", text.strip().lower())
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not an age; expected something like 30d, 12h or 90m")
    return float(found[1]) * _SECONDS[found[2]]
