"""Comparison of runs: groups over seeds, what may not be compared, and the figures of tables."""

import json
import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from pararnn.lab import cli
from pararnn.lab.compare.curves import curves_of
from pararnn.lab.compare.groups import MEASURED_BY, SAME_RUN, kind_of, sets_of
from pararnn.lab.compare.report import at_seconds, at_tokens, markdown
from pararnn.lab.compare.runs import find_runs, points_of
from pararnn.lab.train.folder import BY_CONTENT, add_start
from pararnn.lab.train.log import append_row
from pararnn.lab.train.overrides import resolved, texts_of
from pararnn.lab.train.recipes import recipe

TOKENS = 16 * 256
"""Tokens of a step of tiny."""
DEVICE = "a card"


def make_run(
    folder, bits, *overrides, name="tiny", content="these", device=DEVICE, speed=1000.0, upto=None
):
    """A run's folder with validations every 10 steps, of `bits`, at a constant speed."""
    folder = Path(folder)
    settings = [f"steps={10 * len(bits)}", *overrides, f"out={folder}"]
    config = replace(resolved(recipe("tiny"), settings), name=name)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(asdict(config)))
    if content:
        (folder / "data.json").write_text(json.dumps({"content": content}))
    if device:
        facts = {"step": 0, "device": device, "processes": 1, "parameters": 1000, "versions": {}}
        add_start(folder, facts)
    for index, value in enumerate(bits[:upto], 1):
        row = {"step": 10 * index, "tokens": 10 * index * TOKENS}
        append_row(folder / "log.csv", {**row, "loss": 2.0, "tokens_per_second": speed})
        append_row(folder / "log.csv", {**row, "valid_loss": 1.0, "valid_bits_per_byte": value})
    return folder


def sets_in(*folders):
    runs, left_out = find_runs(map(Path, folders))
    return sets_of(runs), left_out


@pytest.fixture
def study(tmp_path):
    """Two rates of a GRU, three seeds each, one of which is not finished."""
    for rate, end in (("0.001", 2.0), ("0.002", 1.0)):
        for seed in (0, 1, 2):
            make_run(
                tmp_path / "sweep" / f"{rate}-{seed}",
                [4.0, 3.0, end + 0.1 * seed],
                f"optimiser.learning_rate={rate}",
                f"seed={seed}",
                upto=2 if (rate, seed) == ("0.002", 2) else None,
            )
    return tmp_path / "sweep"


def test_runs_that_differ_by_their_seed_are_a_group(study):
    (only,), left_out = sets_in(study)
    assert left_out == []
    slow, fast = only.groups
    assert (slow.label, fast.label) == (
        "gru tiny, learning_rate 0.001",
        "gru tiny, learning_rate 0.002",
    )
    assert slow.end == pytest.approx((2.1, 2.0, 2.2, 3))
    assert fast.end == pytest.approx((1.05, 1.0, 1.1, 2))  # without the one that has not ended
    assert [run.state for run in fast.others] == ["at step 20 of 30"]
    assert only.differences == {"optimiser.learning_rate": ["0.001", "0.002"]}
    assert sets_in(*sorted(study.iterdir()))[0][0].groups == only.groups


def test_the_report_says_what_has_not_ended(study):
    sets, _ = sets_in(study)
    text = markdown(sets, [])
    assert "**1 run of 6 not finished**" in text
    assert "0.002-2 | 1 | gru tiny, learning_rate 0.002 (in no mean) | 2 | at step 20 of 30" in text
    lines = [line for line in text.splitlines() if line.startswith("| gru tiny")]
    assert lines[0].startswith("| gru tiny, learning_rate 0.002 | 1 k | 2 | 123 k | 1.0500 (1.0000")
    assert "Fewest bits: gru tiny, learning_rate 0.002, 50% below gru tiny, learning_rate" in text
    assert "Each of its seeds is below each of theirs." in text


def test_seeds_that_overlap_tell_nothing_apart(tmp_path):
    for rate, ends in (("0.001", (1.0, 2.0)), ("0.002", (1.1, 2.1))):
        for seed, end in enumerate(ends):
            overrides = f"optimiser.learning_rate={rate}", f"seed={seed}"
            make_run(tmp_path / f"{rate}-{seed}", [3.0, end], *overrides)
    text = markdown(*sets_in(tmp_path))
    assert "Their seeds overlap: these runs do not tell the two apart." in text
    make_run(tmp_path / "c", [3.0, 0.5], "optimiser.learning_rate=0.004")
    assert "With one seed it is not known by how much" in markdown(*sets_in(tmp_path))


def test_runs_of_other_lengths_are_compared_at_equal_tokens(tmp_path):
    make_run(tmp_path / "short", [4.0, 2.0])
    make_run(tmp_path / "long", [4.0, 2.5, 1.0, 1.0])
    (only,), _ = sets_in(tmp_path)
    long, short = only.groups
    assert only.equal_tokens == 20 * TOKENS
    assert at_tokens(only, long).mean == 2.5
    assert at_tokens(only, short).mean == 2.0
    text = markdown([only], [])
    assert "**Runs of different lengths** (81.9 k, 164 k tokens)" in text
    assert "Equal tokens favour the shorter one" in text
    assert "Fewest bits: gru tiny, steps 20, 20% below gru tiny, steps 40" in text


def test_what_a_run_has_not_reached_is_no_figure(tmp_path):
    make_run(tmp_path / "whole", [4.0, 3.0])
    make_run(tmp_path / "cut", [4.0, 3.0], "model.cell=lstm", upto=1)
    (only,), _ = sets_in(tmp_path)
    cut, whole = only.groups
    assert not cut.is_finished
    assert cut.end is at_tokens(only, cut) is at_seconds(only, cut) is None
    assert at_tokens(only, whole).mean == 3.0
    (run,) = cut.runs
    assert [run.at("tokens", steps * TOKENS) for steps in (9, 10, 11)] == [None, 4.0, None]
    lines = [line for line in markdown([only], []).splitlines() if line.startswith("| lstm")]
    assert lines[0].startswith("| lstm tiny (not finished) | 1 k | 1 | 41 k | – | – |")  # noqa: RUF001


def test_equal_seconds_follow_from_the_speed(tmp_path):
    make_run(tmp_path / "slow", [4.0, 3.0, 2.0], "model.cell=lstm", speed=1000.0)
    make_run(tmp_path / "fast", [5.0, 4.0, 3.0], speed=2000.0)
    (only,), _ = sets_in(tmp_path)
    by_label = {group.label: group for group in only.groups}
    assert by_label.keys() == {"lstm tiny", "gru tiny"}
    assert only.equal_seconds == pytest.approx(30 * TOKENS / 2000)
    # The slow one is half way, between its first and its second validation.
    assert at_seconds(only, by_label["lstm tiny"]).mean == pytest.approx(3.5)
    assert at_seconds(only, by_label["gru tiny"]).mean == 3.0
    assert "at 1 min 1 s" in markdown([only], [])


@pytest.mark.parametrize("device", ["another card", ""])
def test_seconds_of_other_devices_are_not_compared(tmp_path, device):
    make_run(tmp_path / "a", [4.0, 3.0], "model.cell=lstm")
    make_run(tmp_path / "b", [4.0, 3.0], device=device)
    (only,), _ = sets_in(tmp_path)
    assert all(at_seconds(only, group) is None for group in only.groups)
    text = markdown([only], [])
    assert (
        f"**Seconds are not compared**: the runs' devices are a card, {device or 'unknown'}" in text
    )
    assert "at 1 min" not in text


@pytest.mark.parametrize(
    ("overrides", "content", "what"),
    [
        ((), "those", "the content of the data"),
        (("data.tokenizer=bpe:260",), "those", "`data.tokenizer`"),
        (("data.sequence_length=128",), "these", "`data.sequence_length`"),
        (("valid_rows=8",), "these", "`valid_rows`"),
        (("data.train=b",), "", "`data.train`"),
    ],
)
def test_what_was_measured_otherwise_is_a_set_of_its_own(tmp_path, overrides, content, what):
    """Bits of other text, another tokenizer or other rows stand in no table next to these."""
    make_run(tmp_path / "a", [4.0, 3.0])
    make_run(tmp_path / "b", [4.0, 1.0], *overrides, content=content)
    sets, _ = sets_in(tmp_path)
    assert [len(each.groups) for each in sets] == [1, 1]
    text = markdown(sets, [])
    assert f"**Not all can be compared**: there are 2 sets, which differ in {what}. " in text
    assert "## Set 2" in text
    assert "Fewest bits" not in text


def test_the_same_text_by_another_path_is_the_same(tmp_path):
    make_run(tmp_path / "a", [4.0, 3.0], "data.train=a", "seed=1")
    make_run(tmp_path / "b", [4.0, 2.0], "data.train=b", "save_every=7", "data.cache=x")
    (only,), _ = sets_in(tmp_path)
    (group,) = only.groups
    assert group.end == (2.5, 2.0, 3.0, 2)


def test_a_seed_counts_once(tmp_path):
    make_run(tmp_path / "a", [4.0, 3.0], upto=1)
    make_run(tmp_path / "b", [4.0, 2.0])
    make_run(tmp_path / "c", [4.0, 1.0])
    (only,), _ = sets_in(tmp_path)
    (group,) = only.groups
    assert [run.folder.name for run in group.runs] == ["b"]
    assert {run.folder.name for run in group.others} == {"a", "c"}
    assert "Seeds that another run of the same config has too, and in no mean" in markdown(
        [only], []
    )


def test_folders_of_others_are_left_out_by_name(tmp_path, study):
    (tmp_path / "cache").mkdir()
    make_run(tmp_path / "new", [3.0, 2.0], upto=0)
    make_run(tmp_path / "old", [3.0, 2.0])
    record = json.loads((tmp_path / "old" / "config.json").read_text())
    (tmp_path / "old" / "config.json").write_text(json.dumps(record | {"stepz": 3}))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "pararnn"}')
    runs, left_out = find_runs(sorted(tmp_path.iterdir()))
    assert len(runs) == 6
    messages = ("cache is no run", "model is no run", "new has no validation", "old: .*stepz")
    for line, message in zip(left_out, messages, strict=True):
        assert re.search(message, line)
    text = markdown(sets_of(runs), left_out)
    assert "## Left out" in text
    assert "new has no validation so far (at step 0 of 20)" in text


def test_seconds_are_of_training_and_without_what_the_first_steps_do_once():
    def row(step, speed="", bits=""):
        return {
            "step": str(step),
            "tokens": str(100 * step),
            "tokens_per_second": speed,
            "valid_bits_per_byte": bits,
        }

    rows = [row(1, "1"), row(2, "50"), row(3, "100"), row(3, bits="3.5"), row(5, bits="3.0")]
    assert points_of(rows) == [(3, 300, 2 + 2 + 1, 3.5), (5, 500, 5 + 2, 3.0)]
    assert points_of([row(1, "50"), row(1, bits="2")]) == [(1, 100, 2, 2)]
    assert points_of([row(4, bits="2")]) == [(4, 400, 0, 2)]
    assert points_of([]) == []


def test_names_begin_with_the_architecture(tmp_path):
    tiny = recipe("tiny").model
    kinds = [
        (tiny, "gru"),
        (replace(tiny, cell="user_cells:Memory"), "Memory"),
        (replace(tiny, mixers=("attention", "attention")), "transformer"),
        (replace(tiny, mixers=("rnn", "attention")), "hybrid"),
    ]
    assert [kind_of(model) for model, _ in kinds] == [kind for _, kind in kinds]
    make_run(tmp_path / "a", [3.0], name="gru-30m")
    make_run(tmp_path / "b", [3.0], "model.cell=lstm", name="gru-30m")
    make_run(tmp_path / "c", [3.0], "model.hidden_size=64", name="gru-30m")
    (only,), _ = sets_in(tmp_path)
    assert [group.label for group in only.groups] == [
        "gru-30m, hidden_size 128, intermediate_size 512",
        "lstm gru-30m",
        "gru-30m, hidden_size 64, intermediate_size 256",
    ]
    assert only.differences.keys() == {
        "model.cell",
        "model.hidden_size",
        "model.intermediate_size",
    }


def test_curves_are_where_all_seeds_are(tmp_path):
    make_run(tmp_path / "a", [4.0, 3.0, 2.0], "steps=50")
    make_run(tmp_path / "b", [5.0, 4.0], "steps=50", "seed=1")
    (only,), _ = sets_in(tmp_path)
    (group,) = only.groups
    assert not group.is_finished
    across, bits = curves_of(group, "tokens")
    assert (across / TOKENS).tolist() == [10, 20]
    assert bits.tolist() == [[4.0, 3.0], [5.0, 4.0]]


def test_the_command_writes_a_folder_of_its_own(study, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    out = tmp_path / "out"
    make_run(tmp_path / "other", [2.0, 1.0], content="those")
    command = ["compare", str(study), str(tmp_path / "other"), "--out", str(out)]
    assert cli.main(command) == 0
    text = capsys.readouterr().out
    assert (out / "report.md").read_text() == text
    assert (out / "curves.png").read_bytes()[:4] == b"\x89PNG"
    record = json.loads((out / "comparison.json").read_text(), parse_constant=pytest.fail)
    assert [len(each["groups"]) for each in record["sets"]] == [2, 1]
    assert record["sets"][0]["groups"][0]["end"]["mean"] == pytest.approx(2.1)
    assert cli.main(command) == 0  # again, into its own folder
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "report.md").write_text("mine")
    with pytest.raises(SystemExit):
        cli.main([*command[:-1], str(tmp_path / "mine")])
    assert "report.md is there, and not by an earlier call" in capsys.readouterr().err
    assert (tmp_path / "mine" / "report.md").read_text() == "mine"
    with pytest.raises(SystemExit):
        cli.main(["compare", str(tmp_path / "mine"), "--out", str(out)])
    assert "there is no run to compare: " in capsys.readouterr().err


def test_keys_that_groups_depend_on_exist():
    keys = {*SAME_RUN, *MEASURED_BY, *BY_CONTENT}
    assert keys <= texts_of(recipe("tiny")).keys()
