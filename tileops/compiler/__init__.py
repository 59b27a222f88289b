"""The one compiler: a KernelConfig becomes an Artifact. The build step and the JIT both use it.

``build``      config -> cubin + record; needs TileLang, NVRTC and nvJitLink, no GPU
``jit``        the same for use where no package has the kernel: one that spills registers is let through
``toolchain``  what would compile, or why nothing can

Importing this package costs nothing; TileLang is imported by the first build.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

from tileops.catalog import MAX_SMEM
from tileops.compiler import flags, toolchain
from tileops.config import SCHEMA, VERSION, Artifact, KernelConfig, Record
from tileops.errors import CompileError

__all__ = ["build", "jit", "toolchain", "toolchain_name"]

#: Lowest CUDA driver API version for cubins of each compiler major and arch (CUDA compatibility guide: minor-version
#: compatibility; archs that CUDA 12.0 did not know need the driver that introduced them).
_NEW_ARCHS = {"sm_100a": 12080, "sm_120a": 12080}


def toolchain_name() -> str | None:
    """The name that records of this machine's compiler carry, or None where no compiler is installed."""
    found, _ = toolchain.find()
    return found.name if found else None


def jit(config: KernelConfig) -> Artifact:
    """As ``build``, but a kernel that spills registers is no error: for sizes that nobody tuned, slow is better than none."""
    return build(config, spills=True)


def build(config: KernelConfig, program: KernelConfig | None = None, *, spills: bool = False) -> Artifact:
    """Compiles one kernel.

    Args:
        config: the kernel.
        program: instead, the program that another arch's config has, still compiled for ``config.arch``: a GPU at hand can then
            run what other archs get (``python -m build_kernels --program-of``).
        spills: whether a kernel that keeps registers in local memory is let through.

    Raises:
        CompileError: no compiler is installed, TileLang or the CUDA compiler refused, or the kernel needs more shared
            memory than its arch has or spills registers. The source and log are kept in a folder that the message names.
    """
    found, reason = toolchain.find()
    if found is None:
        raise CompileError(f"Cannot compile {config}: {reason}.", kernel=config.kernel, arch=config.arch, log=reason, folder=None)
    from tileops.compiler import nvrtc
    from tileops.compiler.lower import lower

    source = ""
    try:
        lowered = lower(program or config)
        source = lowered.source
        assembled = nvrtc.compile_cubin(source, config.arch, lowered.symbol, found, _ptx_arch(program or config, config.arch))
    except Exception as error:
        raise _failure(config, source, error) from error
    smem = lowered.dynamic_smem + assembled.static_smem
    if smem > MAX_SMEM[config.arch]:
        raise _failure(config, source, ValueError(f"needs {smem} bytes of shared memory, {config.arch} has {MAX_SMEM[config.arch]}"))
    if assembled.spills and not spills:
        raise _failure(config, source, ValueError(f"keeps {assembled.spills} bytes a thread in local memory (spilled registers)"))
    record = Record(
        schema=SCHEMA,
        key=config.key,
        kernel=config.kernel,
        arch=config.arch,
        config=config.fields,
        source=config.source,
        cubin_sha256=hashlib.sha256(assembled.cubin).hexdigest(),
        cubin_size=len(assembled.cubin),
        symbol=lowered.symbol,
        params=lowered.params,
        grid=lowered.grid,
        block=lowered.block,
        dynamic_smem=lowered.dynamic_smem,
        static_smem=assembled.static_smem,
        registers=assembled.registers,
        spills=assembled.spills,
        alignment=lowered.alignment,
        min_driver=max(found.major * 1000, _NEW_ARCHS.get(config.arch, 0)),
        provenance={
            "compiler": found.name,
            "flags": [*flags.NVRTC_FLAGS, *flags.LINK_FLAGS],
            "passes": {k: flags.PASS_CONFIGS[k] for k in sorted(flags.PASS_CONFIGS)},
            **({"program": program.arch} if program else {}),
            "tileops": VERSION,
        },
        tensormaps=lowered.tensormaps,
        optional=lowered.optional,
        schedule=dict(config.schedule),
    )
    return Artifact(record, assembled.cubin)


def _ptx_arch(program: KernelConfig, arch: str) -> str:
    """PTX for the program's own arch, where that came before ``arch``; else for the one that ``arch`` shares with later ones."""
    return program.arch if program.arch == arch or _number(program.arch) < _number(arch) else arch.rstrip("a")


def _number(arch: str) -> int:
    return int(arch.removeprefix("sm_").rstrip("a"))


def _failure(config: KernelConfig, source: str, error: Exception) -> CompileError:
    """Keeps source and log for whoever looks into it; a disk that cannot hold them does not hide the error."""
    log = str(getattr(error, "log", None) or f"{type(error).__name__}: {error}")
    folder: str | None = None
    try:
        folder = tempfile.mkdtemp(prefix=f"tileops-{config.kernel}-{os.getpid()}-")
        Path(folder, "kernel.cu").write_text(source)
        Path(folder, "log.txt").write_text(f"{config}\n\n{log}\n")
    except OSError:
        pass
    first = next((line for line in log.splitlines() if "error" in line.lower()), log.splitlines()[0] if log else "")
    kept = f" Source and log: {folder}." if folder else ""
    return CompileError(
        f"{config} did not compile: {first.strip()[:300]}.{kept}", kernel=config.kernel, arch=config.arch, log=log, folder=folder
    )
