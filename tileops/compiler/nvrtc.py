"""CUDA source -> cubin: NVRTC to PTX, unused globals pruned, nvJitLink to SASS. ctypes, so that any major can be loaded.

Why two steps: NVRTC needs ``-default-device`` for TileLang's headers, and that flag turns some 700 constexpr members of
CUTLASS and CCCL into device variables. In the cubin they are 70 to 100 KB of symbols and relocations; in PTX, a documented
text format, each is one line that names something nothing else names. If a line that was needed were ever cut, the
assembler would refuse the text.
"""

from __future__ import annotations

import ctypes
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from tileops.compiler import flags
from tileops.compiler.toolchain import Toolchain

_PTX_INPUT = 2  # NVJITLINK_INPUT_PTX
_GLOBAL = re.compile(r"^\s*(?:\.visible |\.weak )?\.(?:global|const) [^;]*?([\w$]+)(?:\[\d*\])?(?: = [^;]*)?;$")
_WORD = re.compile(r"[\w$]+")


class CompilerLog(Exception):
    """A compiler refused its input; ``log`` is what it said."""

    def __init__(self, step: str, log: str) -> None:
        super().__init__(f"{step}: {log.strip()[:2000]}")
        self.step = step
        self.log = log


@dataclass(frozen=True)
class Assembled:
    """A cubin and what the assembler reported of its one kernel."""

    cubin: bytes
    registers: int
    static_smem: int
    spills: int


def compile_cubin(source: str, arch: str, symbol: str, toolchain: Toolchain, ptx_arch: str) -> Assembled:
    """Compiles ``source`` for ``arch`` (``sm_90a``), by way of PTX for ``ptx_arch``, the same or one that came before. Raises
    CompilerLog with the compiler's words."""
    return _assemble(prune_globals(_to_ptx(source, ptx_arch, toolchain)), arch, symbol, toolchain.nvjitlink)


def prune_globals(ptx: str) -> str:
    """The text without the module-scope variables that nothing else in it names."""
    uses = Counter(_WORD.findall(ptx))
    kept = []
    for line in ptx.split("\n"):
        match = _GLOBAL.match(line)
        if match is None or uses[match.group(1)] > 1:
            kept.append(line)
    return "\n".join(kept)


def _to_ptx(source: str, arch: str, toolchain: Toolchain) -> str:
    lib = ctypes.CDLL(str(toolchain.nvrtc))
    program = ctypes.c_void_p()
    # TileLang's NVRTC shims have to come before every other header of the source.
    text = "#include <tl_templates/cuda/nvrtc_std.h>\n" + source
    _check(lib.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"kernel.cu", 0, None, None), "nvrtcCreateProgram")
    try:
        options = [
            f"--gpu-architecture=compute_{arch.removeprefix('sm_')}",
            f"-D__CUDACC_VER_MAJOR__={toolchain.major}",
            *flags.NVRTC_FLAGS,
            *(f"-I{folder}" for folder in toolchain.includes),
        ]
        array = (ctypes.c_char_p * len(options))(*(o.encode() for o in options))
        if lib.nvrtcCompileProgram(program, len(options), array):
            raise CompilerLog("nvrtc", _text(lib, "nvrtcGetProgramLog", program).decode(errors="replace"))
        return _text(lib, "nvrtcGetPTX", program).decode()
    finally:
        lib.nvrtcDestroyProgram(ctypes.byref(program))


def _assemble(ptx: str, arch: str, symbol: str, library: Path) -> Assembled:
    lib = ctypes.CDLL(str(library))
    handle = ctypes.c_void_p()
    options = [f"-arch={arch}", "-verbose", *flags.LINK_FLAGS]
    array = (ctypes.c_char_p * len(options))(*(o.encode() for o in options))
    _check(_versioned(lib, "nvJitLinkCreate")(ctypes.byref(handle), len(options), array), "nvJitLinkCreate")
    try:
        data = ptx.encode() + b"\0"
        failed = _versioned(lib, "nvJitLinkAddData")(handle, _PTX_INPUT, data, ctypes.c_size_t(len(data)), b"kernel.ptx")
        failed = failed or _versioned(lib, "nvJitLinkComplete")(handle)
        if failed:
            raise CompilerLog("nvJitLink", _text(lib, "nvJitLinkGetErrorLog", handle).decode(errors="replace"))
        info = _text(lib, "nvJitLinkGetInfoLog", handle).decode(errors="replace")
        cubin = _text(lib, "nvJitLinkGetLinkedCubin", handle, terminated=False)
    finally:
        _versioned(lib, "nvJitLinkDestroy")(ctypes.byref(handle))
    return Assembled(cubin, *_resources(info, symbol, _RESERVED.get(arch, 0)))


#: Bytes of a kernel's shared memory in the assembler's report that are the system's own, and no part of the arch's limit.
_RESERVED = {"sm_90a": 1024}


def _resources(info: str, symbol: str, reserved: int = 0) -> tuple[int, int, int]:
    """Registers, static shared memory and local-memory bytes per thread from the assembler's report."""
    found = re.search(rf"'{re.escape(symbol)}':\s*\n[^\n]*?used (\d+) registers(?P<rest>[^\n]*)", info)
    if not found:
        raise CompilerLog("nvJitLink", f"no resource report for {symbol} in:\n{info}")
    smem = re.search(r"(\d+) bytes smem", found["rest"])
    local = re.search(r"(\d+) bytes lmem", found["rest"])
    stack = re.search(r"(\d+) stack", found["rest"])
    spills = max(int(local.group(1)) if local else 0, int(stack.group(1)) if stack else 0)
    return int(found.group(1)), max(int(smem.group(1)) - reserved, 0) if smem else 0, spills


def _versioned(lib: ctypes.CDLL, name: str) -> ctypes._NamedFuncPointer:
    """nvJitLink exports its functions under versioned names (``__nvJitLinkCreate_12_9``); the plain one is a header's inline."""
    for candidate in (name, *(f"__{name}_{major}_{minor}" for major in (13, 12) for minor in range(12, -1, -1))):
        try:
            return getattr(lib, candidate)  # type: ignore[no-any-return]
        except AttributeError:
            continue
    raise CompilerLog("nvJitLink", f"{name} is not exported")


def _text(lib: ctypes.CDLL, getter: str, handle: ctypes.c_void_p, terminated: bool = True) -> bytes:
    function = _versioned(lib, getter) if getter.startswith("nvJitLink") else getattr(lib, getter)
    sizer = _versioned(lib, f"{getter}Size") if getter.startswith("nvJitLink") else getattr(lib, f"{getter}Size")
    size = ctypes.c_size_t()
    _check(sizer(handle, ctypes.byref(size)), f"{getter}Size")
    buffer = ctypes.create_string_buffer(size.value + 1)
    _check(function(handle, buffer), getter)
    return buffer.raw[: size.value].rstrip(b"\0") if terminated else buffer.raw[: size.value]


def _check(code: int, call: str) -> None:
    if code:
        raise CompilerLog(call, f"returned {code}")
