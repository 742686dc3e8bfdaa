"""Docstrings are in plain technical English: see the glossary in CONTRIBUTING.md."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
QUESTIONS = {"What", "Whether", "How", "Where", "When", "Who", "Which", "Those", "That"}


def _trees() -> Iterator[tuple[Path, ast.Module]]:
    for folder in ("src", "benchmarks"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield path, ast.parse(path.read_text(encoding="utf-8"))


def _docstrings(tree: ast.Module) -> Iterator[str]:
    """Those of modules, classes, functions, fields and constants."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            yield from (
                ast.literal_eval(part.value)
                for part in node.body
                if isinstance(part, ast.Expr)
                and isinstance(part.value, ast.Constant)
                and isinstance(part.value.value, str)
            )


def test_docstrings_state_and_do_not_ask():
    wrong = [
        f"{path}: {text.splitlines()[0]}"
        for path, tree in _trees()
        for text in _docstrings(tree)
        if text.split()[0].strip(",.:") in QUESTIONS
    ]
    assert wrong == []
