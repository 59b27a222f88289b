"""docs/kernel-reports.md: every report is held by a test, and the page names the tests that there are."""

from __future__ import annotations

import re
from pathlib import Path

from kernel_reports import REPORTS, held

PAGE = Path(__file__).parents[1] / "docs" / "kernel-reports.md"


def test_every_report_is_held_by_a_test():
    assert [number for number, tests in held().items() if not tests] == []


def test_the_page_names_the_tests_that_there_are():
    text = PAGE.read_text()
    assert set(re.findall(r"`(tests/[^`]+::[^`]+)`", text)) == {test for tests in held().values() for test in tests}
    assert [int(n) for n in re.findall(r"^\| (\d+) \|", text, re.MULTILINE)] == list(REPORTS)
