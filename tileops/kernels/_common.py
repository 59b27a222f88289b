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

#: For programs that place every barrier themselves (``barrier``) and rely on no two shared arrays being one: TileLang would
#: take an element's update in place for a hazard, and does not see what is in flight.
BY_HAND: dict[str, object] = {**PASS_CONFIGS, "tl.disable_thread_storage_sync": True, "tl.disable_shared_memory_reuse": True}

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


def fetch(*extents: int) -> Any:
    """A loop nest that copies from global to shared memory, each element under one condition, else 0: by cp.async where the
    copies are 16 bytes wide, so that they have arrived after ``commit`` and ``arrived``; others are made at once."""
    if _cpu:
        return T.grid(*extents)
    return T.Parallel(*extents, annotations={"parallel_async_without_async_commit_wait": True})


def commit() -> Any:
    """A statement: what was fetched since the last one is a group."""
    return None if _cpu else T.ptx_commit_group()


def arrived(groups: int) -> Any:
    """A statement: waits until all but the last ``groups`` groups are there. Others read them after a barrier."""
    return None if _cpu else T.ptx_wait_group(groups)


def barrier() -> Any:
    """A statement: all threads of the CTA meet."""
    return None if _cpu else T.sync_threads()


def swizzled(tile: Any) -> Any:
    """A statement: 16-byte pieces of a shared tile's rows are permuted, so that rows do not meet in one bank."""
    from tilelang.layout import make_swizzled_layout

    return None if _cpu else T.annotate_layout({tile: make_swizzled_layout(tile)})


#: The special function unit's 2**x as it is: results below 2**-126 become 0, without the scaling that CUDA's exp2f adds.
EX2 = """
static __device__ __forceinline__ float tileops_ex2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
"""


def ex2_source() -> Any:
    """A statement: the kernel uses ``ex2``."""
    return None if _cpu else T.import_source(EX2)


def ex2(x: Any) -> Any:
    """2**x, for float32 x <= 0."""
    return T.exp2(x) if _cpu else T.call_extern("float32", "tileops_ex2", x)


def log1p(x: Any) -> Any:
    """log(1 + x) of float32 x >= 0 to 2e-7 of it, without a branch, so that several can be on their way.

    With 2**e next to 1 + x, log1p(x) = e * log(2) + log1p(m), m = x / 2**e + (1 / 2**e - 1) in [-1/4, 1/2]: one rounding, none
    where e is 0. The polynomial is a minimax fit of (log1p(m) - m) / m**2 there, in units of log1p(m).
    """
    exponent = (T.reinterpret(1.0 + x, "int32") - 0x3F400000) & -0x800000
    scale = T.reinterpret(0x3F800000 - exponent, "float32")
    m = x * scale + (scale - 1.0)
    q = T.float32(LOG1P[-1])
    for a in reversed(LOG1P[:-1]):
        q = q * m + T.float32(a)
    return T.cast(exponent >> 23, "float32") * T.float32(0.6931471805599453) + (q * (m * m) + m)


LOG1P = (-0.5000006, 0.3333355, -0.24993427, 0.19977033, -0.16823025, 0.14984675, -0.12067384, 0.05412157)


@T.macro
def _gemm(a, at, b, bt, c, M, N, K, transpose_A, transpose_B):
    for i, j, q in T.grid(M, N, K):
        c[i, j] += T.cast(a[(*at, q, i) if transpose_A else (*at, i, q)], "float32") * T.cast(
            b[(*bt, j, q) if transpose_B else (*bt, q, j)], "float32"
        )


def gemm(a: Any, at: tuple[Any, ...], b: Any, bt: tuple[Any, ...], c: Any, transpose_A: bool = False, transpose_B: bool = False) -> Any:
    """A statement: c += a[at] @ b[bt], where ``at`` and ``bt`` are the indices before a tile's two. Each warpgroup has whole rows."""
    if _cpu:
        M, N = (int(extent) for extent in c.shape)
        return _gemm(a, at, b, bt, c, M, N, int(a.shape[len(at) + (not transpose_A)]), transpose_A, transpose_B)
    left, right = (t[(*index, slice(None), slice(None))] if index else t for t, index in ((a, at), (b, bt)))
    return T.gemm(left, right, c, transpose_A=transpose_A, transpose_B=transpose_B, policy=T.GemmWarpPolicy.FullRow)


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
