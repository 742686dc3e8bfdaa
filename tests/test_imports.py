"""Imports are light, optional packages stay out, and point one way along the data flow."""

import ast
import os
import re
from pathlib import Path

from fresh import run_fresh

import pararnn

ROOT = Path(pararnn.__file__).parent

# The data flow: a module may import from its own row and from the rows above, never below. The docs
# show it in this order.
FLOW = [
    ["intact", "private"],
    ["device"],
    ["atomic", "errors", "numerics", "parameters", "records", "values", "version"],
    ["cache", "extras", "imports", "palette", "provenance", "sweeps"],
    ["progress"],
    ["cells"],
    ["zoo"],
    ["program/apart", "program/coupling", "program/record"],
    ["program/guard", "program/structure"],
    ["program/loads"],
    ["program/follow"],
    ["program/reads", "program/trace"],
    ["program/derive", "program/statements"],
    ["program/late", "program/matrix", "program/mixing"],
    ["program/program"],
    ["program/entries"],
    ["solvers"],
    ["codegen"],
    ["context/group"],
    ["context/deal", "context/shift", "context/whole"],
    ["tensors"],
    ["sequences"],
    ["engines"],
    ["context/piece", "context/sweeps"],
    ["context/span"],
    ["context/solve", "context/turns"],
    ["op"],
    ["solve"],
    ["scan"],
    ["context/parallel"],
    ["layers"],
    ["check/claims", "check/reference"],
    ["check/oracle"],
    ["check/contract", "check/readout"],
    ["check/matrix"],
    ["check/verify"],
    ["tune/adapt", "tune/explain", "tune/timing"],
    ["tune/autotune"],
    ["lm"],
    ["tasks"],
    ["train"],
    ["evaluation"],
    ["compare"],
    ["serving"],
    ["cli"],
    ["__main__"],
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
    reference = "".join(_says(name) for names in FLOW for name in names)
    text = SHOWN.read_text(encoding="utf-8")
    if os.environ.get("PARARNN_WRITE_GOLDENS"):
        SHOWN.write_text(BLOCK.sub(lambda _: reference, text), encoding="utf-8")
    assert BLOCK.findall(SHOWN.read_text(encoding="utf-8")) == [reference]


def _imports(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_imports_point_one_way():
    row_of = {name: row for row, names in enumerate(FLOW) for name in names}

    def place(parts):
        inner = "/".join(parts[:2])
        return inner if inner in row_of else parts[0]

    modules = set()
    for path in ROOT.rglob("*.py"):
        if path.name == "__init__.py" and not list(_imports(path)):
            continue
        own = place(path.relative_to(ROOT).with_suffix("").parts)
        if own == "__init__":
            continue
        assert own in row_of, f"{path}: say in FLOW where {own} belongs"
        modules.add(own)
        for module in _imports(path):
            parts = module.split(".")
            if parts[0] != "pararnn" or len(parts) == 1:
                continue
            if (other := place(parts[1:])) != own:
                assert row_of[other] < row_of[own], f"{path} imports {module}, further down"
    assert modules == set(row_of)


def _run(code):
    result = run_fresh(code)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_optional_packages_stay_out():
    code = """
import sys
import torch
before = set(sys.modules)
import pararnn
new = {name.partition(".")[0] for name in set(sys.modules) - before}
print(sorted(new - set(sys.stdlib_module_names) - {"pararnn"}))
own = ["train", "lm", "tasks", "evaluation", "cli"]
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


COMPILED = ["engines", "op", "solve", "scan", "layers", "lm", "tasks/models", "sequences"]
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
