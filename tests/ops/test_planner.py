"""How a plan passes tensors that are not given. No driver is called."""

from __future__ import annotations

import ctypes
from contextlib import contextmanager
from types import SimpleNamespace

import helpers_store as h
import pytest
import torch

pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")

from tileops import driver
from tileops.config import Param
from tileops.driver import Kernel, _api
from tileops.errors import CorruptArtifactError
from tileops.ops import _planner, _resolve, _torch

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


def parameters_of(launch: _planner.Launch) -> list[int]:
    """The parameters' addresses, as the driver gets them."""
    return list((ctypes.c_uint64 * len(PARAMS)).from_address(launch._arguments[2].value))


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
    at = dict(zip((p.name for p in PARAMS), parameters_of(launch)))
    launch._fill(launch._buffer, launch._first, 0, 0, 0, *addresses)
    pointers = {p.name: ctypes.c_uint64.from_address(at[p.name]).value for p in PARAMS if p.kind == "pointer"}
    assert pointers == {"x": x.data_ptr(), "D": 0}
    assert ctypes.c_int64.from_address(at["D_stride0"]).value == 0
    assert ctypes.c_int64.from_address(at["x_stride0"]).value == 6


def test_the_stride_of_a_dimension_of_size_1_is_0(planned):
    x = planned.slots[0]._replace(shape=(1, 6), stride=(7, 1))
    planned.launch("recurrent", {}, {"x": x, "D": None}, {"B": 3})
    launch = planned.steps[0].run.__self__
    at = dict(zip((p.name for p in PARAMS), parameters_of(launch)))
    assert ctypes.c_int64.from_address(at["x_stride0"]).value == 0


def test_a_tensor_that_no_call_has_is_a_bad_record(planned):
    with pytest.raises(CorruptArtifactError, match="has a tensor 'D' that no call has; remove the artifact"):
        planned.launch("recurrent", {}, {"x": planned.slots[0]}, {"B": 3, "D.stride0": 6})


def test_one_that_the_kernel_needs_is_missed(planned):
    with pytest.raises(ValueError, match=r"^recurrent: x is not optional\.$"):
        planned.launch("recurrent", {}, {"x": None, "D": planned.slots[0]}, {"B": 3})


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("current", [0, 1])
def test_one_launch_into_one_new_tensor(planned, monkeypatch, alone, current):
    """Decode's kind of plan, as a recognised call runs it: by its own short way, by the way of all others, and on another device."""
    launched, entered, status, before = [], [], 0, current

    def launch(description, function, parameters, extra):
        x, out = (ctypes.c_uint64.from_address(at).value for at in (ctypes.c_uint64 * 2).from_address(parameters.value))
        stream = ctypes.c_uint64.from_address(description.value + 32).value
        launched.append((x, out, stream))
        return status

    @contextmanager
    def device(ordinal):
        nonlocal current
        entered.append(ordinal)
        current, previous = ordinal, current
        yield
        current = previous

    monkeypatch.setattr(_api, "function", lambda name, version: launch)
    monkeypatch.setattr(_api, "failure", lambda name, status, about: RuntimeError(f"{name} {status}"))
    monkeypatch.setattr(driver, "device_info", lambda ordinal: SimpleNamespace(name="a GPU"))
    monkeypatch.setattr(_planner, "allocate", lambda shape, stride, dtype: torch.empty_strided(shape, stride, dtype=dtype))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda ordinal: 7, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: current, raising=False)
    monkeypatch.setattr(torch.cuda, "device", device)
    planned.device = torch.device("cuda", 0)
    out = planned.empty((4, 6), torch.bfloat16)
    planned.launch("recurrent", {}, {"x": planned.slots[0], "D": out}, {"B": 3})
    plan = _planner.Plan(planned, out)
    assert plan._alone is not None
    plan._alone = plan._alone if alone else None
    x = torch.zeros(4, 6)
    then, names = plan.written()
    call = _torch.recogniser([x, None], lambda: 0, 0, exact=True, then=then, names=names)
    made = call(x, None)
    assert made.shape == (4, 6) and made.stride() == (6, 1) and made.dtype == torch.bfloat16
    assert launched == [(x.data_ptr(), made.data_ptr(), 7)] and entered == [0] * before and current == before
    status = 700
    with pytest.raises(RuntimeError, match=r"^cuLaunchKernelEx 700$"):
        call(x, None)


def test_plans_of_more_than_that_do_not_take_the_short_way(planned):
    x = planned.slots[0]
    launches = {
        "it is an input that is returned": lambda out: x,
        "two are returned": lambda out: (out, x),
        "two launches": lambda out: planned.launch("recurrent", {}, {"x": x, "D": out}, {"B": 3}) or out,
        "a workspace": lambda out: planned.workspace((8,), torch.float32) and out,
    }
    out = planned.empty((4, 6), torch.float32)
    planned.launch("recurrent", {}, {"x": x, "D": out}, {"B": 3})
    for what, more in launches.items():
        assert not _planner.Plan(planned, more(out))._alone, what
