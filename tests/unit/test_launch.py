"""How a launch lays out its parameters, whatever their order in the record. No driver is called."""

from __future__ import annotations

import ctypes
import itertools

import helpers_store as h
import pytest

pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")

from tileops.config import Param, TensorMap
from tileops.driver import Kernel, Launch

MAP = TensorMap(dtype=9, dims=("64", "H"), strides=("x.stride0 * 2",), box=(64, 1), swizzle=3, promotion=2)
PARAMS = (
    Param("A", "pointer", "A"),
    Param("x_desc", "tensormap", "x"),
    Param("B", "int32", "B"),
    Param("y", "pointer", "y"),
    Param("dt_max", "float32", "dt_max"),
    Param("z_desc", "tensormap", "z"),
    Param("x_stride0", "int64", "x.stride0"),
)


def launch(**sizes: int) -> Launch:
    record = h.artifact(params=PARAMS, tensormaps={"x_desc": MAP, "z_desc": MAP}, grid=("B", "1", "1")).record
    return Launch(Kernel(record, 0, 0), {"B": 3, "H": 4, "x.stride0": 2**40, **sizes}, {"dt_max": 0.5})


def test_every_parameter_has_its_place():
    made = launch()
    assert made.tensors == ("A", "y", "x", "z")
    made._fill(made._buffer, made._first, 0xA, 0xB)
    at = dict(zip((p.name for p in PARAMS), made._addresses))
    assert ctypes.c_uint64.from_address(at["A"]).value == 0xA
    assert ctypes.c_uint64.from_address(at["y"]).value == 0xB
    assert ctypes.c_int32.from_address(at["B"]).value == 3
    assert ctypes.c_float.from_address(at["dt_max"]).value == 0.5
    assert ctypes.c_int64.from_address(at["x_stride0"]).value == 2**40


def test_tensor_maps_are_aligned_and_nothing_overlaps():
    made = launch()
    places = sorted((address, 128 if p.kind == "tensormap" else 8) for p, address in zip(PARAMS, made._addresses))
    assert all(address % size == 0 for address, size in places)
    assert all(first + size <= second for (first, size), (second, _) in itertools.pairwise(places))
    start = ctypes.addressof(made._buffer)
    assert start <= places[0][0] and sum(places[-1]) <= start + ctypes.sizeof(made._buffer)


def test_a_value_beyond_32_bits_and_a_grid_beyond_cuda_are_refused():
    with pytest.raises(ValueError, match=r"grid x would be 2147483648"):
        launch(B=2**31)
    with pytest.raises(ValueError, match=r"B = -2147483649 does not fit"):
        launch(B=-(2**31) - 1)
