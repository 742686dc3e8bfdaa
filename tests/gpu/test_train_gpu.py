"""Training on a GPU: compiled blocks in bfloat16, going on with the same bits, two GPUs."""

import functools

import pytest
import torch
from lm_kinds import options
from processes import on_processes

pytest.importorskip("transformers")

from test_train_trainer import LENGTH, Packed, config, losses, run_until, same_bits, weights

from pararnn.lab.train.config import DataConfig
from pararnn.lab.train.log import read_rows
from pararnn.lab.train.run import run_training
from pararnn.lm.config import LMConfig

SIZES = {"hidden_size": 64, "intermediate_size": 128}


def config_of(out, kind="hybrid", **more):
    model = LMConfig(**options(kind) | SIZES)
    return config(out, **{"model": model, "precision": "bfloat16"} | more)


def rows_of(out):
    return [row for row in read_rows(out / "log.jsonl") if "grad_norm" in row]


@pytest.mark.parametrize("kind", ["gru", "hybrid"])
@pytest.mark.parametrize(
    "more", [{"verify_every": 2}, {"checkpointing": True}, {"compile": False}], ids=str
)
def test_going_on_changes_no_bit(tmp_path, monkeypatch, kind, more):
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    run_training(config_of(whole, kind, **more), Packed())
    run_until(monkeypatch, 5, config_of(halves, kind, **more))
    run_training(config_of(halves, kind, **more), Packed())
    assert losses(whole) == losses(halves)
    same_bits(weights(whole / "model"), weights(halves / "model"))
    assert all(float(row["memory_gib"]) > 0 for row in rows_of(whole))


def test_carried_states_go_on_in_compiled_blocks(tmp_path, monkeypatch):
    data = DataConfig(sequence_length=LENGTH, stateful=True)
    results = {}
    for compile in (True, False):
        out = tmp_path / str(compile)
        run_until(monkeypatch, 5, config_of(out, "gru", data=data, compile=compile))
        run_training(config_of(out, "gru", data=data, compile=compile), Packed())
        results[compile] = [float(loss) for loss in losses(out).values()]
    assert results[True] == pytest.approx(results[False], abs=0.03)
    whole = tmp_path / "whole"
    run_training(config_of(whole, "gru", data=data), Packed())
    assert results[True] == [float(loss) for loss in losses(whole).values()]
    fresh = tmp_path / "fresh"
    run_training(config_of(fresh, "gru"), Packed())
    assert results[True] != [float(loss) for loss in losses(fresh).values()]


def test_two_gpus_are_one(tmp_path):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    one, two = tmp_path / "one", tmp_path / "two"
    run_training(config_of(one, precision="float32"), Packed())
    on_processes(functools.partial(on_two, two))
    for step, loss in losses(one).items():
        assert float(losses(two)[step]) == pytest.approx(float(loss), abs=2e-4)
    reference = weights(one / "model")
    for name, value in weights(two / "model").items():
        torch.testing.assert_close(value, reference[name], rtol=0, atol=2e-3, msg=name)


def on_two(out, rank):
    run_training(config_of(out, precision="float32", device_batch=2), Packed())
