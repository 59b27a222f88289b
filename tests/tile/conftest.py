"""Puts tests/ops on the import path: its recurrence.py, ssd_cases.py and forward_features.py serve these tests too."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "ops"))
