"""What the generated CUDA must show: 64-bit offsets, wide loads where they are allowed, no load outside its tail test."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("tilelang", reason="TileLang is not installed; tile programs cannot be lowered")

from tileops import catalog, expr
from tileops.compiler.lower import Lowered, lower

MODEL = {"Q": 128, "P": 80, "N": 144, "dtype": "bfloat16", "dt_dtype": "float32", "out_dtype": "float32", "state_dtype": "bfloat16"}
FLAGS = {
    "tied": False,
    "y_float32": True,
    "packed": True,
    "half": True,
    "cb_float32": True,
}

#: Inputs of each kernel that are read 16 bytes at a time where ``aligned``.
WIDE = {"chunk_coupling": ("Bm", "Cm"), "chunk_state": ("x", "Bm"), "chunk_scan": ("x", "Cm", "cb")}


def lowered(kernel: str, arch: str = "sm_80", **changed: object) -> Lowered:
    arch = arch if catalog.exists(kernel, arch) else catalog.ONLY_ON[kernel][0]
    values = {**MODEL, **FLAGS, "aligned": True, **changed}
    return lower(catalog.config(kernel, arch, **{name: values[name] for name in catalog.KERNELS[kernel]}))


def body(kernel: str, arch: str = "sm_80", **changed: object) -> str:
    source = lowered(kernel, arch, **changed).source
    return source[source.rindex("__global__") :]


#: Block coordinates and the sizes they count up to: what an offset multiplies.
INDEX = r"[BSCHGM]|b|h|g|c|bc|bh|bch|bcg"
#: In these kernels more: elsewhere the names are of tiles.
TOKENS = dict.fromkeys(("gate", "pack_rows", "pack_rest", "seq_passing"), INDEX + "|[RADVW]|[radvt]|row")

#: Kernels whose tensors are vectors: no size multiplies in their offsets.
VECTORS = ("fused_clear", "pack_starts", "pack_map")

#: Kernels that compute more than offsets of sizes that the grid or a token bounds: only their subscripts are offsets.
SUBSCRIPTS = ("chunk_cumsum", "fused_main", "recurrent", "gate", "pack_rows", "pack_tails", "pack_rest", "seq_mask")


def narrow_products(text: str, index: str) -> list[str]:
    """Products with a run-time size or index that are not computed in 64 bits, but for those that make a token or a head."""
    found = re.findall(rf"(?<![\w)])(?:{index})\)? \* [^ )]+|[^ (]+ \* \(*(?:{index})\b", text)
    return [f for f in found if not re.fullmatch(rf"c \* {MODEL['Q']}|g \* \(H|1\) \* \(H", f)]


def subscripts(text: str) -> str:
    """What stands in the subscripts of the kernel's tensors (parameters: pointers in the head of the text), or is added to them."""
    head, code = text.split("{", 1)
    tensors = "|".join(re.findall(r"__restrict__ (\w+)", head))
    found = []
    for start in re.finditer(rf"\b(?:{tensors})(?:\[| \+ \()", code):
        depth, end = 1, start.end()
        while depth:
            depth += {"[": 1, "(": 1, "]": -1, ")": -1}.get(code[end], 0)
            end += 1
        found.append(code[start.end() : end - 1])
    return "\n".join(found)


@pytest.mark.parametrize("kernel", [kernel for kernel in catalog.KERNELS if kernel not in VECTORS])
def test_reports_22_and_23_every_offset_is_computed_in_64_bits(kernel: str) -> None:
    text = subscripts(body(kernel, aligned=False)) if kernel in SUBSCRIPTS else body(kernel).split("{", 1)[1]
    assert "(int64_t)" in text
    index = TOKENS.get(kernel, INDEX)
    assert narrow_products(text, index) == []
    assert narrow_products(re.sub(r"\(\(int64_t\)(\w+)\)", r"\1", text), index) != []


@pytest.mark.parametrize("cb_float32", catalog.BOOLS)
@pytest.mark.parametrize("kernel", WIDE)
def test_inputs_are_read_16_bytes_at_a_time_only_where_aligned(kernel: str, cb_float32: bool) -> None:
    wide, narrow = (body(kernel, P=64, aligned=aligned, cb_float32=cb_float32) for aligned in (True, False))
    for name in WIDE[kernel]:
        pieces = len(re.findall(rf"cp_async_gs(?:_conditional)?<16>\([^\n]*\(&\({name}\[", wide))
        assert pieces, name
        assert len(re.findall(rf"\b{name}\[", wide)) == pieces, f"{name} is also read one element at a time"
        if name != "cb":  # a workspace: always contiguous and aligned
            assert re.search(rf"\b{name}\[", narrow) and not re.search(rf"\*\)\({name} \+", narrow), name


@pytest.mark.parametrize(("kernel", "names"), [("pack_rows", ("source", "out")), ("gate", ("x", "z", "y", "out"))])
def test_copies_and_gates_are_16_bytes_wide_only_where_aligned(kernel: str, names: tuple[str, ...]) -> None:
    wide, narrow = body(kernel, half=False), body(kernel, aligned=False)
    for name in names:
        assert re.search(rf"\*\((?:u?int|float)4\*\)\({name} \+", wide) and not re.search(rf"\b{name}\[", wide), name
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
def test_report_52_the_largest_tiles_fit_the_smallest_shared_memory(kernel: str, arch: str) -> None:
    if not catalog.exists(kernel, arch):
        with pytest.raises(ValueError, match="only"):
            catalog.config(kernel, arch, **{name: allowed[0] for name, allowed in catalog.KERNELS[kernel].items()})
        return
    result = lowered(kernel, arch, Q=256, P=256, N=256, dtype="float16")
    smallest = min(catalog.MAX_SMEM[arch] for arch in catalog.ARCHS if catalog.exists(kernel, arch))
    assert result.dynamic_smem <= smallest
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


def test_80_rows_are_read_as_panels_by_one_map() -> None:
    result = lowered("fused_main", N=128)
    x = result.tensormaps["x_desc"]
    assert result.grid[0] == "M * H * parts" and lowered("fused_main").grid[0] == "M * H * parts * 2"
    assert (x.dims, x.box, x.swizzle) == (("16", "S", "5", "H", "B"), (16, 64, 5, 1, 1), 1)
    # The same with a batch of 1, whose stride is bound as 0.
    sizes = {"x.stride0": 0, "x.stride1": 3200, "x.stride2": 80, "S": 5, "H": 6}
    assert [expr.evaluate(s, sizes) for s in x.strides] == [6400, 32, 160, 16]


def test_the_op_counts_the_ctas_of_a_head_as_the_kernel_does() -> None:
    from tileops.kernels import fused_main
    from tileops.ops import _fused

    sizes = [(p, n) for p in catalog.HEAD_DIMS for n in catalog.STATE_DIMS]
    assert [fused_main.tile_rows(*s) for s in sizes] == [_fused.tile_rows(*s) for s in sizes]
    assert {fused_main.tile_rows(p, n) for p, n in sizes if p == 80 and n <= 128} == {80}
    assert {fused_main.tile_rows(p, n) for p, n in sizes if p != 80 or n > 128} == {64}


def test_flags_mean_the_same_to_the_op_and_to_the_kernel() -> None:
    from tileops.kernels import fused_main
    from tileops.ops import _fused

    names = ("SOFTPLUS", "BIAS", "INITIAL", "SKIP", "GATE", "PACKED", "SCOUTS", "ALWAYS")
    assert [getattr(fused_main, name) for name in names] == [getattr(_fused, name) for name in names]


@pytest.mark.parametrize("tied", catalog.BOOLS)
@pytest.mark.parametrize("state_dtype", ["float32", *catalog.DTYPES])
def test_optional_tensors_are_passed_on_to_be_tested_and_never_indexed(state_dtype: str, tied: bool) -> None:
    result = lowered("recurrent", state_dtype=state_dtype, tied=tied)
    assert result.optional == ("D", "dt_bias", "slots", "slots64", "y", "y_half", "z")
    text = result.source[result.source.rindex("__global__") :]
    head, code = text.split("{", 1)
    for name in result.optional:
        assert re.search(rf"__restrict__ {name}\b", head), name
        assert not re.search(rf"(?<!&\()\b{name}\[|\b{name}\[(?!\(int64_t\)0\])", code), name  # but for the address &(y[0])
    for name in ("state", "y", "y_half"):  # a const one would let loads go through the read-only cache, and stores nowhere
        assert not re.search(rf"const \w+\* __restrict__ {name}\b", head), name
    assert lowered("chunk_scan").optional == ()


@pytest.mark.parametrize(
    ("kernel", "name"),
    [("chunk_state", "seq_idx"), ("state_passing", "initial_states"), ("seq_passing", "initial_states")],
)
def test_a_tensor_that_may_be_absent_is_read_behind_a_test_of_its_address(kernel: str, name: str) -> None:
    assert lowered(kernel).optional == (name,)
    code = body(kernel).split("{", 1)[1]
    test = re.search(rf"{name} == NULL", code)
    assert test and not re.search(rf"\b{name}(\[| \+)", code[: test.start()])


def test_cumsum_reads_a_bias_that_is_not_given_by_no_load() -> None:
    source = lowered("chunk_cumsum").source
    assert lowered("chunk_cumsum").optional == ("dt_bias",)
    assert "tileops_value(p + h, p != nullptr)" in source and source.count("ld.global") == 1
    assert '"{ .reg .pred p; setp.ne.s32 p, %2, 0; @p ld.global.f32 %0, [%1]; }" : "+f"(v) : "l"(p), "r"((int)real)' in source
    assert "dt_bias[" not in body("chunk_cumsum")


@pytest.mark.parametrize("dtype", catalog.DTYPES)
def test_the_decode_state_is_read_and_written_16_bytes_at_a_time(dtype: str) -> None:
    for state_dtype, width in (("float32", 4), ("float16", 8), ("bfloat16", 8)):
        result = lowered("recurrent", dtype=dtype, state_dtype=state_dtype, tied=True)
        assert {p.bind for p in result.params if p.bind.startswith("state.")} == {f"state.stride{d} // {width}" for d in range(3)}
        assert f"#define WIDTH {width}\n" in result.source and result.alignment["state"] == 16
        assert result.source.count('@p ld.global" LOAD_HINT ".v4.b32') == result.source.count('@p st.global" STORE_HINT ".v4.b32') == 1


def test_softplus_is_neither_the_fast_exp_nor_the_fast_log() -> None:
    text = lowered("chunk_cumsum").source
    assert "tileops_softplus(part" in text and "__expf" not in text and "logf" not in text


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_what_seq_idx_leaves_out_is_zeroed_after_all_threads_have_scaled(arch, dtype):
    lines = body("chunk_state", arch, dtype=dtype, P=64, N=128).splitlines()
    marked = str(0x7FC00BAD)
    (zeroing,) = [i for i, line in enumerate(lines) if f"== {marked}" in line and any("Xs) +" in l for l in lines[i + 1 : i + 4])]
    assert any("__syncthreads" in line for line in lines[zeroing - 4 : zeroing])
