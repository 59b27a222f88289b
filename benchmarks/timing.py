"""Clocks. GPU time is that of a CUDA graph's replays; host time is how long an eager call takes to return."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

REPLAYS = 21
_REPLAY_US = 1000.0  # a replay holds as many rounds as it takes to last this long: its fixed cost is a few microseconds
_MOST_CALLS = 512
_CLEARED_PER_S = 2e11  # half of what was seen

Call = Callable[[], Any]


def quantiles(values: Sequence[float]) -> tuple[float, list[float]]:
    """The median, and the 10th and 90th percentile."""
    ordered = sorted(values)

    def at(q: float) -> float:
        place = q * (len(ordered) - 1)
        low = math.floor(place)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (ordered[high] - ordered[low]) * (place - low)

    return at(0.5), [at(0.1), at(0.9)]


def l2_bytes() -> int:
    return int(torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size)


def gpu_us(calls: Sequence[Call], device: str) -> tuple[float, list[float], int]:
    """Microseconds of one call (median, 10th and 90th percentile over replays) and the calls in a replay.

    ``calls`` do the same on different inputs; a replay goes round all of them, so that none finds its inputs in the L2.
    """
    if device == "cpu":
        median, spread = quantiles([_seconds(call) * 1e6 for call in calls for _ in range(3)])
        return median, spread, 1
    for call in calls:
        call()
    _settle()
    graph = _capture(calls, 1)
    rounds = min(math.ceil(_REPLAY_US / min(_spans(graph.replay, 3))), max(_MOST_CALLS // len(calls), 1))
    if rounds > 1:
        graph = _capture(calls, rounds)
    _spans(graph.replay, 2)
    count = rounds * len(calls)
    return *quantiles([us / count for us in _spans(graph.replay, REPLAYS)]), count


def _settle() -> None:
    """Gives cached memory back, as a capture would, and waits until the driver has cleared it.

    Memory that is freed is cleared in the background at about 400 GB/s (seen on an H200): kernels that need all of the bandwidth
    take 10 % longer meanwhile, for 150 ms after 60 GB.
    """
    torch.cuda.synchronize()
    gc.collect()
    held = torch.cuda.memory_reserved()
    torch.cuda.empty_cache()
    time.sleep((held - torch.cuda.memory_reserved()) / _CLEARED_PER_S)


def _capture(calls: Sequence[Call], rounds: int) -> torch.cuda.CUDAGraph:
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    return graph


def _spans(work: Call, count: int) -> list[float]:
    """GPU microseconds of each of ``count`` times ``work``, queued without waiting."""
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]
    for start, end in events:
        start.record()
        work()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) * 1e3 for start, end in events]


def host_us(calls: Sequence[Call], device: str, *, batches: int = 20, length: int = 8) -> tuple[float, list[float]]:
    """Microseconds until an eager call returns. The queue is emptied after every ``length`` calls, so that no call waits for room."""
    for i in range(length):  # the allocator may have given its memory back
        calls[i % len(calls)]()
    times = []
    for _ in range(batches):
        if device != "cpu":
            torch.cuda.synchronize()
        times += [_seconds(calls[i % len(calls)]) * 1e6 for i in range(length)]
    if device != "cpu":
        torch.cuda.synchronize()
    return quantiles(times)


def cpu_us() -> float:
    """Microseconds of a loop of the interpreter: how fast the CPU is at the moment. Of one machine, two speeds were seen, twice apart."""
    return quantiles([_seconds(lambda: sum(range(1000))) * 1e6 for _ in range(50)])[0]


def _seconds(call: Call) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def ceilings() -> dict[str, Any]:
    """What this GPU does now: a device-to-device copy of 4 GiB (bytes read and written), a bfloat16 matrix product on random data.

    Not in a graph, where such a copy is a node of its own kind and was seen to run at two thirds of the rate.
    """
    source = torch.randn(1 << 30, device="cuda")
    target = torch.empty_like(source)
    copy, copy_spread = quantiles(_spans(partial(target.copy_, source), REPLAYS))
    del source, target
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    product, product_spread = quantiles(_spans(partial(torch.mm, a, b, out=out), REPLAYS))
    return {
        "copy_bytes_per_s": 2 * (4 << 30) / copy * 1e6,
        "copy_us": [copy, *copy_spread],
        "matmul_flop_per_s": 2 * 8192**3 / product * 1e6,
        "matmul_us": [product, *product_spread],
    }
