"""torch.compile and torch.library on CUDA: no graph break, one compile for many lengths, the state's mutation declared."""

from __future__ import annotations

import pytest
from library_cases import NAMES, calls, compiled_equals_eager, compiles_after_the_first_length, opcheck

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", NAMES)
def test_opcheck(name):
    opcheck(*calls("cuda")[name])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("backend", ["aot_eager", "cudagraphs"])
def test_report_62_compiles_without_a_graph_break(name, backend):
    compiled_equals_eager(*calls("cuda")[name], backend=backend)


def test_one_compile_serves_many_lengths():
    assert compiles_after_the_first_length("cuda", "aot_eager") == 0
