"""The main job on real input: builds the kernels of one model, runs a Mamba-2 block on them, and checks every number.

The block is one layer of mamba2-130m (d_model 768, expand 2, H=24, P=64, N=128, G=1, conv 4, bfloat16) with seeded random
weights; its prompt is README.md, a token a byte. Prefill is one ``Mamba2FwdOp`` call, the last 64 bytes are then fed one by
one to ``SSDRecurrentFwdOp``. On a machine without a GPU the block runs in plain PyTorch on the CPU, and the kernels that
were built are verified.

    make demo        or        python examples/mamba2_block.py [--device cpu]
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import tileops
import tileops.mamba
from tileops import catalog, compiler, models, store
from tileops.config import KernelConfig

ROOT = Path(__file__).resolve().parents[1]
MODEL = models.preset("mamba2-130m")
D_MODEL, D_CONV, STEPS = 768, 4, 64
HEADS, HEAD_DIM, D_STATE = 24, MODEL.head_dim, MODEL.d_state
D_INNER = HEADS * HEAD_DIM
D_XBC = D_INNER + 2 * D_STATE

#: The variants that this block asks for (one group, 16-byte aligned views); see build_kernels/matrix.py.
DECODE = ("recurrent state_dtype=float32 tied=True",)
ONE_KERNEL = ("fused_main y_float32=True", "fused_clear")
STAGES = (
    "chunk_cumsum out_dtype=float32",
    "chunk_coupling aligned=True cb_float32=True",
    "chunk_state dt_dtype=float32 aligned=True",
    "state_passing aligned=True",
    "chunk_scan dt_dtype=float32 aligned=True cb_float32=True",
)

#: Largest relative error, in norm: the tensor cores' operands are rounded to bfloat16, which costs about 2e-3.
ALLOWED = 5e-3


class Cache(NamedTuple):
    """What decoding carries from token to token."""

    conv: Tensor  # (batch, D_CONV - 1, D_XBC): the last inputs of the convolution
    state: Tensor  # (batch, HEADS, HEAD_DIM, D_STATE) float32, updated in place


class SSDInputs(NamedTuple):
    """What the SSD of a whole sequence was computed from, and its result before skip, gate and norm."""

    x: Tensor
    dt: Tensor
    B: Tensor
    C: Tensor
    y: Tensor


class Mamba2Block(torch.nn.Module):
    """in-projection -> causal convolution, SiLU -> SSD -> + D x -> RMSNorm gated by SiLU(z) -> out-projection."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(seed)

        def weight(*shape: int, scale: float) -> torch.nn.Parameter:
            return torch.nn.Parameter((torch.randn(*shape, generator=g) * scale).bfloat16(), requires_grad=False)

        def vector(values: Tensor) -> torch.nn.Parameter:
            return torch.nn.Parameter(values.float(), requires_grad=False)

        self.embedding = weight(256, D_MODEL, scale=1.0)
        self.in_proj = weight(D_INNER + D_XBC + HEADS, D_MODEL, scale=D_MODEL**-0.5)
        self.conv = weight(D_XBC, D_CONV, scale=D_CONV**-0.5)
        self.conv_bias = weight(D_XBC, scale=0.1)
        self.out_proj = weight(D_MODEL, D_INNER, scale=D_INNER**-0.5)
        self.norm = vector(torch.ones(D_INNER))
        # As Mamba-2 draws them: rates of 1 to 16, steps of 0.001 to 0.1.
        self.A = vector(-torch.empty(HEADS).uniform_(1, 16, generator=g))
        step = torch.exp(torch.empty(HEADS).uniform_(-6.9, -2.3, generator=g))
        self.dt_bias = vector(step + torch.log(-torch.expm1(-step)))
        self.D = vector(torch.ones(HEADS))
        self.prefill_op = tileops.mamba.Mamba2FwdOp(chunk_size=MODEL.chunk_size)
        self.decode_op = tileops.mamba.SSDRecurrentFwdOp(dt_softplus=True)

    def prefill(self, tokens: Tensor) -> tuple[Tensor, Cache, SSDInputs]:
        """tokens (batch, seqlen) -> output (batch, seqlen, D_MODEL), the cache after the last token, and the SSD's inputs."""
        z, xbc, dt = self._project(tokens)
        padded = F.pad(xbc, (0, 0, D_CONV - 1, 0))
        x, B, C = self._convolve(padded.unfold(1, D_CONV, 1))
        y, state = self.prefill_op(x, dt, self.A, B, C, dt_bias=self.dt_bias)
        # A prompt shorter than the convolution leaves zeros in its state.
        return self._finish(y, x, z), Cache(padded[:, -(D_CONV - 1) :].clone(), state), SSDInputs(x, dt, B, C, y)

    def decode(self, token: Tensor, cache: Cache) -> tuple[Tensor, Tensor]:
        """token (batch,) -> output (batch, D_MODEL) and the SSD's y; ``cache`` moves on by one token, in place."""
        z, xbc, dt = self._project(token[:, None])
        window = torch.cat([cache.conv, xbc], dim=1)
        cache.conv.copy_(window[:, 1:])
        x, B, C = (t[:, 0] for t in self._convolve(window.transpose(1, 2)[:, None]))
        # A rate, a step and a bias per head: the op reads them once for all its elements.
        y = self.decode_op(self.A, dt[:, 0], x, B, C, cache.state, dt_bias=self.dt_bias)
        return self._finish(y, x, z[:, 0]), y

    def _project(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        z, xbc, dt = F.linear(F.embedding(tokens, self.embedding), self.in_proj).split([D_INNER, D_XBC, HEADS], dim=-1)
        return z, xbc, dt.float()

    def _convolve(self, windows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """windows (batch, seqlen, D_XBC, D_CONV) -> x (..., HEADS, HEAD_DIM), B and C (..., 1, D_STATE): views of one tensor."""
        out = (windows.float() * self.conv.float()).sum(-1) + self.conv_bias.float()
        x, B, C = F.silu(out).bfloat16().split([D_INNER, D_STATE, D_STATE], dim=-1)
        return x.unflatten(-1, (HEADS, HEAD_DIM)), B.unsqueeze(-2), C.unsqueeze(-2)

    def _finish(self, y: Tensor, x: Tensor, z: Tensor) -> Tensor:
        y = (y + self.D[:, None] * x.float()).flatten(-2) * F.silu(z.float())
        return F.linear(F.rms_norm(y, (D_INNER,), self.norm, 1e-5).bfloat16(), self.out_proj)


def recurrence(block: Mamba2Block, inputs: SSDInputs) -> Tensor:
    """y of the SSD in float64, token by token, from the inputs as given: (batch, seqlen, HEADS, HEAD_DIM)."""
    x, B, C = (t.double() for t in (inputs.x, inputs.B[..., 0, :], inputs.C[..., 0, :]))
    dt = F.softplus(inputs.dt.double() + block.dt_bias.double())
    decay = torch.exp(dt * block.A.double())
    state = torch.zeros(x.shape[0], HEADS, HEAD_DIM, D_STATE, dtype=torch.float64, device=x.device)
    y = torch.empty_like(x)
    for t in range(x.shape[1]):
        state.mul_(decay[:, t, :, None, None]).addcmul_((dt[:, t, :, None] * x[:, t])[..., None], B[:, t, None, None, :])
        y[:, t] = state.matmul(C[:, t, None, :, None]).squeeze(-1)
    return y


def error(found: Tensor, expected: Tensor) -> float:
    """Relative error in norm."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def prepare(arch: str, jobs: int | None) -> tuple[list[KernelConfig], bool]:
    """Builds what artifacts/ lacks, and says of each kernel where it would come from. False: one is missing or damaged."""
    sys.path.insert(0, str(ROOT))
    from build_kernels import building, matrix
    from tileops.compiler import pool

    prefill = ONE_KERNEL if catalog.exists("fused_main", arch) else STAGES
    configs = matrix.select(MODEL.kernels([arch]), (*prefill, *DECODE))
    start = time.perf_counter()
    where, reason = compiler.toolchain.find()
    if where is None:
        print(f"1. Kernels for {arch}: nothing can be compiled here ({reason})")
    else:
        report = building.build(configs, ROOT / "artifacts", jobs=jobs or pool.default_jobs(), stream=sys.stderr)
        done = f"{len(report.built)} compiled, {len(report.present)} there already, {time.perf_counter() - start:.1f} s"
        print(f"1. Kernels for {arch}: {done}" + (f", {len(report.failed)} FAILED" if report.failed else ""))
    faults = {fault.key: fault.reason for root in store.roots() if root.kind == "packaged" for fault in root.verify()}
    fine = True
    for config in configs:
        lookup = store.find(config)
        reason = faults.get(config.key, "" if lookup.artifact else "; ".join(f"{step.root}: {step.reason}" for step in lookup.trace))
        size = f"{lookup.artifact.record.cubin_size:6} bytes, verified" if lookup.artifact else ""
        print(f"   {config.kernel:15} {lookup.kind or 'MISSING':9} {reason or size}")
        fine &= not reason
    return configs, fine


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--arch", choices=catalog.ARCHS, help="build for this arch (default: the GPU's own, sm_90a where there is none)")
    parser.add_argument("--jobs", type=int)
    args = parser.parse_args()
    arch = args.arch or "sm_90a"
    if args.device == "cuda" and not args.arch:
        capability = torch.cuda.get_device_capability()
        arch = next(iter(catalog.archs_for(*capability)), "")
        if not arch:
            print(f"No arch of tileops runs on this GPU (compute capability {capability}); try --device cpu.")
            return 1
    print(
        f"One Mamba-2 block of {MODEL.name}: d_model {D_MODEL}, H {HEADS}, P {HEAD_DIM}, N {D_STATE}, Q {MODEL.chunk_size}, {MODEL.dtype}\n"
    )
    _, fine = prepare(arch, args.jobs)

    device = torch.device(args.device)
    tokens = torch.frombuffer(bytearray((ROOT / "README.md").read_bytes()), dtype=torch.uint8).long()[None].to(device)
    prompt, rest = tokens[:, :-STEPS], tokens[:, -STEPS:]
    before = tileops.stats()  # the look-ups above count, too
    block = Mamba2Block().to(device)
    start = time.perf_counter()
    _, cache, _ = block.prefill(prompt)
    cache.state.sum().item()  # waits for the GPU
    first = time.perf_counter() - start
    start = time.perf_counter()
    steps = [block.decode(token, cache) for token in rest.unbind(1)]
    cache.state.sum().item()
    pace = (time.perf_counter() - start) / STEPS
    decoded, decoded_y = (torch.stack(parts, dim=1) for parts in zip(*steps))

    if device.type == "cuda":
        counts = ", ".join(f"{name} {value - before[name]}" for name, value in tileops.stats().items() if value > before[name])
        print(f"\n2. Runs on {torch.cuda.get_device_name()} with these kernels ({counts})")
    else:
        print("\n2. Runs on the CPU: every op by the target `reference` (plain PyTorch); the kernels above wait for a GPU")
    print(f"   prefill of {prompt.shape[1]} bytes of README.md: first answer after {first * 1e3:.1f} ms (the first call in this process)")
    print(f"   then {STEPS} decode steps: {pace * 1e3:.2f} ms a token")

    whole, whole_cache, inputs = block.prefill(tokens)
    exact = recurrence(block, inputs)
    rows = [
        (f"prefill of all against prefill + {STEPS} steps: output", error(decoded, whole[:, -STEPS:])),
        (f"prefill of all against prefill + {STEPS} steps: state", error(cache.state, whole_cache.state)),
        ("prefill against the float64 recurrence", error(inputs.y, exact)),
        (f"the {STEPS} decode steps against the float64 recurrence", error(decoded_y, exact[:, -STEPS:])),
    ]
    print(f"\n3. Agreement, as relative error in norm (allowed: {ALLOWED:g})")
    for name, value in rows:
        ok = value <= ALLOWED  # False for NaN
        fine &= ok
        print(f"   {name:58} {value:8.1e}  {'ok' if ok else 'TOO LARGE'}")
    print("\nAll is well." if fine else "\nSomething is wrong: see above.")
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
