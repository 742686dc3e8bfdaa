"""Sweeps: combinations of values, the command line, and runs that end, diverge or are killed."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from pararnn.base.errors import DivergenceError, TrainingError
from pararnn.lab import cli
from pararnn.lab.sweeps import combinations, name_of, split_sweep
from pararnn.lab.tasks.run import sweep_of as task_sweep
from pararnn.lab.train.recipes import recipe
from pararnn.lab.train.sweep import run_sweep, sweep_of

TINY = recipe("tiny")


def test_all_combinations_of_the_values():
    assert combinations(["seed=0, 1", "lr=1,2,3"], ["steps=5"]) == [
        (f"seed={seed}", f"lr={rate}") for seed in (0, 1) for rate in (1, 2, 3)
    ]
    assert combinations([]) == [()]
    assert combinations(["model.mixers=rnn,rnn|rnn,attention"]) == [
        ("model.mixers=rnn,rnn",),
        ("model.mixers=rnn,attention",),
    ]


@pytest.mark.parametrize(
    ("sweep", "message"),
    [
        (["seed"], "'seed' is no key=value,value to sweep over"),
        (["seed="], "'seed=' is no key=value,value"),
        (["seed=0,,1"], "'seed=0,,1' is no key=value,value"),
        (["=1,2"], "'=1,2' is no key=value,value"),
        (["seed=0,1", "seed=2"], "seed has values twice: name it once"),
        (["steps=1,2"], "steps has values twice"),
    ],
)
def test_bad_sweeps(sweep, message):
    with pytest.raises(ValueError, match=message):
        combinations(sweep, ["steps = 5"])


@pytest.mark.parametrize(
    "command",
    [
        "tiny steps=3 --sweep seed=0,1 lr=1,2 --print",
        "--print --sweep seed=0,1 lr=1,2 tiny steps=3",
        "tiny --sweep=seed=0,1 steps=3 --print --sweep lr=1,2",
        "--sweep seed=0,1 --print tiny steps=3 --sweep lr=1,2",
    ],
)
def test_values_behind_the_flag_are_the_sweeps(command):
    others, sweep = split_sweep(command.split())
    if "=seed" in command:  # the flag has its value, and what follows is behind it
        reference = ["--print", "tiny"], ["--sweep", "seed=0,1", "steps=3", "lr=1,2"]
    else:
        reference = ["--print", "steps=3", "tiny"], ["--sweep", "seed=0,1", "lr=1,2"]
    assert (sorted(others), sweep) == reference


def test_names_are_for_folders_and_do_not_collide():
    assert (
        name_of({"optimiser.learning_rate": "0.001", "seed": "0"}) == "learning_rate-0.001-seed-0"
    )
    assert name_of({"a.x": "1", "b.x": "2"}) == "a.x-1-b.x-2"
    assert name_of({"data.train": "books/*.txt"}) == "train-books-.txt"


def test_a_sweep_is_of_configs_with_folders_of_their_own():
    runs = sweep_of(TINY, ["out=runs/mine"], ["seed=0,1", "optimiser.learning_rate=1e-3,2e-3"])
    folders = {run.out for run in runs}
    assert len(runs) == len(folders) == 4
    assert runs[1].out == str(Path("runs/mine/learning_rate-0.002-seed-0"))
    assert (runs[1].optimiser.learning_rate, runs[1].seed) == (0.002, 0)
    # Neither the order of keys, nor how numbers are written, nor further values move a run.
    again = sweep_of(TINY, ["out=runs/mine"], ["optimiser.learning_rate=.0020,0.001", "seed=1,0,2"])
    assert folders < {run.out for run in again}
    assert {run.out: run for run in again}[runs[1].out] == runs[1]


@pytest.mark.parametrize(
    ("sweep", "message"),
    [
        (["optimiser.learning_rate=1e-3,.001"], "have the same values, learning_rate-0.001"),
        (["out=a,b"], "out is the folder of all runs"),
        (["lr=1,2"], "did you mean optimiser.learning_rate"),
        (["seed=0,x"], "seed must be an integer, got 'x'"),
    ],
)
def test_sweeps_that_cannot_be_run(sweep, message):
    with pytest.raises(ValueError, match=message):
        sweep_of(TINY, [], sweep)


def test_the_command_shows_every_run_of_a_sweep(capsys):
    assert cli.main(["train", "tiny", "--print", "steps=7", "--sweep", "seed=4,5"]) == 0
    texts = capsys.readouterr().out.split("\n\n")
    assert len(texts) == 2
    assert "steps = 7\n" in texts[1]
    assert "seed = 5\n" in texts[1]
    for command in ("train tiny --sweep", "tasks run parity --mixer gru --sweep"):
        with pytest.raises(SystemExit):
            cli.main(command.split())
        assert "--sweep: expected at least one argument" in capsys.readouterr().err


def test_a_sweep_goes_on_behind_a_run_that_diverges(tmp_path, capsys):
    configs = sweep_of(replace(TINY, out=str(tmp_path)), [], ["seed=0,1,2"])
    begins = []

    def train(config):
        begins.append(config.seed)
        if config.seed == 1:
            raise DivergenceError("the loss is NaN", 7)
        return Path(config.out) / "model"

    with pytest.raises(TrainingError, match=r"1 of 3 runs diverged, the others .*: .*seed-1$"):
        run_sweep(configs, train)
    assert begins == [0, 1, 2]
    assert "seed-1 diverged in step 7: the other runs of the sweep go on" in capsys.readouterr().err

    def broken(config):
        begins.append("broken")
        raise TrainingError("no text")

    with pytest.raises(TrainingError, match=r"^no text$"):  # would be so in all others
        run_sweep(configs, broken)
    assert begins.count("broken") == 1


def test_a_folder_of_another_run_raises_before_the_first(tmp_path):
    configs = sweep_of(replace(TINY, out=str(tmp_path)), [], ["seed=0,1,2"])
    (tmp_path / "seed-2").mkdir()
    (tmp_path / "seed-2" / "config.json").write_text(json.dumps({"seed": 9}))
    with pytest.raises(TrainingError, match="seed-2"):
        run_sweep(configs, lambda config: pytest.fail("it has begun"))


def test_a_sweep_of_tasks_names_its_results():
    runs = task_sweep("parity", "gru", ["steps=5"], ["lr=1e-3,.002", "bare=true,false"])
    assert [run.file_name() for run in runs] == [
        f"parity-gru-bare-{bare}-lr-{rate}.json"
        for rate in (0.001, 0.002)
        for bare in ("true", "false")
    ]
    assert [run.train.lr for run in runs] == [0.001, 0.001, 0.002, 0.002]
    assert {run.train.steps for run in runs} == {5}
    (plain,) = task_sweep("parity", "gru", [], [])
    assert plain.file_name() == "parity-gru.json"
    with pytest.raises(ValueError, match="there is no key 'mixer'"):
        task_sweep("parity", "gru", [], ["mixer=gru,lstm"])
