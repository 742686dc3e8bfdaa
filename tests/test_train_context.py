"""`pararnn train` with rows that several processes share: a run is that of one process."""

import dataclasses
import functools
import shutil

import pytest
import torch
from lm_kinds import options
from processes import on_processes

pytest.importorskip("transformers")

from test_train_trainer import LENGTH, Packed, config, losses, weights

from pararnn.base.errors import TrainingError
from pararnn.lab.train.config import DataConfig
from pararnn.lab.train.feed import label_count, local_span
from pararnn.lab.train.log import read_rows
from pararnn.lab.train.run import run_training
from pararnn.lm.config import LMConfig


class Documents(torch.utils.data.Dataset):
    """Rows of a dataset with the positions of two documents; some labels are ignored."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        row, first = self.rows[index], 1 + index % (LENGTH - 1)
        positions = torch.cat([torch.arange(first), torch.arange(LENGTH - first)])
        labels = row["labels"].masked_fill(positions == 0, -100)
        return {**row, "labels": labels, "position_ids": positions}


def data(resets):
    rows = Packed()
    if not resets:
        return rows
    return rows._replace(train=Documents(rows.train), valid=Documents(rows.valid))


CASES = {
    "plain": {"verify_every": 2, "model": LMConfig(**options("hybrid"))},
    "documents": {
        "data": DataConfig(sequence_length=LENGTH, resets=True),
        "checkpointing": True,
        "model": LMConfig(**options("lstm")),
        "reshard": False,
    },
}


def run(out, name, steps=4, **more):
    every = {"save_every": 2, "valid_every": 2}
    return run_training(
        config(out / name, **CASES[name], **every, steps=steps, **more), data(name == "documents")
    )


def run_all(out, shared, device_batch, rank=0):
    for name in CASES:
        run(out, name, context_parallel=shared, device_batch=device_batch)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    single, both = (tmp_path_factory.mktemp(name) for name in ("one", "four"))
    run_all(single, 1, 4)
    on_processes(functools.partial(run_all, both, 2, 2), 4)  # two groups of two
    return single, both


@pytest.mark.parametrize("name", CASES)
def test_four_processes_are_one(runs, name):
    one, four = (folder / name for folder in runs)
    for step, loss in losses(one).items():
        assert float(losses(four)[step]) == pytest.approx(float(loss), abs=2e-5)
    reference = weights(one / "model")
    for key, value in weights(four / "model").items():
        torch.testing.assert_close(value, reference[key], rtol=0, atol=4e-4, msg=key)
    valid_losses = [
        [float(row["valid_loss"]) for row in read_rows(folder / "log.jsonl") if "valid_loss" in row]
        for folder in (one, four)
    ]
    assert valid_losses[0]
    assert valid_losses[1] == pytest.approx(valid_losses[0], abs=2e-5)


def test_solves_are_checked_on_every_span(runs):
    rows = [row for row in read_rows(runs[1] / "plain" / "log.jsonl") if "defect" in row]
    assert [int(row["step"]) for row in rows] == [2, 4]
    assert all(0 < float(part) <= 1 for row in rows for part in row["defect"])


def test_one_process_goes_on_from_four(runs):
    one, four = (folder / "documents" for folder in runs)
    reference = weights(one / "model")
    shutil.rmtree(four / "checkpoint-4")
    run(runs[1], "documents", device_batch=4)
    for key, value in weights(four / "model").items():
        torch.testing.assert_close(value, reference[key], rtol=0, atol=4e-4, msg=key)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_spans_have_the_labels_of_whole_rows(ranks):
    labels = torch.arange(10).view(2, 5).masked_fill(torch.tensor([0, 0, 1, 0, 0]).bool(), -100)
    batch = {"input_ids": torch.arange(10).view(2, 5), "labels": labels}
    parts = [local_span(batch, rank, ranks) for rank in range(ranks)]
    assert torch.equal(torch.cat([part["input_ids"] for part in parts], 1), batch["input_ids"])
    assert sum(int(label_count(part)) for part in parts) == 6
    if ranks > 1:
        targets = torch.cat([part["shift_labels"] for part in parts], 1)
        assert targets.tolist() == [[1, -100, 3, 4, -100], [6, -100, 8, 9, -100]]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"context_parallel": 0}, "context_parallel must be positive, got 0"),
        (
            {"context_parallel": 2, "data": DataConfig(sequence_length=LENGTH, stateful=True)},
            "context_parallel=2 spreads them",
        ),
        ({"context_parallel": LENGTH + 1}, f"sequence_length must be {LENGTH + 1} at least"),
    ],
)
def test_impossible_configs_raise(tmp_path, more, message):
    with pytest.raises(ValueError, match=message):
        config(tmp_path, **more)


def test_models_and_processes_that_do_not_fit_raise(tmp_path):
    own = LMConfig(**options("gru") | {"mixers": ("rnn", "user_mixers:Decay")})
    with pytest.raises(TrainingError, match=r"mixer cannot run on several ranks: Decay reads"):
        run_training(config(tmp_path, context_parallel=2, model=own), Packed())
    with pytest.raises(TrainingError, match="needs a multiple of 2 processes, got 1"):
        run_training(config(tmp_path, context_parallel=2), Packed())
    assert dataclasses.asdict(config(tmp_path))["context_parallel"] == 1
