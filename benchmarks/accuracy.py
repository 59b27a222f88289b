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
from tileops import mamba

#: (batch, seqlen, n_heads, d_head, d_state, n_groups, chunk_size, with initial states, dtype)
SHAPES = [
    (1, 4096, 48, 64, 128, 1, 256, False, torch.bfloat16),
    (2, 2048, 128, 64, 128, 8, 128, False, torch.bfloat16),
    (1, 1000, 24, 64, 128, 1, 256, False, torch.bfloat16),
    (2, 1000, 24, 64, 128, 1, 256, True, torch.bfloat16),
    (2, 300, 16, 64, 128, 2, 128, True, torch.float16),
]


def error(out: Tensor, ref: Tensor) -> float:
    """Relative error in norm; NaN or infinity in ``out`` gives NaN."""
    return ((out.double() - ref).norm() / ref.norm()).item()


def poison() -> None:
    """Writes NaN over memory that the allocator will hand out next."""
    blocks = [torch.full((1 << 24,), float("nan"), device="cuda") for _ in range(16)]
    del blocks


def recurrence(x: Tensor, v: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """y and the final state, token by token in float64. v is dt after bias and softplus."""
    ratio = x.shape[2] // B.shape[2]
    x, v, A, state = x.double(), v.double(), A.double(), state.double().clone()
    B, C = (t.double().repeat_interleave(ratio, 2) for t in (B, C))
    y = torch.empty_like(x)
    for t in range(x.shape[1]):
        state = state * torch.exp(v[:, t] * A)[..., None, None] + (v[:, t, :, None] * x[:, t])[..., None] * B[:, t, :, None, :]
        y[:, t] = (state * C[:, t, :, None, :]).sum(-1)
    return y, state


def chunked(t: Tensor, length: int) -> Tensor:
    """(batch, seqlen, ...) padded with zeros and cut: (batch, chunks, length, ...)."""
    batch, seqlen = t.shape[:2]
    chunks = -(-seqlen // length)
    padded = t.new_zeros(batch, chunks * length, *t.shape[2:])
    padded[:, :seqlen] = t
    return padded.view(batch, chunks, length, *t.shape[2:])


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
    v = dt.double() + bias.double()
    v = torch.where(v > 20, v, torch.log1p(torch.exp(v)))
    ratio = heads // groups
    out: dict[str, float] = {}

    y_ref, state_ref = recurrence(x, v, A, B, C, zeros if state0 is None else state0)
    poison()
    y, state = mamba.Mamba2FwdOp(Q)(x, dt, A, B, C, bias, state0)
    out["forward y"], out["forward state"] = error(y, y_ref), error(state, state_ref)

    poison()
    dt_out, dA = mamba.SSDChunkCumsumFwdOp(Q, dt_softplus=True)(dt, A, bias)
    v_chunks = chunked(v, Q).permute(0, 3, 1, 2)  # batch, heads, chunks, Q
    out["cumsum dt"] = error(dt_out, v_chunks)
    out["cumsum dA"] = error(dA, (v_chunks * A.double()[None, :, None, None]).cumsum(-1))

    poison()
    cb = mamba.SSDChunkCouplingFwdOp(Q)(C, B)
    Bc, Cc, xc = (chunked(t.double(), Q) for t in (B, C, x))
    out["coupling"] = error(cb, torch.einsum("bclgn,bcsgn->bcgls", Cc, Bc).tril())

    poison()
    states = mamba.SSDChunkStateFwdOp()(x, B, dt_out, dA)
    dA64, dt64 = dA.double(), dt_out.double()
    Bh, Ch = (t.repeat_interleave(ratio, 3) for t in (Bc, Cc))
    weight = torch.exp(dA64[..., -1:] - dA64) * dt64
    out["chunk state"] = error(states, torch.einsum("bclhp,bclhn,bhcl->bchpn", xc, Bh, weight))

    poison()
    flat = states.flatten(3)
    first = None if state0 is None else state0.flatten(2)
    prev, final = mamba.SSDStatePassingFwdOp()(flat, dA[..., -1], first)
    running, before = (zeros if state0 is None else state0).double().flatten(2), []
    for c in range(flat.shape[1]):
        before.append(running)
        running = torch.exp(dA64[:, :, c, -1])[..., None] * running + flat[:, c].double()
    # The first chunk starts from zeros without initial states: compared, but it adds nothing to either norm.
    out["passing prev"], out["passing final"] = (
        error(prev, torch.stack(before, 1)) if len(before) > 1 or initial else 0.0,
        error(final, running),
    )

    poison()
    prev = prev.view(states.shape)
    y = mamba.SSDChunkScanFwdOp()(x, cb, dA, C, prev, dt_out)
    decay = torch.exp((dA64[..., :, None] - dA64[..., None, :]).clamp(max=0)).tril()
    mixing = cb.double().repeat_interleave(ratio, 2) * (decay * dt64[..., None, :]).transpose(1, 2)
    scanned = torch.einsum("bchls,bcshp->bclhp", mixing, xc)
    scanned += torch.einsum("bclhn,bchpn,bhcl->bclhp", Ch, prev.double(), torch.exp(dA64))
    out["chunk scan"] = error(y, scanned.flatten(1, 2)[:, :seqlen])

    step = randn(batch, heads, head_dim, d_state) if state0 is None else state0.clone()
    for name, expanded in (("tied", True), ("full", False)):
        A3 = A.view(-1, 1, 1).expand(heads, head_dim, d_state)
        dt3 = v[:, -1].float().unsqueeze(-1).expand(batch, heads, head_dim)
        if not expanded:
            A3, dt3 = A3.contiguous(), dt3.contiguous()
        y_ref, state_ref = recurrence(x[:, -1:], v[:, -1:].float(), A, B[:, -1:], C[:, -1:], step)
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
