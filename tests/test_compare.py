"""Comparison of runs: groups over seeds, tables at equal tokens and seconds, what is not alike."""

import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from overrides import resolved

from pararnn.base.errors import TrainingError
from pararnn.lab import cli
from pararnn.lab.compare import compare_runs, validations
from pararnn.lab.train.log import LOG, append_row
from pararnn.lab.train.recipes import recipe

TOKENS = 16 * 256
"""Tokens of a step of tiny."""


def make_run(folder, bits, *overrides, content="these", device="a card", speed=1000.0):
    """A run's folder with a validation every 10 steps; the first steps took long."""
    config = resolved(recipe("tiny"), [f"steps={10 * max(1, len(bits))}", *overrides])
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(asdict(replace(config, out=str(folder)))))
    (folder / "data.json").write_text(json.dumps({"content": content}))
    start = {"device": device, "processes": 1, "parameters": 1000}
    (folder / "record.json").write_text(json.dumps({"starts": [start]}))
    for index, value in enumerate(bits, 1):
        row = {"step": 10 * index, "tokens": 10 * index * TOKENS}
        rate = speed if index > 1 else speed / 100
        append_row(folder / LOG, {**row, "loss": 2.0, "tokens_per_second": rate})
        append_row(folder / LOG, {**row, "valid_loss": 1.0, "valid_bits_per_byte": value})
    return folder


def rows_of(text):
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    head = [cell.strip() for cell in lines[0]]
    return [dict(zip(head, map(str.strip, line), strict=True)) for line in lines[2:]]


@pytest.fixture
def study(tmp_path):
    """Two rates of three seeds, and a longer run of an LSTM."""
    for rate, end in (("0.001", 2.0), ("0.002", 1.0)):
        for seed in (0, 1, 2):
            folder = tmp_path / "sweep" / f"{rate}-{seed}"
            rate_and_seed = f"optimiser.learning_rate={rate}", f"seed={seed}"
            make_run(folder, [4.0, 3.0, end + 0.1 * seed], *rate_and_seed)
    make_run(tmp_path / "long", [4.0, 3.0, 2.0, 0.5], "model.cell=lstm", speed=2000.0)
    return tmp_path


def test_seeds_are_a_group_and_lengths_meet_at_equal_tokens_and_seconds(study, capsys):
    out = study / "out"
    assert cli.main(["compare", str(study / "sweep"), str(study / "long"), "--out", str(out)]) == 0
    text = (out / "comparison.md").read_text()
    assert capsys.readouterr().out == text
    fast, longer, slow = rows_of(text)
    assert fast["group"] == "tiny, cell gru, learning_rate 0.002, steps 30"
    assert (fast["seeds"], longer["seeds"]) == ("3", "1")
    assert fast["at 123 k tokens"] == "1.1000 (1.0000 to 1.2000)"
    assert longer["at 123 k tokens"] == "2.0000"
    assert slow["at the end"] == "2.1000 (2.0000 to 2.2000)"
    # All have trained for 81.92 s, the LSTM to its end: the slow first steps count as the others.
    assert longer["at 1 min 22 s"] == "0.5000"
    assert fast["at 1 min 22 s"] == "3.0000 (3.0000 to 3.0000)"
    assert (out / "comparison.png").read_bytes().startswith(b"\x89PNG")


def test_other_data_have_a_table_and_other_devices_no_seconds(tmp_path):
    make_run(tmp_path / "a", [4.0, 2.0])
    make_run(tmp_path / "b", [4.0, 1.0], "seed=1", device="another card")
    make_run(tmp_path / "c", [4.0, 1.0], "model.cell=lstm", content="other text")
    text = compare_runs([tmp_path], tmp_path / "out")
    first, second = text.split("\n\n")[:2]
    (row,) = rows_of(first)
    assert (row["seeds"], row["at the end"]) == ("2", "1.5000 (1.0000 to 2.0000)")
    assert row["at 1 min 22 s"] == "-"
    assert rows_of(second)[0]["group"].endswith("cell lstm")


def test_runs_without_a_validation_and_damaged_lines(tmp_path):
    folder = make_run(tmp_path / "a", [4.0, 2.0])
    with (folder / LOG).open("a") as file:
        file.write('{"step": 30, "tok')  # killed
    diverged = make_run(tmp_path / "diverged", [], "optimiser.learning_rate=1e30")
    append_row(diverged / LOG, {"step": 1, "tokens": TOKENS, "loss": 2.0, "tokens_per_second": 1.0})
    assert list(validations([tmp_path])["bits"]) == [4.0, 2.0]
    (row,) = rows_of(compare_runs([tmp_path], tmp_path / "out"))
    assert row["at the end"] == "2.0000"
    with pytest.raises(TrainingError, match=r"no folder .*nowhere: name those of runs"):
        validations([folder, tmp_path / "nowhere"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(TrainingError, match=r"no run with a validation in .*empty: name folders"):
        validations([tmp_path / "empty"])
    with pytest.raises(TrainingError, match=r"cannot write to .*; name another folder \(--out\)"):
        compare_runs([folder], folder / LOG)
    for name, text in (("record.json", "[1]"), ("config.json", '{"seed": 1}')):
        (folder / name).write_text(text)
        with pytest.raises(TrainingError, match=r"/a has records that no run of .* has written"):
            validations([tmp_path])
    append_row(tmp_path / LOG, {"step": 1, "loss": math.inf})
    assert json.loads((tmp_path / LOG).read_text()) == {"step": 1, "loss": None}
    assert Path(folder / LOG).exists()
