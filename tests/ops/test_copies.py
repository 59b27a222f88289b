"""An op is part of a module: it can be copied and pickled, also after it has run."""

from __future__ import annotations

import copy
import pickle
import threading

from tileops.mamba import Mamba2FwdOp


def test_plans_are_left_behind():
    op = Mamba2FwdOp(64, dt_limit=(0.0, 0.5))
    op._plans[("a call",)] = threading.Lock()  # as a plan does, it holds what cannot be copied
    for other in (copy.deepcopy(op), pickle.loads(pickle.dumps(op))):
        assert repr(other) == repr(op) and other._plans == {}
    assert len(op._plans) == 1
