"""The benchmark of mixing cells computes what it says, besides times."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import mixing
import tables_mixing
from common import read_rows
from mixing import Case


def test_cases_are_those_of_the_issue() -> None:
    cases = mixing.all_cases()
    assert len({case.name for case in cases}) == len(cases)
    own = [case for case in cases if case.way == "kernels" and case.dtype == "bfloat16"]
    assert len(own) == 3 * 7 * 4
    assert {(case.head, case.width) for case in own} >= {(16, 768), (512, 512), (768, 768)}
    assert all(case.heads * case.head == case.width for case in cases)
    seconds = mixing.expected_seconds(own, processes=15)
    assert 3 * len(own) < seconds < mixing.expected_seconds(cases, processes=15)


def test_only_names_cases(capsys: pytest.CaptureFixture[str]) -> None:
    mixing.main(["--list", "--only", "kernels-gru-64-B(1|16)-bfloat16"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:] == ["kernels-gru-64-B1-bfloat16", "kernels-gru-64-B16-bfloat16"]
    assert lines[0].startswith("2 cases, about ")


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Run four small cases on a CPU, the calls once each; returns the folder of the results."""
    times = {"kernels": 2.0, "layer": 3.0, "cudnn": 5.0, "loop": 8.0}

    def times_of(calls: Any, by_graph: bool, budget: float) -> dict[str, Any]:
        results = calls[0]()
        count = len(results) if isinstance(results, tuple) else 0
        assert all(t.isfinite().all() for t in (results if count else [results]))
        ms = times[current[0].way] * (1 + (count > 0))
        row = {"median_ms": ms, "min_ms": ms / 2, "runs": 1}
        return row | {"timing": "graph" if by_graph else "calls"}

    current: list[Case] = []
    way_of = mixing.way_of

    def remember_way(case: Case) -> mixing.Way:
        current[:] = [case]
        return way_of(case)

    small = [Case(way, "lstm", 768, 1, "float32", 3) for way in ("kernels", "layer", "cudnn")]
    small.append(Case("loop", "slstm", 64, 2, "float32", 3))
    small.append(Case("flashrnn-triton", "lstm", 64, 2, "float32", 3))  # not installed
    for name, value in {
        "DEVICE": "cpu",
        "all_cases": lambda: small,
        "way_of": remember_way,
        "times_of": times_of,
        "compile_all": lambda *args: None,
        "cache_bytes": lambda: 0,
        "copy_rate": lambda budget: 1e9,
    }.items():
        monkeypatch.setattr(mixing, name, value)
    monkeypatch.setitem(sys.modules, "flashrnn", None)
    return tmp_path


def test_rows_have_sizes_limits_and_ratios(
    on_cpu: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mixing.main(["--out", str(on_cpu)])
    assert "peer left out: flashrnn-triton-lstm-64-B2-float32" in capsys.readouterr().out
    rows = read_rows(on_cpu / "mixing.csv")
    assert [(row["way"], row["pass"]) for row in rows] == [
        (way, step) for way in ("kernels", "layer", "cudnn", "loop") for step in ("forward", "both")
    ]
    assert [row["over_kernels"] for row in rows] == [
        "1.0",
        "1.0",
        "1.5",
        "1.5",
        "2.5",
        "2.5",
        "",
        "",
    ]
    first = rows[0]
    assert [first[key] for key in ("head", "heads", "B", "T", "D")] == ["768", "1", "1", "3", "768"]
    numbers = 768 * 3 * (4 + 2)  # gates and states
    assert math.isclose(float(first["limit_ms"]), numbers * 4 / 1e6, abs_tol=1e-5)
    assert first["commit"]
    assert first["torch"] == torch.__version__
    table = tables_mixing.mixing.markdown(rows).splitlines()
    assert (
        table[2]
        == "| LSTM | 768, dense | 1 | 2 / 4 | 3 (1.5 x) / 6 (1.5 x) | 5 (2.5 x) / 10 (2.5 x) |  |"
    )


def test_a_part_of_a_run_leaves_other_rows(on_cpu: Path) -> None:
    mixing.main(["--out", str(on_cpu)])
    old_rows = read_rows(on_cpu / "mixing.csv")
    mixing.main(["--out", str(on_cpu), "--only", "^cudnn", "--quick"])
    assert read_rows(on_cpu / "mixing.csv") == old_rows


def test_the_picture_shows_what_ran(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    about = {"device": "d", "torch": "t", "B": "16", "median_ms": "1.5", "dtype": "bfloat16"}
    rows = [
        {**about, "way": way, "cell": cell, "head": str(head), "pass": step}
        for way in ("kernels", "cudnn")
        for cell in ("lstm", "gru")
        for head in (16, 512)
        for step in ("forward", "both")
    ]
    mixing.picture(rows, tmp_path / "mixing.png")
    assert (tmp_path / "mixing.png").stat().st_size > 10_000
