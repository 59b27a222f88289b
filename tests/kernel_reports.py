"""What users of Mamba-2 kernels reported, and which tests hold it: writes docs/kernel-reports.md.

A test says which report it holds in its name, docstring or comments: ``test_report_28_...``, ``# report 10``,
"Reports 14 and 72".

    python tests/kernel_reports.py CPU.xml GPU.xml > docs/kernel-reports.md      junitxml files of recorded test runs
"""

from __future__ import annotations

import ast
import re
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parent

#: number -> what a user must never meet. Numbers are those of the collection that the reports were gathered in.
REPORTS = {
    1: "huge decay rates: the exponent of every decay is at most 0 before exp",
    2: "masked pairs are selected before exp, never multiplied by 0 after it",
    4: "decays across a span that float32's exp cannot hold are taken as one difference",
    5: "float16 inputs whose products or state exceed 65504",
    6: "softplus keeps its digits from -80 to 200",
    7: "results do not depend on what memory held before",
    9: "seq_idx: a chunk that ends in padding has state 0, foreign NaN is not read",
    10: "rates in bfloat16 are refused",
    11: "long decode agrees with prefill; a state in another dtype is never taken by accident",
    12: "rates of 0, -0 and -inf",
    14: "limits of dt apply after bias and softplus",
    16: "offsets beyond 2**31 bytes: a row pitch of 35072 elements, 65536 tokens",
    17: "offsets beyond 2**31 elements: 524288 tokens of 80 heads",
    18: "262144 tokens",
    19: "2**31 elements of chunk states",
    22: "64-bit offsets in every kernel",
    23: "64-bit offsets in the generated source",
    24: "more than 65535 chunks or decode rows: no grid limit",
    25: "a launch that CUDA refuses raises, never a silent no-op",
    27: "the final state is after the last token, whatever the length",
    28: "an initial state decays from its own end",
    29: "chunks of very different steps: sums restart at each chunk only",
    31: "one call = two calls = token by token",
    32: "initial_states has an effect; None is zeros, bit for bit",
    34: "empty batches and sequences",
    35: "seq_idx separates sequences where it is documented to",
    36: "prefill agrees with decode",
    37: "an expanded rate gives the bits of a full one, without a copy",
    38: "views of one projection, odd pitches and offsets, transposed heads, a strided last dimension",
    40: "head h reads group h // (H / G)",
    41: "any ratio of heads to groups; one that does not divide is refused",
    42: "sizes without a kernel are refused by name",
    45: "d_head = d_state = 16",
    46: "cb per head is refused",
    47: "the cumsum at every number of heads and chunk length",
    49: "tensors on the second GPU while the first is current; mixed devices are refused",
    50: "the arch follows the tensors' device",
    52: "no kernel needs more shared memory than its arch has",
    53: "a GPU without kernels is refused, not served wrong",
    54: "an unknown arch is refused; every element of an output is written",
    55: "what a GPU can run is decided for the tensors' device",
    56: "200 new shapes: nothing is compiled or loaded, no process is started",
    57: "the cut of a sequence is sound for every length",
    60: "the first call of a process may be inside CUDA-graph capture; replays see new data",
    62: "torch.compile without a graph break",
    64: "the same bits from run to run, and for a row alone or in any batch",
    66: "the error stays near what rounding the inputs forces",
    67: "optional arguments may be left out",
    68: "a slot that stands for padding is never accessed",
    69: "a state in a pool is updated in place, once; its neighbours are not touched",
    72: "every argument that is accepted has an effect",
    73: "output dtypes are checked at construction",
    75: "inputs that require grad are refused",
}

#: Report 59 (a crash after autotuning) has no test: nothing is tuned at run time.
_MENTION = re.compile(r"reports?[_ ](\d+(?:(?:_and_|_|, | and |, and )\d+)*)", re.IGNORECASE)


def mentions() -> Iterator[tuple[int, str]]:
    """(report, test) for every test function that names one; a test is ``tests/gpu/test_x.py::test_y``."""
    for path in sorted(TESTS.rglob("test_*.py")):
        text = path.read_text()
        for node in ast.parse(text).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
                source = "\n".join(text.splitlines()[first - 1 : node.end_lineno])
                for found in _MENTION.finditer(source):
                    for number in re.findall(r"\d+", found[1]):
                        if int(number) in REPORTS:
                            yield int(number), f"{path.relative_to(TESTS.parent).as_posix()}::{node.name}"


def held() -> dict[int, list[str]]:
    """Report -> the tests that hold it."""
    found: dict[int, list[str]] = {number: [] for number in REPORTS}
    for number, test in mentions():
        if test not in found[number]:
            found[number].append(test)
    return found


def outcomes(files: list[str]) -> dict[str, Counter[str]]:
    """test -> how many of its cases passed, failed or were skipped."""
    found: dict[str, Counter[str]] = {}
    for file in files:
        for case in ElementTree.parse(file).iter("testcase"):
            test = f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name', '').partition('[')[0]}"
            kinds = {child.tag for child in case}
            outcome = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
            found.setdefault(test, Counter())[outcome] += 1
    return found


def table(files: list[str]) -> str:
    seen = outcomes(files)
    lines = [
        "# Reports on Mamba-2 kernels, and the tests that hold them",
        "",
        "Written by `python tests/kernel_reports.py` from junitxml files of test runs; tests in `tests/gpu` ran on an NVIDIA H200.",
        "Each row is a kind of fault that users of other libraries met. The last column counts the cases of each test in those runs.",
        "Numbers are those of the collection of public reports that the rows were gathered from; those that are missing concern no part",
        "of this library.",
        "",
        "| report | what holds here | test | passed |",
        "|---|---|---|---|",
    ]
    for number, tests in held().items():
        for i, test in enumerate(tests):
            result = seen.get(test, Counter())
            rest = ", ".join(f"{result[kind]} {kind}" for kind in ("failed", "skipped") if result[kind])
            count = ", ".join(filter(None, [str(result["passed"]) if result["passed"] else "", rest])) or "not in these runs"
            lines.append(f"| {number if i == 0 else ''} | {REPORTS[number] if i == 0 else ''} | `{test}` | {count} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(table(sys.argv[1:]), end="")
