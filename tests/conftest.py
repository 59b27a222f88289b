"""Puts this folder on the import path (helpers_*.py), and writes docs/fault-matrix.md when asked to.

``pytest tests/processes --fault-matrix docs/fault-matrix.md``: a test that shows what a fault does says so through the
fixture ``fault`` (tests/processes/conftest.py); the table holds the rows of the tests that passed.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

_ROWS = pytest.StashKey[dict[tuple[str, str], tuple[str, str]]]()
_config: list[pytest.Config] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fault-matrix", metavar="FILE", help="write the table of faults shown by the tests that passed")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_ROWS] = {}
    _config[:] = [config]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    # Through the report, so that rows also arrive from the workers of pytest-xdist.
    if report.when == "call" and report.passed:
        for name, value in report.user_properties:
            if name == "fault":
                fault, outcome = value
                # One row for the cases of one test that end alike.
                _config[0].stash[_ROWS][(report.nodeid.partition("[")[0], fault)] = (fault, outcome)


def pytest_sessionfinish(session: pytest.Session) -> None:
    target = session.config.getoption("--fault-matrix")
    rows = session.config.stash.get(_ROWS, {})
    if not target or hasattr(session.config, "workerinput"):
        return
    lines = [
        "# What a fault does to the artifact store",
        "",
        "Written by the tests themselves: `pytest tests/processes --fault-matrix docs/fault-matrix.md`. Every row was seen to",
        "happen with real processes and real file systems, and each test also shows a hit. Only a network file system's faults that",
        "strike once (ESTALE, EBUSY) are played in the child process: no such file system was at hand.",
        "",
        "| fault | what happened | test |",
        "|---|---|---|",
    ]
    for (test, _), (fault, outcome) in sorted(rows.items()):
        lines.append(f"| {fault} | {outcome} | `{test}` |")
    Path(target).write_text("\n".join(lines) + "\n")
