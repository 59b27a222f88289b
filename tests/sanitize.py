"""Every op on small shapes, for compute-sanitizer (not collected by pytest):

    compute-sanitizer --tool memcheck  --report-api-errors no --error-exitcode 9 python tests/sanitize.py          also: racecheck
    compute-sanitizer --tool initcheck --report-api-errors no --error-exitcode 9 python tests/sanitize.py --unread

(cuda-bindings asks the driver for functions that it may not have: errors of the API, of no interest here.)

Each tensor gets its own allocation, so that an access beyond its end is seen; all are made on the CPU and results are looked at there, so
that the only kernels are the ops' own. ``--unread``: results stay where they are, since initcheck does not see what tensor maps store. The
kernels of one model suffice: ``--d-head 64 --d-state 128``, chunks of 256.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
sys.path[:0] = [str(Path(__file__).parent / "ops"), str(Path(__file__).parents[1])]

import torch  # noqa: E402
from ssd_cases import Case, Inputs, inputs  # noqa: E402

import tileops.ops.mamba2 as mamba2  # noqa: E402
from tileops.mamba import Mamba2FwdOp, SSDRecurrentFwdOp  # noqa: E402

Q = 256
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
Check = Callable[..., None]


def on_gpu(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [t.cuda() for t in tensors]


def forwards(given: Inputs, case: Case, check: Check) -> None:
    x, dt, A, B, C, bias, _ = every = on_gpu(*given.all)
    op = Mamba2FwdOp(case.Q)
    half = Mamba2FwdOp(case.Q, out_dtype=x.dtype)
    D, D2, z = on_gpu(torch.randn(case.H), torch.randn(case.H, case.P), torch.randn_like(given.x))
    check(*op(x, dt, A, B, C), *op(*every), *op(*every, D=D, z=z), *half(*every, D=D2))
    if case.B == 1 and case.S > 3:
        ends, states = on_gpu(torch.tensor([0, 1, 1, case.S // 2, case.S - 1], dtype=torch.int32), given.initial_states.repeat(4, 1, 1, 1))
        check(*op(x, dt, A, B, C, bias, states, cu_seqlens=ends, D=D, z=z))
    (seq,) = on_gpu((torch.arange(case.S) // 37).int().repeat(case.B, 1))
    check(*op(*every, seq_idx=seq))
    shifted = torch.empty(x.numel() + 1, dtype=x.dtype, device="cuda")[1:].view(x.shape)  # not 16-byte aligned
    shifted.copy_(given.x)
    check(*op(shifted, dt, A, B, C, bias))


def decodes(case: Case, dtype: torch.dtype, check: Check) -> None:
    given = inputs(Case(case.B, 1, case.H, case.P, case.N, case.G, case.Q), dtype, device="cpu")
    rate, step = on_gpu(given.A, given.dt[:, 0].abs())
    rate, step = rate.view(-1, 1, 1).expand(case.H, case.P, case.N), step.unsqueeze(-1).expand(case.B, case.H, case.P)
    whole = on_gpu(rate.cpu().contiguous(), step.cpu().contiguous())
    x, B, C, D, bias, z = on_gpu(
        given.x[:, 0], given.B[:, 0], given.C[:, 0], torch.randn(case.H), torch.randn(case.H), torch.randn_like(given.x[:, 0])
    )
    for A, dt in ((rate, step), whole):
        state, pool, slots = on_gpu(
            given.initial_states,
            torch.randn(case.B + 3, case.H, case.P, case.N),
            torch.tensor([-1, *range(case.B + 1, 2, -1)][: case.B]),
        )
        check(SSDRecurrentFwdOp()(A, dt, x, B, C, state), state)
        y = SSDRecurrentFwdOp(dt_softplus=True)(A, dt, x, B, C, pool, D=D, z=z, dt_bias=bias, state_batch_indices=slots)
        check(y, pool)


def finite(*tensors: torch.Tensor) -> None:
    for t in tensors:
        assert bool(torch.isfinite(t.cpu()).all())


def ended(*_: torch.Tensor) -> None:
    torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dtypes", nargs="*", choices=[*DTYPES, []], help="default: both")
    parser.add_argument("--unread", action="store_true", help="look at no result")
    args = parser.parse_args()
    check = ended if args.unread else finite
    served = mamba2.serves
    for dtype in [DTYPES[name] for name in args.dtypes or DTYPES]:
        for case in (Case(1, 1, 2, 64, 128, 1, Q), Case(1, 200, 3, 64, 128, 1, Q), Case(2, 321, 4, 64, 128, 2, Q)):
            given = inputs(case, dtype, device="cpu")
            for path in (served, lambda *_: False):  # the kernel that serves, then the five stages
                mamba2.serves = path
                forwards(given, case, check)
            mamba2.serves = served
            decodes(case, dtype, check)
    print("every result is finite" if check is finite else "done")


if __name__ == "__main__":
    main()
