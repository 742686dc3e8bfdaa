"""Runs of synthetic tasks: configs, results, tables and the command."""

import json
import re

import pytest
import torch
from overrides import flags, plain, task_run
from table import has_compiler

from pararnn.base.errors import TrainingError
from pararnn.lab import progress
from pararnn.lab.cli import main
from pararnn.lab.commands import task_runs
from pararnn.lab.options import split_sweep
from pararnn.lab.records import finite
from pararnn.lab.tasks import TASKS, training
from pararnn.lab.tasks.report import spread_table, table, write_report
from pararnn.lab.tasks.results import read_result, read_results, rows_of, summary
from pararnn.lab.tasks.run import run_all, run_task
from pararnn.lab.tasks.training import PAPER_STEPS

SMALL = ("length=8", "width=16", "heads=2", "rows=64", "batch=8", "every=10", "test=200")


def test_the_defaults_are_the_papers():
    config = task_run("keep-nth", "gru")
    model, train = config.model, config.train
    assert (model.width, model.heads, model.conv, model.layers) == (64, 4, 4, 1)
    assert (config.task.length, train.rows, config.test, train.seeds) == (100, 10_000, 100_000, 3)
    assert (train.lr, train.weight_decay, train.batch) == (5e-4, 1e-6, 16)
    assert train.steps == PAPER_STEPS == 1_875_000
    models = {name: task_run(name, "gru").model for name in TASKS}
    assert {name for name, each in models.items() if each.bare} == {"keep-nth", "parity"}
    assert {name for name, each in models.items() if each.positions} == {"keep-nth"}
    assert all(models[name].clip == 0.9 for name in ("keep-nth", "mqar", "1-hop", "2-hop"))
    assert models["parity"].clip is None


def test_overrides():
    config = task_run("keep-nth", "lstm", ["n=3", "clip=none", "lr=0.01", "bare=false"])
    assert config.task.n == 3
    assert config.model.clip is None
    assert config.train.lr == 0.01
    assert not config.model.bare
    assert config.model.mixer == "lstm"
    with_seconds = task_run("parity", "gru", ["seconds=2.5", "test=7"], lengths=(5, 6))
    assert with_seconds.train.seconds == 2.5
    assert with_seconds.test == 7
    assert with_seconds.lengths == (5, 6)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("stop=soon", "stop must be one of any, all, never, got 'soon'"),
        ("batch=10001", "batch must be at most rows = 10000"),
        ("test=0", "test must be positive, got 0"),
        ("lr=0", "lr must be positive and finite, got 0.0"),
        ("lr=inf", "lr must be positive and finite, got inf"),
        ("weight_decay=-1", "weight_decay must be 0 or positive, got -1.0"),
        ("seconds=-1", "seconds must be positive, or none, got -1.0"),
    ],
)
def test_bad_overrides(override, message, capsys):
    with pytest.raises(SystemExit):
        task_run("parity", "gru", [override])
    assert message in plain(capsys.readouterr().err)


def test_impossible_lengths_raise_before_training():
    with pytest.raises(ValueError, match="items must be from 1 to 5, got 10"):
        task_run("copying", "gru", lengths=(100, 10))
    with pytest.raises(ValueError, match=r"lengths must be positive, got 8, 0$"):
        task_run("parity", "gru", lengths=(8, 0))
    with pytest.raises(ValueError, match="learned up to 100, lengths are"):
        task_run("parity", "transformer", lengths=(1000,))


def run(names, mixers, out, *more):
    """Run small models on the CPU by the command; names and mixers with commas between them."""
    remaining, sweep = split_sweep(more)
    options = [part for text in remaining for part in (flags([text]) if "=" in text else [text])]
    command = ["tasks", "run", *names.split(","), "--mixer", *mixers.split(",")]
    command += ["--device", "cpu", "--out", str(out), *flags(SMALL), *options]
    return main([*command, *(["--sweep", *sweep] if sweep else [])])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two results, made by the command."""
    out = tmp_path_factory.mktemp("tasks")
    assert run("parity", "gru,user_cells:Timeless", out, "--lengths", "8", "40", "steps=30") == 0
    return out


def test_results(folder):
    paths = sorted(folder.iterdir())
    assert [path.name for path in paths] == ["parity-gru.json", "parity-user_cells-Timeless.json"]
    result = json.loads(paths[0].read_text())
    reference = {"task": "parity", "mixer": "gru", "seeds": [0, 1, 2], "steps": 30, "capped": True}
    assert reference.items() <= result.items()
    assert len(result["accuracies"]) == len(result["history"]) == 3
    assert result["best"] == max(result["accuracies"])
    assert list(result["lengths"]) == ["8", "40"]
    assert result["device"] == "cpu"
    assert all(0 < share < 1 for results in result["lengths"].values() for share in results)
    assert result["config"]["task"] == {"length": 8, "judge": "all"}
    assert result["versions"]["torch"] == torch.__version__
    assert "parity, gru: " in summary(result)
    assert ", capped; at 8 " in summary(result)


def test_results_are_repeatable_and_name_their_commit(folder, monkeypatch):
    monkeypatch.setenv("PARARNN_COMMIT", "abc")
    config = task_run("parity", "gru", [*SMALL, "steps=30"], lengths=(8, 40))
    again = run_task(config)
    old = json.loads((folder / "parity-gru.json").read_text())
    assert again["accuracies"] == old["accuracies"]
    assert again["lengths"] == old["lengths"]
    assert again["commit"] == "abc"
    assert old["commit"] is None


def test_progress_is_shown(tmp_path, capsys, monkeypatch):
    """Nothing was said until a run was at its end."""
    monkeypatch.setattr(progress, "EVERY", 0.0)
    assert run("parity", "gru", tmp_path, "steps=20", "seeds=2", "seconds=600") == 0
    start, *lines = capsys.readouterr().err.splitlines()
    assert start == (
        "parity, gru: 64 sequences of 8, 576 parameters, 2 seeds, on cpu; at most 20 steps of 8 or "
        "10 min 0 s"
    )
    for step, line in zip((10, 20), lines, strict=True):
        figures = r"\d.* left, loss \d\.\d+, accuracy \d\d\.\d\d%"
        assert re.fullmatch(rf"parity, gru: {step} of 20 steps, {figures}", line)


def test_trainings_side_by_side_are_trainings(folder, tmp_path, capsys):
    """Three take turns in two lanes; each result is that of a run alone."""
    options = ["--lengths", "8", "40", "steps=30", "--at-once", "2"]
    assert run("parity", "gru,user_cells:Timeless,lstm", tmp_path, *options) == 0
    for path in folder.iterdir():
        one, other = (json.loads(each.read_text()) for each in (path, tmp_path / path.name))
        for key in ("accuracies", "history", "lengths", "steps"):
            assert one[key] == other[key], key
    assert len(list(tmp_path.iterdir())) == 3
    capsys.readouterr()
    with pytest.raises(SystemExit):
        run("parity", "gru", tmp_path / "none", "steps=30", "--at-once", "0")
    assert "must be at least 1, got '0'" in plain(capsys.readouterr().err)


@pytest.mark.parametrize("more", [[], ["fresh=true"], ["start=1", "rows=60"]])
@pytest.mark.one_in(3)
def test_a_killed_training_goes_on_with_the_same_bits(more, tmp_path, monkeypatch):
    monkeypatch.setattr(training, "SAVE_SECONDS", 0.0)
    config = task_run("parity", "gru", [*SMALL, "steps=50", "lr=0.01", "stop=never", *more])
    whole = run_task(config)
    step = training.Stepper.__call__

    def die(self):
        if self.count == 37:
            raise KeyboardInterrupt
        step(self)

    monkeypatch.setattr(training.Stepper, "__call__", die)
    with pytest.raises(KeyboardInterrupt):
        run_all([config], tmp_path)
    assert [path.suffix for path in tmp_path.iterdir()] == [".part"]

    def count(self):
        counts.append(self.count)
        step(self)

    counts = []
    monkeypatch.setattr(training.Stepper, "__call__", count)
    run_all([config], tmp_path)
    assert counts[0] == 30
    assert [path.name for path in tmp_path.iterdir()] == [config.file_name()]
    result = read_result(tmp_path / config.file_name())
    for key in ("accuracies", "history", "steps", "horizons", "diverged"):
        assert result[key] == finite(whole)[key], key


def test_one_process_at_a_time_makes_a_result(tmp_path, monkeypatch):
    """Two would write one save, and resume from the other's."""
    first, second = (task_run("parity", mixer, [*SMALL, "steps=20"]) for mixer in ("gru", "lstm"))
    step, messages = training.Stepper.__call__, []

    def in_another_process(self):
        if not messages:
            with pytest.raises(TrainingError, match="another process makes") as error:
                run_all([second, first], tmp_path)
            messages.append(str(error.value))
            run_all([second], tmp_path)  # another result
        step(self)

    monkeypatch.setattr(training.Stepper, "__call__", in_another_process)
    run_all([first], tmp_path)
    assert f"{tmp_path / first.file_name()}: wait for its end" in messages[0]
    assert len(read_results(tmp_path)) == 2
    run_all([first, second], tmp_path)


def test_results_that_exist_stay(folder, capsys):
    old = (folder / "parity-gru.json").read_bytes()
    assert run("parity", "gru", folder, "--lengths", "8", "40", "steps=30") == 0
    assert "parity-gru.json exists: left as it is" in capsys.readouterr().out
    assert (folder / "parity-gru.json").read_bytes() == old
    two_layers = task_run("parity", "gru", ["layers=2"])
    assert two_layers.file_name() == "parity-gru-2-layers.json"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["steps=10"], "parity-gru.json has steps = 30, and this run 10: give it another folder"),
        (["steps=30", "judge=last"], "has judge = 'all', and this run 'last'"),
        (["steps=30", "--lengths", "8"], r"has lengths = \[8, 40\], and this run \[8\]"),
    ],
)
def test_a_result_of_another_config_raises(changes, message, folder, capsys):
    """It was left as it is, and stood in the table for what had been asked."""
    lengths = [] if "--lengths" in changes else ["--lengths", "8", "40"]
    old = sorted(folder.iterdir())
    with pytest.raises(SystemExit):
        run("parity", "lstm,gru", folder, *lengths, *changes)
    assert re.search(message, capsys.readouterr().err)
    assert sorted(folder.iterdir()) == old  # nothing was trained


def test_report(folder, capsys):
    pytest.importorskip("matplotlib")
    assert main(["tasks", "table", str(folder)]) == 0
    text = capsys.readouterr().out
    assert (folder / "table.md").read_text() == text
    for name in ("heat.png", "lengths.png"):
        assert (folder / name).read_bytes()[:4] == b"\x89PNG"
    assert len(read_results(folder)) == 2


@pytest.mark.parametrize("text", ['{"a": 1}', "[1]", '{"a"', ""])
def test_files_that_are_no_results_are_named(text, tmp_path, capsys):
    (tmp_path / "parity-gru.json").write_text(text)
    with pytest.raises(SystemExit):
        main(["tasks", "table", str(tmp_path)])
    assert re.search(
        r"error: \S+parity-gru\.json is no result.* remove it\n", capsys.readouterr().err
    )
    with pytest.raises(SystemExit):
        run("parity", "gru", tmp_path)
    assert "parity-gru.json is no result" in capsys.readouterr().err


def _result(task, mixer, best, cap=False, layers=1):
    config = {"model": {"layers": layers}}
    fields_by_name = {"task": task, "mixer": mixer, "best": best, "capped": cap}
    return {**fields_by_name, "chance": 0.1, "config": config, "lengths": {}}


def test_table():
    results = [
        _result("parity", "lstm", 0.99999),
        _result("2-hop", "mamba2", 0.5, cap=True),
        _result("keep-nth", "gru", 1.0),
        _result("s3", "gru", 0.25, layers=2),
    ]
    lines = table(results).splitlines()
    assert lines[0] == "| | keep-nth | parity | 2-hop | s3 |"
    assert lines[2:7] == [
        "| mamba2 | (1) | (52) | 50+ (98) |  |",
        "| gru | 100 (100) | (100) | (100) |  |",
        "| gru, 2 layers |  |  |  | 25 |",
        "| lstm | (100) | 99.9 (100) | (100) |  |",
        "| chance | 10 | 10 | 10 | 10 |",
    ]


@pytest.fixture(scope="module")
def diverging_run(tmp_path_factory):
    """Results of runs that diverge at once, by regression and by classes, made by the command."""
    out = tmp_path_factory.mktemp("diverged")
    assert run("parity,adding", "gru", out, "--lengths", "8", "40", "steps=40", "lr=1e25") == 0
    return out


@pytest.mark.parametrize("task", ["parity", "adding"])
def test_a_run_that_diverged_has_no_accuracy(task, diverging_run):
    """It had that of the first class, to which argmax takes NaN, and NaN in its file."""
    text = (diverging_run / f"{task}-gru.json").read_text()
    result = json.loads(text, parse_constant=pytest.fail)  # JSON's standard knows no NaN
    assert result["accuracies"] == [None] * 3
    assert result["best"] is None
    assert result["lengths"] == {"8": [None] * 3, "40": [None] * 3}
    assert result["diverged"] == [10] * 3
    assert result["steps"] == 10  # nothing is left to train
    assert f"{task}, gru: none (diverged by step 10), none" in summary(result)


def test_the_table_names_diverged_runs(diverging_run):
    pytest.importorskip("matplotlib")
    assert "| gru | diverged (100) | diverged |" in write_report(diverging_run)


def test_a_diverged_seed_does_not_affect_the_others(monkeypatch):
    """Its best weights from before are tested."""
    config = task_run("parity", "gru", [*SMALL, "steps=30", "seeds=2"], lengths=(16,))
    reference = run_task(config)
    step = training.Stepper.__call__

    def spoil(self):
        step(self)
        if self.count == 15:
            self.model.weights["head.weight"].data[0] = float("nan")

    monkeypatch.setattr(training.Stepper, "__call__", spoil)
    result = run_task(config)
    assert result["diverged"] == [20, None]
    assert result["accuracies"][1] == reference["accuracies"][1]
    assert result["history"][0] == reference["history"][0]
    assert result["history"][1][1][0] is result["history"][1][2][0] is None
    assert 0 < result["accuracies"][0] < 1
    assert " (diverged by step 20), " in summary(result)


def test_results_of_earlier_versions_are_read(tmp_path):
    result = _result("parity", "gru", 0.5) | {"best": float("nan")}
    (tmp_path / "parity-gru.json").write_text(json.dumps(result))
    assert read_results(tmp_path)[0]["best"] is None


def test_an_empty_folder(tmp_path, capsys):
    with pytest.raises(ValueError, match="holds no results: pararnn tasks run NAME --out"):
        write_report(tmp_path)
    with pytest.raises(SystemExit):
        main(["tasks", "table", str(tmp_path)])
    assert "holds no results" in capsys.readouterr().err


def test_list(capsys):
    assert main(["tasks", "list"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in [*TASKS, "gru", "m2rnn", "transformer", "mamba2"])


def test_bad_commands(capsys):
    for bad in (["run", "nope", "--mixer", "gru"], ["run", "parity", "--mixer", "gruu"]):
        with pytest.raises(SystemExit) as error:
            main(["tasks", *bad, "--device", "cpu"])
        assert error.value.code == 2
        assert "there is no " in capsys.readouterr().err


def test_a_folder_that_cannot_be_made_is_refused(tmp_path, capsys):
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit):
        run("parity", "gru", tmp_path / "file")
    message = capsys.readouterr().err
    assert "cannot write to" in message
    assert "name another folder (--out)" in message


@pytest.mark.skipif(not has_compiler(), reason="the loop in Python takes minutes")
@pytest.mark.thorough
def test_a_gru_learns_parity_and_holds_it_at_other_lengths():
    options = ["length=16", "lr=0.01", "batch=32", "seeds=2", "every=50", "steps=1000", "test=2000"]
    result = run_task(task_run("parity", "gru", options, lengths=(64,)))
    assert result["best"] == 1
    assert not result["capped"]
    assert max(result["lengths"]["64"]) > 0.9


def _seeds(mixer, rate, accuracies, first=0, task="parity", **more):
    train = {"lr": rate, "seed": first, "seeds": len(accuracies)}
    best = max((each for each in accuracies if each is not None), default=None)
    return {
        **_result(task, mixer, best),
        "accuracies": accuracies,
        "seeds": [*range(first, first + len(accuracies))],
        "diverged": [None if each is not None else 5 for each in accuracies],
        "config": {"model": {"layers": 1}, "train": train},
        "lengths": {"9": accuracies},
        **more,
    }


RATES = [
    _seeds("gru", 0.001, [0.5, 0.75, 1.0]),
    _seeds("gru", 0.002, [0.25, None]),
    _seeds("gru", 0.002, [1.0, 0.5], first=2, capped=True),
    _seeds("lstm", 0.001, [0.875], task="s3"),
    _seeds("gru", 0.001, [None], task="s3"),
]


def test_rates_of_one_folder_are_rows_of_their_own():
    """The last file of a mixer and a task hid the others."""
    lines = table(RATES).splitlines()
    assert lines[0] == "| | parity | s3 |"
    assert lines[2:6] == [
        "| gru, lr 0.001 | 100 | diverged |",
        "| gru, lr 0.002 | 100+ |  |",
        "| lstm | (100) | 87.5 |",
        "| chance | 10 | 10 |",
    ]


def test_the_spread_is_over_all_seeds_of_a_config():
    lines = spread_table(RATES).splitlines()
    assert lines[2:5] == [
        "| gru, lr 0.001 | 75 (50 to 100) | 1 of 1 diverged |",
        "| gru, lr 0.002 | 58.3 (25 to 100), 1 of 4 diverged |  |",
        "| lstm |  | 87.5 |",
    ]
    assert "over the seeds (1 to 4)" in lines[-1]
    (gru,) = [each for each in rows_of(RATES) if each["row"] == "gru, lr 0.002"]
    assert gru["seeds"] == [0, 1, 2, 3]
    assert gru["accuracies"] == gru["lengths"]["9"] == [0.25, None, 1.0, 0.5]
    assert gru["diverged"] == [None, 5, None, None]


def test_a_sweep_takes_lengths():
    """They raised a KeyError."""
    runs = task_runs(["parity"], ["gru"], flags(SMALL), ["lengths=8,16|32"])
    assert [run.lengths for run in runs] == [(8, 16), (32,)]
    assert [run.sweep for run in runs] == ["lengths--8-16", "lengths--32"]


def test_a_sweep_runs_each_value_once(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    sweep = ["steps=10", "seeds=1", "--sweep", "lr=1e-3,2e-3", "seed=0,1"]
    assert run("parity", "gru", tmp_path, *sweep) == 0
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [
        f"parity-gru-lr-{rate}-seed-{seed}.json" for rate in (0.001, 0.002) for seed in (0, 1)
    ]
    (tmp_path / names[2]).unlink()
    capsys.readouterr()
    assert run("parity", "gru", tmp_path, *sweep) == 0
    assert capsys.readouterr().out.count("exists: left as it is") == 3
    results = {row["row"]: row for row in rows_of(read_results(tmp_path))}
    assert [*results] == ["gru, lr 0.001", "gru, lr 0.002"]
    for name, row in results.items():
        both = run_task(
            task_run("parity", "gru", [*SMALL, "steps=10", "seeds=2", name[5:].replace(" ", "=")])
        )
        assert row["accuracies"] == pytest.approx(both["accuracies"], abs=0.02)
    assert main(["tasks", "table", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "| gru, lr 0.002 |" in text
    assert "in brackets the worst and the best" in text
