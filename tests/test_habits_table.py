"""The table of habits names tests that exist, knows every answer, and leaves no test out."""

import ast
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parent.parent / "docs" / "habits.md"
ROWS = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")][1:]
LINK = re.compile(r"\[(\w+)\]\(([^)]+)\)")
OURS = ["test_habits.py", "test_habits_oracle.py", "test_habits_wrappers.py", "test_distributed.py"]


def _tests_in(path):
    tree = ast.parse(path.read_text())
    names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    return {name for name in names if name.startswith("test_")}


@pytest.mark.parametrize("row", ROWS)
def test_rows_are_answered_and_tested(row):
    _, answer, tests = (cell.strip() for cell in row.strip("|").split("|"))
    assert answer in ("works", "raises")
    links = LINK.findall(tests)
    assert links
    for name, target in links:
        assert name in _tests_in(PAGE.parent / target)


@pytest.mark.parametrize("file", OURS)
def test_every_test_has_a_row(file):
    named = {name for row in ROWS for name, target in LINK.findall(row) if target.endswith(file)}
    assert _tests_in(PAGE.parent.parent / "tests" / file) == named
