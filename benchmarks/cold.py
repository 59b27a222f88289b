"""What a process pays before it is warm: ``python -m benchmarks.cold NAME DEVICE``, specs as JSON on standard input, a JSON line out.

Everything is milliseconds. A first call is timed from the construction of its op to the end of its work on the GPU.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from random import Random
from typing import Any

_NEW_SHAPES = 300


def main() -> int:
    name, device = sys.argv[1:]
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    data = json.loads(sys.stdin.readline())

    import torch

    from benchmarks import inputs, timing
    from benchmarks.shapes import Spec

    specs = [Spec(**spec) for spec in data]
    torch.set_grad_enabled(False)
    sync: Callable[[], None] = torch.cuda.synchronize if device != "cpu" else lambda: None
    start = time.perf_counter()
    adaptor: Any = importlib.import_module(f"benchmarks.{name}")
    out: dict[str, Any] = {"import": (time.perf_counter() - start) * 1e3}

    sets = [inputs.make(spec, device) for spec in specs]  # the CUDA context comes up here
    if device != "cpu":
        block = torch.empty(4 << 30, dtype=torch.uint8, device=device)  # memory that the allocator keeps: no driver call in a first call
        del block
    sync()

    def first_call(key: str, spec: Spec, tensors: dict[str, Any]) -> Callable[[], Any]:
        start = time.perf_counter()
        bind = adaptor.build(spec)
        built = time.perf_counter()
        call = bind(tensors)
        call()
        sync()
        out[f"construct {key}"] = (built - start) * 1e3
        out[f"first {key}"] = (time.perf_counter() - start) * 1e3
        return call

    forward, second, decode = specs
    calls = {"forward": first_call("forward", forward, sets[0])}
    first_call("forward of a second shape", second, sets[1])
    calls["decode"] = first_call("decode", decode, sets[2])
    for key, call in calls.items():
        out[f"host {key}"] = timing.host_us([call], device)[0] / 1e3
    if name == "ours":
        out["new shape"] = new_shapes(adaptor.build(forward), sets[1], sync)
        out["cpu_us"] = timing.cpu_us()
    replies.write(json.dumps(out) + "\n")
    return 0


def new_shapes(bind: Callable[..., Any], tensors: dict[str, Any], sync: Callable[[], None]) -> list[float]:
    """Host time of a shape's first call, less that of its third, for many shapes that one op has not met."""
    random = Random(0)
    batch, seqlen = tensors["x"].shape[:2]
    shapes = {(random.randint(1, batch), random.randint(1, seqlen)) for _ in range(_NEW_SHAPES)}
    over = []
    for b, s in sorted(shapes):
        call = bind({name: t[:b, :s] if t.dim() > 1 else t for name, t in tensors.items()})
        times = []
        for _ in range(3):  # the second learns to recognise the shape
            sync()
            start = time.perf_counter()
            call()
            times.append((time.perf_counter() - start) * 1e3)
        over.append(times[0] - times[2])
    return over


if __name__ == "__main__":
    sys.exit(main())
