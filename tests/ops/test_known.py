"""A call is taken for one seen before only where its plan's key is the same."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch

from tileops import targets
from tileops.mamba import SSDStatePassingFwdOp
from tileops.ops import _base, _torch


def tensors() -> list[torch.Tensor | None]:
    return [torch.zeros(4, 6, 8), torch.zeros(4, 6, dtype=torch.bfloat16), None, torch.zeros(8), None]


def changed(**places: torch.Tensor | None) -> list[torch.Tensor | None]:
    made = tensors()
    for place, tensor in places.items():
        made[int(place[1:])] = tensor
    return made


class Plan:
    """Whose calls give the addresses that they get."""

    def written(self):
        return "return [{addresses}]", {}


def kinds_of(call: list[torch.Tensor | None]):
    return _torch.recogniser(call, _base._modes, _base._modes(), exact=False, then="return True")


def learnt(call: list[torch.Tensor | None]) -> _base._Known:
    known = _base._Known(Plan())
    assert known.call(*call) is None
    known.learn(call, _base._modes())
    return known


def recognised(known: _base._Known, call: list[torch.Tensor | None]) -> bool:
    addresses = known.call(*call)
    assert addresses is None or addresses == [t.data_ptr() for t in call if t is not None]
    return addresses is not None


def test_equal_calls_are_recognised():
    first = tensors()
    known = learnt(first)
    assert recognised(known, first)
    assert recognised(known, tensors())
    assert recognised(known, changed(t0=torch.zeros(5, 6, 8)[1:]))
    assert _base._signature(first) == _base._signature(tensors())


def nested(layout: torch.layout = torch.strided) -> torch.Tensor:
    """Of which torch's own test of tensors asks for strides, and ends the process where they are none."""
    row = torch.zeros(6, dtype=torch.bfloat16)
    return torch.nested.nested_tensor([row, row], layout=layout)


OTHERS = {
    "shape": changed(t0=torch.zeros(4, 6, 9)),
    "rank": changed(t0=torch.zeros(4, 48)),
    "strides": changed(t0=torch.zeros(4, 8, 6).transpose(1, 2)),
    "expanded": changed(t3=torch.zeros(1).expand(8)),
    "dtype": changed(t1=torch.zeros(4, 6, dtype=torch.float16)),
    "device": changed(t0=torch.zeros(4, 6, 8, device="meta")),
    "alignment": changed(t0=torch.zeros(4 * 6 * 8 + 1)[1:].view(4, 6, 8)),
    "negated": changed(t3=torch._neg_view(torch.zeros(8))),
    "requires grad": changed(t3=torch.zeros(8, requires_grad=True)),
    "sparse": changed(t3=torch.zeros(8).to_sparse()),
    "nested": changed(t1=nested()),
    "jagged": changed(t1=nested(torch.jagged)),
    "none more": changed(t2=torch.zeros(8)),
    "another one": changed(t2=torch.zeros(8), t3=None),
    "one less": changed(t3=None),
    "no tensor": changed(t3=[0.0] * 8),
}
#: Of those, what differs in sizes, strides and addresses alone.
SIZES = ("shape", "strides", "expanded", "alignment")


@pytest.mark.parametrize("name", OTHERS)
def test_others_are_not(name):
    assert not recognised(learnt(tensors()), OTHERS[name])


@pytest.mark.parametrize("name", OTHERS)
def test_kinds_are_all_but_sizes_strides_and_addresses(name):
    kinds = kinds_of(tensors())
    assert kinds(*tensors()) is not None
    assert (kinds(*OTHERS[name]) is not None) == (name in SIZES)


def test_modes_are_part_of_kinds():
    kinds = kinds_of(tensors())
    with torch.no_grad():
        assert kinds(*tensors()) is None


def test_modes_and_default_target_are_part_of_it():
    call = changed(t3=torch.nn.Parameter(torch.zeros(8)))
    with torch.no_grad():
        known, plain = learnt(call), learnt(tensors())
        assert recognised(known, call) and recognised(plain, tensors())  # a layer's own parameters, too
        with torch.inference_mode():
            assert not recognised(plain, tensors())
        with torch.autograd.forward_ad.dual_level():
            assert not recognised(plain, tensors())
    assert not recognised(known, call) and not recognised(plain, call) and not recognised(plain, tensors())
    known = learnt(tensors())
    targets.set_default_target("reference")
    try:
        assert not recognised(known, tensors())
    finally:
        targets.set_default_target(None)
    assert recognised(known, tensors())


@pytest.mark.parametrize("guards", [None, object()], ids=["no module", "no class"])
def test_without_torchs_test_none_is_recognised(monkeypatch, guards):
    monkeypatch.setattr("tileops.ops._torch._guards", guards)
    assert not recognised(learnt(tensors()), tensors()) and kinds_of(tensors()) is _torch.unknown


def test_a_call_is_learnt_with_the_modes_that_its_key_has():
    """Whatever another thread has set since."""
    call, modes = tensors(), _base._modes()
    known = _base._Known(Plan())
    targets.set_default_target("reference")
    try:
        known.learn(call, modes)
        assert not recognised(known, call)
    finally:
        targets.set_default_target(None)
    assert recognised(known, call)


def test_a_learnt_call_ends_with_its_plan():
    """At once: a server may have the garbage collector off."""
    gc.disable()
    try:
        known = learnt(tensors())
        ended = weakref.ref(known.call), weakref.ref(known.plan)
        del known
        assert [ref() for ref in ended] == [None, None]
    finally:
        gc.enable()


def freed(tensor: torch.Tensor) -> torch.Tensor:
    """Its memory given back, as FSDP does between uses."""
    tensor.untyped_storage().resize_(0)
    return tensor


def test_a_tensor_whose_memory_was_freed_is_not_recognised_and_an_empty_one_is():
    known = learnt(tensors())
    assert not recognised(known, changed(t0=freed(torch.zeros(4, 6, 8))))
    with_empty = changed(t3=torch.zeros(0))
    assert recognised(learnt(with_empty), with_empty)


def test_one_is_refused_where_its_sizes_are_known(monkeypatch):
    op = SSDStatePassingFwdOp()
    monkeypatch.setattr(targets, "choose", lambda *_: targets.BUILTIN)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)
    monkeypatch.setattr(op, "_make_plan", lambda *_: SimpleNamespace(run=lambda *_: "ran", ordinal=None, written=Plan().written))
    states, decay = torch.zeros(1, 2, 3, 16), torch.zeros(1, 3, 2)
    for _ in range(3):
        assert op(states, decay) is not None
    with pytest.raises(ValueError, match=r"^states: expected a tensor with memory that kernels can read"):
        op(freed(states), decay)


def test_a_subclass_keeps_its_own_call():
    class Counted(SSDStatePassingFwdOp):
        def __call__(self, *args, **kwargs):
            return "its own"

    assert Counted()() == "its own"
    assert SSDStatePassingFwdOp.__call__ is SSDStatePassingFwdOp.forward
