"""Puts tests/ops on the import path: its recurrence.py and ssd_cases.py serve the CPU and the GPU tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "ops"))
