"""Who may import whom. The source says it (ast, module level); a fresh interpreter says what really gets loaded."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "tileops"

LEAVES = {"catalog", "compiler.flags", "config", "env", "errors", "expr", "models", "schedules"}

#: layer -> (other layers it may import at module level, packages from outside it may import at module level). Leaves are
#: always allowed, and so is the standard library. Longest name first where two fit.
RULES: dict[str, tuple[set[str], set[str]]] = {
    "store": (set(), {"filelock", "platformdirs"}),
    "driver": (set(), {"cuda"}),
    "kernels": (set(), {"tilelang"}),
    "compiler": (set(), set()),
    "targets": (set(), {"torch"}),
    "reference": (set(), {"torch"}),
    # _resolve decides between loading and compiling; tileops.compiler itself imports no TileLang.
    "ops._resolve": ({"store", "driver", "targets", "compiler"}, {"torch"}),
    "ops": ({"store", "driver", "targets"}, {"torch"}),
    "mamba": ({"ops"}, {"torch"}),
    "cli": ({"store"}, set()),
    "__main__": ({"cli"}, set()),
    "artifacts": (set(), set()),
    "": (set(), set()),  # tileops/__init__.py
}

#: What must not be imported anywhere in a layer, not even inside a function.
NEVER = {"store": {"torch", "cuda"}, "driver": {"torch"}, "kernels": {"torch"}, "compiler": {"torch", "cuda"}}

FILES = sorted(PACKAGE.rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_in(module: str, layer: str) -> bool:
    return module == layer or module.startswith(f"{layer}.")


def layer_of(module: str) -> str:
    if module in LEAVES:
        return "leaf"
    fitting = [layer for layer in RULES if is_in(module, layer)]
    assert fitting, f"tileops.{module} has no layer: say in RULES, or LEAVES, what it may import"
    return max(fitting, key=len)


def imports(path: Path, everywhere: bool) -> Iterator[tuple[str, int]]:
    """(imported module, line): of the module level, outside `if TYPE_CHECKING`; or of the whole file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = list(ast.walk(tree)) if everywhere else list(module_level(tree.body))
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import; write it in full"
            # `from tileops import store` imports tileops.store.
            names = [f"{node.module}.{alias.name}" for alias in node.names] if is_package(str(node.module)) else [str(node.module)]
            yield from ((name, node.lineno) for name in names)


def is_package(module: str) -> bool:
    return module.split(".")[0] == "tileops" and (ROOT / module.replace(".", "/")).is_dir()


def module_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            yield from module_level(node.orelse)
            continue
        yield node
        for part in ("body", "orelse", "finalbody", "handlers"):
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                for child in getattr(node, part, []):
                    yield from module_level(child.body if isinstance(child, ast.ExceptHandler) else [child])


@pytest.mark.parametrize("path", FILES, ids=[module_name(path) or "tileops" for path in FILES])
def test_imports_of_a_module_keep_to_its_layer(path):
    module = module_name(path)
    layer = layer_of(module)
    inner, outer = (set(), set()) if layer == "leaf" else RULES[layer]
    wrong = []
    for name, line in imports(path, everywhere=False):
        top, _, rest = name.partition(".")
        if top == "tileops":
            allowed = {*LEAVES, *inner} | ({layer.partition(".")[0]} if layer not in ("leaf", "") else set())
            ok = not rest or any(is_in(rest, other) for other in allowed)
        else:
            ok = top in sys.stdlib_module_names or top in outer
        if not ok:
            wrong.append(f"{path.relative_to(ROOT)}:{line} imports {name}")
    assert not wrong, f"the layer {layer!r} may import leaves, {sorted(inner | outer) or 'nothing else'}: {wrong}"


@pytest.mark.parametrize("path", FILES, ids=[module_name(path) or "tileops" for path in FILES])
def test_no_module_imports_what_its_layer_never_may(path):
    forbidden = {"build_kernels", "tests", "benchmarks", "examples"}
    for layer, names in NEVER.items():
        if is_in(module_name(path), layer):
            forbidden |= names
    found = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for name, line in imports(path, everywhere=True)
        if name.split(".")[0] in forbidden
    ]
    assert not found


def test_the_rules_see_what_they_forbid(tmp_path):
    path = tmp_path / "module.py"
    path.write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import cuda\n"
        "try:\n    import torch\nexcept ImportError:\n    import tilelang\n"
        "def f():\n    import build_kernels\nclass C:\n    from tileops import store, config\n"
    )
    assert [name for name, _ in imports(path, everywhere=False)] == ["typing", "torch", "tilelang", "tileops.store", "tileops.config"]
    assert "build_kernels" in [name for name, _ in imports(path, everywhere=True)]
    assert layer_of("store.cache") == "store" and layer_of("compiler.flags") == "leaf" and layer_of("") == ""
    with pytest.raises(AssertionError, match="has no layer"):
        layer_of("storehouse")


#: Loaded in a fresh interpreter -> modules that must not come with it.
HEAVY = {"torch", "tilelang", "tvm", "cuda", "numpy"}
LOADS = {
    "tileops": HEAVY | {"filelock", "platformdirs", "tileops.store", "tileops.ops"},
    "tileops.config, tileops.catalog, tileops.models, tileops.expr, tileops.env, tileops.errors": HEAVY
    | {"filelock", "platformdirs", "tileops.store"},
    "tileops.store": HEAVY | {"tileops.driver", "tileops.compiler", "tileops.ops"},
    "tileops.driver": {"torch", "tilelang", "tvm", "cuda", "tileops.store", "tileops.ops"},
    "tileops.compiler": {"torch", "tilelang", "tvm", "cuda", "tileops.store", "tileops.ops"},
    "tileops.targets": {"torch", "tilelang", "cuda", "tileops.ops"},
    "tileops.cli": {"torch", "tilelang", "tvm", "cuda", "numpy", "tileops.ops", "tileops.compiler.lower", "tileops.driver"},
    # Beyond what torch brings.
    "torch, tileops.mamba": {"tilelang", "tvm", "cuda", "filelock", "platformdirs", "tileops.store", "tileops.driver", "tileops.compiler"},
}


def fresh(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("loaded", LOADS)
def test_what_an_import_loads(loaded):
    before = "import torch; seen = set(sys.modules)" if loaded.startswith("torch") else "seen = set()"
    modules = fresh(f"import sys; {before}; import {loaded}; print(*(set(sys.modules) - seen))").split()
    forbidden = LOADS[loaded]
    assert not [name for name in modules if any(name == bad or name.startswith(f"{bad}.") for bad in forbidden)]


def test_help_imports_neither_torch_nor_tilelang():
    code = """
import sys
from tileops.cli import main
try:
    main(["--help"])
except SystemExit as end:
    assert not end.code
print("modules:", *sys.modules)
"""
    modules = fresh(code).rpartition("modules:")[2].split()
    assert not {"torch", "tilelang", "tvm", "cuda", "numpy"} & set(modules)


def test_importing_the_operators_makes_no_cuda_context_and_writes_nothing(tmp_path, record_property):
    code = f"""
import os, sys, time
os.environ.update(HOME={str(tmp_path)!r}, TILEOPS_CACHE_DIR={str(tmp_path / "cache")!r}, XDG_CACHE_HOME={str(tmp_path)!r})
import torch
start = time.perf_counter()
import tileops.mamba
print((time.perf_counter() - start) * 1e3)
tileops.mamba.Mamba2FwdOp(); tileops.mamba.SSDRecurrentFwdOp()
assert not torch.cuda.is_initialized()
"""
    milliseconds = float(fresh(code))
    record_property("import_milliseconds_beyond_torch", milliseconds)  # reported, not judged: budgets are benchmarks
    assert list(tmp_path.iterdir()) == []
