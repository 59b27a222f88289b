"""What holds for every verb: help, statuses, JSON, a closed pipe, an interrupt."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from tileops import compiler
from tileops.cli import VERBS, _arguments, _exit, errors_of

ARGUMENTS = ("--chunk-size", "16", "--head-dim", "16", "--d-state", "16", "--arch", "sm_80")
