"""torch.compile and torch.library on the CPU: tests/gpu/test_library_gpu.py is the same on CUDA."""

from __future__ import annotations

import io

import pytest
import torch
from library_cases import NAMES, calls, compiled_equals_eager, compiles_after_the_first_length, copies, flat, opcheck
from library_cases import options as library_options


@pytest.mark.parametrize("name", NAMES)
def test_opcheck(name):
    opcheck(*calls("cpu")[name])


@pytest.mark.parametrize("name", NAMES)
def test_report_62_compiles_without_a_graph_break(name):
    compiled_equals_eager(*calls("cpu")[name], backend="aot_eager")


def test_one_compile_serves_many_lengths():
    assert compiles_after_the_first_length("cpu", "aot_eager") == 0


def test_wrong_arguments_are_refused_when_the_graph_runs():
    op, arguments = calls("cpu")["Mamba2FwdOp"]
    wrong = copies(arguments)
    wrong[5] = wrong[5][:-1]
    with pytest.raises(ValueError, match="dt_bias"):
        torch.compile(op.forward, fullgraph=True, backend="aot_eager")(*wrong)


@pytest.mark.parametrize("name", NAMES)
def test_an_op_is_one_node_of_an_exported_program(name):
    op, arguments = calls("cpu")[name]

    class Module(torch.nn.Module):
        def forward(self, *args):
            return op(*args)

    program = torch.export.export(Module(), tuple(copies(arguments)))
    assert [str(n.target) for n in program.graph.nodes if "tileops" in str(n.target)] == [f"tileops.{op.library_name}.default"]
    stored = io.BytesIO()
    torch.export.save(program, stored)
    stored.seek(0)
    got = torch.export.load(stored).module()(*copies(arguments))
    assert all(torch.equal(a, b) for a, b in zip(flat(got), flat(op(*copies(arguments)))))


def test_the_target_is_part_of_the_graph():
    op, arguments = calls("cpu")["SSDChunkCouplingFwdOp"]
    chosen = type(op)(op.chunk_len, target="reference")
    torch._dynamo.reset()
    got = torch.compile(chosen.forward, fullgraph=True, backend="aot_eager")(*arguments)
    assert torch.equal(got, op(*arguments))


def test_features_and_out_are_traced_too():
    op, (x, dt, A, B, C, bias, _) = calls("cpu")["Mamba2FwdOp"]
    D, z = torch.randn(x.shape[2]), torch.randn_like(x)
    out, other = torch.empty_like(x), torch.empty_like(x)
    torch._dynamo.reset()

    def call(out):
        y, final = op(x, dt, A, B, C, bias, D=D, z=z, out=out)
        return y + 1, final

    y, final = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")(out)
    expected_y, expected_final = call(other)
    assert torch.equal(y, expected_y) and torch.equal(out, other) and torch.equal(final, expected_final)
    torch.library.opcheck(
        torch.ops.tileops.mamba2_fwd.default, (x, dt, A, B, C, bias), {"D": D, "z": z, "out": other, **library_options(op)}
    )


def test_report_75_inputs_that_require_grad_are_refused_under_compile_too():
    op, arguments = calls("cpu")["Mamba2FwdOp"]
    given = copies(arguments)
    given[0] = given[0].float().requires_grad_()
    given[3], given[4] = given[3].float(), given[4].float()
    torch._dynamo.reset()
    traced = torch.compile(op.forward, backend="aot_eager")
    with pytest.raises(Exception, match=r"requires grad, and this op is forward only"):
        traced(*given)
    with torch.no_grad():
        assert torch.isfinite(traced(*given)[0]).all()


def test_written_arguments_have_alias_sets_of_their_own():
    schema = str(torch.ops.tileops.ssd_recurrent_fwd.default._schema)
    assert "Tensor(a!) state" in schema and "Tensor(b!)? out" in schema
