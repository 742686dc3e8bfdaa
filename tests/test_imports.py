"""Imports are light, optional packages stay out, and point one way along the data flow."""

import ast
import graphlib
import os
import re
from functools import cache
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
from fresh import run_fresh

import pararnn

ROOT = Path(pararnn.__file__).parent

# The data flow: a module may import from its folder and from those above it, never below. The docs
# show it in this order.
FLOW = [
    "base",
    "cells",
    "zoo",
    "program",
    "solvers",
    "codegen",
    "messages",
    "sequences",
    "engines",
    "ranks",
    "op",
    "solve",
    "scan",
    "layers",
    "check",
    "tune",
    "lm",
    "lab",
    "lab/tasks",
    "lab/train",
    "lab/evaluation",
    "lab/compare",
    "lab/serving",
    "lab/commands",
    "lab/cli",
    "__main__",
]


SHOWN = Path(__file__).parent.parent / "docs" / "how-it-works.md"
BLOCK = re.compile(r"(?<=<!-- flow -->\n\n```text\n).*?(?=```\n\n<!-- end flow -->)", re.DOTALL)


def _says(name):
    """A line of the docs: the module or folder, and the first line of its docstring."""
    path, label = ROOT / f"{name}.py", f"{name}.py"
    if not path.exists():
        path, label = ROOT / name / "__init__.py", f"{name}/"
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    return f"{label:<21} {docstring.splitlines()[0]}\n"


def test_the_docs_show_the_flow():
    """Rewrite them with PARARNN_WRITE_GOLDENS=1, and read the difference."""
    reference = "".join(map(_says, FLOW))
    text = SHOWN.read_text(encoding="utf-8")
    if os.environ.get("PARARNN_WRITE_GOLDENS"):
        SHOWN.write_text(BLOCK.sub(lambda _: reference, text), encoding="utf-8")
    assert BLOCK.findall(SHOWN.read_text(encoding="utf-8")) == [reference]


def _imports(tree):
    """Yield the modules, and objects of modules, that a tree's import statements name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


@cache
def _module_graph():
    """Return the package's modules, as paths without .py, and those that each imports."""
    files = {path.relative_to(ROOT).with_suffix("").as_posix(): path for path in ROOT.rglob("*.py")}
    modules = {name.removesuffix("/__init__"): path for name, path in files.items()}
    graph = {}
    for name, path in modules.items():
        names = (
            imported.removeprefix("pararnn.").replace(".", "/")
            for imported in _imports(ast.parse(path.read_text(encoding="utf-8")))
            if imported.startswith("pararnn.")
        )
        graph[name] = {n if n in modules else n.rpartition("/")[0] for n in names} - {"", name}
    del graph["__init__"]
    return MappingProxyType(graph)


def _folder(module):
    return next(name for name in sorted(FLOW, reverse=True) if f"{module}/".startswith(f"{name}/"))


def test_imports_point_one_way():
    graph = _module_graph()
    assert {_folder(module) for module in graph} == set(FLOW)
    upward = [
        f"{module} imports {other}, further down"
        for module, others in graph.items()
        for other in others
        if FLOW.index(_folder(other)) > FLOW.index(_folder(module))
    ]
    assert upward == []


def test_modules_import_each_other_in_no_circle():
    sorter = graphlib.TopologicalSorter(_module_graph())
    sorter.prepare()  # raises CycleError, which names the circle


def test_the_core_does_not_import_the_lab():
    graph = _module_graph()
    core = {module for module in graph if not module.startswith("lab")} - {"__main__"}
    assert [m for m in core if any(other.startswith("lab") for other in graph[m])] == []


def _run(code):
    result = run_fresh(code)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


@pytest.mark.skipif(
    torch.version.cuda is not None and not torch.cuda.is_available(),
    reason="PyTorch for CUDA needs its stand-in for a GPU, which imports it",
)
def test_layers_are_made_without_the_compiler():
    """Whose import takes a second: PyTorch's functions that draw on the meta device need it."""
    code = """
import sys
import pararnn
pararnn.LSTMCell(8, 16), pararnn.GRU(8, 16)
print("torch._dynamo" in sys.modules)
"""
    assert _run(code) == "False"


def test_optional_packages_stay_out():
    code = """
import sys
import torch
before = set(sys.modules)
import pararnn
new = {name.partition(".")[0] for name in set(sys.modules) - before}
print(sorted(new - set(sys.stdlib_module_names) - {"pararnn"}))
own = ["lab", "lm"]
heavy = ["matplotlib", "tqdm", "sympy", "torch._inductor", *("pararnn." + name for name in own)]
print([name for name in heavy if name in sys.modules and name not in before])
"""
    third_party, heavy = _run(code).splitlines()
    assert heavy == "[]"
    assert set(ast.literal_eval(third_party)) <= {"torch", "numpy"}


def test_import_is_quick():
    # What takes time: to trace cells, to start programs, to load libraries.
    code = """
import sys, torch
slow = {"subprocess.Popen", "os.posix_spawn", "os.system", "ctypes.dlopen"}
seen = []
sys.addaudithook(lambda event, args: seen.append(event) if event in slow else None)
import pararnn
print(seen, pararnn.program.program._BY_KEY)
"""
    assert _run(code) == "[] {}"


def test_package_is_typed_and_versioned():
    assert (ROOT / "py.typed").exists()
    assert pararnn.__version__.count(".") == 2
    assert all(hasattr(pararnn, name) for name in pararnn.__all__)
    assert all(getattr(pararnn, name).__doc__ for name in pararnn.__all__ if name.islower())


COMPILED = ["engines", "op", "solve", "scan", "layers", "lm", "lab/tasks/models", "sequences"]
"""Packages that torch.compile traces."""
NOT_TRACED = {"Choice.pair"}


def _compiled_trees():
    for name in COMPILED:
        trees = (
            [ROOT / f"{name}.py"] if (ROOT / f"{name}.py").exists() else (ROOT / name).rglob("*.py")
        )
        for path in trees:
            yield from ast.walk(ast.parse(path.read_text(encoding="utf-8")))


def test_compiled_code_has_nothing_that_older_compilers_take_wrongly():
    """PyTorch 2.9's fails on zip(strict=False) where lengths differ, and takes a property of a
    NamedTuple for something that is never None, silently; to 2.11's
    torch.compiler.is_exporting() is true everywhere. Its source is checked, as `make test` has a
    newer one: the workflow's job with PyTorch 2.9.1 runs it."""
    properties, zips, exporting = set(), [], []
    for node in _compiled_trees():
        if isinstance(node, ast.ClassDef) and "NamedTuple" in map(ast.unparse, node.bases):
            own = [part for part in node.body if isinstance(part, ast.FunctionDef)]
            properties |= {
                f"{node.name}.{part.name}"
                for part in own
                if "property" in map(ast.unparse, part.decorator_list)
            }
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "zip":
            loose = [word for word in node.keywords if ast.unparse(word) == "strict=False"]
            zips += [ast.unparse(node) for _ in loose]
        if isinstance(node, ast.Attribute) and node.attr == "is_exporting":
            exporting.append(ast.unparse(node))
    assert properties == NOT_TRACED
    # On the host: it is not traced.
    assert zips == ["zip(sizes, starts, strict=False)"]
    assert exporting == []
