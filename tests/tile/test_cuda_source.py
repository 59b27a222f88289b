"""What the generated CUDA must show: 64-bit offsets, wide loads where they are allowed, no load outside its tail test."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("tilelang", reason="TileLang is not installed; tile programs cannot be lowered")

from tileops import catalog, expr
from tileops.compiler.lower import Lowered, lower

MODEL = {"Q": 128, "P": 80, "N": 144, "dtype": "bfloat16", "dt_dtype": "float32", "out_dtype": "float32"}
FLAGS = {"softplus": True, "has_bias": True, "has_seq_idx": True, "has_initial_states": True, "tied": False, "y_float32": True}

#: 16-bit inputs of each kernel, read 16 bytes at a time where ``aligned``.
WIDE = {"chunk_coupling": ("Bm", "Cm"), "chunk_state": ("x", "Bm"), "chunk_scan": ("x", "Cm", "cb")}


def lowered(kernel: str, arch: str = "sm_80", **changed: object) -> Lowered:
    arch = arch if catalog.exists(kernel, arch) else catalog.ONLY_ON[kernel][0]
    values = {**MODEL, **FLAGS, "aligned": True, **changed}
    return lower(catalog.config(kernel, arch, **{name: values[name] for name in catalog.KERNELS[kernel]}))


def body(kernel: str, arch: str = "sm_80", **changed: object) -> str:
    source = lowered(kernel, arch, **changed).source
    return source[source.rindex("__global__") :]


#: Block coordinates and the sizes they count up to: what an offset multiplies.
INDEX = r"(?:[BSCHGM]|b|h|g|c|bc|bh|bch|bcg)"


def narrow_products(text: str) -> list[str]:
    """Products with a run-time size or index that are not computed in 64 bits, but for those with the chunk length (tokens)."""
    found = re.findall(rf"(?<![\w)]){INDEX}\)? \* [^ )]+|[^ (]+ \* \(*{INDEX}\b", text)
    return [f for f in found if not re.fullmatch(rf"c \* {MODEL['Q']}", f)]


def subscripts(text: str) -> str:
    """What stands in the subscripts of the kernel's tensors (parameters: pointers in the head of the text)."""
    head, code = text.split("{", 1)
    tensors = "|".join(re.findall(r"__restrict__ (\w+)", head))
    found = []
    for start in re.finditer(rf"\b(?:{tensors})\[", code):
        depth, end = 1, start.end()
        while depth:
            depth += {"[": 1, "]": -1}.get(code[end], 0)
            end += 1
        found.append(code[start.end() : end - 1])
    return "\n".join(found)


@pytest.mark.parametrize("kernel", [kernel for kernel in catalog.KERNELS if kernel != "fused_clear"])  # no size in its offsets
def test_every_offset_is_computed_in_64_bits(kernel: str) -> None:
    # Where C++ functions do the work, the program computes block coordinates, which the grid bounds: only subscripts are offsets.
    text = subscripts(body(kernel)) if kernel in ("fused_main", "recurrent") else body(kernel).split("{", 1)[1]
    assert "(int64_t)" in text
    assert narrow_products(text) == []
    assert narrow_products(text.replace("((int64_t)H)", "H").replace("((int64_t)G)", "G")) != []


@pytest.mark.parametrize("kernel", WIDE)
def test_16_bit_inputs_are_read_16_bytes_at_a_time_only_where_aligned(kernel: str) -> None:
    wide, narrow = body(kernel, P=64), body(kernel, P=64, aligned=False)
    for name in WIDE[kernel]:
        assert re.search(rf"\*\(uint4\*\)\({name} \+", wide), name
        assert not re.search(rf"\b{name}\[", wide), f"{name} is also read one element at a time"
        if name != "cb":  # a workspace: always contiguous and aligned
            assert re.search(rf"\b{name}\[", narrow) and not re.search(rf"\*\)\({name} \+", narrow), name


@pytest.mark.parametrize("dtype", catalog.DTYPES)
@pytest.mark.parametrize("kernel", WIDE)
@pytest.mark.parametrize("aligned", catalog.BOOLS)
def test_no_input_is_read_before_its_tail_test(kernel: str, dtype: str, aligned: bool) -> None:
    """TileLang moves loads that are cast out of their condition, into arrays named ``<tensor>_local_cast``."""
    moved = set(re.findall(r"\b(\w+)_local_cast\w*\[", body(kernel, dtype=dtype, aligned=aligned)))
    assert not moved & {"x", "Bm", "Cm", "prev_states", "state", "seq_idx"}, moved


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120a"])
@pytest.mark.parametrize("kernel", catalog.KERNELS)
def test_the_largest_tiles_fit_the_smallest_shared_memory(kernel: str, arch: str) -> None:
    if not catalog.exists(kernel, arch):
        with pytest.raises(ValueError, match="only"):
            catalog.config(kernel, arch, **{name: allowed[0] for name, allowed in catalog.KERNELS[kernel].items()})
        return
    result = lowered(kernel, arch, Q=256, P=256, N=256, dtype="float16")
    smallest = min(catalog.MAX_SMEM[arch] for arch in catalog.ARCHS if catalog.exists(kernel, arch))
    assert result.dynamic_smem + 1024 <= smallest  # 1 KiB: TileLang's static barriers on sm_90a
    assert result.grid[1:] == ("1", "1"), "unbounded dimensions belong on grid x"


def test_tensor_maps_are_those_of_the_program() -> None:
    result = lowered("fused_main")
    maps = result.tensormaps
    assert [p.name for p in result.params if p.kind == "tensormap"] == ["Bm_desc", "Cm_desc", "x_desc", "y_desc"] == list(maps)
    assert {p.bind for p in result.params if p.kind == "tensormap"} == {"Bm", "Cm", "x", "y"}
    assert all(result.alignment[name] == 16 for name in ("Bm", "Cm", "x", "y"))
    assert maps["x_desc"].dims == ("80", "H", "S", "B") and maps["Bm_desc"].dims == ("144", "G", "S", "B")
    # A padded pitch, and a batch of 1, whose stride is bound as 0.
    sizes = {"x.stride0": 0, "x.stride1": 3200, "x.stride2": 80, "S": 5, "H": 6}
    assert [expr.evaluate(s, sizes) for s in maps["x_desc"].strides] == [160, 6400, 16]
    assert [expr.evaluate(s, sizes) for s in maps["y_desc"].strides] == [320, 1920, 9600]
    assert (maps["x_desc"].box, maps["y_desc"].box) == ((64, 1, 64, 1), (32, 1, 64, 1))
    assert [maps[n].dtype for n in ("x_desc", "y_desc")] == [9, 7]
    halves = lowered("fused_main", dtype="float16", y_float32=False).tensormaps
    assert (halves["x_desc"].dtype, halves["y_desc"].dtype, halves["y_desc"].box) == (6, 6, (64, 1, 64, 1))
    assert lowered("chunk_scan").tensormaps == {}


def test_softplus_uses_log1p_and_exact_exp() -> None:
    text = body("chunk_cumsum")
    assert "log1pf(expf(" in text and "__expf" not in text
