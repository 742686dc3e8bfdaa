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
