"""How a plan passes tensors that are not given. No driver is called."""

from __future__ import annotations

import ctypes

import helpers_store as h
import pytest
import torch

pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")

from tileops.config import Param
from tileops.driver import Kernel, _api
from tileops.ops import _planner, _resolve

PARAMS = (
    Param("x", "pointer", "x"),
    Param("D", "pointer", "D"),
    Param("D_stride0", "int64", "D.stride0"),
    Param("x_stride0", "int64", "x.stride0"),
)


@pytest.fixture
def planned(monkeypatch):
    """A launch of a kernel whose D is optional, over x alone."""
    record = h.artifact(params=PARAMS, optional=("D",), grid=("B", "1", "1"), kernel="gate").record
    monkeypatch.setattr(_resolve, "obtain", lambda *_: Kernel(record, 0, 0))
    monkeypatch.setattr(_api, "function", lambda name, version: None)
    return _planner.Planner([torch.zeros(4, 6), None], torch.device("cpu"))


def test_a_tensor_that_is_not_given_is_address_0_with_strides_0(planned, monkeypatch):
    fired = []
    monkeypatch.setattr(_planner.Launch, "fire", lambda self, addresses, stream: fired.append((self, addresses)))
    planned.launch("recurrent", {}, {"x": planned.slots[0], "D": planned.slots[1]}, {"B": 3})
    x = torch.zeros(4, 6)
    _planner.Plan(planned, planned.slots[0])
    (step,) = planned.steps
    assert step.slots == [planned.slots[0]]
    step.run([x.data_ptr()], 0)
    ((launch, addresses),) = fired
    assert launch.tensors == ("x",) and addresses == [x.data_ptr()]
    at = dict(zip((p.name for p in PARAMS), launch._addresses))
    launch._fill(launch._buffer, launch._first, 0, 0, 0, *addresses)
    pointers = {p.name: ctypes.c_uint64.from_address(at[p.name]).value for p in PARAMS if p.kind == "pointer"}
    assert pointers == {"x": x.data_ptr(), "D": 0}
    assert ctypes.c_int64.from_address(at["D_stride0"]).value == 0
    assert ctypes.c_int64.from_address(at["x_stride0"]).value == 6


def test_one_that_the_kernel_needs_is_missed(planned):
    with pytest.raises(ValueError, match=r"^recurrent: x is not optional\.$"):
        planned.launch("recurrent", {}, {"x": None, "D": planned.slots[0]}, {"B": 3})
