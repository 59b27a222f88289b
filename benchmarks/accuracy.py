"""Errors of the seven ops against float64 on a CUDA GPU: ``python -m benchmarks.accuracy [--json FILE]``.

Every figure is ``norm(out - ref) / norm(ref)``. The reference of the full forward, of the decode step and of the state a
chunk ends with is a token-by-token recurrence in float64 on the inputs as given; that of the other stages is their
definition in float64. Outputs are read only after NaN has been written all over the allocator's free memory.
"""

from __future__ import annotations

import argparse
import json
import sys
import time

import torch
from torch import Tensor

import tileops
from benchmarks import reference
from benchmarks.reference import error, poison
from tileops import mamba

#: (batch, seqlen, n_heads, d_head, d_state, n_groups, chunk_size, with initial states, dtype)
SHAPES = [
    (1, 4096, 48, 64, 128, 1, 256, False, torch.bfloat16),
    (2, 2048, 128, 64, 128, 8, 128, False, torch.bfloat16),
    (1, 1000, 24, 64, 128, 1, 256, False, torch.bfloat16),
    (2, 1000, 24, 64, 128, 1, 256, True, torch.bfloat16),
    (2, 300, 16, 64, 128, 2, 128, True, torch.float16),
]


def measure(
    batch: int, seqlen: int, heads: int, head_dim: int, d_state: int, groups: int, Q: int, initial: bool, dtype: torch.dtype
) -> dict[str, float]:
    generator = torch.Generator("cuda").manual_seed(seqlen + heads)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", generator=generator)

    x = randn(batch, seqlen, heads, head_dim).to(dtype)
    dt, bias = randn(batch, seqlen, heads) - 2, randn(heads) / 2
    A = -torch.rand(heads, device="cuda", generator=generator) * 15 - 1
    B, C = (randn(batch, seqlen, groups, d_state).to(dtype) for _ in range(2))
    state0 = randn(batch, heads, head_dim, d_state) if initial else None
    zeros = torch.zeros(batch, heads, head_dim, d_state, device="cuda")
    v = reference.softplus(dt, bias)
    out: dict[str, float] = {}

    y_ref, state_ref = reference.recurrence(x, v, A, B, C, zeros if state0 is None else state0)
    poison()
    y, state = mamba.Mamba2FwdOp(Q)(x, dt, A, B, C, bias, state0)
    out["forward y"], out["forward state"] = error(y, y_ref), error(state, state_ref)

    poison()
    dt_out, dA = mamba.SSDChunkCumsumFwdOp(Q, dt_softplus=True)(dt, A, bias)
    dt_ref, dA_ref = reference.chunk_cumsum(v, A, Q)
    out["cumsum dt"], out["cumsum dA"] = error(dt_out, dt_ref), error(dA, dA_ref)

    poison()
    cb = mamba.SSDChunkCouplingFwdOp(Q)(C, B)
    out["coupling"] = error(cb, reference.chunk_coupling(C, B, Q))

    poison()
    states = mamba.SSDChunkStateFwdOp()(x, B, dt_out, dA)
    out["chunk state"] = error(states, reference.chunk_state(x, B, dt_out, dA))

    poison()
    flat = states.flatten(3)
    first = None if state0 is None else state0.flatten(2)
    prev, final = mamba.SSDStatePassingFwdOp()(flat, dA[..., -1], first)
    prev_ref, final_ref = reference.state_passing(flat, dA[..., -1], first)
    # The first chunk starts from zeros without initial states: compared, but it adds nothing to either norm.
    out["passing prev"] = error(prev, prev_ref) if flat.shape[1] > 1 or initial else 0.0
    out["passing final"] = error(final, final_ref)

    poison()
    prev = prev.view(states.shape)
    y = mamba.SSDChunkScanFwdOp()(x, cb, dA, C, prev, dt_out)
    out["chunk scan"] = error(y, reference.chunk_scan(x, cb, dA, C, prev, dt_out))

    step = randn(batch, heads, head_dim, d_state) if state0 is None else state0.clone()
    for name, expanded in (("tied", True), ("full", False)):
        A3 = A.view(-1, 1, 1).expand(heads, head_dim, d_state)
        dt3 = v[:, -1].float().unsqueeze(-1).expand(batch, heads, head_dim)
        if not expanded:
            A3, dt3 = A3.contiguous(), dt3.contiguous()
        y_ref, state_ref = reference.recurrence(x[:, -1:], v[:, -1:].float(), A, B[:, -1:], C[:, -1:], step)
        updated = step.clone()
        poison()
        y = mamba.SSDRecurrentFwdOp()(A3, dt3, x[:, -1], B[:, -1], C[:, -1], updated)
        out[f"decode y ({name} A)"], out[f"decode state ({name} A)"] = error(y, y_ref[:, 0]), error(updated, state_ref)
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", help="write the table to this file")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA GPU")
    rows = {}
    for shape in SHAPES:
        *sizes, initial, dtype = shape
        values = " ".join(f"{letter}={value}" for letter, value in zip("PNGQ", sizes[3:]))
        name = f"{'x'.join(map(str, sizes[:3]))} {values}{' init' if initial else ''} {str(dtype)[6:]}"
        rows[name] = measure(*shape)
    ops = list(next(iter(rows.values())))
    print("| norm(out - ref) / norm(ref) | " + " | ".join(rows) + " |\n|---|" + "---|" * len(rows))
    for op in ops:
        print(f"| {op} | " + " | ".join(f"{row[op]:.2e}" for row in rows.values()) + " |")
    print(
        f"\n{torch.cuda.get_device_name()}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')},",
        f"TileLang imported: {'tilelang' in sys.modules}",
    )
    print("kernels:", {k: n for k, n in tileops.stats().items() if n})
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(
                {"date": time.strftime("%Y-%m-%d"), "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "errors": rows},
                file,
                indent=1,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
