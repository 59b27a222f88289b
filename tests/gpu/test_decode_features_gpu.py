"""SSDRecurrentFwdOp beyond the spec's call, on CUDA, against the float64 recurrence. «report N» is a user's report on another library.

Results are allocated full of NaN (``call``), pads and absent tensors included: what is not written, or read without being given, shows.
"""

from __future__ import annotations

import math

import pytest
import recurrence
import torch
from decode_cases import FEATURES, STORED, Decode, decode, features
from ssd_cases import TOLERANCE, close, generator

from tileops.mamba import SSDRecurrentFwdOp

pytestmark = pytest.mark.gpu

BF16, FP16, F32 = torch.bfloat16, torch.float16, torch.float32
DEVICE = "cuda"
TIGHT = TOLERANCE[F32]
TIED = pytest.mark.parametrize("tied", [False, True])
STATES = pytest.mark.parametrize("state_dtype", [F32, BF16, FP16], ids=str)
ALL = FEATURES[-1]


def on_gpu(batch: int = 4, heads: int = 8, head_dim: int = 64, d_state: int = 128, groups: int = 2, **more) -> Decode:
    return decode(batch, heads, head_dim, d_state, groups, device=DEVICE, **more)


def call(case: Decode, softplus: bool = False, op: SSDRecurrentFwdOp | None = None) -> torch.Tensor:
    """y of a call that allocates results full of NaN; the case's state is updated."""
    op = op or SSDRecurrentFwdOp(dt_softplus=softplus)
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3, device=DEVICE).isnan().all(), "torch.empty is not poisoned"
        return op(*case.six, **case.keywords)
    finally:
        torch.use_deterministic_algorithms(False)


def expected(case: Decode, softplus: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    keywords = {name: t for name, t in case.keywords.items() if name != "out"}
    return recurrence.decode(*case.six, **keywords, dt_softplus=softplus)


@TIED
@STATES
@pytest.mark.parametrize("names", [(), *FEATURES], ids="+".join)
def test_reports_67_and_72_each_feature_and_combinations(names, state_dtype, tied):
    case = on_gpu(tied=tied)
    case = features(case.changed(state=case.state.to(state_dtype)), names)
    softplus = "softplus" in names
    y64, state64 = expected(case, softplus)
    before = [t.clone() for t in case.inputs]
    y = call(case, softplus)
    assert y.dtype == F32 and y.is_contiguous()
    close(y, y64, TIGHT, "y")
    close(case.state, state64, max(TIGHT, STORED[state_dtype]), "state")
    assert all(torch.equal(a, b) for a, b in zip(before, case.inputs)), "an input was written"


@TIED
@pytest.mark.parametrize("sizes", [(3, 6, 16, 16, 2), (3, 128, 80, 128, 8), (3, 24, 128, 256, 1), (1, 80, 64, 128, 1), (33, 5, 64, 128, 5)])
@pytest.mark.parametrize("state_dtype", [F32, BF16], ids=str)
def test_other_sizes_with_every_feature(sizes, state_dtype, tied):
    case = on_gpu(*sizes, tied=tied)
    case = features(case.changed(state=case.state.to(state_dtype)), ALL)
    y64, state64 = expected(case, True)
    close(call(case, True), y64, TIGHT, "y")
    close(case.state, state64, max(TIGHT, STORED[state_dtype]), "state")


@pytest.mark.parametrize("state_dtype", [F32, BF16, FP16], ids=str)
def test_float16_inputs(state_dtype):
    for tied in (False, True):
        case = on_gpu(dtype=FP16, tied=tied)
        case = features(case.changed(state=case.state.to(state_dtype)), ALL)
        y64, state64 = expected(case, True)
        close(call(case, True), y64, TIGHT, "y")
        close(case.state, state64, max(TIGHT, STORED[state_dtype]), "state")


def test_report_6_softplus_over_its_range():
    steps = torch.arange(-80, 40, 0.25, device=DEVICE).view(1, -1)
    heads = steps.shape[1]
    case = on_gpu(1, heads, groups=1, tied=True)
    case = case.changed(dt=steps, A=torch.zeros(heads, device=DEVICE), state=torch.zeros_like(case.state))
    y64, state64 = expected(case, True)
    y = call(case, True)
    relative = ((case.state.double() - state64)[0].flatten(1).norm(dim=1) / state64[0].flatten(1).norm(dim=1)).cpu()
    assert relative.max() < 1e-6, relative
    close(y, y64, TIGHT, "y")
    full = case.changed(dt=steps.unsqueeze(-1).expand(1, heads, 64).contiguous(), state=torch.zeros_like(case.state))
    assert torch.equal(call(full, True), y) and torch.equal(full.state, case.state)


# --- bits --------------------------------------------------------------------------------------------------------------


@STATES
@pytest.mark.parametrize("batch", [4, 17])
def test_report_37_values_per_head_give_the_bits_of_full_ones_with_every_feature(batch, state_dtype):
    tied = on_gpu(batch, tied=True)
    tied = features(tied.changed(state=tied.state.to(state_dtype)), ALL)
    full = tied.changed(A=tied.A.contiguous(), dt=tied.dt.contiguous(), state=tied.state.clone())
    short = tied.changed(A=tied.A[:, 0, 0], dt=tied.dt[..., 0], state=tied.state.clone())
    mixed = short.changed(dt=tied.dt.contiguous(), state=tied.state.clone())
    for name in ("D", "dt_bias"):
        full.keywords[name] = tied.keywords[name].contiguous()
        short.keywords[name] = tied.keywords[name][:, 0]
    y = call(tied, True)
    for other in (full, short, mixed):
        assert torch.equal(call(other, True), y)
        assert torch.equal(other.state, tied.state)


@TIED
@pytest.mark.parametrize("batch", [5, 17])
@pytest.mark.parametrize("state_dtype", [F32, BF16], ids=str)
def test_report_64_a_row_has_the_same_bits_alone_and_in_any_slot(state_dtype, batch, tied):
    case = on_gpu(batch, tied=tied)
    case = features(case.changed(state=case.state.to(state_dtype)), ALL)
    rows = case.state[case.keywords["state_batch_indices"].long()].clone()
    y = call(case, True)
    for b in range(batch):
        one = slice(b, b + 1)
        alone = case.changed(dt=case.dt[one], x=case.x[one], B_in=case.B_in[one], C_in=case.C_in[one], state=rows[one])
        alone.keywords["z"] = case.keywords["z"][one]
        del alone.keywords["state_batch_indices"]
        assert torch.equal(call(alone, True), y[one])
        assert torch.equal(rows[b], case.state[case.keywords["state_batch_indices"][b]])


def test_features_that_are_not_used_change_no_bit():
    plain, used = on_gpu(), on_gpu()
    used.keywords.update(
        D=torch.zeros(8, device=DEVICE),
        dt_bias=torch.zeros(8, 64, device=DEVICE),
        state_batch_indices=torch.arange(4, device=DEVICE),
        out=torch.empty(4, 8, 64, device=DEVICE),
    )
    assert torch.equal(call(plain), call(used)) and torch.equal(plain.state, used.state)


# --- slots -------------------------------------------------------------------------------------------------------------


@TIED
@STATES
@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("batch", [5, 18])
def test_reports_68_and_69_slots_and_pads(batch, index, state_dtype, tied):
    case = on_gpu(batch, tied=tied)
    case = features(case.changed(state=case.state.to(state_dtype)), ("D", "z"))
    pool = torch.randn(2 * batch, *case.state.shape[1:], generator=generator(3, DEVICE), device=DEVICE).to(state_dtype)
    slots = torch.randperm(2 * batch, generator=generator(4, DEVICE), device=DEVICE)[:batch].to(index)
    pool[slots.long()] = case.state
    pads = {0: -1, 3: 2 * batch, 4: 2**31 - 1}
    for b, slot in pads.items():
        slots[b] = slot
        case.x[b], case.keywords["z"][b] = math.nan, math.inf
    live = [b for b in range(batch) if b not in pads]
    before = pool.clone()
    y64, _ = expected(case)
    given = case.changed(state=pool)
    given.keywords["state_batch_indices"] = slots
    y = call(given)
    assert y[list(pads)].count_nonzero() == 0
    close(y[live], y64[live], TIGHT, "y")
    call(case)
    before[slots[live].long()] = case.state[live]
    assert torch.equal(pool, before), "a slot that no row names was written, or one of a row is wrong"


def test_report_68_slots_beyond_32_bits_and_pools_without_slots_are_pads():
    case = on_gpu(2)
    before = case.state.clone()
    case.keywords["state_batch_indices"] = torch.tensor([2**32, -(2**32) + 1], device=DEVICE)
    assert call(case).count_nonzero() == 0 and torch.equal(case.state, before)
    assert call(case.changed(state=case.state[:0])).count_nonzero() == 0
    case.keywords["out"] = torch.full((2, 8, 128), math.nan, device=DEVICE)[..., ::2]
    assert call(case.changed(state=case.state[:0])).count_nonzero() == 0


@STATES
@pytest.mark.parametrize("pick", [slice(2, 6), slice(0, 8, 2)], ids=str)
def test_report_69_a_view_of_a_pool_is_updated_in_place_and_its_neighbours_are_not(pick, state_dtype):
    case = on_gpu(tied=True)
    pool = torch.randn(8, 3, 8, 64, 128, device=DEVICE).to(state_dtype)
    case = case.changed(state=pool[pick, 1].clone())
    before, view = pool.clone(), case.changed(state=pool[pick, 1])
    for _ in range(3):
        assert torch.equal(call(view), call(case))
    before[pick, 1] = case.state
    assert torch.equal(pool, before)


def test_slots_of_a_strided_pool():
    case = on_gpu(4, tied=True)
    layers = torch.randn(9, 2, 8, 64, 128, device=DEVICE)
    slots = torch.tensor([[8, 0], [1, 0], [5, 0], [0, 0]], dtype=torch.int32, device=DEVICE)[:, 0]
    case = case.changed(state=layers[slots.long(), 1].clone())
    before, given = layers.clone(), case.changed(state=layers[:, 1])
    given.keywords["state_batch_indices"] = slots
    assert torch.equal(call(given), call(case))
    before[slots.long(), 1] = case.state
    assert torch.equal(layers, before)


# --- states of 16 bits -------------------------------------------------------------------------------------------------


@TIED
@pytest.mark.parametrize("state_dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_16_bit_states_are_rounded_to_nearest_once_and_y_comes_before(dtype, state_dtype, tied):
    case = on_gpu(dtype=dtype, tied=tied)
    rounded = case.changed(state=case.state.to(state_dtype))
    exact = case.changed(state=rounded.state.float())
    y64, _ = expected(exact)
    close(call(rounded), y64, TIGHT, "y")
    call(exact)
    assert torch.equal(rounded.state, exact.state.to(state_dtype))


def test_a_float16_state_beyond_its_range_is_infinite_and_a_nan_stays():
    case = on_gpu(1, tied=True)
    state = torch.zeros_like(case.state, dtype=FP16)
    state[0, 0, 0, 0], state[0, 0, 1, 0] = 60000.0, math.nan
    case = case.changed(
        A=torch.zeros(8, device=DEVICE),
        dt=torch.full((1, 8), 10.0, device=DEVICE),
        x=torch.full_like(case.x, 100.0),
        B_in=torch.full_like(case.B_in, 10.0),
        state=state,
    )
    call(case)
    assert case.state[0, 0, 0, 0] == math.inf and case.state[0, 0, 1, 0].isnan() and case.state[0, 1].eq(10000.0).all()


@pytest.mark.parametrize("state_dtype", [F32, BF16, FP16], ids=str)
def test_reports_11_and_66_4096_steps(state_dtype):
    case = on_gpu(1, 4, groups=1, tied=True)
    # A narrow state's error is that of a walk as long as its memory, 1 / (A dt) steps: at A = -0.1 half of the bound.
    A = -torch.tensor([0.1, 0.3, 0.6, 0.9], device=DEVICE)
    case = case.changed(A=A, state=torch.zeros_like(case.state, dtype=state_dtype))
    case = features(case, ("D", "z", "dt_bias"))
    op = SSDRecurrentFwdOp(dt_softplus=True)
    g = generator(9, DEVICE)
    xs, zs, Bs, Cs = (torch.randn(4096, 1, *tail, generator=g, device=DEVICE).to(BF16) for tail in ((4, 64), (4, 64), (1, 128), (1, 128)))
    dts = torch.randn(4096, 1, 4, generator=g, device=DEVICE) - 3
    exact, worst = case.state.double(), 0.0
    for t in range(4096):
        step = case.changed(x=xs[t], B_in=Bs[t], C_in=Cs[t], dt=dts[t], state=exact)
        step.keywords["z"] = zs[t]
        y64, exact = expected(step, True)
        y = op(*step.changed(state=case.state).six, **step.keywords)
        if t % 512 == 511:
            worst = max(worst, float((y.double() - y64).norm() / y64.norm()), float((case.state.double() - exact).norm() / exact.norm()))
    assert worst < (1e-5 if state_dtype == F32 else 8 * STORED[state_dtype]), worst


# --- y and layouts -----------------------------------------------------------------------------------------------------


@TIED
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_y_in_xs_dtype_is_that_in_float32_rounded(dtype, tied):
    case, plain = on_gpu(dtype=dtype, tied=tied), on_gpu(dtype=dtype, tied=tied)
    y = call(case, op=SSDRecurrentFwdOp(out_dtype=dtype))
    assert y.dtype == dtype and y.is_contiguous()
    assert torch.equal(y, call(plain).to(dtype)) and torch.equal(case.state, plain.state)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_out_is_written_and_returned_and_its_neighbours_are_not(dtype):
    plain, case = on_gpu(), on_gpu()
    wanted = call(plain).to(dtype)
    memory = torch.full((4, 3, 8, 69), 7.0, dtype=dtype, device=DEVICE)
    case.keywords["out"] = memory[:, 1, :, 3:67]
    op = SSDRecurrentFwdOp()
    assert call(case, op=op) is case.keywords["out"]
    assert torch.equal(case.keywords["out"], wanted) and torch.equal(case.state, plain.state)
    again = on_gpu()
    again.keywords["out"] = torch.empty(64, 8, 4, dtype=dtype, device=DEVICE).permute(2, 1, 0)
    assert torch.equal(call(again, op=op), wanted)
    case.keywords["out"].fill_(7.0)
    assert (memory == 7.0).all()


@TIED
def test_layouts_of_every_input(tied):
    case = features(on_gpu(tied=tied), ("D", "z", "dt_bias", "state_batch_indices"))
    y64, state64 = expected(case, True)
    for change in ("every other", "offset 1", "rows apart"):
        given = case.changed(state=case.state.clone())
        views = {n: t for n, t in {**vars(given), **given.keywords}.items() if isinstance(t, torch.Tensor) and n not in ("state", "out")}
        for name, t in views.items():
            if change == "every other":
                new = torch.stack([t, t], -1)[..., 0]
            elif change == "offset 1":
                new = torch.cat([t.flatten()[:1], t.flatten()])[1:].view(t.shape)
            else:
                new = torch.cat([t, t], -1)[..., : t.shape[-1]]
            if name in given.keywords:
                given.keywords[name] = new
            else:
                setattr(given, name, new)
        close(call(given, True), y64, TIGHT, f"y, {change}")
        close(given.state, state64, TIGHT, f"state, {change}")


def test_report_34_empty_batch_with_every_feature():
    case = features(on_gpu(0), ALL)
    assert call(case, True).shape == (0, 8, 64)


def test_what_is_refused():
    case = on_gpu()
    for name, value, words in [
        ("D", torch.zeros(8), r"^D: expected device cuda:0 .*got cpu"),
        ("z", case.x.float(), r"^z: expected dtype bfloat16 \(that of x\)"),
        ("out", case.x, r"^out: shares memory with x"),
        ("out", torch.zeros(8, 64, device=DEVICE).expand(4, 8, 64), r"^out: cannot be written"),
    ]:
        other = case.changed()
        other.keywords[name] = value
        before = case.state.clone()
        with pytest.raises(ValueError, match=words):
            call(other)
        assert torch.equal(case.state, before)
    half = torch.zeros(4, 8, 64, 132, dtype=BF16, device=DEVICE)[..., :128]
    with pytest.raises(ValueError, match=r"^state: cannot be updated in place: expected every row to start at a multiple of 16 bytes"):
        call(case.changed(state=half))


def test_the_same_op_with_and_without_features_one_after_the_other():
    op = SSDRecurrentFwdOp()
    for _ in range(2):
        for names in ((), ("D",), ("z",), ("D", "z"), ("state_batch_indices",), ()):
            case = features(on_gpu(tied=True), names)
            y64, state64 = expected(case)
            close(call(case, op=op), y64, TIGHT, f"y with {names}")
            close(case.state, state64, TIGHT, f"state with {names}")


def test_a_graph_replays_with_new_slots_in_the_same_memory():
    case = features(on_gpu(tied=True), ("D", "state_batch_indices"))
    case.keywords["out"] = torch.zeros(4, 8, 64, device=DEVICE)
    op, slots, first = SSDRecurrentFwdOp(), case.keywords["state_batch_indices"], case.state.clone()
    op(*case.six, **case.keywords)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        op(*case.six, **case.keywords)
    case.state.copy_(first)
    slots.copy_(torch.tensor([1, -1, 7, 3], dtype=torch.int32, device=DEVICE))
    y64, state64 = expected(case)
    graph.replay()
    close(case.keywords["out"], y64, TIGHT, "y")
    close(case.state, state64, TIGHT, "state")


@TIED
@pytest.mark.parametrize("batch", [1, 3, 40])
def test_steps_in_a_row_are_those_of_steps_one_by_one(tied, batch):
    """A step may be launched while what is before it still runs: another step, torch's kernels, a fill, another stream's work."""
    op, x, marks = SSDRecurrentFwdOp(), on_gpu(batch, tied=tied), torch.zeros(1 << 20, device=DEVICE)
    first = [t.clone() for t in (x.state, x.x)]
    y = torch.empty(batch, 8, 64, device=DEVICE)
    side = torch.cuda.Stream()

    def steps(pause) -> None:
        x.state.copy_(first[0])
        x.x.copy_(first[1])
        for i in range(24):
            op(*x.six, out=y)
            pause()
            if i % 4 == 1:
                x.x.add_(y.to(x.x.dtype), alpha=0.01)
            elif i % 4 == 2:
                marks.zero_()
            elif i % 4 == 3:
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    x.state.mul_(0.5)
                torch.cuda.current_stream().wait_stream(side)
            pause()

    steps(torch.cuda.synchronize)
    expected = y.clone(), x.state.clone()
    steps(lambda: None)
    assert torch.equal(y, expected[0]) and torch.equal(x.state, expected[1])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        steps(lambda: None)
    for _ in range(5):
        y.fill_(math.nan)
        graph.replay()
        assert torch.equal(y, expected[0]) and torch.equal(x.state, expected[1])
