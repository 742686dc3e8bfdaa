"""The benchmark of mixing cells computes what it says, besides times."""

from __future__ import annotations

import itertools
import math
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import mixing
import mixing_ways
import tables_mixing
from common import read_rows
from isolated import Isolated, LostError, reason_of
from mixing_ways import Case
from table import HANGS_AFTER


def test_cases_are_those_of_the_issue() -> None:
    cases = mixing.all_cases()
    assert len({case.name for case in cases}) == len(cases)
    own = [case for case in cases if case.way == "kernels" and case.dtype == "bfloat16"]
    dreamer = Case("kernels", "block-gru", 64, 16, length=512)
    assert len(own) == 3 * 7 * 4 + 1
    assert (dreamer in own, dreamer.heads) == (True, 8)
    assert {(case.head, case.width) for case in own} >= {(16, 768), (512, 512), (768, 768)}
    assert all(case.heads * case.head == case.width for case in cases)
    seconds = mixing.expected_seconds(own, processes=15)
    assert 3 * len(own) < seconds < mixing.expected_seconds(cases, processes=15)


def test_only_names_cases(capsys: pytest.CaptureFixture[str]) -> None:
    mixing.main(["--list", "--only", "kernels-gru-64-B(1|16)-bfloat16"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:] == ["kernels-gru-64-B1-bfloat16", "kernels-gru-64-B16-bfloat16"]
    assert lines[0].startswith("2 cases, about ")


class Inline:
    """`Isolated` without a process."""

    def results(self, function: Any, *args: Any, seconds: float) -> Iterator[Any]:
        try:
            yield from function(*args)
        except Exception as error:
            raise LostError(reason_of(error)) from error

    def close(self) -> None:
        """Do nothing."""


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Run small cases on a CPU, the calls once each; returns the folder of the results."""
    times = {"kernels": 2.0, "layer": 3.0, "projection": 1.5, "cudnn": 5.0, "loop": 8.0}

    def launched_times(calls: Any, launch: str, device: str, budget: float) -> dict[str, Any]:
        results = calls[0]()
        assert all(t.isfinite().all() for t in results)
        assert device == "cpu"
        ms = times[current[0].way] * (1 + isinstance(results, tuple))
        return {"median_ms": ms, "min_ms": ms / 2, "runs": 1}

    current: list[Case] = []
    way_of = mixing_ways.way_of

    def remember_way(case: Case, device: str) -> mixing_ways.Way:
        current[:] = [case]
        return way_of(case, device)

    ways = ("kernels", "layer", "projection", "cudnn")
    small = [Case(way, "lstm", 768, 1, "float32") for way in ways]
    small.append(Case("loop", "slstm", 64, 2, "float32"))
    small.append(Case("flashrnn-triton_fused", "lstm", 64, 2, "float32"))  # not installed
    monkeypatch.setattr(mixing_ways, "way_of", remember_way)
    monkeypatch.setattr(mixing, "all_cases", lambda: small)
    monkeypatch.setattr(mixing, "launched_times", launched_times)
    monkeypatch.setattr(mixing, "Isolated", Inline)
    monkeypatch.setitem(sys.modules, "flashrnn", None)
    return tmp_path


def run(out: Path, *more: str) -> list[dict[str, str]]:
    """Run the benchmark on the CPU, and return the rows of its file."""
    mixing.main(["--out", str(out), "--device", "cpu", "--length", "3", *more])
    return read_rows(out / "mixing.csv")


@pytest.mark.thorough
def test_rows_have_sizes_limits_and_ratios(
    on_cpu: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = run(on_cpu)
    reason = "compilation: ModuleNotFoundError: import of flashrnn halted; None in sys.modules"
    assert f"missing: {reason}" in capsys.readouterr().out
    ways = ("kernels", "layer", "projection", "cudnn", "loop", "flashrnn-triton_fused")
    assert [(row["way"], row["pass"]) for row in rows] == [
        (way, step) for way in ways for step in ("forward", "both")
    ]
    ratios = {row["way"]: (row["over_kernels"], row["apart_over_kernels"]) for row in rows}
    assert ratios == {
        "kernels": ("1.0", ""),
        "layer": ("1.5", "0.75"),
        "projection": ("0.75", ""),
        "cudnn": ("2.5", ""),
        "loop": ("", ""),
        "flashrnn-triton_fused": ("", ""),
    }
    assert [(row["median_ms"], row["missing"]) for row in rows[-2:]] == [("", reason)] * 2
    first = rows[0]
    assert [first[key] for key in ("head", "heads", "B", "T", "D")] == ["768", "1", "1", "3", "768"]
    numbers = 768 * 3 * (4 + 2)  # gates and states
    assert math.isclose(float(first["limit_ms"]), numbers * 4 / 1e6, abs_tol=1e-5)
    assert first["commit"]
    assert first["torch"] == torch.__version__
    line = tables_mixing.KERNELS.markdown(r for r in rows if r["way"] != "layer").splitlines()[2]
    assert line.startswith(
        "| LSTM | 768, dense | 1 | 2 / 4 | 1.5 (0.75 x) / 3 (0.75 x) | 5 (2.5 x)"
    )
    layers = tables_mixing.LAYERS.markdown(filter(tables_mixing.LAYERS.where, rows))
    assert layers.splitlines()[2] == (
        "| LSTM | 768, dense | 1 | 3 | 3 (1.5 x) / 6 (1.5 x) | 1.5 (0.75 x) / 3 (0.75 x) "
        "| 0.75 x / 0.75 x |"
    )


@pytest.mark.thorough
def test_a_part_of_a_run_leaves_other_rows(on_cpu: Path) -> None:
    old_rows = run(on_cpu)
    assert run(on_cpu, "--only", "^cudnn", "--quick") == old_rows


def test_no_case_begins_after_the_limit(on_cpu: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mixing.main(["--out", str(on_cpu), "--device", "cpu", "--length", "3", "--seconds", "0"])
    assert "6 cases left, from kernels-lstm-768-B1-float32 on" in capsys.readouterr().out
    assert not (on_cpu / "mixing.csv").exists()


@pytest.mark.thorough
def test_files_are_merged_in_the_order_of_the_cases(on_cpu: Path) -> None:
    rows = run(on_cpu / "whole")
    for part, only in (("first", "cudnn"), ("second", "kernels|loop")):
        run(on_cpu / part, "--only", only)
    files = [str(on_cpu / part / "mixing.csv") for part in ("first", "second")]
    result = run(on_cpu / "merged", "--merge", *files)
    ways = ("kernels", "cudnn", "loop")
    assert result == [row for row in rows if row["way"] in ways]


def test_of_flashrnns_backends_the_fastest_is_shown() -> None:
    about = {"dtype": "bfloat16", "over_kernels": "1.5", "pass": "forward", "cell": "lstm"}
    rows = [
        {**about, "way": way, "median_ms": ms}
        for way, ms in (("flashrnn-cuda", "3"), ("flashrnn-cuda_fused", "2"), ("flashrnn-x", ""))
    ]
    assert {tables_mixing.column_of(row) for row in rows} == {"flashrnn"}
    assert tables_mixing.both_passes(rows) == "2 (cuda_fused, 1.5 x) / -"


@pytest.mark.thorough
def test_a_crash_or_a_hang_ends_only_its_own_process() -> None:
    runner = Isolated()
    assert list(runner.results(range, 3, seconds=HANGS_AFTER)) == [0, 1, 2]
    for function, argument, seconds, reason in (
        (int, "x", HANGS_AFTER, "ValueError: invalid literal for int"),
        (os._exit, 3, HANGS_AFTER, "its process ended with code 3"),
        (os.abort, None, HANGS_AFTER, "its process ended with code -6"),
        (time.sleep, HANGS_AFTER, 1, "no end within 1 s"),
        (itertools.count, 0, 1, "no end within 1 s"),
    ):
        with pytest.raises(LostError, match=reason):
            list(
                runner.results(function, *[a for a in [argument] if a is not None], seconds=seconds)
            )
    assert list(runner.results(range, 2, seconds=HANGS_AFTER)) == [0, 1]
    runner.close()


def test_reasons_tell_the_compilers_line() -> None:
    text = "Error building extension\n[1/2] nvcc\nkernel.cu(3): error: no such name\nninja: stopped"
    assert reason_of(RuntimeError(text)) == "RuntimeError: kernel.cu(3): error: no such name"
    assert reason_of(ValueError("")) == "ValueError: "
    assert reason_of(ValueError("at 3:1:\nx = f(y)\nno f")) == "ValueError: at 3:1: no f"
    error = ValueError("at 3:1:\nx = f(y)\n^")
    error.__cause__ = NameError("no Any")
    assert reason_of(error) == "ValueError: at 3:1: ^; NameError: no Any"


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
