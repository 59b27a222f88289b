"""sync[i] = 0 for i < M: the segments' ticket and flags, before fused_main runs with more than one segment."""

from typing import Any

import tilelang.language as T

from tileops.kernels import _common as k

PASS_CONFIGS = k.PASS_CONFIGS

#: As in fused_main: waits for what is before it, then lets the next kernel come.
SOURCE = """
static __device__ __forceinline__ void ssd_begin() { asm volatile("griddepcontrol.wait; griddepcontrol.launch_dependents;" ::: "memory"); }
"""


def program() -> Any:
    (M,) = k.dims("M")

    @T.prim_func
    def fused_clear(sync: T.Tensor((M,), "int32")):
        with T.Kernel(T.ceildiv(M, 256), threads=256) as bx:
            T.import_source(SOURCE)
            T.evaluate(T.call_extern("handle", "ssd_begin"))
            i = bx * 256 + T.get_thread_binding()
            if i < M:
                sync[i] = 0

    return fused_clear
