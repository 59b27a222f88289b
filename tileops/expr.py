"""The tiny arithmetic of records: how grids and scalar parameters are computed from a call's sizes. A leaf.

Grammar: non-negative integers, names (``B``, ``x.stride0``), ``+ - * //``, parentheses, ``ceildiv(a, b)``, ``min(a, b)``,
``max(a, b)``. All values are integers; ``//`` rounds down. Nothing else is accepted, so a record cannot carry code.
"""

from __future__ import annotations

import ast
import functools
import operator
from collections.abc import Callable, Mapping

from tileops.errors import CorruptArtifactError

#: A hostile record could nest deeper than the interpreter's stack.
_LONGEST = 500

_FUNCTIONS: dict[str, Callable[[int, int], int]] = {"ceildiv": lambda a, b: -(-a // b), "min": min, "max": max}
_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}


@functools.lru_cache(maxsize=4096)
def parse(text: str) -> Callable[[Mapping[str, int]], int]:
    """The expression as a function of a name -> value mapping. Raises CorruptArtifactError for anything outside the grammar."""
    if len(text) > _LONGEST:
        raise CorruptArtifactError(
            f"expression of {len(text)} characters: no record has one over {_LONGEST}.", path="record", reason="grammar"
        )
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise CorruptArtifactError(f"expression {text!r} does not parse.", path="record", reason="grammar") from None
    return _compile(tree, text)


def evaluate(text: str, sizes: Mapping[str, int]) -> int:
    """The expression's value. Raises KeyError with the name that ``sizes`` lacks."""
    return parse(text)(sizes)


def _compile(node: ast.expr, text: str) -> Callable[[Mapping[str, int]], int]:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        value = node.value
        return lambda sizes: value
    if isinstance(node, ast.Name):
        return operator.itemgetter(node.id)
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return operator.itemgetter(f"{node.value.id}.{node.attr}")
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        operate, left, right = _OPERATORS[type(node.op)], _compile(node.left, text), _compile(node.right, text)
        return lambda sizes: operate(left(sizes), right(sizes))
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in _FUNCTIONS
        and len(node.args) == 2
        and not node.keywords
    ):
        function, (first, second) = _FUNCTIONS[node.func.id], (_compile(a, text) for a in node.args)
        return lambda sizes: function(first(sizes), second(sizes))
    raise CorruptArtifactError(f"expression {text!r} is outside the record's grammar.", path="record", reason="grammar")
