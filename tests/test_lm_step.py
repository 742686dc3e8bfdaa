"""The benchmarks of language models: what they measure, and what follows from times."""

import sys
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import lm_decode
import lm_step
import mamba2
import markdown_tables
import tables
from common import add_row, read_rows, write_csv


def test_language_models_have_steps(tmp_path, monkeypatch) -> None:
    cpu = torch.device("cpu")
    rows = [
        {**lm_step.provenance(cpu), **lm_step.measure(case, cpu, False, warmup=1, repeats=2)}
        for case in lm_step.smoke_cases()
    ]
    assert all(0 < row["min_ms"] <= row["median_ms"] for row in rows)
    assert [row["B"] * row["T"] for row in rows] == [64, 64, 64, 200]
    write_csv(tmp_path / "lm_step.csv", rows)
    monkeypatch.setattr(markdown_tables, "RESULTS", tmp_path)
    lines = tables.FIGURES["lm_step"]().splitlines()
    assert [line.split(" | ")[0][2:] for line in lines[-4:]] == [
        "gru-tiny",
        "transformer-tiny",
        "mamba2-tiny",
        "gru-tiny, packed",
    ]


def test_language_models_decode(tmp_path, monkeypatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr(lm_decode, "MORE", 2)
    cases, cpu, rows = lm_decode.smoke_cases(), torch.device("cpu"), []
    for case in cases:
        model = mamba2.language_model(case.config, dtype=torch.bfloat16).eval()
        mamba2.ready_to_decode(model)
        row = lm_decode.measure(case, model, rounds=1)
        rows.append({**lm_step.provenance(cpu), **row, "weights_ms": 0.5})
    write_csv(tmp_path / "lm_decode.csv", rows)
    monkeypatch.setattr(markdown_tables, "RESULTS", tmp_path)
    *_, head, _, gru, transformer, peer, generated = tables.FIGURES["lm_decode"]().splitlines()
    assert head == "| model | context | B | eager | generate | weights read |"
    for line, start in ((gru, "gru-tiny | 8 | 2"), (transformer, "transformer-tiny | 8 | 2")):
        assert line.startswith(f"| {start} | ")
        assert line.endswith(" |  | 0.5 |")
    assert peer.startswith("| mamba2-tiny | 8 | 2 | ")
    assert generated.startswith("| gru-tiny | 8 | 1 |  | ")


def test_tables_say_what_is_not_measured(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(markdown_tables, "RESULTS", tmp_path)
    for name in ("lm_step", "lm_decode"):
        assert tables.FIGURES[name]() == f"Not measured yet: `benchmarks/{name}.py`."


def test_steps_of_a_size_have_the_same_tokens() -> None:
    found = lm_step.cases()
    sizes = {(case.name.split("-")[1], case.batch * case.length) for case in found}
    assert sizes == {("400M", 32_768), ("1B", 16_384)}
    assert len(found) == 4 * 3 + 4 * 2 + 2
    assert {case.name for case in found if case.packed} == {"gru-400M", "lstm-400M"}


def test_documents_fill_a_row() -> None:
    borders = lm_step.borders_of(32_768)
    assert (borders[0], borders[-1]) == (0, 32_768)
    assert len(borders) > 8
    assert 0 < borders.diff().min() <= borders.diff().max() <= 4096


def test_what_follows_from_the_times_of_steps() -> None:
    found = lm_step.figures([100.0, 90.0, 200.0], 400_000_000, 32_768)
    assert found == {
        "median_ms": 100.0,
        "min_ms": 90.0,
        "tokens_per_s": 327_680,
        "mfu_percent": pytest.approx(6 * 4e8 * 327_680 / 989e12 * 100, abs=0.01),
    }


def test_rows_take_the_place_of_their_case(tmp_path) -> None:
    path = tmp_path / "rows.csv"
    add_row(path, {"model": "a", "T": 1, "ms": 5}, ("model", "T"))
    add_row(path, {"model": "b", "T": 1, "ms": 6}, ("model", "T"))
    add_row(path, {"model": "a", "T": 1, "ms": 7, "GiB": 2}, ("model", "T"))
    assert read_rows(path) == [
        {"model": "a", "T": "1", "ms": "7", "GiB": "2"},
        {"model": "b", "T": "1", "ms": "6", "GiB": ""},
    ]


def test_mamba2_trains_as_recipes_do(monkeypatch, tmp_path) -> None:
    """Several in one process, each freed before the next."""
    train_step = pytest.importorskip("train_step")
    monkeypatch.setattr(train_step, "peer_sizes", lambda name: mamba2.TINY)
    assert train_step.described("gru-7b") == train_step.recipe("gru-7b")
    config = train_step.resolved(train_step.described("mamba2-7b"), ["data.sequence_length=16"])
    config = replace(config, device_batch=2, batch=2, steps=100, out=str(tmp_path), compile=False)
    kept, plain = [], train_step.spread

    def spread(*args):
        assert all(model() is None for model in kept)
        model = plain(*args)
        kept.append(weakref.ref(model))
        return model

    monkeypatch.setattr(train_step, "spread", spread)
    with train_step.process_group():
        rows = [train_step.measure(config, "bare", warmup=1, steps=2) for _ in range(2)]
    with torch.device("meta"):
        model = mamba2.language_model(mamba2.TINY)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert [(row["recipe"], row["steps"], row["parameters"]) for row in rows] == [
        ("mamba2-7b", 2, count)
    ] * 2
    with pytest.raises(ValueError, match="give --paths bare"):
        train_step.by_trainer(config, None, None)
