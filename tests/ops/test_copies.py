"""An op is part of a module: it can be copied and pickled, also after it has run. It stays what it was built as."""

from __future__ import annotations

import copy
import inspect
import pickle
import threading

import pytest
from library_cases import NAMES, calls, options

from tileops.mamba import Mamba2FwdOp


def test_plans_are_left_behind():
    op = Mamba2FwdOp(64, dt_limit=(0.0, 0.5))
    op._plans[("a call",)] = threading.Lock()  # as a plan does, it holds what cannot be copied
    for other in (copy.deepcopy(op), pickle.loads(pickle.dumps(op))):
        assert repr(other) == repr(op) and other._plans == {}
    assert len(op._plans) == 1


@pytest.mark.parametrize("name", NAMES)
def test_options_are_fixed_and_the_refusal_says_what_to_do(name):
    op, _ = calls("cpu")[name]
    before = options(op)
    assert set(before) == set(inspect.signature(type(op)).parameters)
    for each in (op, copy.copy(op), pickle.loads(pickle.dumps(op))):
        for option, value in before.items():
            with pytest.raises(
                AttributeError, match=rf"^{option}: expected to stay what the op was built with; build another, {name}\({option}="
            ):
                setattr(each, option, value)
        assert options(each) == before
