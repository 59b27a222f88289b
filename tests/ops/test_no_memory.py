"""Tensors that have no memory of their own: shapes alone (meta, fake), and those of torch.func's transforms."""

from __future__ import annotations

import inspect
import warnings

import pytest
import torch
from library_cases import NAMES, calls, copies, flat
from library_cases import options as library_options
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad

import tileops
from tileops import mamba


def features(device: str) -> list:
    """(op, positional, keywords) with every tensor beyond the spec."""
    full, (x, dt, A, B, C, bias, _) = calls(device)["Mamba2FwdOp"]
    step, arguments = calls(device)["SSDRecurrentFwdOp"]
    heads, half, at = A.shape[0], x.dtype, {"device": device}
    packed = {"z": x[:1], "cu_seqlens": torch.tensor([0, 7, 40], dtype=torch.int32, **at), "D": torch.zeros(heads, **at)}
    rows = {"seq_idx": torch.zeros(x.shape[:2], dtype=torch.int32, **at), "out": torch.zeros_like(x)}
    slots = {"state_batch_indices": torch.tensor([1, -1], **at), "z": arguments[2], "dt_bias": torch.zeros(heads, **at)}
    return [
        (full, (x[:1], dt[:1], A, B[:1], C[:1], bias), packed),
        (type(full)(16, out_dtype=half), (x, dt, A, B, C, bias), rows),
        (step, arguments, slots),
        (type(step)(out_dtype=half), arguments, {"D": torch.zeros(heads, **at)}),
        (step, arguments, {"out": torch.zeros_like(arguments[2])}),
    ]


CALLS = [*((op, arguments, {}) for op, arguments in map(calls("cpu").get, NAMES)), *features("cpu")]  # type: ignore[misc]
IDS = [*NAMES, "cu_seqlens", "seq_idx and out", "slots", "out_dtype", "out"]


def moved(move, arguments, keywords):
    return [None if a is None else move(a) for a in arguments], {name: move(t) for name, t in keywords.items()}


@pytest.mark.parametrize("target", [None, "reference", tileops.BUILTIN])
@pytest.mark.parametrize(("op", "arguments", "keywords"), CALLS, ids=IDS)
def test_meta_tensors_give_shapes_and_dtypes(op, arguments, keywords, target):
    expected = flat(op(*copies(arguments), **keywords))
    given, words = moved(lambda t: t.to("meta"), arguments, keywords)
    chosen = {**op.options(), "target": target}
    got = flat(type(op)(**chosen)(*given, **words))
    assert [(t.shape, t.dtype, t.device.type) for t in got] == [(t.shape, t.dtype, "meta") for t in expected]
    if "out" in words:
        assert got[0] is words["out"]


def test_meta_tensors_are_checked_as_others():
    op, arguments, _ = CALLS[0]
    given, _ = moved(lambda t: t.to("meta"), arguments, {})
    with pytest.raises(ValueError, match=r"^dt: expected shape \(2, 40, 4\), got \(2, 39, 4\)\."):
        op(given[0], given[1][:, 1:], *given[2:])


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(("op", "arguments", "keywords"), CALLS[:-1], ids=IDS[:-1])
def test_fake_tensors_launch_nothing_and_warn_of_nothing(op, arguments, keywords, device):
    """They say that they are on a GPU, where there may be none; a kernel would be given the address 0."""
    expected = flat(op(*copies(arguments), **keywords))
    with FakeTensorMode():
        given, words = moved(lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device), arguments, keywords)
        with warnings.catch_warnings():
            warnings.simplefilter("error" if "out" not in words else "ignore")
            got = flat(op(*given, **words))
    assert all(isinstance(t, FakeTensor) for t in got)
    assert [(t.shape, t.dtype, t.device.type) for t in got] == [(t.shape, t.dtype, device) for t in expected]


class Wrapper(torch.Tensor):
    """As DTensor: on a device, with the elements elsewhere."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device="cuda:0")

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise NotImplementedError(str(function))


@pytest.mark.parametrize(("op", "arguments", "keywords"), CALLS, ids=IDS)
def test_a_tensor_whose_storage_was_freed_is_refused_before_anything_is_done(op, arguments, keywords):
    """As FSDP frees it between uses. torch's own functions end the process, or decode's state is advanced first."""
    names = list(inspect.signature(op.forward).parameters)
    for name in [*(n for n, a in zip(names, arguments) if a is not None), *keywords]:
        given, words = copies(arguments), {n: t.clone() for n, t in keywords.items()}
        freed = words[name] if name in words else given[names.index(name)]
        freed.untyped_storage().resize_(0)
        kept = {n: t.clone() for n, t in (*zip(names, given), *words.items()) if t is not None and n != name}
        with pytest.raises(ValueError, match=rf"^{name}: expected a tensor with memory that kernels can read, got a Tensor without"):
            op(*given, **words)
        for n, t in (*zip(names, given), *words.items()):
            assert n not in kept or torch.equal(t, kept[n]), n


def test_a_tensor_that_is_not_where_it_says_is_refused():
    op, arguments = calls("cpu")["SSDChunkCouplingFwdOp"]
    with pytest.raises(
        ValueError, match=r"^C_mat: expected a tensor with memory that kernels can read, got a Wrapper without; pass a plain"
    ):
        op(*map(Wrapper, arguments))


@pytest.mark.parametrize("name", NAMES)
def test_vmap_is_refused_with_the_way_out(name):
    op, arguments = calls("cpu")[name]
    first = list(arguments)
    words = r"^\w+: torch\.vmap does not reach into this op; call it once, with what vmap maps over in the batch dimension\."
    with pytest.raises(ValueError, match=words):  # the batch itself, which ops then miss
        torch.vmap(lambda t: op(t, *first[1:]))(first[0])
    last = max(i for i, t in enumerate(first) if t is not None)
    with pytest.raises(ValueError, match=words):
        torch.vmap(lambda t: op(*first[:last], t, *first[last + 1 :]))(torch.stack([first[last]] * 2))


def test_derivatives_of_torch_func_are_refused():
    op, (x, *rest) = calls("cpu")["Mamba2FwdOp"]

    def loss(x):
        return op(x, *rest)[0].sum()

    def untracked(x):
        with torch.no_grad():
            return loss(x)

    with pytest.raises(ValueError, match=r"^x: requires grad, and this op is forward only"):
        torch.func.grad(loss)(x)
    for run in (lambda: torch.func.jvp(loss, (x,), (x,)), lambda: torch.func.grad(untracked)(x)):
        with pytest.raises(ValueError, match=r"^x: is differentiated by torch\.func, and this op is forward only; call it outside of"):
            run()
    with forward_ad.dual_level():
        op(x, *rest)  # within, but not of it
        torch.ops.tileops.mamba2_fwd(x, *rest, **library_options(op))  # as what torch.compile makes calls it, below autograd
        with pytest.raises(
            ValueError, match=r"^x: has a tangent of torch\.autograd\.forward_ad, and this op is forward only; pass its primal"
        ):
            op(forward_ad.make_dual(x, x), *rest)


def test_a_layer_can_be_built_and_called_on_meta():
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scan, self.rates = mamba.Mamba2FwdOp(16), torch.nn.Parameter(-torch.ones(4), requires_grad=False)

        def forward(self, x, dt, B, C):
            return self.scan(x, dt, self.rates, B, C)[0]

    with torch.device("meta"):
        layer = Layer()
        y = layer(torch.empty(2, 40, 4, 16), torch.empty(2, 40, 4), torch.empty(2, 40, 2, 16), torch.empty(2, 40, 2, 16))
    assert (y.shape, y.device.type) == ((2, 40, 4, 16), "meta")
