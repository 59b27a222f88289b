"""The tiny arithmetic of records: how grids and scalar parameters are computed from a call's sizes. A leaf.

Grammar: non-negative integers, names (``B``, ``x.stride0``), ``+ - * //``, parentheses, ``ceildiv(a, b)``, ``min(a, b)``,
``max(a, b)``. All values are integers; ``//`` rounds down. Nothing else is accepted, so a record cannot carry code.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tileops.errors import CorruptArtifactError

#: Characters. A hostile record could nest deeper than the interpreter's stack, or have integers that take long to multiply.
_LONGEST = 500

#: What the mapping of sizes is called in the code that expressions become; no name of theirs is a name in it.
_SIZES = "sizes"
_LOAD = ast.Load()
_AT: Any = {"lineno": 1, "col_offset": 0}

_FUNCTIONS: dict[str, Callable[[int, int], int]] = {"ceildiv": lambda a, b: -(-a // b), "min": min, "max": max}
_OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.FloorDiv)


def check(text: str) -> None:
    """Raises CorruptArtifactError for anything outside the grammar."""
    _parse(text)


def names(texts: Iterable[str]) -> set[str]:
    """What the values of these expressions depend on. Raises CorruptArtifactError."""
    return set().union(*[_parse(text)[1] for text in texts])


def function(texts: Iterable[str]) -> Callable[[Mapping[str, int]], tuple[int, ...]]:
    """The expressions as one function of a name -> value mapping, which raises KeyError with a name that is not there.

    Raises CorruptArtifactError for anything outside the grammar.
    """
    values = ast.Tuple([_parse(text)[0] for text in texts], _LOAD, **_AT)
    argument = ast.arguments(posonlyargs=[], args=[ast.arg(_SIZES, **_AT)], kwonlyargs=[], kw_defaults=[], defaults=[])
    code = compile(ast.Expression(ast.Lambda(argument, values, **_AT)), "<record>", "eval")
    made: Callable[[Mapping[str, int]], tuple[int, ...]] = eval(code, {"__builtins__": {}, **_FUNCTIONS})
    return made


def evaluate(text: str, sizes: Mapping[str, int]) -> int:
    """One expression's value. Raises KeyError with the name that ``sizes`` lacks."""
    return function([text])(sizes)[0]


@functools.lru_cache(maxsize=4096)
def _parse(text: str) -> tuple[ast.expr, frozenset[str]]:
    """The expression, rebuilt of nothing but the grammar's nodes, and its names."""
    if len(text) > _LONGEST:
        raise CorruptArtifactError(
            f"expression of {len(text)} characters: no record has one over {_LONGEST}.", path="record", reason="grammar"
        )
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise CorruptArtifactError(f"expression {text!r} does not parse.", path="record", reason="grammar") from None
    found: set[str] = set()
    return _rebuilt(tree, text, found), frozenset(found)


def _rebuilt(node: ast.expr, text: str, found: set[str]) -> ast.expr:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return ast.Constant(node.value, **_AT)
    if isinstance(node, ast.Name):
        return _size(node.id, found)
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return _size(f"{node.value.id}.{node.attr}", found)
    if isinstance(node, ast.BinOp) and isinstance(node.op, _OPERATORS):
        return ast.BinOp(_rebuilt(node.left, text, found), type(node.op)(), _rebuilt(node.right, text, found), **_AT)
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in _FUNCTIONS
        and len(node.args) == 2
        and not node.keywords
    ):
        return ast.Call(ast.Name(node.func.id, _LOAD, **_AT), [_rebuilt(a, text, found) for a in node.args], [], **_AT)
    raise CorruptArtifactError(f"expression {text!r} is outside the record's grammar.", path="record", reason="grammar")


def _size(name: str, found: set[str]) -> ast.expr:
    found.add(name)
    return ast.Subscript(ast.Name(_SIZES, _LOAD, **_AT), ast.Constant(name, **_AT), _LOAD, **_AT)
