"""Options of a command line: sweeps and names of their runs; what else there is: test_cli.py."""

import pytest

from pararnn.lab.options import arguments_of, name_of, points_of, split_sweep


def test_all_combinations_of_the_values():
    assert points_of(["seed=0,1", "lr=1,2,3"]) == [
        {"seed": seed, "lr": rate} for seed in "01" for rate in "123"
    ]
    assert points_of([]) == [{}]
    mixers = points_of(["mixers=rnn,rnn|rnn,attention"])
    assert [point["mixers"] for point in mixers] == ["rnn,rnn", "rnn,attention"]
    assert arguments_of(mixers[0], {"mixers": ()}) == ["--mixers", "rnn", "rnn"]
    assert arguments_of({"data-train": "a,b"}, {"data_train": ""}) == ["--data-train", "a,b"]


@pytest.mark.parametrize("sweep", [["seed"], ["seed="], ["seed=0,,1"], ["=1,2"], ["a=1", "a=2"]])
def test_bad_sweeps(sweep):
    with pytest.raises(ValueError, match="must be a new key=value,value"):
        points_of(sweep)


def test_values_after_the_flag_are_the_sweeps():
    command = "tiny --sweep seed=0,1 --print --sweep lr=1,2 --steps 3"
    assert split_sweep(command.split()) == (
        ["tiny", "--print", "--steps", "3"],
        ["seed=0,1", "lr=1,2"],
    )


def test_names_are_for_folders_and_do_not_collide():
    values = {"seed": 0, "optimiser.learning_rate": 0.001}
    assert name_of(values) == "learning_rate-0.001-seed-0"
    assert name_of({"a.x": "1", "b.x": "2"}) == "a.x-1-b.x-2"
    assert name_of({"data.train": "books/*.txt"}) == "train-books-.txt"
