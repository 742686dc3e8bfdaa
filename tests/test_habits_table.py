"""Tables of what works and what raises name tests that exist, and leave no test of habits out."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"
TABLE = re.compile(r"^\| \w+ \| \| test \|\n\|[-|]+\|\n((?:\|.*\n)+)", re.MULTILINE)
LINK = re.compile(r"\[(\w+)\]\(([^)]+)\)")
OURS = ["test_habits.py", "test_habits_oracle.py", "test_habits_wrappers.py", "test_distributed.py"]


def _rows(page):
    [rows] = TABLE.findall((DOCS / page).read_text())
    return rows.splitlines()


ROWS = {page: _rows(page) for page in ("layers.md", "language-models.md")}


@cache
def _tests_in(path):
    tree = ast.parse(path.read_text())
    names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    return {name for name in names if name.startswith("test_")}


@pytest.mark.parametrize("row", [row for rows in ROWS.values() for row in rows])
def test_rows_are_answered_and_tested(row):
    _, answer, tests = (cell.strip() for cell in row.strip("|").split("|"))
    assert answer in ("works", "raises")
    links = LINK.findall(tests)
    assert links
    for name, target in links:
        assert name in _tests_in(DOCS / target)


@pytest.mark.parametrize("file", OURS)
def test_every_test_has_a_row(file):
    links = LINK.findall("".join(ROWS["layers.md"]))
    names = {name for name, target in links if target.endswith(file)}
    assert _tests_in(DOCS.parent / "tests" / file) == names
