"""The matrix file: read, checked as a whole before anything is compiled, and expanded into KernelConfigs.

Wrong data is a MatrixError that names the file, the block and the key.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path
from typing import Any

from tileops import catalog, models
from tileops.config import KernelConfig

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

#: The matrix that a distribution is built from.
DEFAULT = Path(__file__).with_name("matrix.toml")


class MatrixError(ValueError):
    """The matrix, or what narrows it down, cannot be built as it is written."""


def load(path: Path = DEFAULT, archs: Sequence[str] | None = None, names: Sequence[str] = ()) -> list[KernelConfig]:
    """Every kernel of a matrix file, once each, in the file's order.

    Args:
        path: TOML, see matrix.toml.
        archs: instead of the file's archs, all of them.
        names: model presets; if any are given, they stand in place of the file's blocks.

    Raises:
        MatrixError: as the module says.
        OSError: the file cannot be read.
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise MatrixError(f"{path} is not TOML: {error}.") from None
    _known(data, {"archs", "block"}, str(path))
    default_archs = archs if archs is not None else data.get("archs", list(catalog.ARCHS))
    blocks = [{"models": list(names)}] if names else data.get("block")
    if not isinstance(blocks, list) or not blocks:
        raise MatrixError(f"{path}: expected at least one [[block]].")
    found: dict[str, KernelConfig] = {}
    for number, block in enumerate(blocks, 1):
        where = "--model" if names else f"{path}, block {number}"
        if not isinstance(block, Mapping):
            raise MatrixError(f"{where}: expected a table.")
        own_archs = default_archs if archs is not None else block.get("archs", default_archs)
        try:
            for config in _expand(block, _archs(own_archs, where), where):
                found.setdefault(config.key, config)
        except MatrixError:
            raise
        except ValueError as error:
            raise MatrixError(f"{where}: {error}") from None
    return list(found.values())


def select(configs: Iterable[KernelConfig], patterns: Sequence[str]) -> list[KernelConfig]:
    """The configs that match one of the patterns; all of them where there is none.

    A pattern is words, all of which must hold: ``name`` is a kernel's name, ``field=value`` one of its compile-time values;
    both may have shell wildcards (``"chunk_* Q=256 aligned=True"``). A kernel without the field does not match.

    Raises:
        MatrixError: a pattern selects nothing.
    """
    known = list(configs)
    if not patterns:
        return known
    chosen: set[str] = set()
    for pattern in patterns:
        hits = {config.key for config in known if _matches(config, pattern.split())}
        if not hits or not pattern.split():
            kernels = ", ".join(catalog.KERNELS)
            raise MatrixError(
                f"--only {pattern!r} selects no kernel of the matrix; expected words like a kernel's name ({kernels}) or field=value."
            )
        chosen |= hits
    return [config for config in known if config.key in chosen]


def _matches(config: KernelConfig, words: Sequence[str]) -> bool:
    values = {**config.fields, "arch": config.arch}
    for word in words:
        field, is_value, wanted = word.partition("=")
        if not is_value:
            if not fnmatchcase(config.kernel, word):
                return False
        elif field not in values or not fnmatchcase(str(values[field]), wanted):
            return False
    return True


def _expand(block: Mapping[str, Any], archs: Sequence[str], where: str) -> Iterable[KernelConfig]:
    if "models" in block:
        _known(block, {"models", "dtype", "archs"}, where)
        for name in _list(block, "models", where):
            model = models.preset(str(name))
            for dtype in _list(block, "dtype", where) if "dtype" in block else (None,):
                yield from model.kernels(archs, dtype)
    elif "kernel" in block:
        kernel = block["kernel"]
        if kernel not in catalog.KERNELS:
            raise MatrixError(f"{where}: kernel is {kernel!r}; expected one of {', '.join(catalog.KERNELS)}.")
        fields = catalog.KERNELS[kernel]
        _known(block, {"kernel", "archs", *fields}, where)
        given = {name: _list(block, name, where) for name in fields if name in block}
        own = [arch for arch in archs if catalog.exists(kernel, arch)]
        if not own:
            raise MatrixError(f"{where}: kernel {kernel} exists for {', '.join(catalog.ONLY_ON[kernel])} only.")
        for arch in own:
            for values in product(*given.values()):
                for full in catalog.expand(kernel, dict(zip(given, values))):
                    yield catalog.config(kernel, arch, **full)
    else:
        _known(block, {"chunk_size", "head_dim_and_d_state", "dtype", "archs"}, where)
        for pair in _list(block, "head_dim_and_d_state", where):
            if not isinstance(pair, list) or len(pair) != 2:
                raise MatrixError(f"{where}: head_dim_and_d_state holds {pair!r}; expected pairs like [64, 128].")
            for chunk_size, dtype in product(_list(block, "chunk_size", where), _list(block, "dtype", where)):
                yield from catalog.for_model(chunk_size=chunk_size, head_dim=pair[0], d_state=pair[1], dtype=dtype, archs=archs)


def _known(table: Mapping[str, Any], allowed: set[str], where: str) -> None:
    unknown = set(table) - allowed
    if unknown:
        raise MatrixError(f"{where}: {', '.join(sorted(unknown))} not understood; expected some of {', '.join(sorted(allowed))}.")


def _list(table: Mapping[str, Any], key: str, where: str) -> list[Any]:
    value = table.get(key)
    if not isinstance(value, list) or not value:
        raise MatrixError(f"{where}: {key} is {'missing' if key not in table else repr(value)}; expected a list with something in it.")
    return value


def _archs(value: Any, where: str) -> list[str]:
    if not isinstance(value, (list, tuple)) or not value or not all(arch in catalog.ARCHS for arch in value):
        raise MatrixError(f"{where}: archs are {value!r}; expected some of {', '.join(catalog.ARCHS)}.")
    return list(value)
