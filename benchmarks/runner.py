"""Starts a process for each implementation, puts every row to them in turn, and merges their answers into a result file."""

from __future__ import annotations

import json
import os
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from benchmarks import shapes
from benchmarks.shapes import Spec

ROOT = Path(__file__).resolve().parents[1]

#: folder in --peers -> the module that calls it, and how its compiler is kept busy ahead of the measurement: "rows", processes
#: that take different rows; "share", processes that take all of them and compile different candidates.
PEERS = {"mamba_ssm": ("peer_mamba_ssm", "share"), "tileops010": ("peer_tileops010", "rows")}
#: Peers that copy inputs that are views are measured once more, as <name>_contiguous, on copies made before the clock starts.
COPYING = ("tileops010",)

#: Seconds for one row of one implementation, and for its compilation.
_MEASURE_LIMIT = 120.0
_COMPILE_LIMIT = 150.0
_COLD_LIMIT = 180.0
_COLD_PROCESSES = 5

_LATE = "no answer within"

SCHEMA = 1
#: What every row has; others may be added.
ROW_KEYS = (
    "op", "name", "batch", "seqlen", "n_heads", "d_head", "d_state", "n_groups", "dtype",
    "gpu_us", "host_us", "first_call_ms", "floor_us", "peers_us", "peers_host_us", "error", "peers_error",
)  # fmt: skip


class Lost(Exception):
    """A process ended or did not answer in time; it is gone."""


class Worker:
    """One process. ``ask`` waits for its answer."""

    def __init__(self, module: str, device: str, environment: dict[str, str], *, program: str = "worker") -> None:
        self.log = tempfile.TemporaryFile("w+", errors="replace")
        # Not in the repository: with -m the working directory comes first on the path, and one peer is called tileops as well.
        self.process = subprocess.Popen(
            [sys.executable, "-m", f"benchmarks.{program}", module, device],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            env=environment,
            cwd=tempfile.gettempdir(),
            text=True,
        )
        self._answers: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._answers.put(line)
        self._answers.put("")

    def ask(self, request: Any, timeout: float = _MEASURE_LIMIT) -> dict[str, Any]:
        """The answer; ``{"failed": reason}`` is one. Raises Lost."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            line = self._answers.get(timeout=timeout)
        except queue.Empty:
            self.close()
            raise Lost(f"{_LATE} {timeout:.0f} s") from None
        except OSError:
            line = ""
        if not line:
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(5)
            self.close()
            raise Lost(f"the process ended with status {self.process.returncode}: {self._last_words()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _last_words(self) -> str:
        self.log.seek(0)
        lines = [line.strip() for line in self.log.read().splitlines() if line.strip()]
        return lines[-1][:300] if lines else "nothing on standard error"

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


class Implementation:
    """An implementation under measurement: its process, started again after it was lost."""

    def __init__(self, module: str, device: str, environment: dict[str, str]) -> None:
        self.module, self.device, self.environment = module, device, environment
        self._worker: Worker | None = None

    def ask(self, request: dict[str, Any], timeout: float = _MEASURE_LIMIT) -> dict[str, Any]:
        if self._worker is None:
            self._worker = Worker(self.module, self.device, self.environment)
        try:
            answer = self._worker.ask(request, timeout)
        except Lost as lost:
            self._worker = None
            return {"failed": str(lost)}
        if "CUDA" in answer.get("failed", ""):  # its context may be unusable
            self.close()
        return answer

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()
            self._worker = None


def environment(peer: Path | None, caches: Path) -> dict[str, str]:
    """Of a process: the repository on its path, behind the peer's folder; compilers' caches in ``caches``."""
    inherited = [os.path.abspath(p) for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
    path = [*([str(peer)] if peer is not None else []), str(ROOT), *inherited]
    own = {"PYTHONPATH": os.pathsep.join(path), "TRITON_CACHE_DIR": str(caches / "triton"), "TILELANG_CACHE_DIR": str(caches / "tilelang")}
    return {"TILEOPS_POLICY": "packaged", **os.environ, **own}


def run(
    suites: Sequence[str],
    peers: Path | None,
    out: Path,
    *,
    device: str = "cuda",
    jobs: int | None = None,
    only: Sequence[str] = (),
) -> dict[str, Any]:
    """Measures, writing ``out`` after every row; the result is also returned.

    Args:
        suites: some of shapes.SUITES.
        peers: the folder that holds the peers' folders; None: ours alone.
        only: rows whose name contains one of these.
    """
    found = {name: peers.resolve() / name for name in PEERS if peers is not None and (peers / name).is_dir()}
    started = time.monotonic()
    report = Report(out)
    with ExitStack() as stack:
        caches = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="benchmarks-")))
        ours = Implementation("ours", device, environment(None, caches))
        others = {name: Implementation(PEERS[name][0], device, environment(folder, caches)) for name, folder in found.items()}
        for implementation in (ours, *others.values()):
            stack.callback(implementation.close)
        begin(report, ours, others, device)
        wanted = {suite: [s for s in rows_of(suite, device) if chosen(s, only)] for suite in suites}
        warm = [spec for suite in suites if suite != "cold" for spec in wanted[suite]]
        with report.timed("prepare"):
            refused = prepare(others, warm, jobs or os.cpu_count() or 1, report) if warm and others else {}
        for suite in suites:
            if not wanted[suite]:
                continue
            with report.timed(suite):
                if suite == "cold":
                    for implementation in (ours, *others.values()):
                        implementation.close()  # a cold process has the GPU to itself
                    for row in cold_rows(wanted[suite], found, device):
                        report.add(row)
                    continue
                for spec in wanted[suite]:
                    report.add(measured_row(spec, ours, others, refused, report))
        report.data["seconds"]["all"] = round(time.monotonic() - started, 1)
        report.write()
    return report.data


def chosen(spec: Spec, only: Sequence[str]) -> bool:
    """Whether ``--only`` lets a row through; cold rows are measured together or not at all."""
    return not only or (spec.suite != "cold" and any(text in spec.name for text in only))


def rows_of(suite: str, device: str) -> list[Spec]:
    return shapes.specs(suite) if device != "cpu" else shapes.tiny(suite)


class Report:
    """The result file, rewritten as a whole at each step: a run that is cut short leaves what it had."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.data: dict[str, Any] = {
            "schema": SCHEMA,
            "date": time.strftime("%Y-%m-%d"),
            "machine": {},
            "versions": {},
            "ceilings": {},
            "seconds": {},
            "rows": [],
        }

    def add(self, row: dict[str, Any]) -> None:
        assert set(ROW_KEYS) <= set(row), set(ROW_KEYS) - set(row)
        self.data["rows"].append(row)
        self.write()
        print(line_of(row), flush=True)

    def write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        beside = self.path.with_name(self.path.name + ".part")
        beside.write_text(json.dumps(self.data, indent=1) + "\n")
        beside.replace(self.path)

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        start = time.monotonic()
        try:
            yield
        finally:
            self.data["seconds"][what] = round(time.monotonic() - start, 1)


def begin(report: Report, ours: Implementation, others: dict[str, Implementation], device: str) -> None:
    """Machine, versions and ceilings; without ours there is nothing to measure."""
    machine = ours.ask({"command": "machine"})
    if "failed" in machine:
        raise SystemExit(f"benchmarks: {machine['failed']}")
    report.data["machine"] = machine
    for name, implementation in {"ours": ours, **others}.items():
        answer = implementation.ask({"command": "versions"})
        report.data["versions"].update(answer.get("versions", {name: answer.get("failed")}))
    checked = ours.ask({"command": "selfcheck"})
    report.data["reference"] = {
        "method": "float64 on the inputs as given, in chunks of 64 tokens; relative error in norm",
        "chunks_against_token_by_token": checked.get("error", checked.get("failed")),
    }
    if device != "cpu":
        report.data["ceilings"] = ours.ask({"command": "ceilings"})
    report.write()


def prepare(others: dict[str, Implementation], specs: list[Spec], jobs: int, report: Report) -> dict[tuple[str, Spec], str]:
    """Fills the peers' compiler caches by many processes. Returns the rows that could not be, with the reason."""
    refused: dict[tuple[str, Spec], str] = {}
    seconds: dict[str, dict[str, float]] = {name: {} for name in others}
    threads = []
    processes = 0
    for name, implementation in others.items():
        way = PEERS[name][1]
        todo: queue.SimpleQueue[Spec] = queue.SimpleQueue()
        for spec in specs if way == "rows" else ():
            todo.put(spec)

        def work(name: str = name, implementation: Implementation = implementation, todo: Any = todo, share: Any = None) -> None:
            quiet = Implementation(implementation.module, implementation.device, {**implementation.environment, "OMP_NUM_THREADS": "1"})
            for spec in taken(todo) if share is None else specs:
                answer = quiet.ask({"command": "prepare", "spec": spec.to_json(), "share": share}, _COMPILE_LIMIT)
                if share is not None:
                    continue
                if "failed" not in answer:
                    seconds[name][f"{spec.op} {spec.name}"] = round(answer["seconds"], 2)
                elif answer["failed"].startswith(_LATE):  # anything else is tried again when it is measured
                    refused[name, spec] = f"compilation: {answer['failed']}"
            quiet.close()

        each = jobs if way == "rows" else max(jobs // 2, 1)
        processes += each
        for index in range(each):
            share = [index, each] if way == "share" else None
            threads.append(threading.Thread(target=work, kwargs={"share": share}, daemon=True))
            threads[-1].start()
    for thread in threads:
        thread.join()
    report.data["prepare"] = {"processes": processes, "seconds": {name: table for name, table in seconds.items() if table}}
    return refused


def taken(todo: queue.SimpleQueue[Spec]) -> Iterator[Spec]:
    while True:
        try:
            yield todo.get_nowait()
        except queue.Empty:
            return


def row_of(spec: Spec) -> dict[str, Any]:
    """A row with nothing in it yet. Keys that mean nothing for the op stay out."""
    row: dict[str, Any] = {key: value for key, value in spec.to_json().items() if value is not None}
    return {
        **row,
        **dict.fromkeys(("gpu_us", "host_us", "first_call_ms", "floor_us", "error")),
        **{f"peers_{k}": {} for k in ("us", "host_us", "error")},
    }


def measured_row(
    spec: Spec,
    ours: Implementation,
    others: dict[str, Implementation],
    refused: dict[tuple[str, Spec], str],
    report: Report,
) -> dict[str, Any]:
    request = {"command": "measure", "spec": spec.to_json()}
    row = row_of(spec)
    mine = ours.ask({**request, "rounding": True})
    digest = mine.pop("digest", None)
    row.update({key: value for key, value in mine.items() if key != "failed"})
    if "failed" in mine:
        row["reason"] = mine["failed"]
    row["floor_us"] = floor_us(spec, mine.get("bytes"), report.data["ceilings"])
    reasons: dict[str, str] = {}
    for name, implementation in others.items():
        reason = refused.get((name, spec))
        variants = [(name, request)]
        if name in COPYING and spec.suite != "decode":
            variants.append((f"{name}_contiguous", {**request, "contiguous": True}))
        for peer, asked in variants:
            answer = {"failed": reason} if reason is not None else implementation.ask(asked)
            if digest is not None and answer.get("digest", digest) != digest:
                answer = {"failed": "drew other inputs than ours"}
            if "failed" in answer:
                reasons[peer] = answer["failed"]
            for ours_key, key in (("gpu_us", "us"), ("host_us", "host_us"), ("error", "error")):
                row[f"peers_{key}"][peer] = answer.get(ours_key)
            for key in ("spread", "host_spread", "cpu_us", "errors", "output_dtype"):
                row.setdefault(f"peers_{key}", {})[peer] = answer.get(key)
    if reasons:
        row["peers_reason"] = reasons
    return row


def floor_us(spec: Spec, nbytes: int | None, ceilings: dict[str, Any]) -> float | None:
    """No implementation that reads its inputs and writes its outputs is faster: the larger of two times.

    Bytes at the measured copy bandwidth; for the full forward also the least matrix arithmetic, 4 P N a token and head, at the
    measured rate.
    """
    bandwidth, rate = ceilings.get("copy_bytes_per_s"), ceilings.get("matmul_flop_per_s")
    if nbytes is None or bandwidth is None or rate is None:
        return None
    flops = 4 * spec.d_head * spec.d_state * spec.batch * spec.seqlen * spec.n_heads if spec.op == "Mamba2FwdOp" else 0
    return float(max(nbytes / bandwidth, flops / rate) * 1e6)


def cold_rows(specs: list[Spec], found: dict[str, Path], device: str) -> Iterator[dict[str, Any]]:
    """One row a quantity. Ours: the median of some fresh processes; a peer: one process whose compiler cache is empty."""
    runs = [cold_process("ours", None, specs, device) for _ in range(_COLD_PROCESSES if device != "cpu" else 1)]
    answers: dict[str, dict[str, Any]] = {}

    def cold(name: str, folder: Path) -> None:
        answers[name] = cold_process(PEERS[name][0], folder, specs, device)

    threads = [threading.Thread(target=cold, args=item) for item in found.items()]  # side by side: they mostly compile
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    good = [r for r in runs if "failed" not in r]
    cpu_us = statistics.median(r["cpu_us"] for r in good) if good else None
    forward, second, decode = specs
    quantities = {
        "import": (forward, "import, beyond torch's"),
        "construct forward": (forward, "construct"),
        "first forward": (forward, "construct and first call"),
        "first forward of a second shape": (second, "construct and first call, second shape"),
        "construct decode": (decode, "construct"),
        "first decode": (decode, "construct and first call"),
        "host forward": (forward, "host time of a call"),
        "host decode": (decode, "host time of a call"),
    }
    for key, (spec, words) in quantities.items():
        row = {**row_of(spec), "name": f"{spec.name}: {words}", "quantity": key}
        values = [r[key] for r in good]
        row["ms"] = statistics.median(values) if values else None
        row["ms_spread"] = [min(values), max(values)] if values else None
        row["peers_ms"] = {name: answer.get(key) for name, answer in answers.items()}
        if "first" in key:
            row["first_call_ms"] = row["ms"]
        if "host" in key:
            row["host_us"] = None if row["ms"] is None else row["ms"] * 1e3
            row["peers_host_us"] = {name: None if ms is None else ms * 1e3 for name, ms in row["peers_ms"].items()}
        row["cpu_us"] = cpu_us
        yield _with_reasons(row, runs, answers)
    over = sorted(ms for r in good for ms in r["new shape"])
    row = {**row_of(forward), "name": "a new batch and seqlen, host time over a repeated call", "quantity": "new shape", "peers_ms": {}}
    row["ms"] = statistics.median(over) if over else None
    row["ms_p99"] = over[int(0.99 * (len(over) - 1))] if over else None
    row["shapes"] = len(over)
    row["cpu_us"] = cpu_us
    yield _with_reasons(row, runs, answers)


def _with_reasons(row: dict[str, Any], runs: Iterable[dict[str, Any]], answers: dict[str, dict[str, Any]]) -> dict[str, Any]:
    failed = [r["failed"] for r in runs if "failed" in r]
    if failed:
        row["reason"] = failed[0]
    reasons = {name: answer["failed"] for name, answer in answers.items() if "failed" in answer}
    if reasons:
        row["peers_reason"] = reasons
    return row


def cold_process(module: str, folder: Path | None, specs: list[Spec], device: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="benchmarks-cold-") as caches:
        worker = Worker(module, device, environment(folder, Path(caches)), program="cold")
        try:
            return worker.ask([spec.to_json() for spec in specs], _COLD_LIMIT)
        except Lost as lost:
            return {"failed": str(lost)}
        finally:
            worker.close()


def line_of(row: dict[str, Any]) -> str:
    """A row as it is printed while the run goes on."""
    if "ms" in row:
        words = [f"{row['ms']:.3f} ms" if row["ms"] is not None else row.get("reason", "-")]
        words += [f"{name} {'-' if ms is None else f'{ms:.1f} ms'}" for name, ms in row["peers_ms"].items()]
    else:
        words = [_figures(row["gpu_us"], row["host_us"], row["error"]) if row["gpu_us"] is not None else row.get("reason", "-")]
        for name, us in row["peers_us"].items():
            numbers = _figures(us, row["peers_host_us"][name], row["peers_error"][name]) if us is not None else row["peers_reason"][name]
            words.append(f"{name} {numbers}")
    return f"{row['op']:22} {row['name']:34} " + " | ".join(words)


def _figures(gpu: float, host: float, error: float) -> str:
    return f"{gpu:8.1f} us, host {host:5.1f}, error {error:.1e}"
