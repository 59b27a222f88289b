"""Which kernels exist, what each is compiled with, and which ones a model needs. A leaf: stdlib only.

The build step, ``tileops warm``, look-up at construction and the planner of a call all make their KernelConfigs here,
so that what is built and what is asked for cannot drift apart.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from itertools import product

from tileops import schedules
from tileops.config import KernelConfig, Value

#: GPU architectures that artifacts are built for. An ``a`` arch runs on exactly its own compute capability.
ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a")

#: Shared memory that one CTA may use, bytes (CUDA programming guide, technical specifications per compute capability).
MAX_SMEM = {
    "sm_80": 166912,
    "sm_86": 101376,
    "sm_89": 101376,
    "sm_90": 232448,
    "sm_90a": 232448,
    "sm_100a": 232448,
    "sm_120a": 101376,
}


@functools.cache
def archs_for(major: int, minor: int) -> tuple[str, ...]:
    """Archs whose cubins run on compute capability major.minor, best first; empty where none does.

    Within one major, a cubin runs on its own and later minors (CUDA C++ programming guide, binary compatibility);
    an ``a`` arch runs on exactly its own capability.
    """
    found = []
    for arch in ARCHS:
        digits = arch.removeprefix("sm_").rstrip("a")
        of_major, of_minor = int(digits[:-1]), int(digits[-1])
        if of_major == major and (of_minor == minor or (of_minor < minor and not arch.endswith("a"))):
            found.append((of_minor, arch))
    return tuple(arch for _, arch in sorted(found, reverse=True))


CHUNK_LENGTHS = (16, 32, 64, 128, 256)
HEAD_DIMS = tuple(range(16, 257, 16))
STATE_DIMS = tuple(range(16, 257, 16))
DTYPES = ("float16", "bfloat16")
BOOLS = (False, True)

#: Kernels that, on archs from sm_90 on, wait themselves for what is before them in the stream, so that they may be launched while that
#: still runs ("programmatic dependent launch"). Launched the plain way they do the same.
OVERLAPPING = frozenset({"chunk_cumsum", "recurrent", "fused_main", "fused_clear"})


def overlaps(kernel: str, arch: str) -> bool:
    """Whether ``kernel``, compiled for ``arch``, is one of OVERLAPPING."""
    return kernel in OVERLAPPING and arch not in ("sm_80", "sm_86", "sm_89")


#: kernel -> compile-time field -> values it may take. Order of kernels is the order of the stages.
KERNELS: dict[str, dict[str, tuple[Value, ...]]] = {
    "chunk_cumsum": {"Q": CHUNK_LENGTHS, "out_dtype": ("float32", *DTYPES)},
    "chunk_coupling": {"Q": CHUNK_LENGTHS, "N": STATE_DIMS, "dtype": DTYPES, "aligned": BOOLS, "cb_float32": BOOLS},
    "chunk_state": {
        "Q": CHUNK_LENGTHS,
        "P": HEAD_DIMS,
        "N": STATE_DIMS,
        "dtype": DTYPES,
        "dt_dtype": ("float32", *DTYPES),
        "aligned": BOOLS,
    },
    "state_passing": {"aligned": BOOLS},
    "chunk_scan": {
        "Q": CHUNK_LENGTHS,
        "P": HEAD_DIMS,
        "N": STATE_DIMS,
        "dtype": DTYPES,
        "dt_dtype": ("float32", *DTYPES),
        "aligned": BOOLS,
        "cb_float32": BOOLS,
    },
    "pack_starts": {},
    "pack_map": {},
    "pack_rows": {"aligned": BOOLS},
    "pack_tails": {},
    "pack_rest": {},
    "seq_runs": {"Q": CHUNK_LENGTHS},
    "seq_mask": {"Q": CHUNK_LENGTHS},
    "seq_passing": {"packed": BOOLS},
    "gate": {"dtype": DTYPES, "half": BOOLS, "aligned": BOOLS},
    "fused_clear": {},
    "fused_main": {"P": HEAD_DIMS, "N": STATE_DIMS, "dtype": DTYPES, "y_float32": BOOLS},
    "recurrent": {"P": HEAD_DIMS, "N": STATE_DIMS, "dtype": DTYPES, "state_dtype": ("float32", *DTYPES), "tied": BOOLS},
}

#: Kernels that exist for some archs only; every other one exists for all of ARCHS.
ONLY_ON = dict.fromkeys(("fused_clear", "fused_main", "pack_rest"), ("sm_90a",))


def exists(kernel: str, arch: str) -> bool:
    """Whether this package has ``kernel`` for ``arch``."""
    return kernel not in ONLY_ON or arch in ONLY_ON[kernel]


def config(kernel: str, arch: str, **values: Value) -> KernelConfig:
    """The config of ``kernel`` with these values. Raises ValueError where a field is missing, unknown or unsupported, and for
    an arch that the kernel does not exist for."""
    fields = KERNELS.get(kernel)
    if fields is None:
        raise ValueError(f"kernel {kernel!r} does not exist; expected one of {', '.join(KERNELS)}.")
    if not exists(kernel, arch):
        raise ValueError(f"kernel {kernel} exists for {', '.join(ONLY_ON[kernel])} only, not for {arch}.")
    if set(values) != set(fields):
        raise ValueError(f"kernel {kernel} takes {sorted(fields)}; got {sorted(values)}.")
    for name, value in values.items():
        if not any(value == allowed and type(value) is type(allowed) for allowed in fields[name]):
            raise ValueError(f"kernel {kernel} does not support {name}={value!r}; supported: {describe(fields[name])}.")
    return KernelConfig.make(kernel, arch, values, schedule=schedules.chosen(kernel, arch, values))


def describe(values: Iterable[Value]) -> str:
    """A set of values in words: ``16, 32 ... 256`` for long ranges."""
    listed = [str(v) for v in values]
    return f"{listed[0]}, {listed[1]} ... {listed[-1]}" if len(listed) > 8 else ", ".join(listed)


def for_model(*, chunk_size: int, head_dim: int, d_state: int, dtype: str, archs: Iterable[str]) -> list[KernelConfig]:
    """Every kernel that the seven ops can ask for when they run a model of these values, once each, sorted by stage.

    Unaligned variants, dt in x's dtype and decode states of every dtype are included: a user's layout is not known before serving.
    """
    known: dict[str, Value] = {"Q": chunk_size, "P": head_dim, "N": d_state, "dtype": dtype}
    found: dict[str, KernelConfig] = {}
    for arch in archs:
        for kernel, fields in KERNELS.items():
            if not exists(kernel, arch):
                continue
            for values in expand(kernel, {name: value for name, value in known.items() if name in fields}):
                made = config(kernel, arch, **values)
                found[made.key] = made
    return list(found.values())


def expand(kernel: str, partial: Mapping[str, Value]) -> list[dict[str, Value]]:
    """Every combination of the fields of ``kernel`` that agrees with ``partial``; dt is float32 or in x's dtype.

    cb is float32 inside of the full forward only, where dt is too: one without the other only where ``partial`` names both.
    """
    choices = {name: (partial[name],) if name in partial else allowed for name, allowed in KERNELS[kernel].items()}
    if "dt_dtype" in choices and "dtype" in partial and "dt_dtype" not in partial:
        choices["dt_dtype"] = ("float32", partial["dtype"])
    every = _combinations(choices)
    if {"cb_float32", "dt_dtype"} <= set(partial):
        return list(every)
    return [values for values in every if not values.get("cb_float32") or values.get("dt_dtype", "float32") == "float32"]


def _combinations(choices: dict[str, tuple[Value, ...]]) -> Iterator[dict[str, Value]]:
    for combination in product(*choices.values()):
        yield dict(zip(choices, combination))
