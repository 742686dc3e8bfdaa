"""Every Python example of the README and of the docs runs, and the pages hold no leftovers."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from table import has_compiler

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import tables

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
MEASURED = re.compile(
    r"\d(?:[\d.,]*\d)? (?:to [\d.,]+ )?"
    r"(?:times (?:as|the|it|faster|slower)|ms|us|tokens/s|TFLOP/s|GiB)\b"
)
"""Figures that only a measurement gives."""
LIMITS = (
    "9,475 ms",
    "has taken 150 ms",
    "16 times as many",
    "4 times the error",
    "20 times the",
    "100 times the limit",
)
"""Limits, settings and the paper's figures that look like one."""


def blocks(page: Path) -> list[str]:
    """Return the page's Python blocks, each padded so that its line numbers are the page's."""
    text = page.read_text()
    return ["\n" * text.count("\n", 0, match.start(1)) + match[1] for match in BLOCK.finditer(text)]


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p)], ids=lambda page: page.name)
@pytest.mark.one_in(4)
def test_examples_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of a page run in order, in one namespace."""
    if page.name == "generated-kernels.md" and not has_compiler():
        pytest.skip("needs a C++ compiler")
    module = ModuleType("example_" + re.sub(r"\W", "_", page.stem))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    for source in blocks(page):
        exec(compile(source, str(page), "exec"), module.__dict__)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_local_links_lead_somewhere(page: Path) -> None:
    targets = LINK.findall(FENCE.sub("", page.read_text()))
    local = [t for t in targets if not t.startswith(("http:", "https:", "mailto:"))]
    missing = [target for target in local if not (page.parent / target).exists()]
    assert not missing


def test_readme_has_the_cell_that_it_promises() -> None:
    """The README's cell takes at most 15 lines, parameters included."""
    cell = next(b for b in blocks(ROOT / "README.md") if "(pararnn.Cell)" in b).strip()
    body = cell[cell.index("class ") :].split("\n\n\n")[0]
    assert len([line for line in body.splitlines() if line.strip()]) <= 15


def test_tables_are_what_the_result_files_say() -> None:
    texts = {page: (ROOT / page).read_text(encoding="utf-8") for page in tables.PAGES}
    assert [page for page, text in texts.items() if tables.with_figures(text) != text] == []


def test_each_table_is_on_a_page_that_is_rewritten() -> None:
    names = [match[2] for page in PAGES for match in tables.MARKED.finditer(page.read_text())]
    pages = {page for page in PAGES if "<!-- figures:" in page.read_text()}
    assert pages == {ROOT / page for page in tables.PAGES}
    assert sorted(names) == sorted(tables.FIGURES)


@pytest.mark.parametrize(
    "page", [p for p in PAGES if p.name != "negative-results.md"], ids=lambda page: page.name
)
def test_no_measured_figure_stands_outside_of_tables(page: Path) -> None:
    text = FENCE.sub("", tables.MARKED.sub("", page.read_text(encoding="utf-8")))
    text = " ".join(text.split())
    for limit in LIMITS:
        text = text.replace(limit, "")
    match = MEASURED.search(text)
    assert match is None, f"put {match[0]!r} into a table of benchmarks/tables.py, and link to it"
