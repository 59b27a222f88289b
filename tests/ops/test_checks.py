"""Bad arguments: every message names the argument, what was expected and what came; nothing runs. One row, one change."""

from __future__ import annotations

import inspect
import re

import pytest
import torch

from tileops import mamba
from tileops.ops import _base, _checks, _torch

B, S, H, P, N, G, Q, C = 2, 100, 8, 16, 32, 2, 64, 2
BF16, F32 = torch.bfloat16, torch.float32


def good(op: str) -> dict[str, torch.Tensor | None]:
    """Arguments that the op takes."""

    def zeros(*shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    x, bc = zeros(B, S, H, P, dtype=BF16), zeros(B, S, G, N, dtype=BF16)
    chunked = zeros(B, H, C, Q)
    return {
        "Mamba2FwdOp": {
            "x": x,
            "dt": zeros(B, S, H),
            "A": zeros(H),
            "B": bc,
            "C": bc,
            "dt_bias": zeros(H),
            "initial_states": zeros(B, H, P, N),
            "D": zeros(H, P),
            "z": zeros(B, S, H, P, dtype=BF16),
            "seq_idx": zeros(B, S, dtype=torch.int32),
            "cu_seqlens": None,  # in place of seq_idx, and for a batch of 1: test_forward_features.py, and below
            "out": zeros(B, S, H, P),
        },
        "SSDChunkCumsumFwdOp": {"dt": zeros(B, S, H), "A": zeros(H), "dt_bias": zeros(H)},
        "SSDChunkCouplingFwdOp": {"C_mat": bc, "B_mat": bc},
        "SSDChunkStateFwdOp": {"x": x, "Bmat": bc, "dt": chunked, "dA_cumsum": chunked, "seq_idx": zeros(B, S, dtype=torch.int32)},
        "SSDStatePassingFwdOp": {"states": zeros(B, C, H, N), "dA_chunk_cumsum": zeros(B, H, C), "initial_states": zeros(B, H, N)},
        "SSDChunkScanFwdOp": {
            "x": x,
            "cb": zeros(B, C, G, Q, Q, dtype=BF16),
            "dA_cumsum": chunked,
            "C": bc,
            "prev_states": zeros(B, C, H, P, N),
            "dt": chunked,
        },
        "SSDRecurrentFwdOp": {
            "A": zeros(H, P, N),
            "dt": zeros(B, H, P),
            "x": zeros(B, H, P, dtype=BF16),
            "B_in": zeros(B, G, N, dtype=BF16),
            "C_in": zeros(B, G, N, dtype=BF16),
            "state": zeros(B, H, P, N),
            "D": zeros(H, P),
            "z": zeros(B, H, P, dtype=BF16),
            "dt_bias": zeros(H, P),
            "state_batch_indices": torch.arange(B, dtype=torch.int32),
            "out": zeros(B, H, P),
        },
    }[op]


def build(op: str):
    takes_length = op in ("SSDChunkCumsumFwdOp", "SSDChunkCouplingFwdOp", "Mamba2FwdOp")
    return getattr(mamba, op)(Q) if takes_length else getattr(mamba, op)()


ARGUMENTS = [(op, name) for op in mamba.__all__ for name, value in good(op).items() if value is not None]
OPTIONAL = ("initial_states", "seq_idx", "D", "z", "dt_bias", "state_batch_indices", "out")
INTEGERS = ("seq_idx", "state_batch_indices")
FULL, STATE, SCAN, STEP = "Mamba2FwdOp", "SSDChunkStateFwdOp", "SSDChunkScanFwdOp", "SSDRecurrentFwdOp"


@pytest.mark.parametrize("op", mamba.__all__)
def test_good_arguments_pass(op):
    build(op)(**good(op))


@pytest.mark.parametrize("op", mamba.__all__)
def test_names_and_order_of_arguments_are_forwards(op):
    assert list(inspect.signature(getattr(mamba, op).forward).parameters)[1:] == list(good(op))


@pytest.mark.parametrize(("op", "name"), ARGUMENTS)
def test_not_a_tensor(op, name):
    with pytest.raises(TypeError, match=rf"^{name}: expected a tensor of shape \(.*\), got list\."):
        build(op)(**{**good(op), name: [1.0]})


@pytest.mark.parametrize(("op", "name"), [(op, name) for op, name in ARGUMENTS if name not in OPTIONAL])
def test_none_for_an_argument_that_is_not_optional(op, name):
    with pytest.raises(TypeError, match=rf"^{name}: expected a tensor of shape \(.*\), got NoneType\."):
        build(op)(**{**good(op), name: None})


@pytest.mark.parametrize(("op", "name"), ARGUMENTS)
def test_wrong_rank(op, name):
    given = good(op)
    given[name] = given[name].unsqueeze(0)
    with pytest.raises(ValueError, match=rf"^{name}: expected shape \(.*\), got {re.escape(str(tuple(given[name].shape)))}\."):
        build(op)(**given)


@pytest.mark.parametrize(("op", "name"), ARGUMENTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.int16], ids=str)
def test_wrong_dtype(op, name, dtype):
    given = good(op)
    given[name] = given[name].to(dtype)
    with pytest.raises(ValueError, match=rf"^{name}: expected dtype .*, got {str(dtype)[6:]}\."):
        build(op)(**given)


@pytest.mark.parametrize(("op", "name"), [(op, name) for op, name in ARGUMENTS if name != next(iter(good(op)))])
def test_report_49_another_device_than_the_first_arguments(op, name):
    given = good(op)
    given[name] = given[name].to("meta")
    first = next(iter(given))
    with pytest.raises(ValueError, match=rf"^{name}: expected device cpu \(where {first} is\), got meta\."):
        build(op)(**given)


@pytest.mark.parametrize(("op", "name"), [(op, name) for op, name in ARGUMENTS if name not in INTEGERS])
def test_report_75_requires_grad(op, name):
    given = good(op)
    given[name] = given[name].clone().requires_grad_()
    with pytest.raises(ValueError, match=rf"^{name}: requires grad, and this op is forward only .*{name}\.detach\(\)\."):
        build(op)(**given)
    with torch.no_grad():
        build(op)(**given)


@pytest.mark.parametrize(("op", "name"), ARGUMENTS)
def test_sparse(op, name):
    given = good(op)
    given[name] = given[name].to_sparse()
    with pytest.raises(ValueError, match=rf"^{name}: expected a strided tensor, got layout torch.sparse_coo\."):
        build(op).check(*given.values())


@pytest.mark.parametrize(("op", "name"), ARGUMENTS)
def test_nested(op, name):
    given = good(op)
    given[name] = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])
    with pytest.raises(ValueError, match=rf"^{name}: expected a strided tensor, got a nested one"):
        build(op)(**given)


@pytest.mark.parametrize(("op", "name"), ARGUMENTS)
def test_lazily_negated_views(op, name):
    """Report: memory holds the wrong sign of such a view, and kernels read memory."""
    given = good(op)
    if given[name].is_floating_point():
        given[name] = torch._neg_view(given[name])
        with pytest.raises(ValueError, match=rf"^{name}: is a lazily negated .* {name}\.resolve_conj\(\)\.resolve_neg\(\)"):
            build(op)(**given)


def test_a_state_of_inference_mode_is_refused_outside_it():
    given = good(STEP)
    with torch.inference_mode():
        given["state"] = given["state"].clone()
        build(STEP)(**given)
    with pytest.raises(ValueError, match=r"^state: cannot be updated in place: .*state\.clone\(\)"):
        build(STEP)(**given)


@pytest.mark.parametrize("value", [4097, 2**31, 10**30])
def test_chunk_size_beyond_reason(value):
    with pytest.raises(ValueError, match=f"^chunk_size: expected a positive int up to 4096, got {value}"):
        mamba.Mamba2FwdOp(value)


def other(op: str, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.zeros(shape, dtype=good(op)[name].dtype)


@pytest.mark.parametrize(
    ("op", "name", "shape", "message"),
    [
        (FULL, "dt", (B, S, H + 1), "expected shape (2, 100, 8), got (2, 100, 9)."),
        (FULL, "A", (H - 1,), "expected shape (8,), got (7,)."),
        (FULL, "B", (B, S - 1, G, N), "expected shape (2, 100, n_groups, d_state), got (2, 99, 2, 32)."),
        (FULL, "C", (B, S, G, N + 1), "expected shape (2, 100, 2, 32), got (2, 100, 2, 33)."),
        (FULL, "C", (B, S, G + 1, N), "expected shape (2, 100, 2, 32), got (2, 100, 3, 32)."),
        (FULL, "dt_bias", (H + 1,), "expected shape (8,), got (9,)."),  # report 72
        (FULL, "initial_states", (B, H, N, P), "expected shape (2, 8, 16, 32), got (2, 8, 32, 16)."),
        (FULL, "D", (H + 1,), "expected shape (8,) or (8, 16), got (9,)."),
        (FULL, "D", (P, H), "expected shape (8,) or (8, 16), got (16, 8)."),
        (FULL, "z", (B, S, H, P + 1), "expected shape (2, 100, 8, 16), got (2, 100, 8, 17)."),
        (FULL, "seq_idx", (B, S - 1), "expected shape (2, 100), got (2, 99)."),
        (FULL, "out", (B, S, H, N), "expected shape (2, 100, 8, 16), got (2, 100, 8, 32)."),
        ("SSDChunkCumsumFwdOp", "A", (H + 1,), "expected shape (8,), got (9,)."),
        ("SSDChunkCumsumFwdOp", "dt_bias", (1,), "expected shape (8,), got (1,)."),
        ("SSDChunkCouplingFwdOp", "B_mat", (B, S, G, N + 1), "expected shape (2, 100, 2, 32), got (2, 100, 2, 33)."),
        (STATE, "Bmat", (B, 99, G, N), "expected shape (2, 100, n_groups, d_state), got (2, 99, 2, 32)."),
        (STATE, "dt", (B, H, C + 1, Q), "expected num_chunks = ceil(seq_len / chunk_len) = ceil(100 / 64) = 2, got 3."),
        (STATE, "dA_cumsum", (B, H, C, Q - 1), "expected shape (2, 8, 2, 64), got (2, 8, 2, 63)."),
        (STATE, "seq_idx", (B, S + 1), "expected shape (2, 100), got (2, 101)."),
        ("SSDStatePassingFwdOp", "dA_chunk_cumsum", (B, C, H), "expected shape (2, 8, 2), got (2, 2, 8)."),
        ("SSDStatePassingFwdOp", "initial_states", (B, H, N - 1), "expected shape (2, 8, 32), got (2, 8, 31)."),
        (SCAN, "cb", (B, C, H, Q, Q), "expected shape (2, num_chunks, 2, chunk_len, chunk_len), got (2, 2, 8, 64, 64)."),  # report 46
        (SCAN, "cb", (B, C, G, Q, Q + 1), "expected chunk_len twice in its last two dimensions, got shape (2, 2, 2, 64, 65)."),
        (SCAN, "cb", (B, C + 1, G, Q, Q), "expected num_chunks = ceil(seqlen / chunk_len) = ceil(100 / 64) = 2, got 3."),
        (SCAN, "prev_states", (B, C, H, N, P), "expected shape (2, 2, 8, 16, 32), got (2, 2, 8, 32, 16)."),
        (SCAN, "dt", (B, H, C, Q + 1), "expected shape (2, 8, 2, 64), got (2, 8, 2, 65)."),
        (STEP, "dt", (B, H, P + 1), "expected shape (batch, 8, 16) or (batch, 8), got (2, 8, 17)."),
        (STEP, "dt", (B, H + 1), "expected shape (batch, 8, 16) or (batch, 8), got (2, 9)."),
        (STEP, "x", (B + 1, H, P), "expected shape (2, 8, 16), got (3, 8, 16)."),
        (STEP, "C_in", (B, G, N + 1), "expected shape (2, 2, 32), got (2, 2, 33)."),
        (STEP, "state", (B, H, N, P), "expected shape (n_slots, 8, 16, 32), got (2, 8, 32, 16)."),
        (STEP, "D", (P, H), "expected shape (8, 16) or (8,), got (16, 8)."),
        (STEP, "D", (P,), "expected shape (8, 16) or (8,), got (16,)."),
        (STEP, "z", (B, H), "expected shape (2, 8, 16), got (2, 8)."),
        (STEP, "dt_bias", (H, 1), "expected shape (8, 16) or (8,), got (8, 1)."),  # report 72
        (STEP, "state_batch_indices", (B + 1,), "expected shape (2,), got (3,)."),
        (STEP, "out", (B, P, H), "expected shape (2, 8, 16), got (2, 16, 8)."),
    ],
)
def test_wrong_sizes(op, name, shape, message):
    given = {**good(op), name: other(op, name, shape)}
    with pytest.raises(ValueError, match=f"^{re.escape(f'{name}: {message}')}$"):
        build(op)(**given)
    # Where a good call of the same kinds of tensors came before, sizes are all that is looked at.
    seen, now = ([t if t is None else t.clone() for t in call.values()] for call in (good(op), given))
    alike = _torch.recogniser(seen, _base._modes, _base._modes(), exact=False, then="return True")(*now) is True
    assert alike == (len(shape) == good(op)[name].dim())
    with pytest.raises(ValueError, match=f"^{re.escape(f'{name}: {message}')}$"):
        build(op).check(*now, alike=alike)


@pytest.mark.parametrize(
    ("op", "changes"),
    [
        (FULL, {"B": (B, S, 3, N), "C": (B, S, 3, N)}),
        (STATE, {"Bmat": (B, S, 3, N)}),
        (SCAN, {"cb": (B, C, 3, Q, Q), "C": (B, S, 3, N)}),
        (STEP, {"B_in": (B, 3, N), "C_in": (B, 3, N)}),
    ],
)
def test_report_41_heads_that_do_not_divide_into_groups(op, changes):
    given = {**good(op), **{name: other(op, name, shape) for name, shape in changes.items()}}
    with pytest.raises(ValueError, match=r"^n_groups: expected a divisor of n_heads = 8, got 3\.$"):
        build(op)(**given)


@pytest.mark.parametrize(
    ("op", "name", "dtype", "message"),
    [
        (FULL, "A", BF16, "A: expected dtype float32, got bfloat16. Keep rates in float32: rounded ones ruin long contexts."),  # report 10
        (FULL, "dt", BF16, "dt: expected dtype float32, got bfloat16. Pass dt.float()."),
        (FULL, "B", torch.float16, "B: expected dtype bfloat16 (that of x), got float16."),
        (FULL, "x", torch.float64, "x: expected dtype bfloat16 or float16 or float32, got float64."),
        (FULL, "initial_states", BF16, "initial_states: expected dtype float32, got bfloat16. Pass initial_states.float()."),
        (FULL, "D", BF16, "D: expected dtype float32, got bfloat16. Pass D.float()."),
        (FULL, "z", F32, "z: expected dtype bfloat16 (that of x), got float32."),
        (FULL, "seq_idx", torch.int64, "seq_idx: expected dtype int32, got int64. Pass seq_idx.to(torch.int32)."),
        (FULL, "out", torch.float16, "out: expected dtype float32 or bfloat16 (float32, or that of x), got float16."),
        (STATE, "dt", torch.float16, "dt: expected dtype bfloat16 or float32 (that of x, or float32), got float16."),
        (STATE, "seq_idx", torch.int64, "seq_idx: expected dtype int32, got int64. Pass seq_idx.to(torch.int32)."),  # report 35
        (SCAN, "cb", F32, "cb: expected dtype bfloat16 (that of x), got float32."),
        (SCAN, "prev_states", BF16, "prev_states: expected dtype float32, got bfloat16. Pass prev_states.float()."),
        (STEP, "A", BF16, "A: expected dtype float32, got bfloat16. Keep rates in float32: rounded ones ruin long contexts."),
        (STEP, "state", torch.float64, "state: expected dtype float32 or float16 or bfloat16, got float64."),
        (STEP, "D", BF16, "D: expected dtype float32, got bfloat16. Pass D.float()."),
        (STEP, "dt_bias", BF16, "dt_bias: expected dtype float32, got bfloat16. Pass dt_bias.float()."),
        (STEP, "z", F32, "z: expected dtype bfloat16 (that of x), got float32."),
        (STEP, "out", torch.float16, "out: expected dtype float32 or bfloat16 (float32, or that of x), got float16."),
        (STEP, "state_batch_indices", F32, "state_batch_indices: expected dtype int32 or int64, got float32."),
    ],
)
def test_wrong_dtype_of_one(op, name, dtype, message):
    given = good(op)
    given[name] = given[name].to(dtype)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        build(op)(**given)


@pytest.mark.parametrize(
    ("op", "changes", "name"),
    [
        (FULL, {"x": (B, S, 0, P), "dt": (B, S, 0)}, "n_heads"),
        (FULL, {"B": (B, S, 0, N)}, "n_groups"),
        (FULL, {"B": (B, S, G, 0)}, "d_state"),
        (STATE, {"x": (B, S, H, 0)}, "d_head"),
        ("SSDStatePassingFwdOp", {"states": (B, C, H, 0)}, "d_state"),
        (STEP, {"A": (0, P, N)}, "n_heads"),
    ],
)
def test_only_batch_and_length_may_be_zero(op, changes, name):
    given = {**good(op), **{key: other(op, key, shape) for key, shape in changes.items()}}
    with pytest.raises(ValueError, match=rf"^{name}: expected at least 1, got 0\.$"):
        build(op)(**given)


@pytest.mark.parametrize("value", [0, -1])
def test_chunk_size_below_one(value):
    with pytest.raises(ValueError, match=f"^chunk_size: expected a positive int up to 4096, got {value}"):
        mamba.Mamba2FwdOp(value)
    with pytest.raises(ValueError, match=f"^chunk_len: expected a positive int up to 4096, got {value}"):
        mamba.SSDChunkCouplingFwdOp(value)


def test_what_the_in_tree_kernels_do_not_take_is_said_with_what_they_take():
    """Report 42. These checks come before a CUDA call's launch; the reference takes the same arguments."""
    given = good(FULL)
    with pytest.raises(ValueError, match=r"^chunk_size: the in-tree CUDA kernels support 16, 32, 64, 128, 256, got 100; target='ref"):
        mamba.Mamba2FwdOp(100).check_builtin(*given.values())
    for name, changes in {"d_head": {"x": (B, S, H, 20)}, "d_state": {"B": (B, S, G, 512)}}.items():
        changed = {**given, **{key: other(FULL, key, shape) for key, shape in changes.items()}}
        with pytest.raises(ValueError, match=rf"^{name}: the in-tree CUDA kernels support 16, 32 \.\.\. 256, got (20|512)"):
            mamba.Mamba2FwdOp(Q).check_builtin(*changed.values())
    with pytest.raises(ValueError, match=r"^x: the in-tree CUDA kernels take bfloat16 or float16, got float32; target='reference'"):
        mamba.Mamba2FwdOp(Q).check_builtin(given["x"].float(), *list(given.values())[1:])


@pytest.mark.parametrize("op", mamba.__all__)
def test_good_arguments_pass_the_in_tree_kernels_checks(op):
    build(op).check_builtin(*good(op).values())


def packed_call(batch: int = 1, **changes: torch.Tensor) -> dict[str, torch.Tensor | None]:
    """Arguments of a call with cu_seqlens: three sequences."""
    cut = {name: t[:batch] for name, t in good(FULL).items() if name in ("x", "dt", "B", "C", "z", "out")}
    extra = {"cu_seqlens": torch.tensor([0, 30, 30, 90], dtype=torch.int32), "initial_states": torch.zeros(3, H, P, N), "seq_idx": None}
    return {**good(FULL), **cut, **extra, **changes}


def test_a_good_pack_passes():
    assert build(FULL)(**packed_call())[1].shape == (3, H, P, N)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seq_idx": torch.zeros(1, S, dtype=torch.int32)}, "seq_idx: expected None where cu_seqlens is given, got both: each says where "),
        ({"batch": 2}, "x: expected batch = 1 where cu_seqlens is given, got 2."),
        (
            {"cu_seqlens": torch.zeros(4, dtype=torch.int64)},
            "cu_seqlens: expected dtype int32, got int64. Pass cu_seqlens.to(torch.int32).",
        ),
        ({"cu_seqlens": torch.zeros(4, 1, dtype=torch.int32)}, "cu_seqlens: expected shape (n_seqs + 1,), got (4, 1)."),
        ({"cu_seqlens": torch.zeros(0, dtype=torch.int32)}, "cu_seqlens: expected shape (n_seqs + 1,), so at least one value, got none."),
        ({"initial_states": torch.zeros(1, H, P, N)}, "initial_states: expected shape (3, 8, 16, 32), got (1, 8, 16, 32)."),
        ({"cu_seqlens": torch.zeros(4, dtype=torch.int32, device="meta")}, "cu_seqlens: expected device cpu (where x is), got meta."),
    ],
    ids=lambda v: "",
)
def test_packs_that_are_refused(changes, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        build(FULL)(**packed_call(**changes))
    with pytest.raises(TypeError, match=r"^cu_seqlens: expected a tensor of shape \(n_seqs \+ 1,\), got list\."):
        build(FULL)(**{**packed_call(), "cu_seqlens": [0, 3]})


def test_out_dtypes_that_are_refused():
    for value, error, words in (
        (F32.to_complex(), ValueError, "got complex64"),
        ("float32", TypeError, "got str"),
        (torch.int8, ValueError, "int8"),
    ):
        with pytest.raises(error, match=f"^out_dtype: expected .*{words}"):
            mamba.Mamba2FwdOp(out_dtype=value)
    with pytest.raises(ValueError, match=r"^out_dtype: expected float32 or that of x, bfloat16, got float16\.$"):
        mamba.Mamba2FwdOp(Q, out_dtype=torch.float16)(**good(FULL))
    with pytest.raises(ValueError, match=r"^out: expected dtype bfloat16 \(the op's out_dtype\), got float32\.$"):
        mamba.Mamba2FwdOp(Q, out_dtype=BF16)(**good(FULL))


def test_overlap_is_seen_whatever_the_order_of_strides():
    base = torch.zeros(4096)
    for strides in ((512, 64, 8, 1), (64, 512, 8, 1), (8, 64, 512, 1)):
        _checks.updated_in_place("state", base.as_strided((8, 8, 8, 8) if strides[2] == 8 else (8, 8, 4, 8), strides))
    for strides in ((512, 64, 4, 1), (64, 64, 8, 1), (0, 64, 8, 1)):
        with pytest.raises(ValueError, match="its elements share memory"):
            _checks.updated_in_place("state", base.as_strided((2, 2, 8, 8), strides))
