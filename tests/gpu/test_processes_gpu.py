"""First calls where things go wrong elsewhere: inside graph capture, on side streams, in threads, after fork, on a second device."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

SETUP = """
import threading, os, sys
import torch
import tileops.mamba as m
def inputs(device="cuda", seed=0, B=2, S=300, H=8, P=64, N=128, G=1, dtype=torch.bfloat16):
    g = torch.Generator(device).manual_seed(seed)
    r = lambda *s: torch.randn(*s, device=device, generator=g)
    return (r(B, S, H, P).to(dtype), r(B, S, H), -torch.rand(H, device=device, generator=g) - 0.5,
            r(B, S, G, N).to(dtype), r(B, S, G, N).to(dtype))
"""


def run(body: str, timeout: float = 120, **env: str) -> str:
    """Runs ``body`` in a fresh interpreter; its stdout. A non-zero exit status fails with its stderr."""
    import os

    done = subprocess.run(
        [sys.executable, "-c", SETUP + textwrap.dedent(body)], capture_output=True, text=True, timeout=timeout, env={**os.environ, **env}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_report_60_first_call_of_the_process_is_inside_graph_capture():
    run(
        """
        x, dt, A, B, C = inputs()
        op = m.Mamba2FwdOp(256)
        stream = torch.cuda.Stream()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            y, final = op(x, dt, A, B, C)
        for seed in (0, 1, 2):
            for old, new in zip((x, dt, A, B, C), inputs(seed=seed)):
                old.copy_(new)
            graph.replay()
            torch.cuda.synchronize()
            eager = op(x, dt, A, B, C)
            assert torch.equal(y, eager[0]) and torch.equal(final, eager[1]), seed
        """
    )


def test_two_streams_and_eight_threads_give_the_serial_answer():
    run(
        """
        cases = [inputs(seed=s, S=100 + 7 * s) for s in range(8)]
        op = m.Mamba2FwdOp(256)
        got, errors = [None] * 8, []
        def work(i):
            try:
                with torch.cuda.stream(torch.cuda.Stream()):
                    for _ in range(20):
                        got[i] = op(*cases[i])
                    torch.cuda.current_stream().synchronize()
            except BaseException as error:
                errors.append(error)
        threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
        torch.cuda.synchronize()
        [t.start() for t in threads]; [t.join() for t in threads]
        assert not errors, errors
        for i in range(8):
            y, final = op(*cases[i])
            assert torch.equal(y, got[i][0]) and torch.equal(final, got[i][1]), i
        """
    )


def test_side_stream_is_the_one_used():
    run(
        """
        x, dt, A, B, C = inputs(S=2048, H=32)
        op = m.Mamba2FwdOp(256)
        expected = op(x, dt, A, B, C)[0]
        late = torch.zeros_like(x)
        torch.cuda.synchronize()
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            torch.cuda._sleep(200_000_000)
            late.copy_(x)           # only a launch on this stream waits for it
            y = op(late, dt, A, B, C)[0]
        side.synchronize()
        assert torch.equal(y, expected)
        """
    )


def test_fork_before_cuda_is_used_works_and_after_it_is_refused_in_words():
    out = run(
        """
        op = m.Mamba2FwdOp(256)            # built before CUDA is up
        pid = os.fork()
        if pid == 0:
            try:
                y, _ = op(*inputs())
                torch.cuda.synchronize()
                os._exit(0 if torch.isfinite(y).all() else 3)
            except BaseException as error:
                print(error, file=sys.stderr, flush=True)
                os._exit(4)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        args = inputs()
        op(*args); torch.cuda.synchronize()
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                op(*args)
                os.write(write, b"no error")
            except RuntimeError as error:
                os.write(write, str(error).encode())
            os._exit(0)
        os.waitpid(pid, 0)
        print(os.read(read, 4096).decode())
        y, _ = op(*args)                   # the parent is unharmed
        torch.cuda.synchronize()
        """
    )
    assert "fork" in out, out


def test_reports_49_50_and_55_tensors_on_the_second_gpu_while_the_first_is_current():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    run(
        """
        op = m.Mamba2FwdOp(256)
        one, two = inputs("cuda:0"), [t.to("cuda:1") for t in inputs("cuda:0")]
        y0 = op(*one)[0]
        y1 = op(*two)[0]
        assert y1.device == torch.device("cuda:1") and torch.cuda.current_device() == 0
        assert torch.equal(y0.cpu(), y1.cpu())
        try:
            op(one[0], *two[1:])
        except ValueError as error:
            assert "cuda:0" in str(error) and "cuda:1" in str(error), error
        else:
            raise SystemExit("mixed devices were accepted")
        """
    )


def test_out_of_memory_is_named_so_and_the_next_call_works():
    run(
        """
        args = inputs()
        op = m.Mamba2FwdOp(256)
        expected = op(*args)[0]
        large = inputs(B=1, S=2**20, H=8)          # y alone is 2 GiB
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info()
        hog = torch.empty(free - 2**30, dtype=torch.uint8, device="cuda")
        try:
            op(*large)
        except torch.cuda.OutOfMemoryError as error:
            assert "orrupt" not in str(error)
        else:
            raise SystemExit("2 GiB came out of 1 GiB")
        del hog
        assert torch.equal(op(*args)[0], expected)
        """
    )
