"""Every op on small shapes, for compute-sanitizer (not collected by pytest):

    compute-sanitizer --tool memcheck  --report-api-errors no --error-exitcode 9 python tests/sanitize.py      also: racecheck, initcheck

(cuda-bindings asks the driver for functions that it may not have: errors of the API, of no interest here.)

Each tensor gets its own allocation, so that an access beyond its end is seen. The kernels of one model suffice:
``--d-head 64 --d-state 128``, chunks of 256, bfloat16.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
sys.path[:0] = [str(Path(__file__).parent / "ops"), str(Path(__file__).parents[1])]

import torch  # noqa: E402
from ssd_cases import Case, Inputs, inputs  # noqa: E402

import tileops.ops.mamba2 as mamba2  # noqa: E402
from tileops.mamba import Mamba2FwdOp, SSDRecurrentFwdOp  # noqa: E402

Q = 256
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def forwards(given: Inputs, case: Case) -> None:
    x, dt, A, B, C, bias, initial = given.all
    op = Mamba2FwdOp(case.Q)
    half = Mamba2FwdOp(case.Q, out_dtype=x.dtype)
    D, z = torch.randn(case.H, device="cuda"), torch.randn_like(x)
    finite(*op(x, dt, A, B, C), *op(*given.all), *op(*given.all, D=D, z=z), *half(*given.all, D=D.unsqueeze(-1).repeat(1, case.P)))
    if case.B == 1 and case.S > 3:
        ends = torch.tensor([0, 1, 1, case.S // 2, case.S - 1], dtype=torch.int32, device="cuda")
        states = initial.repeat(4, 1, 1, 1)
        finite(*op(x, dt, A, B, C, bias, states, cu_seqlens=ends, D=D, z=z))
    seq = (torch.arange(case.S, device="cuda") // 37).int().repeat(case.B, 1)
    finite(*op(*given.all, seq_idx=seq))
    shifted = torch.empty(x.numel() + 1, dtype=x.dtype, device="cuda")[1:].view(x.shape).copy_(x)  # not 16-byte aligned
    finite(*op(shifted, dt, A, B, C, bias))


def decodes(case: Case, dtype: torch.dtype) -> None:
    given = inputs(Case(case.B, 1, case.H, case.P, case.N, case.G, case.Q), dtype, device="cuda")
    rate, step = given.A.view(-1, 1, 1).expand(case.H, case.P, case.N), given.dt[:, 0].abs().unsqueeze(-1).expand(case.B, case.H, case.P)
    x, B, C = given.x[:, 0], given.B[:, 0], given.C[:, 0]
    D, bias = torch.randn(case.H, device="cuda"), torch.randn(case.H, device="cuda")
    for A, dt in ((rate, step), (rate.contiguous(), step.contiguous())):
        state = given.initial_states.clone()
        finite(SSDRecurrentFwdOp()(A, dt, x, B, C, state), state)
        pool = torch.randn(case.B + 3, case.H, case.P, case.N, device="cuda")
        slots = torch.arange(case.B + 3, device="cuda").flip(0)[: case.B].contiguous()
        slots[0] = -1
        y = SSDRecurrentFwdOp(dt_softplus=True)(A, dt, x, B, C, pool, D=D, z=torch.randn_like(x), dt_bias=bias, state_batch_indices=slots)
        finite(y, pool)


def finite(*tensors: torch.Tensor) -> None:
    torch.cuda.synchronize()
    for t in tensors:
        assert bool(torch.isfinite(t).all())


def main() -> None:
    dtypes = [DTYPES[name] for name in sys.argv[1:] or DTYPES]
    served = mamba2.serves
    for dtype in dtypes:
        for case in (Case(1, 1, 2, 64, 128, 1, Q), Case(1, 200, 3, 64, 128, 1, Q), Case(2, 321, 4, 64, 128, 2, Q)):
            given = inputs(case, dtype, device="cuda")
            for path in (served, lambda *_: False):  # the kernel that serves, then the five stages
                mamba2.serves = path
                forwards(given, case)
            mamba2.serves = served
            decodes(case, dtype)
    print("every result is finite")


if __name__ == "__main__":
    main()
