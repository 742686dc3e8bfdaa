"""Sentences of README and docs whose figures come from the result files."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import markdown_tables
import scan_cpu
import sentences_learn
import sentences_lm
import sentences_training
import tables
from common import RESULTS, read_rows, write_csv

MEASURED = re.compile(
    r"\d[\d.,]* (?:to [\d.,]+ )?(?:times (?:as|the|it|faster|slower)|ms|us|tokens/s|TFLOP/s|GiB)\b"
)
"""Figures that only a measurement gives."""
SETTINGS = (
    "has taken 150 ms",
    "times what a start may be off",
    "20 times the paper's",
    "9,475 ms",  # the paper's
    "4 times the error",
    "another is 5% faster",
)
"""Limits, settings and the paper's figures, which sentences outside of markers may have."""


def prose_of(page: str) -> list[str]:
    """Return the paragraphs of a page outside of markers and of code, each in one line."""
    text = tables.MARKED.sub("", (tables.ROOT / page).read_text(encoding="utf-8"))
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return [" ".join(paragraph.split()) for paragraph in text.split("\n\n")]


@pytest.mark.parametrize("page", tables.PAGES)
def test_no_measured_figure_stands_outside_of_markers(page: str) -> None:
    for paragraph in prose_of(page):
        for setting in SETTINGS:
            paragraph = paragraph.replace(setting, "")
        match = MEASURED.search(paragraph)
        assert match is None, f"{page}: put {match[0]!r} into benchmarks/sentences_*.py"


def test_each_figure_is_on_a_page() -> None:
    pages = [(tables.ROOT / page).read_text(encoding="utf-8") for page in tables.PAGES]
    names = [match[2] for text in pages for match in tables.MARKED.finditer(text)]
    assert sorted(names) == sorted(tables.FIGURES)
    elsewhere = {path.name for path in (tables.ROOT / "docs").glob("*.md")}
    elsewhere -= {Path(page).name for page in tables.PAGES}
    for name in elsewhere:
        assert "<!-- figures:" not in (tables.ROOT / "docs" / name).read_text(encoding="utf-8")


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Replace the results' folder by one of links to its files."""
    for path in RESULTS.iterdir():
        if path.is_file():
            (tmp_path / path.name).symlink_to(path)
    shutil.copytree(RESULTS / "tasks", tmp_path / "tasks")
    monkeypatch.setattr(markdown_tables, "RESULTS", tmp_path)
    monkeypatch.setattr(sentences_training, "RESULTS", tmp_path)
    return tmp_path


def change(path: Path, new: Callable[[dict[str, str]], dict[str, Any]]) -> None:
    """Change the rows of a file, not those of the file that a link leads to."""
    rows = [{**row, **new(row)} for row in read_rows(path)]
    path.unlink()
    write_csv(path, rows)


def test_a_sentence_follows_its_file(results: Path) -> None:
    page = (tables.ROOT / "docs/training.md").read_text(encoding="utf-8")
    assert tables.with_figures(page) == page
    text = " ".join(sentences_training.lm_scale_says().split())
    assert "For 0.51 (GRU), 0.50 (LSTM) and 0.48 (Transformer) of it nothing else runs" in text

    def halve(row: dict[str, str]) -> dict[str, Any]:
        return {"alone_ms": float(row["alone_ms"]) / 2}

    change(results / "lm_scale_profile.csv", halve)
    text = " ".join(sentences_training.lm_scale_says().split())
    assert "For 0.26 (GRU), 0.25 (LSTM) and 0.24 (Transformer)" in text
    assert tables.with_figures(page) != page


def test_words_that_contradict_the_results_raise(results: Path) -> None:
    other = {"gru-1B": "transformer-1B", "transformer-1B": "gru-1B"}
    change(
        results / "lm_generate.csv", lambda row: {"model": other.get(row["model"], row["model"])}
    )
    with pytest.raises(ValueError, match="the Transformer is first where all call"):
        sentences_lm.lm_generate_says()
    names = {"mamba2": "gru", "gru": "mamba2"}
    change(results / "learn_code.csv", lambda row: {"mixer": names.get(row["mixer"], row["mixer"])})
    with pytest.raises(ValueError, match="Mamba2 before the hybrid"):
        sentences_learn.learn_code_says()


def test_scans_are_timed_in_rounds_and_agree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    for what in ("LRU", "minGRU"):
        decay, entering = scan_cpu.random_inputs(what, 20)
        reference = scan_cpu.loop(decay, entering)
        for way in scan_cpu.ways_of(what, 20):
            torch.testing.assert_close(scan_cpu.WAYS[way](decay, entering), reference)
    assert scan_cpu.LOOP not in scan_cpu.ways_of("LRU", 16384)
    assert scan_cpu.FFT not in scan_cpu.ways_of("minGRU", 512)
    measurements = iter(
        ({"ms": 4.0, "min_ms": 3.0}, {"ms": 6.0, "min_ms": 5.0}, {"ms": 5.0, "min_ms": 4.0})
    )
    monkeypatch.setattr(scan_cpu, "measure", lambda *_: next(measurements))
    monkeypatch.setattr(scan_cpu, "cases", lambda _: [("LRU", 20, "pararnn.scan")])
    monkeypatch.setattr(sys, "argv", ["scan_cpu.py", "--out", str(tmp_path)])
    scan_cpu.main()
    (row,) = read_rows(tmp_path / "scan_cpu.csv")
    assert (row["ms"], row["min_ms"], row["rounds"], row["T"]) == ("5.0", "3.0", "3", "20")
