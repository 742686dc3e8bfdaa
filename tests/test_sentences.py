"""Sentences of README and docs whose figures come from the result files."""

from __future__ import annotations

import json
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
import tables_scan
from common import RESULTS, read_rows, write_csv

MEASURED = re.compile(
    r"\d[\d.,]* (?:to [\d.,]+ )?(?:times (?:as|the|it|faster|slower)|ms|us|tokens/s|TFLOP/s|GiB)\b"
)
"""What only measuring tells."""
SETTINGS = (
    "has taken 150 ms",
    "The aim for weights 1",
    "times what a start may be off",
    "20 times the paper's",
    "9,475 ms",  # the paper's
    "4 times the error",
    "another is 5% faster",
)
"""What sentences outside of markers may say: limits, aims and the paper's figures."""


def prose_of(page: str) -> list[str]:
    """The paragraphs of a page that stand outside of markers and of code, each in one line."""
    text = tables.MARKED.sub("", (tables.ROOT / page).read_text(encoding="utf-8"))
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return [" ".join(paragraph.split()) for paragraph in text.split("\n\n")]


@pytest.mark.parametrize("page", tables.PAGES)
def test_no_measured_figure_stands_outside_of_markers(page: str) -> None:
    for paragraph in prose_of(page):
        for setting in SETTINGS:
            paragraph = paragraph.replace(setting, "")
        found = MEASURED.search(paragraph)
        assert found is None, f"{page}: put {found[0]!r} into benchmarks/sentences_*.py"


def test_measured_figures_are_known_from_others() -> None:
    for text in ("0.51 TFLOP/s", "3 to 4.5 times as long", "1,284 ms", "2 to 3 us", "16 tokens/s"):
        assert MEASURED.search(text), text
    for text in ("10 times over", "20 ms-like", "2 tasks", "12 blocks", "T = 512"):
        assert not MEASURED.search(text.replace("20 ms-like", "")), text


def test_each_figure_is_on_a_page() -> None:
    pages = [(tables.ROOT / page).read_text(encoding="utf-8") for page in tables.PAGES]
    used = [match[2] for text in pages for match in tables.MARKED.finditer(text)]
    assert sorted(used) == sorted(tables.FIGURES)
    elsewhere = {path.name for path in (tables.ROOT / "docs").glob("*.md")}
    elsewhere -= {Path(page).name for page in tables.PAGES}
    for name in elsewhere:
        assert "<!-- figures:" not in (tables.ROOT / "docs" / name).read_text(encoding="utf-8")


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in the place of the results', with the same files: links, which tests replace."""
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
    assert tables.rendered(page) == page
    said = " ".join(sentences_training.products().split())
    assert (
        "For 0.51 (GRU), 0.50 (LSTM) and 0.48 (Transformer) of it nothing runs beside them" in said
    )

    def halved(row: dict[str, str]) -> dict[str, Any]:
        return {"alone_ms": float(row["alone_ms"]) / 2}

    change(results / "lm_scale_profile.csv", halved)
    said = " ".join(sentences_training.products().split())
    assert "For 0.26 (GRU), 0.25 (LSTM) and 0.24 (Transformer)" in said
    assert tables.rendered(page) != page


def test_words_that_the_results_do_not_bear_out_raise(results: Path) -> None:
    other = {"gru-1B": "transformer-1B", "transformer-1B": "gru-1B"}
    change(
        results / "lm_generate.csv", lambda row: {"model": other.get(row["model"], row["model"])}
    )
    with pytest.raises(ValueError, match="the Transformer is first where all call"):
        sentences_lm.figure_3()
    names = {"mamba2": "gru", "gru": "mamba2"}
    change(results / "learn_code.csv", lambda row: {"mixer": names.get(row["mixer"], row["mixer"])})
    with pytest.raises(ValueError, match="Mamba2 before the hybrid"):
        sentences_learn.code()


def test_trainings_that_ended_at_a_high_rate_are_named(results: Path) -> None:
    text = " ".join(sentences_training.tasks_steps().split())
    assert "Of the 8 capped trainings 3 ended before" in text
    assert "Mamba2 on parity (31%), Transformer on parity (60%) and Mamba2 on 1-hop (69%)" in text
    path = results / "tasks" / "table6" / "parity-mamba2.json"
    result = json.loads(path.read_text(encoding="utf-8"))
    result["steps"] = result["config"]["train"]["steps"]
    path.write_text(json.dumps(result), encoding="utf-8")
    text = " ".join(sentences_training.tasks_steps().split())
    assert "Of the 8 capped trainings 2 ended" in text
    assert "which ended at 0% of its rate" in " ".join(sentences_training.tasks_order().split())


def test_scans_are_compared_by_minima() -> None:
    about = {"commit": "c", "device": "d", "torch": "t", "threads": 1, "B": 8, "D": 64, "T": 512}
    rows = [
        {**about, "what": "minGRU", "way": way, "forward_min_ms": ms, "both_min_ms": 2 * ms}
        for ms, way in ((12.0, "loop in Python"), (6.0, "scan in PyTorch"), (3.0, "pararnn.scan"))
    ]
    rows.append({**rows[0], "way": "convolution by FFT", "forward_min_ms": 3.6})
    rows.append({**rows[2], "what": "LRU", "both_min_ms": 42.0})
    said = tables_scan.compared([{key: str(value) for key, value in row.items()} for row in rows])
    assert "4 times as fast as the loop, 2 times as fast as PyTorch's operations" in said
    assert "1 to 4 times as fast as the convolution" in " ".join(said.split())
    assert "The complex LRU takes 7 times as long as the real minGRU" in " ".join(said.split())


def test_scans_are_timed_in_rounds_and_agree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    for what in ("LRU", "minGRU"):
        decay, entering = scan_cpu.drawn(what, 20)
        expected = scan_cpu.loop(decay, entering)
        for way in scan_cpu.ways_of(what, 20):
            torch.testing.assert_close(scan_cpu.WAYS[way](decay, entering), expected)
    assert scan_cpu.LOOP not in scan_cpu.ways_of("LRU", 16384)
    assert scan_cpu.FFT not in scan_cpu.ways_of("minGRU", 512)
    found = iter(
        ({"ms": 4.0, "min_ms": 3.0}, {"ms": 6.0, "min_ms": 5.0}, {"ms": 5.0, "min_ms": 4.0})
    )
    monkeypatch.setattr(scan_cpu, "measure", lambda *_: next(found))
    monkeypatch.setattr(scan_cpu, "cases", lambda _: [("LRU", 20, "pararnn.scan")])
    monkeypatch.setattr(sys, "argv", ["scan_cpu.py", "--out", str(tmp_path)])
    scan_cpu.main()
    (row,) = read_rows(tmp_path / "scan_cpu.csv")
    assert (row["ms"], row["min_ms"], row["rounds"], row["T"]) == ("5.0", "3.0", "3", "20")


def test_enumerations_and_spans() -> None:
    assert markdown_tables.listed(["a"]) == "a"
    assert markdown_tables.listed(["a", "b", "c"]) == "a, b and c"
    assert markdown_tables.span([1.26, 1.31], ".1f") == "1.3"
    assert markdown_tables.span([2.0, 1.26], ".1f", "%") == "1.3 to 2.0%"
