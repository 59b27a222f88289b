"""What the kernel files share: strides as parameters, tile sizes, padded tile loads, and the dialect switch. Part of every key.

A kernel file defines ``program(**fields)``; its fields are those of ``tileops.catalog.KERNELS``. Everything about a call's
sizes is a run-time scalar: dimensions are int32 and named B S H G C M; strides count elements, are int64, and are named
``<tensor>_stride<dim>``, or ``<tensor>_stride<dim>_div8`` where the program relies on multiples of 8.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import tilelang.language as T
from tilelang import tvm

PASS_CONFIGS: dict[str, object] = {
    # Tail tests are in the programs, where they are cheap; the pass would add its own around every access.
    "tl.disable_safe_memory_legalize": True,
    # TileLang 0.1.15's 32-byte loads (sm_100a, sm_120a) do not compile where a condition guards them.
    "tl.disable_vectorize_256": True,
}

LOG2E = 1.4426950408889634
#: Lowest finite float32. A cumsum of -inf (A = -inf) is raised to it on one side of a difference, so that -inf - -inf never happens.
LOWEST = -3.4028234663852886e38

_cpu = False


@contextlib.contextmanager
def cpu_dialect() -> Iterator[None]:
    """While active, programs are made for TileLang's CPU backend (tests run them there, with dtype float32)."""
    global _cpu
    _cpu = True
    try:
        yield
    finally:
        _cpu = False


def grid(extent: Any, threads: int) -> Any:
    """The launch frame: a one-dimensional grid. The CPU backend has no threads."""
    if _cpu:
        from tilelang.cpu.language import Kernel

        return Kernel(extent)
    return T.Kernel(extent, threads=threads)


def at_least(ctas: int) -> Any:
    """A statement: registers are limited so that this many CTAs fit on an SM."""
    return None if _cpu else T.annotate_min_blocks_per_sm(ctas)


def parallel(*extents: int) -> Any:
    """A loop nest spread over the threads; serial on the CPU backend, whose parallel loops take no local buffers."""
    return T.grid(*extents) if _cpu else T.Parallel(*extents)


def rolled(extent: Any) -> Any:
    """A serial loop that the CUDA compiler must not unroll: overlapping the loads of its rounds would spill registers."""
    if _cpu or (isinstance(extent, int) and extent == 1):
        return T.serial(extent)
    return T.unroll(extent, annotations={"pragma_unroll_factor": 1})


def shared(shape: tuple[int, ...], dtype: str) -> Any:
    return T.alloc_local(shape, dtype) if _cpu else T.alloc_shared(shape, dtype)


def fragment(shape: tuple[int, ...], dtype: str = "float32") -> Any:
    return T.alloc_local(shape, dtype) if _cpu else T.alloc_fragment(shape, dtype)


def dims(names: str) -> tuple[Any, ...]:
    return tuple(T.dynamic(name) for name in names.split())


def strided(name: str, shape: tuple[Any, ...], dtype: str, div: int = 1, *, last: bool = False) -> Any:
    """A tensor with run-time strides, those of the last dimension too if ``last``, else it is contiguous.

    With ``div`` the strides are multiples of it, which makes wide loads provable.
    """
    suffix = f"_div{div}" if div > 1 else ""
    strides = [T.dynamic(f"{name}_stride{d}{suffix}", "int64") * div for d in range(len(shape) - (not last))]
    return T.StridedTensor(shape, strides if last else (*strides, 1), dtype)


def complete(program: Any) -> Any:
    """The program with those stride scalars as parameters that no tensor's stride is by itself (``8 * x_stride0_div8``)."""
    tir = tvm.tirx
    found: dict[str, Any] = {}

    def visit(node: Any) -> None:
        if isinstance(node, tir.Var):
            found[node.name] = node

    for buffer in program.buffer_map.values():
        for stride in buffer.strides:
            if isinstance(stride, tir.Mul):
                tir.stmt_functor.post_order_visit(stride, visit)
    params = [*program.params, *(found[name] for name in sorted(found))]
    return tir.PrimFunc(params, program.body, program.ret_type, program.buffer_map, program.attrs, program.span)


def padded(size: int, limit: int) -> int:
    """Width of the tiles that cover ``size``: as few as have at most ``limit``, of one multiple of 16."""
    tiles = -(-size // limit)
    return -(-size // (16 * tiles)) * 16


def power_of_two(size: int, limit: int) -> int:
    """Width of the tiles that cover ``size`` where a reduction runs along them: the next power of two, at most ``limit``."""
    return min(1 << (size - 1).bit_length(), limit)


def ceildiv(a: int, b: int) -> int:
    return -(-a // b)


def fp16_scale(top: Any, low: int = -126, high: int = 126) -> tuple[Any, Any]:
    """The power of two, from 2**low to 2**high, that brings a float32 ``top`` >= 0 to [2**14, 2**15), and its inverse.

    float16 holds neither x * dt nor a state at every size; scaled by a power of two and unscaled in float32 they keep
    float16's precision at float32's range.
    """
    exponent = T.max(T.min(268 - (T.reinterpret(top, "int32") >> 23), high + 127), low + 127)
    return T.reinterpret(exponent << 23, "float32"), T.reinterpret((254 - exponent) << 23, "float32")
