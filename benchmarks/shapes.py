"""What is measured: the suites as plain data. A leaf: stdlib only."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

SUITES = ("forward", "decode", "stages", "cold", "models")

STAGES = ("SSDChunkCumsumFwdOp", "SSDChunkCouplingFwdOp", "SSDChunkStateFwdOp", "SSDStatePassingFwdOp", "SSDChunkScanFwdOp")


@dataclass(frozen=True)
class Spec:
    """One row: an op and its sizes. ``tied``: decode with a rate and a step per head, expanded (strides of 0)."""

    suite: str
    op: str
    name: str
    batch: int
    seqlen: int
    n_heads: int
    d_head: int = 64
    d_state: int = 128
    n_groups: int = 1
    dtype: str = "bfloat16"
    chunk_size: int = 256
    tied: bool | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def _named(batch: int, seqlen: int, n_heads: int, **changed: Any) -> dict[str, Any]:
    """Sizes with a name that says what differs from P=64, N=128, G=1, bfloat16."""
    short = {"d_head": "P", "d_state": "N", "n_groups": "G"}
    words = [f"{short[k]}={v}" if k in short else str(v) for k, v in changed.items()]
    return {"name": " ".join([f"{batch}x{seqlen}x{n_heads}", *words]), "batch": batch, "seqlen": seqlen, "n_heads": n_heads, **changed}


_FORWARD = [
    _named(1, 4096, 48),
    _named(8, 2048, 64),
    _named(1, 4096, 80),
    _named(4, 2048, 80),
    _named(2, 32768, 80),
    _named(1, 8192, 128, n_groups=8),
    _named(1, 512, 128),
    _named(1, 1024, 80),
    _named(1, 2048, 80),
    _named(1, 8192, 64, dtype="float16"),
    _named(32, 512, 24),
    _named(1, 131072, 64),
    _named(4, 4096, 128, d_head=80, n_groups=8),
    _named(2, 4096, 32, d_head=128, d_state=256),
    _named(1, 4096, 112, d_state=64, n_groups=2),
]
#: Models that are served (their heads, P, N, groups): one row for each combination, 2048 tokens.
_MODELS = [
    _named(1, 2048, 24),
    _named(1, 2048, 32),
    _named(1, 2048, 48),
    _named(1, 2048, 64),
    _named(1, 2048, 80),
    _named(1, 2048, 128),
    _named(1, 2048, 128, n_groups=8),
    _named(1, 2048, 112, n_groups=8),
    _named(1, 2048, 256, d_state=256, n_groups=8),
    _named(1, 2048, 128, d_head=80, n_groups=8),
    _named(1, 2048, 96, d_head=80, n_groups=8),
    _named(1, 2048, 64, n_groups=8),
    _named(1, 2048, 48, d_state=256),
    _named(1, 2048, 32, d_head=128, d_state=256),
    _named(1, 2048, 24, d_head=128, d_state=256),
    _named(1, 2048, 32, d_head=128, d_state=256, n_groups=2),
    _named(1, 2048, 48, d_head=32),
    _named(1, 2048, 112, d_state=64, n_groups=2),
    _named(1, 2048, 64, d_head=128, d_state=64),
]
_BATCHES = [1 << i for i in range(11)]
_STAGED = [_named(2, 32768, 80), _named(8, 2048, 64), _named(4, 2048, 80), _named(1, 4096, 48)]


def specs(suite: str) -> list[Spec]:
    """The rows of a suite (of cold: the two ops that its processes call, and a second shape)."""
    if suite in ("forward", "models"):
        return [Spec(suite, "Mamba2FwdOp", **sizes) for sizes in (_FORWARD if suite == "forward" else _MODELS)]
    if suite == "decode":
        return [
            Spec(suite, "SSDRecurrentFwdOp", f"B={batch} {'per head' if tied else 'full'}", batch, 1, 80, tied=tied)
            for batch in _BATCHES
            for tied in (True, False)
        ]
    if suite == "stages":
        return [Spec(suite, op, **sizes) for sizes in _STAGED for op in STAGES]
    if suite == "cold":
        return [
            Spec(suite, "Mamba2FwdOp", **_named(1, 4096, 48)),
            Spec(suite, "Mamba2FwdOp", **_named(8, 2048, 64)),
            Spec(suite, "SSDRecurrentFwdOp", "B=64 per head", 64, 1, 80, tied=True),
        ]
    raise ValueError(f"no suite {suite!r}; expected one of {', '.join(SUITES)}.")


#: Small enough for a CPU: the same suites, to try the harness itself.
def tiny(suite: str) -> list[Spec]:
    sizes: dict[str, Any] = {"batch": 2, "seqlen": 40, "n_heads": 4, "d_head": 16, "d_state": 16, "n_groups": 2, "chunk_size": 16}
    ops = {
        "forward": ["Mamba2FwdOp"],
        "models": ["Mamba2FwdOp"],
        "decode": ["SSDRecurrentFwdOp"] * 2,
        "stages": STAGES,
        "cold": ["Mamba2FwdOp"] * 2 + ["SSDRecurrentFwdOp"],
    }
    tied = {"decode": [True, False], "cold": [None, None, True]}.get(suite, [None] * len(ops[suite]))
    return [
        Spec(suite, op, f"tiny {i}", **{**sizes, "seqlen": 1 if "Recurrent" in op else 40}, tied=t)
        for i, (op, t) in enumerate(zip(ops[suite], tied))
    ]
