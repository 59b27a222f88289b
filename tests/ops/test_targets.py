"""Which target serves an op: argument, process default, device, entry points. Third parties are real distributions on sys.path."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import tileops
from tileops import mamba, targets
from tileops.errors import TargetError


@pytest.fixture(autouse=True)
def no_default():
    yield
    tileops.set_default_target(None)


def tensors() -> tuple[torch.Tensor, ...]:
    return torch.ones(1, 4, 2), torch.tensor([-1.0, -2.0])


def test_cpu_tensors_run_the_reference():
    default = mamba.SSDChunkCumsumFwdOp(4)(*tensors())
    explicit = mamba.SSDChunkCumsumFwdOp(4, target="reference")(*tensors())
    assert all(torch.equal(a, b) for a, b in zip(default, explicit))


@pytest.mark.parametrize("make", [lambda n: mamba.SSDStatePassingFwdOp(target=n), tileops.set_default_target], ids=["argument", "default"])
def test_unknown_names_are_refused_at_once_with_those_registered(make):
    with pytest.raises(TargetError, match=r"^target 'cudnn' is not registered; registered: builtin, reference\.$") as caught:
        make("cudnn")
    assert caught.value.registered == ("builtin", "reference")
    with pytest.raises(TypeError, match=r"^target: expected a target name, BUILTIN or None, got int"):
        make(3)


def test_the_in_tree_kernels_refuse_cpu_tensors_with_the_way_out():
    op = mamba.SSDChunkCumsumFwdOp(4, target=tileops.BUILTIN)
    with pytest.raises(TargetError, match=r"^SSDChunkCumsumFwdOp: target 'builtin' runs CUDA tensors only, .*target='reference', or"):
        op(*tensors())


def test_the_process_default_comes_after_the_argument_and_can_be_taken_back():
    op, explicit = mamba.SSDChunkCumsumFwdOp(4), mamba.SSDChunkCumsumFwdOp(4, target="reference")
    expected = op(*tensors())
    tileops.set_default_target(tileops.BUILTIN)
    with pytest.raises(TargetError):
        op(*tensors())
    assert torch.equal(explicit(*tensors())[1], expected[1])
    tileops.set_default_target(None)
    assert torch.equal(op(*tensors())[1], expected[1])


def test_every_op_has_a_reference():
    for name in mamba.__all__:
        assert callable(targets.implementation("reference", name))
    with pytest.raises(TargetError, match=r"^target 'reference' does not serve SoftmaxOp"):
        targets.implementation("reference", "SoftmaxOp")


class Documented(mamba.SSDChunkCumsumFwdOp):
    """A user's own words."""


class Defaulted(mamba.SSDChunkCumsumFwdOp):
    def __init__(self, chunk_len: int = 4, **options) -> None:
        super().__init__(chunk_len, **options)


class Wrapped(mamba.SSDChunkCumsumFwdOp):
    def forward(self, dt, A, dt_bias=None):
        return super().forward(dt, A, dt_bias)


@pytest.mark.parametrize("op", [Documented(4), Defaulted(), Wrapped(4), Defaulted(target="reference")], ids=lambda op: type(op).__name__)
def test_a_subclass_of_an_op_is_served_as_the_op(op):
    expected = mamba.SSDChunkCumsumFwdOp(4)(*tensors())
    assert repr(op).startswith(f"{type(op).__name__}(chunk_len=4, ")
    torch._dynamo.reset()
    traced = torch.compile(lambda *args: op(*args), fullgraph=True, dynamic=True, backend="aot_eager")
    for call in (op, traced):
        assert all(torch.equal(a, b) for a, b in zip(call(*tensors()), expected))


def test_names_of_the_package_load_when_used():
    for name in tileops.__all__:
        assert name in dir(tileops)
        assert getattr(tileops, name) is not None
    assert tileops.BUILTIN == targets.BUILTIN
    assert tileops.errors.TargetError is TargetError
    for name in ("freeze", "policy", "preload", "stats"):
        assert callable(getattr(tileops, name))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = tileops.nothing


MODULE = """
import torch
class Target:
    name = "doubling"
    def implementation(self, op_name):
        if op_name == "SSDChunkCumsumFwdOp":
            return lambda dt, A, dt_bias, **options: (2 * dt, str(sorted(options)))
        if op_name == "Mamba2FwdOp":
            return lambda x, dt, A, B, C, dt_bias, initial_states, **more: sorted(more)
good, unnamed = Target(), object()
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder with a distribution that registers one working target and four broken ones."""
    (tmp_path / "thirdparty.py").write_text(MODULE)
    info = tmp_path / "thirdparty-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: thirdparty\nVersion: 1.0\n")
    objects = {"doubling": "thirdparty:good", "other": "thirdparty:good", "unnamed": "thirdparty:unnamed", "absent": "no_such_module:x"}
    points = [f"{name} = {value}\n" for name, value in {**objects, "reference": "thirdparty:good"}.items()]
    (info / "entry_points.txt").write_text("".join(["[tileops.targets]\n", *points]))
    return tmp_path


def run(site: Path, body: str) -> str:
    """Runs ``body`` in a fresh interpreter that sees the distribution; its stdout."""
    source = "import warnings, torch, tileops, tileops.mamba as m\n" + textwrap.dedent(body)
    path = os.pathsep.join([str(site), str(Path(tileops.__file__).parents[1])])
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_third_partys_target_serves_an_op(site):
    out = run(
        site,
        """
        import sys
        op = m.SSDChunkCumsumFwdOp(4)
        dt, A = torch.ones(1, 4, 2), -torch.ones(2)
        op(dt, A)
        assert "thirdparty" not in sys.modules, "loaded though nobody asked for it"
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*the name is an in-tree target's")
            named = m.SSDChunkCumsumFwdOp(4, target="doubling")
        doubled, options = named(dt, A)
        assert torch.equal(doubled, 2 * dt)
        print(options)
        class Mine(m.SSDChunkCumsumFwdOp):
            pass
        assert torch.equal(Mine(4, target="doubling")(dt, A)[0], 2 * dt)
        tileops.set_default_target("doubling")
        assert torch.equal(op(dt, A)[0], 2 * dt)
        try:
            m.SSDChunkCouplingFwdOp(4)(torch.zeros(1, 4, 1, 8), torch.zeros(1, 4, 1, 8))
        except tileops.errors.TargetError as error:
            print(error)
        """,
    )
    assert "['chunk_len', 'dt_max', 'dt_min', 'dt_softplus', 'out_dtype']" in out
    assert "target 'doubling' does not serve SSDChunkCouplingFwdOp" in out


def test_a_third_partys_target_gets_what_is_beyond_the_spec_as_keywords_where_it_is_passed(site):
    out = run(
        site,
        """
        x, BC = torch.zeros(1, 4, 2, 8), torch.zeros(1, 4, 1, 8)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            op = m.Mamba2FwdOp(4, target="doubling")
        spec = x, torch.zeros(1, 4, 2), torch.zeros(2), BC, BC
        print(op(*spec))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            op = m.Mamba2FwdOp(4, dt_limit=(0.01, 0.1), target="doubling")
        print(op(*spec, z=x.clone(), D=torch.zeros(2)))
        """,
    )
    assert out.splitlines() == [
        "['chunk_size', 'dt_softplus']",
        "['D', 'chunk_size', 'dt_limit', 'dt_softplus', 'z']",
    ]


def test_a_broken_target_is_one_warning_and_takes_nothing_with_it(site):
    out = run(
        site,
        """
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            print(tileops.registered_targets(), tileops.registered_targets())
        for warning in caught:
            print("W", warning.message)
        try:
            m.SSDChunkCumsumFwdOp(4, target="absent")
        except tileops.errors.TargetError as error:
            print("E", error)
        """,
    )
    lines = out.splitlines()
    listed = "('builtin', 'reference', 'doubling')"
    assert lines[0] == f"{listed} {listed}"
    warned = sorted(line.split()[3] for line in lines if line.startswith("W"))
    assert warned == ["'absent'", "'other'", "'reference'", "'unnamed'"]
    assert "E target 'absent' is not registered (it failed to load: ModuleNotFoundError" in lines[-1]
