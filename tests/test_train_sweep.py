"""Sweeps of training runs: what has ended stays, what was killed goes on, with the same bits."""

import json

import pytest

pytest.importorskip("transformers")

from overrides import resolved
from test_train_trainer import Packed, config, losses, same_bits, weights

from pararnn.base.errors import TrainingError
from pararnn.lab.options import name_of, points_of
from pararnn.lab.train.folder import record_of
from pararnn.lab.train.run import run_training
from pararnn.lab.train.sweep import run_sweep, sweep_of
from pararnn.lab.train.trainer import RunTrainer

VALUES = ["seed=0,1"]
QUICK = {"steps": 4, "save_every": 2, "valid_every": 4, "report_to": "none"}


def runs_of(run, sweep=VALUES):
    """The runs of a sweep over a config."""

    def at(point):
        return resolved(run, [f"{key}={value}" for key, value in point.items()])

    return sweep_of(points_of(sweep), at, name_of)


class Killed(BaseException):
    """End of a process."""


def train(run):
    return run_training(run, Packed())


def steps_made(monkeypatch):
    """The (folder's name, step) of every optimizer step from here on."""
    moves = []
    learn = RunTrainer.learn

    def counting(self, parts):
        moves.append((self.out.name, self.step + 1))
        return learn(self, parts)

    monkeypatch.setattr(RunTrainer, "learn", counting)
    return moves


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    out = tmp_path_factory.mktemp("sweep")
    run_sweep(runs_of(config(out, **QUICK)), train)
    return out


def test_the_runs_are_those_one_would_make_alone(whole, tmp_path):
    assert sorted(path.name for path in whole.iterdir()) == ["seed-0", "seed-1"]
    train(config(tmp_path / "alone", **QUICK, seed=1))
    same_bits(weights(tmp_path / "alone" / "model"), weights(whole / "seed-1" / "model"))
    assert losses(whole / "seed-0")[4] != losses(whole / "seed-1")[4]


def test_a_killed_sweep_goes_on_and_repeats_nothing(whole, tmp_path, monkeypatch, capsys):
    configs = runs_of(config(tmp_path, **QUICK))
    learn = RunTrainer.learn

    def kill(self, parts):
        if (self.out.name, self.step) == ("seed-1", 3):
            raise Killed
        return learn(self, parts)

    with monkeypatch.context() as patch:
        patch.setattr(RunTrainer, "learn", kill)
        with pytest.raises(Killed):
            run_sweep(configs, train)
    moves = steps_made(monkeypatch)
    run_sweep(configs, train)
    assert moves == [("seed-1", 3), ("seed-1", 4)]
    assert "seed-0 has ended: left as it is" in capsys.readouterr().err
    for name in ("seed-0", "seed-1"):
        same_bits(weights(tmp_path / name / "model"), weights(whole / name / "model"))
    assert [start["step"] for start in record_of(tmp_path / "seed-1")["starts"]] == [0, 2]
    moves.clear()
    run_sweep(configs, train)
    assert moves == []
    run_sweep(runs_of(config(tmp_path, **QUICK | {"steps": 5}))[:1], train)
    assert moves == [("seed-0", 5)]  # a longer run goes on


def test_a_run_that_diverged_is_not_repeated(tmp_path, monkeypatch, capsys):
    values = ["optimiser.learning_rate=1e30,1e-2"]
    moves = steps_made(monkeypatch)
    for _ in range(2):
        with pytest.raises(TrainingError, match="1 of 2 runs diverged"):
            run_sweep(runs_of(config(tmp_path, **QUICK), values), train)
    assert [step for name, step in moves if name == "learning_rate-0.01"] == [1, 2, 3, 4]
    steps = [step for name, step in moves if name == "learning_rate-1e+30"]
    assert steps == [*range(1, len(steps) + 1)]  # once
    step = json.loads((tmp_path / "learning_rate-1e+30" / "record.json").read_text())["diverged"]
    assert f"1e+30 diverged in step {step['step']}: left as it is" in capsys.readouterr().err
    moves.clear()
    longer = runs_of(config(tmp_path, **QUICK | {"steps": 5}), values)
    with pytest.raises(TrainingError, match="1 of 1 runs diverged"):
        run_sweep(longer[:1], train)
    assert moves  # another schedule of rates


def test_the_record_says_what_a_run_ran_on(whole):
    (start,) = record_of(whole / "seed-0")["starts"]
    assert (start["step"], start["processes"]) == (0, 1)
    assert start["device"]
    sizes = [weight.numel() for weight in weights(whole / "seed-0" / "model").values()]
    assert start["parameters"] == sum(sizes)
    assert set(start["versions"]) == {"pararnn", "torch"}
