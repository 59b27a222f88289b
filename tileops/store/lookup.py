"""Finding an artifact, and telling root by root why it was found or not.

Exception contract: ``find`` answers a miss with a Lookup whose artifact is None, whatever lies on the disks; it raises
SettingError for a policy that is none. ``missing_error`` makes the error; the caller raises it.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

from tileops import catalog
from tileops.config import Artifact, KernelConfig, Record, Value, source_digest
from tileops.errors import MissingKernelError
from tileops.store import discovery, locks, notes, places, policies, publishing
from tileops.store.roots import Miss

#: The installed compiler's name, None where there is none, or a function that finds out (called when the user cache is reached).
Toolchain: TypeAlias = "str | Callable[[], str | None] | None"


class Step(NamedTuple):
    """What one root said: ``hit`` or ``miss``, and why."""

    root: str
    outcome: str
    reason: str


@dataclass(frozen=True)
class Lookup:
    """A look-up and its whole trace. ``artifact`` is verified, or None; ``root`` and ``kind`` tell which root served it."""

    config: KernelConfig
    policy: str
    artifact: Artifact | None
    root: str | None
    kind: str | None
    trace: tuple[Step, ...]

    @cached_property
    def nearest(self) -> Record | None:
        """The record of the same kernel with the fewest differing fields, over all roots; reads indexes only."""
        found = [record for root in discovery.roots() for record in root.matching(self.config.kernel, None, {})]
        return min(found, key=lambda r: (len(differing(self.config, r)), r.arch != self.config.arch, r.arch, r.key), default=None)

    @property
    def differs(self) -> dict[str, tuple[Any, Any]]:
        """field -> (asked for, nearest has); ``arch`` and ``source`` count as fields. Empty where nothing is near."""
        return differing(self.config, self.nearest) if self.nearest is not None else {}


def find(config: KernelConfig, policy: str | None = None, toolchain: Toolchain = None) -> Lookup:
    """Looks ``config`` up in every root that the policy allows, and stops at the first that has it.

    Args:
        policy: ``auto``, ``cached`` or ``packaged``; None: what ``policy(...)`` and TILEOPS_POLICY say.
        toolchain: name of the installed compiler (or a function that gives it): entries of the user cache made by another
            one are then a miss. None: entries of any compiler are used.

    Raises:
        SettingError: the policy is none of these.
    """
    allowed = policies.current(policy)
    trace = []
    for root in discovery.iterate(allowed):
        try:
            artifact = root.get(config, _name(toolchain) if root.kind == "cache" else None)
        except Miss as miss:
            trace.append(Step(root.name, "miss", str(miss)))
            continue
        trace.append(Step(root.name, "hit", f"{artifact.record.cubin_size} bytes, verified"))
        notes.count(f"hits_{root.kind}")
        return Lookup(config, allowed, artifact, root.name, root.kind, tuple(trace))
    if allowed == "packaged":
        trace.append(Step("user cache", "miss", "not asked: the policy is packaged"))
    elif places.location().path is None:
        trace.append(Step("user cache", "miss", places.location().reason or "there is no cache folder"))
    notes.count("misses")
    return Lookup(config, allowed, None, None, None, tuple(trace))


def _name(toolchain: Toolchain) -> str | None:
    return toolchain() if callable(toolchain) else toolchain


def find_or_build(
    config: KernelConfig,
    build: Callable[[KernelConfig], Artifact],
    policy: str | None = None,
    toolchain: Toolchain = None,
    wait: float = locks.WAIT_SECONDS,
) -> Lookup:
    """``find``; on a miss under policy ``auto``, compiles with ``build``, publishes, and answers with the bytes in memory.

    Processes that miss at once wait for the one that compiles, ``wait`` seconds at most, and then find its entry.

    Raises:
        MissingKernelError: a miss, and the policy forbids compiling.
        Whatever ``build`` raises.
    """
    lookup = find(config, policy, toolchain)
    if lookup.artifact is not None:
        return lookup
    if lookup.policy != "auto":
        raise missing_error(lookup)
    with locks.compile_lock(config.key, wait):
        # Looked up again: whoever held the lock may have published what we are about to compile.
        again = find(config, policy, toolchain)
        if again.artifact is not None:
            return again
        start = time.perf_counter()
        artifact = build(config)
        seconds = time.perf_counter() - start
        published = publishing.publish(artifact)
    notes.count("compiles")
    notes.count("compile_ms", round(seconds * 1000))
    notes.logger.info("compiled %s in %.2f s (%s)", config, seconds, published.path or published.reason)
    step = Step("compiler", "hit", f"compiled in {seconds:.2f} s; {published.reason}")
    return Lookup(config, lookup.policy, artifact, "compiler", "jit", (*again.trace, step))


def matching(kernel: str, arch: str | None = None, *, policy: str | None = None, current: bool = True, **fields: Value) -> list[Record]:
    """Records of ``kernel`` whose config has these values (and this arch), from the indexes of the roots alone.

    ``current``: only those made from this package's kernel sources, which are those that ``find`` can return. The first
    root that has a key wins. Sorted by arch and key.
    """
    found: dict[str, Record] = {}
    for root in discovery.iterate(policies.current(policy)):
        for record in root.matching(kernel, arch, fields):
            found.setdefault(record.key, record)
    if current:
        source = current_source(kernel)
        found = {key: record for key, record in found.items() if record.source == source}
    return sorted(found.values(), key=lambda record: (record.arch, record.key))


def current_source(kernel: str) -> str | None:
    """Digest of this package's source of ``kernel``; None for a kernel that it does not have (any more)."""
    try:
        return source_digest(kernel) if kernel in catalog.KERNELS else None
    except OSError:
        return None


def differing(config: KernelConfig, record: Record) -> dict[str, tuple[Any, Any]]:
    """field -> (config's, record's) for every field of the key that differs."""
    wanted: dict[str, Any] = {"arch": config.arch, **config.fields, "source": config.source}
    has: dict[str, Any] = {"arch": record.arch, **record.config, "source": record.source}
    names = [*wanted, *(name for name in has if name not in wanted)]
    return {name: (wanted.get(name), has.get(name)) for name in names if wanted.get(name) != has.get(name)}


def missing_error(lookup: Lookup) -> MissingKernelError:
    """The error for a look-up that found nothing: the nearest artifact, every root looked into, the command that fixes it."""
    config, nearest, differs = lookup.config, lookup.nearest, lookup.differs
    command = fix_command(config)
    if nearest is None:
        near = f"No root holds any {config.kernel} kernel"
    elif not differs:
        near = "The artifact is there but cannot be used"
    else:
        near = f"The nearest artifact differs in {', '.join(_difference(*item) for item in differs.items())}"
    looked = "; ".join(f"{step.root}: {step.reason}" for step in lookup.trace)
    return MissingKernelError(
        f"No artifact for {config}, and {_forbidden(lookup.policy)}. {near}. Looked into: {looked}. Run: {command}",
        config=config.as_dict(),
        key=config.key,
        nearest=nearest.key if nearest is not None else None,
        differs=differs,
        roots=[tuple(step) for step in lookup.trace],
        command=command,
    )


def _forbidden(policy: str) -> str:
    return {
        "packaged": "the policy 'packaged' forbids compiling it and the user cache (what `tileops warm` fills is found under 'cached')",
        "cached": "the policy 'cached' forbids compiling it",
    }.get(policy, "no compiler is installed that could make it (pip install 'tileops[jit]')")


def _difference(name: str, values: tuple[Any, Any]) -> str:
    wanted, has = values
    return "kernel source (another version of this package)" if name == "source" else f"{name} ({has}, not {wanted})"


def fix_command(config: KernelConfig) -> str:
    """The command that puts ``config`` into the user cache."""
    values = {"Q": 256, "P": 64, "N": 128, "dtype": "bfloat16", **config.fields}
    options = {
        "--chunk-size": values["Q"],
        "--head-dim": values["P"],
        "--d-state": values["N"],
        "--dtype": values["dtype"],
        "--arch": config.arch,
    }
    try:
        covered = catalog.for_model(
            chunk_size=int(values["Q"]),
            head_dim=int(values["P"]),
            d_state=int(values["N"]),
            dtype=str(values["dtype"]),
            archs=[config.arch],
        )
    except ValueError:
        covered = []
    except OSError:
        covered = [config]  # a half-broken install without kernel sources: this error must still be one that helps
    if not any((made.kernel, made.values) == (config.kernel, config.values) for made in covered):
        # No model asks for it (an add-on's kernel, say): only the build step can name it.
        return f"python -m build_kernels --arch {config.arch} --only {shlex.quote(config.kernel)}"
    return "tileops warm " + " ".join(f"{name} {shlex.quote(str(value))}" for name, value in options.items())


def trace_lines(lookup: Lookup) -> Iterator[str]:
    """The trace for people, a line a root."""
    for step in lookup.trace:
        yield f"{step.outcome:4}  {step.root}: {step.reason}"
