"""How a launch lays out its parameters, whatever their order in the record. No driver is called."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools

import helpers_store as h
import pytest

pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")

from tileops import driver
from tileops.config import Param, TensorMap
from tileops.driver import Kernel, Launch, _api
from tileops.errors import CorruptArtifactError

MAPS = {
    "x_desc": TensorMap(dtype=9, dims=("64", "H"), strides=("x.stride0 * 2",), box=(64, 1), swizzle=3, promotion=2),
    "z_desc": TensorMap(dtype=7, dims=("8", "B", "H"), strides=("32", "B * 32"), box=(8, 1, 2), swizzle=0, promotion=1),
}
PARAMS = (
    Param("A", "pointer", "A"),
    Param("x_desc", "tensormap", "x"),
    Param("B", "int32", "B"),
    Param("y", "pointer", "y"),
    Param("dt_max", "float32", "dt_max"),
    Param("z_desc", "tensormap", "z"),
    Param("x_stride0", "int64", "x.stride0"),
)


FUNCTION = 0xF00
REFUSED = 0xBAD
PROVENANCE = h.artifact().record.provenance
GPU = driver.DeviceInfo(0, "a GPU", (9, 0), 232448, 12000, 132)


@pytest.fixture
def launched(monkeypatch):
    """What the driver is asked to launch: (grid, block, shared memory, stream, attributes), function, parameters' addresses."""
    calls, encoded = [], []

    class Config(ctypes.Structure):  # CUlaunchConfig
        _fields_ = [
            ("grid", ctypes.c_uint * 3),
            ("block", ctypes.c_uint * 3),
            ("smem", ctypes.c_uint),
            ("stream", ctypes.c_void_p),
            ("attrs", ctypes.c_void_p),
            ("count", ctypes.c_uint),
        ]

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(Config), ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p)
    def launch_kernel(config, function, parameters, extra):
        c = config.contents
        about = tuple(c.grid), tuple(c.block), c.smem, c.stream or 0, c.attrs, c.count
        calls.append((about, function, [parameters[i] for i in range(len(PARAMS))]))
        assert extra is None
        return 0

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
    def replace_address(tensor_map, address):
        if address == REFUSED:
            return 1
        ctypes.c_uint64.from_address(tensor_map).value = address
        return 0

    @ctypes.CFUNCTYPE(
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.c_uint,
        ctypes.c_void_p,
        *[ctypes.POINTER(ctypes.c_uint64)] * 2,
        *[ctypes.POINTER(ctypes.c_uint32)] * 2,
        *[ctypes.c_int] * 4,
    )
    def encode_tiled(tensor_map, dtype, rank, address, dims, strides, box, steps, interleave, swizzle, promotion, fill):
        encoded.append((dtype, rank, dims[:rank], strides[: rank - 1], box[:rank], steps[:rank], interleave, swizzle, promotion, fill))
        return replace_address(tensor_map, address)

    functions = {"cuTensorMapEncodeTiled": encode_tiled, "cuLaunchKernelEx": launch_kernel, "cuTensorMapReplaceAddress": replace_address}

    def function(name: str, version: int):
        return ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.cast(functions[name], ctypes.c_void_p).value)

    monkeypatch.setattr(_api, "function", function)
    monkeypatch.setattr(driver, "device_info", lambda device: GPU)
    yield calls
    x, z = (9, 2, [64, 4], [2**41], [64, 1], [1, 1], 0, 3, 2, 0), (7, 3, [8, 3, 4], [32, 96], [8, 1, 2], [1, 1, 1], 0, 0, 1, 0)
    assert encoded in ([], [x, z])  # for a launch's first addresses alone


def launch(*grid: str, absent: tuple[str, ...] = (), **sizes: int) -> Launch:
    record = h.artifact(params=PARAMS, tensormaps=MAPS, grid=(*(grid or ("B",)), "1", "1")[:3]).record
    return Launch(Kernel(record, 0, FUNCTION), {"B": 3, "H": 4, "x.stride0": 2**40, **sizes}, {"dt_max": 0.5}, absent)


def parameters_of(made: Launch) -> list[int]:
    """The parameters' addresses, as the driver gets them."""
    return list((ctypes.c_uint64 * len(PARAMS)).from_address(made._arguments[2].value))


def test_what_is_launched(launched):
    made = launch()
    record = made.kernel.record
    for stream, addresses in (0, (0xA, 0xB, 0x100, 0x200)), (2**47, (0x1A, 0x1B, 0x300, 0x400)):
        made.fire(addresses, stream)
        about, function, parameters = launched.pop()
        assert about == ((3, 1, 1), tuple(record.block), record.dynamic_smem, stream, None, 0)
        assert function == FUNCTION and parameters == parameters_of(made)
        at = dict(zip((p.name for p in PARAMS), parameters))
        assert [ctypes.c_uint64.from_address(at[name]).value for name in ("A", "y", "x_desc", "z_desc")] == list(addresses)


def test_tensor_maps_are_where_the_call_is_also_after_one_that_failed(launched, monkeypatch):
    monkeypatch.setattr(_api, "failure", lambda name, status, about: RuntimeError(name))
    made = launch()
    for x, z in ((0x100, 0x200), (0x100, 0x300), (0x400, REFUSED), (0x100, 0x300), (REFUSED, 0x200), (0x100, 0x200)):
        if REFUSED in (x, z):
            with pytest.raises(RuntimeError, match=r"^cuTensorMapReplaceAddress$"):
                made.fire((0xA, 0xB, x, z), 0)
            assert not launched
        else:
            made.fire((0xA, 0xB, x, z), 0)
            _, _, parameters = launched.pop()
            at = dict(zip((p.name for p in PARAMS), parameters))
            assert [ctypes.c_uint64.from_address(at[name]).value for name in ("x_desc", "z_desc")] == [x, z]


@pytest.mark.parametrize(
    ("kernel", "arch", "version", "program", "count"),
    [
        ("recurrent", "sm_90a", 12030, {}, 1),
        ("recurrent", "sm_90a", 12020, {}, 0),
        ("recurrent", "sm_89", 13000, {}, 0),
        ("gate", "sm_90a", 13000, {}, 0),
        ("recurrent", "sm_90a", 13000, {"program": "sm_80"}, 0),  # what sm_80 runs, compiled for sm_90a
    ],
)
def test_what_waits_by_itself_may_be_launched_early(launched, monkeypatch, kernel, arch, version, program, count):
    monkeypatch.setattr(driver, "device_info", lambda device: dataclasses.replace(GPU, driver=version))
    record = h.artifact(params=PARAMS, tensormaps=MAPS, kernel=kernel, arch=arch, provenance={**PROVENANCE, **program}).record
    made = Launch(Kernel(record, 0, FUNCTION), {"B": 3, "H": 4, "x.stride0": 2**40}, {"dt_max": 0.5})
    made.fire((0xA, 0xB, 0x100, 0x200), 0)
    (*_, attributes, number), _, _ = launched.pop()
    assert number == count and bool(attributes) == bool(count)
    if count:  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, allowed
        assert [ctypes.c_int.from_address(attributes + at).value for at in (0, 8)] == [6, 1]


@pytest.mark.usefixtures("launched")
def test_every_parameter_has_its_place():
    made = launch()
    assert made.tensors == ("A", "y", "x", "z")
    made._fill(made._buffer, made._first, 0, 0, 0, 0xA, 0xB)
    at = dict(zip((p.name for p in PARAMS), parameters_of(made)))
    assert ctypes.c_uint64.from_address(at["A"]).value == 0xA
    assert ctypes.c_uint64.from_address(at["y"]).value == 0xB
    assert ctypes.c_int32.from_address(at["B"]).value == 3
    assert ctypes.c_float.from_address(at["dt_max"]).value == 0.5
    assert ctypes.c_int64.from_address(at["x_stride0"]).value == 2**40


@pytest.mark.usefixtures("launched")
def test_a_pointer_that_is_not_given_is_0_and_those_behind_it_keep_their_places():
    made = launch(absent=("A",))
    assert made.tensors == ("y", "x", "z")
    made._fill(made._buffer, made._first, 0, 0, 0, 0xB)
    at = dict(zip((p.name for p in PARAMS), parameters_of(made)))
    assert [ctypes.c_uint64.from_address(at[name]).value for name in ("A", "y")] == [0, 0xB]


@pytest.mark.usefixtures("launched")
def test_tensor_maps_are_aligned_and_nothing_overlaps():
    made = launch()
    places = sorted((address, 128 if p.kind == "tensormap" else 8) for p, address in zip(PARAMS, parameters_of(made)))
    assert all(address % size == 0 for address, size in places)
    assert all(first + size <= second for (first, size), (second, _) in itertools.pairwise(places))
    start = ctypes.addressof(made._buffer)
    assert start <= places[0][0] and sum(places[-1]) <= start + ctypes.sizeof(made._buffer)


@pytest.mark.usefixtures("launched")
def test_a_value_beyond_32_bits_and_a_grid_beyond_cuda_are_refused():
    with pytest.raises(ValueError, match=r"grid x would be 2147483648"):
        launch(B=2**31)
    for grid, axis in (("H", "B"), "y"), (("H", "H", "B"), "z"):
        launch(*grid, B=65535)
        with pytest.raises(ValueError, match=rf"grid {axis} would be 65536, CUDA allows 65535"):
            launch(*grid, B=65536)
    with pytest.raises(ValueError, match=r"B = -2147483649 does not fit"):
        launch("H", B=-(2**31) - 1)


@pytest.mark.parametrize("grid", ["nothing", "B // (H - 4)"])
def test_a_record_whose_sizes_have_no_value_is_refused_in_words(launched, grid):
    with pytest.raises(CorruptArtifactError, match="sizes in its record have no value"):
        launch(grid)
    assert not launched


def test_a_grid_below_zero_is_refused(launched):
    with pytest.raises(ValueError, match="grid x would be -3"):
        launch(B=-3)


def test_a_record_whose_map_has_a_size_below_zero_is_refused_in_words(launched):
    with pytest.raises(CorruptArtifactError, match="sizes in its record are beyond 64 bits or below 0; remove the artifact"):
        launch(**{"x.stride0": -64})
    assert not launched
