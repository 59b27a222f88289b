"""What served models need: presets by name, and a reader of Hugging Face config.json files. A leaf: stdlib only.

Only chunk_size, head_dim, d_state and the dtype decide which kernels a model needs; heads and groups are run-time sizes,
listed for people. Presets are read from the models' published config files; a value that was not confirmed from one is
named in ``unconfirmed`` (warm such a model from its own config.json).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tileops import catalog
from tileops.config import KernelConfig

__all__ = ["FAMILIES", "PRESETS", "Model", "preset", "read_config"]


@dataclass(frozen=True)
class Model:
    """The values of one model."""

    name: str
    head_dim: int  # P
    d_state: int  # N
    chunk_size: int  # Q
    dtype: str | None = "bfloat16"  # None: the config file names none
    n_heads: int | None = None  # H; run-time, informational
    n_groups: int | None = None  # G; run-time, informational
    unconfirmed: tuple[str, ...] = ()  # names of fields above that no config file confirmed

    def kernels(self, archs: Iterable[str], dtype: str | None = None) -> list[KernelConfig]:
        """Every kernel that the model needs on ``archs``, see ``tileops.catalog.for_model``.

        Args:
            archs: of ``tileops.catalog.ARCHS``.
            dtype: instead of the model's own: ``float16`` or ``bfloat16``.

        Raises:
            ValueError: no dtype is known, or a value is one that kernels do not support.
        """
        chosen = dtype or self.dtype
        if chosen not in catalog.DTYPES:
            known = f"its dtype is {chosen}" if chosen else "its config names no dtype"
            raise ValueError(f"{self.name}: {known}; kernels exist for {' and '.join(catalog.DTYPES)}: say which one (--dtype).")
        return catalog.for_model(chunk_size=self.chunk_size, head_dim=self.head_dim, d_state=self.d_state, dtype=chosen, archs=archs)


def _table(*rows: tuple[Any, ...]) -> dict[str, Model]:
    return {
        name: Model(name, head_dim=p, d_state=n, chunk_size=q, n_heads=h, n_groups=g, unconfirmed=tuple(unconfirmed))
        for name, h, p, n, g, q, *unconfirmed in rows
    }


#: name -> model. Columns: H, P, N, G, Q, then the names of unconfirmed fields.
PRESETS: dict[str, Model] = _table(
    ("mamba2-130m", 24, 64, 128, 1, 256),
    ("mamba2-370m", 32, 64, 128, 1, 256),
    ("mamba2-780m", 48, 64, 128, 1, 256),
    ("mamba2-1.3b", 64, 64, 128, 1, 256),
    ("mamba2-2.7b", 80, 64, 128, 1, 256),
    ("codestral-mamba-7b", 128, 64, 128, 8, 256),
    ("nemotron-h-4b", 112, 64, 128, 8, 128),
    ("nemotron-h-8b", 128, 64, 128, 8, 128),
    ("nemotron-h-47b", 256, 64, 256, 8, 128, "chunk_size"),
    ("nemotron-h-56b", 256, 64, 256, 8, 128, "chunk_size"),
    ("nemotron-nano-v2-9b", 128, 80, 128, 8, 128, "chunk_size"),
    ("nemotron-nano-v2-12b", 128, 80, 128, 8, 128, "chunk_size"),
    ("nemotron-3-nano-4b", 96, 80, 128, 8, 256),
    ("nemotron-3-nano-30b-a3b", 64, 64, 128, 8, 128),
    ("nemotron-3-super-120b", 128, 64, 128, 8, 128),
    ("falcon-h1-0.5b", 24, 64, 128, 1, 128, "chunk_size"),
    ("falcon-h1-1.5b", 48, 64, 256, 1, 256, "chunk_size"),
    ("falcon-h1-3b", 32, 128, 256, 1, 256, "chunk_size"),
    ("falcon-h1-7b", 24, 128, 256, 1, 256, "chunk_size"),
    ("falcon-h1-34b", 32, 128, 256, 2, 256, "chunk_size"),
    ("granite-4.0-h-350m", 48, 32, 128, 1, 256, "chunk_size"),
    ("granite-4.0-h-1b", 48, 64, 128, 1, 256),
    ("granite-4.0-h-tiny", 48, 64, 128, 1, 256),
    ("granite-4.0-h-small", 128, 64, 128, 1, 256),
    ("bamba-9b", 128, 64, 128, 1, 256),
    ("zamba2-7b", 112, 64, 64, 2, 256),
    ("plamo-2-8b", 64, 128, 64, 1, 256),
)


def preset(name: str) -> Model:
    """The preset called ``name``, in any case. Raises ValueError listing the names."""
    found = PRESETS.get(name.lower())
    if found is None:
        raise ValueError(f"There is no preset {name!r}; presets: {', '.join(PRESETS)}. Any other model: give its config.json.")
    return found


@dataclass(frozen=True)
class _Family:
    """The names that one architecture's config.json gives to the values. ``inner``: the width that heads divide, where
    head_dim may be absent or "auto"."""

    n_heads: str
    head_dim: str
    d_state: str
    n_groups: str | None
    chunk_size: str
    inner: str | None = None
    expand: str | None = None


_BAMBA = _Family("mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_n_groups", "mamba_chunk_size", None, "mamba_expand")

#: model_type -> names of its values (transformers' configuration classes; plamo2's own repository). Granite's and Bamba's classes
#: derive an "auto" head_dim from expand * hidden_size, Falcon-H1's from mamba_d_ssm; everywhere else ``expand`` may be inert.
FAMILIES: dict[str, _Family] = {
    "mamba2": _Family("num_heads", "head_dim", "state_size", "n_groups", "chunk_size"),
    "nemotron_h": _Family("mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups", "chunk_size"),
    "falcon_h1": _Family(
        "mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_n_groups", "mamba_chunk_size", "mamba_d_ssm", "mamba_expand"
    ),
    "granitemoehybrid": _BAMBA,
    "bamba": _BAMBA,
    "zamba2": _Family("n_mamba_heads", "mamba_headdim", "mamba_d_state", "mamba_ngroups", "chunk_size", None, "mamba_expand"),
    "plamo2": _Family("mamba_num_heads", "hidden_size_per_head", "mamba_d_state", None, "mamba_chunk_size"),
}


def read_config(path: str | os.PathLike[str]) -> Model:
    """The model of a Hugging Face config.json (the file, or the folder it lies in), or of state-spaces' original format.

    Multimodal files are read from their ``text_config``. Keys that the kernels depend on are never guessed.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not JSON, not a Mamba-2 model of FAMILIES, or a key is missing or not a positive integer.
    """
    path = os.fspath(path)
    if os.path.isdir(path):
        path = os.path.join(path, "config.json")
    with open(path, encoding="utf-8") as file:
        try:
            data = json.load(file)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} is not JSON: {error}.") from None
    return _from_dict(data, path)


def _from_dict(data: Any, where: str) -> Model:
    if not isinstance(data, Mapping):
        raise ValueError(f"{where}: expected a JSON object, got {type(data).__name__}.")
    if _family(data) is None and isinstance(data.get("text_config"), Mapping):
        outer, data = data, data["text_config"]
        dtype = _dtype(data) or _dtype(outer)
    else:
        dtype = _dtype(data)
    if "ssm_cfg" in data and "model_type" not in data:
        return _original(data, where, dtype)
    family = _family(data)
    if family is None:
        raise ValueError(
            f"{where}: model_type is {data.get('model_type')!r}; known: {', '.join(FAMILIES)}. "
            "Any other model: give the values themselves (--chunk-size --head-dim --d-state)."
        )
    heads = _integer(data, family.n_heads, where)
    groups = 1 if family.n_groups is None else _integer(data, family.n_groups, where)
    return Model(
        name=_name(data, where),
        head_dim=_head_dim(data, family, heads, where),
        d_state=_integer(data, family.d_state, where),
        chunk_size=_integer(data, family.chunk_size, where),
        dtype=dtype,
        n_heads=heads,
        n_groups=groups,
    )


def _family(data: Mapping[str, Any]) -> _Family | None:
    kind = data.get("model_type")
    return FAMILIES.get(kind) if isinstance(kind, str) else None


def _original(data: Mapping[str, Any], where: str, dtype: str | None) -> Model:
    """state-spaces' format: ``d_model`` and the keywords of their Mamba2 class in ``ssm_cfg``, with that class's defaults."""
    given = data["ssm_cfg"] if isinstance(data["ssm_cfg"], Mapping) else {}
    if given.get("layer") != "Mamba2":
        raise ValueError(f"{where}: ssm_cfg.layer is {given.get('layer')!r}; only Mamba2 layers have SSD kernels.")
    values = {"headdim": 64, "d_state": 128, "ngroups": 1, "expand": 2, "chunk_size": 256, **given}
    head_dim = _integer(values, "headdim", where)
    if values.get("d_ssm") is not None:
        inner = _integer(values, "d_ssm", where)
    else:
        inner = _integer(values, "expand", where) * _integer(data, "d_model", where)
    return Model(
        name=_name(data, where),
        head_dim=head_dim,
        d_state=_integer(values, "d_state", where),
        chunk_size=_integer(values, "chunk_size", where),
        dtype=dtype,
        n_heads=inner // head_dim,
        n_groups=_integer(values, "ngroups", where),
    )


def _head_dim(data: Mapping[str, Any], family: _Family, heads: int, where: str) -> int:
    given = data.get(family.head_dim)
    if given not in (None, "auto") or (family.inner is None and family.expand is None):
        return _integer(data, family.head_dim, where)
    if family.inner is not None and data.get(family.inner) is not None:
        inner, how = _integer(data, family.inner, where), family.inner
    else:
        inner = _integer(data, str(family.expand), where) * _integer(data, "hidden_size", where)
        how = f"{family.expand} * hidden_size"
    if inner % heads:
        raise ValueError(f"{where}: {family.head_dim} is {given!r} and {how} = {inner} is not a multiple of {family.n_heads} = {heads}.")
    return inner // heads


def _integer(data: Mapping[str, Any], key: str, where: str) -> int:
    value = data.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{where}: {key} is {'missing' if key not in data else repr(value)}; expected a positive integer.")
    return value


def _dtype(data: Mapping[str, Any]) -> str | None:
    value = data.get("dtype") or data.get("torch_dtype")
    return value.removeprefix("torch.") if isinstance(value, str) and value != "auto" else None


def _name(data: Mapping[str, Any], where: str) -> str:
    named = data.get("_name_or_path")
    if isinstance(named, str) and named:
        return named
    folder, file = os.path.split(os.path.abspath(where))
    return os.path.basename(folder) if file == "config.json" and folder != os.sep else file
