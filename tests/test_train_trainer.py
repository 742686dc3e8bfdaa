"""The training loop: optimizer, schedule, clipping, log, checkpoints, mishaps."""

import dataclasses
import itertools
import json
import random
import re
import shutil
import sys
import time
from functools import partialmethod
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from lm_kinds import VOCABULARY, hugging, options

import pararnn

pytest.importorskip("transformers")


from pararnn.base.errors import PararnnError, TrainingError
from pararnn.lab import progress
from pararnn.lab.train import checkpoints
from pararnn.lab.train import trainer as trainer_module
from pararnn.lab.train.config import DataConfig, OptimiserConfig, RunConfig
from pararnn.lab.train.log import append_row, read_rows
from pararnn.lab.train.optimiser import make_adamw, set_rate, share
from pararnn.lab.train.run import run_training
from pararnn.lab.train.setup import check_rows
from pararnn.lm.config import LMConfig
from pararnn.lm.hf import ParaRNNForCausalLM

LENGTH = 12


class Rows(torch.utils.data.Dataset):
    """Rows that count up from a token of their own; `bad` makes one of them wait for ever."""

    def __init__(self, count, wait_after=None):
        self.count, self.wait_after, self.count_read = count, wait_after, 0

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        self.count_read += 1
        while self.wait_after is not None and self.count_read > self.wait_after:
            time.sleep(1)
        row = (torch.arange(LENGTH) * (1 + index % 3) + index) % VOCABULARY
        return {"input_ids": row, "labels": row}


class Tokenizer:
    vocabulary = 16

    def save(self, folder):
        (Path(folder) / "tokenizer.json").write_text("{}")


class Packed(NamedTuple):
    train: torch.utils.data.Dataset = Rows(20)
    valid: torch.utils.data.Dataset = Rows(6)
    tokenizer: Tokenizer = Tokenizer()
    bytes_per_token: float = 1.25


def config(out, **more):
    settings = {
        "name": "tiny",
        "model": LMConfig(**options("gru")),
        "data": DataConfig(sequence_length=LENGTH),
        "optimiser": OptimiserConfig(learning_rate=1e-2),
        "steps": 6,
        "batch": 4,
        "device_batch": 4,
        "precision": "float32",
        "save_every": 3,
        "valid_every": 3,
        "valid_rows": 6,
        "log_every": 1,
        "out": str(out),
    }
    return RunConfig(**settings | more)


def weights(folder):
    return ParaRNNForCausalLM.from_pretrained(folder).state_dict()


def same_bits(a, b):
    assert a.keys() == b.keys()
    assert all(torch.equal(value, b[name]) for name, value in a.items())


def losses(out):
    return {int(row["step"]): row["loss"] for row in read_rows(out / "log.jsonl") if "loss" in row}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "run"
    run_training(config(out), Packed())
    return out


def test_a_run_learns_and_leaves_a_folder(whole):
    names = {path.name for path in whole.iterdir()}
    assert {"config.json", "log.jsonl", "checkpoint-3", "checkpoint-6", "model"} <= names
    assert not any(name.endswith(".new") for name in names)
    assert float(losses(whole)[6]) < float(losses(whole)[1]) - 0.3
    assert (whole / "model" / "tokenizer.json").exists()
    model = ParaRNNForCausalLM.from_pretrained(whole / "model").eval()
    assert model.config.use_cache
    model_of_checkpoint = hugging("gru")
    checkpoints.load_weights(whole / "checkpoint-6", model_of_checkpoint)
    same_bits(model.state_dict(), model_of_checkpoint.state_dict())


def test_the_log_says_what_happened(whole):
    rows = read_rows(whole / "log.jsonl")
    train_rows = [row for row in rows if "loss" in row]
    assert [int(row["step"]) for row in train_rows] == [1, 2, 3, 4, 5, 6]
    assert [int(row["tokens"]) for row in train_rows] == [48 * step for step in range(1, 7)]
    for row in train_rows:
        assert float(row["tokens_per_second"]) > 0
        assert float(row["grad_norm"]) > 0
        assert len(row["sweeps"]) == len(row["mended"]) == 2
    assert float(train_rows[0]["learning_rate"]) == pytest.approx(1e-2)
    valid_rows = [row for row in rows if "valid_loss" in row]
    assert [int(row["step"]) for row in valid_rows] == [3, 6]
    rows = torch.stack([Rows(6)[index]["input_ids"] for index in range(6)])
    model = ParaRNNForCausalLM.from_pretrained(whole / "model").eval()
    logits = model(rows).logits[:, :-1].flatten(0, 1)
    nats = torch.nn.functional.cross_entropy(logits, rows[:, 1:].flatten()).item()
    assert float(valid_rows[-1]["valid_loss"]) == pytest.approx(nats, rel=1e-5)
    bits = float(valid_rows[-1]["valid_bits_per_byte"])
    assert bits == pytest.approx(nats / 0.6931471805599453 / 1.25, rel=1e-5)


def test_half_a_line_is_no_row(tmp_path):
    path = tmp_path / "log.jsonl"
    append_row(path, {"step": 1, "loss": 2.0})
    with path.open("a") as file:
        file.write('{"step": 2, "lo')
    assert [row["step"] for row in read_rows(path)] == [1]


def shown_lines(capfd):
    """Return what a run has written to stderr; only PyTorch 2.9 writes to stdout."""
    out, err = capfd.readouterr()
    out = "".join(line for line in out.splitlines(True) if not line.startswith("[Gloo]"))
    assert out == ""
    return err


START = [
    "data: given: 240 tokens to learn, 72 held out, 1.25 bytes a token",
    "model: gru, 2 blocks of 16 channels, 6,640 parameters, float32, on CPU, N threads",
    "run: 3 steps of 4 x 12 tokens, 0.6 epochs, into DIR",
]


def split_lines(lines):
    """Split a run's lines: its start, without the machine's values, and the others."""
    first = "\n".join(lines[:3])
    first = re.sub(r"on [^,\n]+, \d+ threads", "on CPU, N threads", first)
    return re.sub(r"into .*", "into DIR", first).splitlines(), lines[3:]


def test_only_lines_are_shown_in_a_file(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(progress, "EVERY", 0.0)
    run_training(config(tmp_path, steps=3), Packed())
    about, lines = split_lines(shown_lines(capfd).splitlines())
    assert about == START
    assert [re.search(r"(\d) of 3 steps", line).group(1) for line in lines] == ["1", "2", "3"]
    assert re.search(r" s left, loss \d+\.\d+", lines[-1])


def test_only_the_bar_is_shown_on_a_terminal(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    bar = pytest.importorskip("tqdm").tqdm
    at_once = partialmethod(bar.__init__, mininterval=0)  # however short a step is
    monkeypatch.setattr(bar, "__init__", at_once)
    run_training(config(tmp_path, steps=3), Packed())
    lines = [line for line in shown_lines(capfd).replace("\r", "\n").splitlines() if line.strip()]
    about, lines = split_lines(lines)
    assert about == START
    assert lines
    assert all("/3.00 [" in line or "/3 [" in line for line in lines), lines
    assert "loss=" in lines[-1]


class Killed(Exception):
    pass


def run_until(monkeypatch, step, request):
    """A run that ends right after the log row of a step, as if it were killed."""
    log = trainer_module.RunTrainer.log

    def stopping(self, *args):
        log(self, *args)
        if self.step == step:
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(trainer_module.RunTrainer, "log", stopping)
        with pytest.raises(Killed):
            run_training(request, Packed())


@pytest.mark.parametrize("step", [2, 5])
def test_going_on_changes_no_bit(whole, tmp_path, monkeypatch, capsys, step):
    out = tmp_path / "run"
    run_until(monkeypatch, step, config(out))
    assert not (out / "model").exists()
    capsys.readouterr()
    run_training(config(out), Packed())
    assert ("resumes from" in capsys.readouterr().out) == (step > 3)
    same_bits(weights(out / "model"), weights(whole / "model"))
    assert losses(out) == losses(whole)
    steps = [row["step"] for row in read_rows(out / "log.jsonl")]
    assert steps == [row["step"] for row in read_rows(whole / "log.jsonl")]


@pytest.mark.parametrize("stop", [5, 6])
def test_a_mean_in_the_log_is_of_all_steps_since_the_row_before(tmp_path, monkeypatch, stop):
    """Also of those before the checkpoint."""
    more = {"log_every": 4, "valid_every": 1, "steps": 8}
    run_training(config(tmp_path / "whole", **more), Packed())
    run_until(monkeypatch, stop, config(tmp_path / "run", **more))
    run_training(config(tmp_path / "run", **more), Packed())
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


def test_checkpoints_of_an_earlier_version_have_no_sum_of_losses(tmp_path, monkeypatch):
    state = trainer_module.RunTrainer.state

    def earlier(self):
        return {name: value for name, value in state(self).items() if name != "unlogged"}

    with monkeypatch.context() as patch:
        patch.setattr(trainer_module.RunTrainer, "state", earlier)
        run_training(config(tmp_path, steps=3, log_every=9), Packed())
    run_training(config(tmp_path, log_every=9), Packed())
    assert losses(tmp_path).keys() == {3, 6}


def test_random_numbers_go_on(tmp_path, monkeypatch):
    """Of all generators that a user's cell may draw from."""
    draws, learn = [], trainer_module.RunTrainer.learn

    def drawing(self, parts):
        draws.append((self.step, random.random(), np.random.rand(), torch.rand(()).item()))  # noqa: NPY002
        return learn(self, parts)

    monkeypatch.setattr(trainer_module.RunTrainer, "learn", drawing)
    run_training(config(tmp_path / "whole"), Packed())
    whole = draws.copy()
    run_until(monkeypatch, 5, config(tmp_path / "run"))
    draws.clear()
    run_training(config(tmp_path / "run"), Packed())
    assert draws == whole[3:]


def test_rows_of_a_second_epoch_are_the_same_after_going_on(tmp_path, monkeypatch):
    results = []
    for stop in (None, 7):
        out = tmp_path / str(stop)
        request = config(out, steps=8)
        if stop:
            run_until(monkeypatch, stop, request)
        run_training(request, Packed())
        results.append(weights(out / "model"))
    same_bits(*results)


def test_more_steps_have_their_own_schedule(tmp_path):
    for steps in (6, 9):
        run_training(config(tmp_path, steps=steps), Packed())
    rows = read_rows(tmp_path / "log.jsonl")
    rates = [row["learning_rate"] for row in rows if "loss" in row]
    wanted = [share(step, 6 if step < 6 else 9, 0.1, 0.0) for step in range(9)]
    assert rates == pytest.approx([1e-2 * each for each in wanted])


def test_a_run_that_has_ended_is_not_trained_again(whole, tmp_path):
    old_losses = losses(whole)
    model = weights(whole / "model")
    run_training(config(whole), Packed(train=Rows(20, wait_after=0)))
    assert losses(whole) == old_losses
    same_bits(weights(whole / "model"), model)


def test_accumulated_batches_are_one_batch(whole, tmp_path):
    run_training(config(tmp_path, device_batch=1), Packed())
    wanted = weights(whole / "model")
    for name, value in weights(tmp_path / "model").items():
        torch.testing.assert_close(value, wanted[name], rtol=0, atol=1e-5)
    for step, loss in losses(tmp_path).items():
        assert float(loss) == pytest.approx(float(losses(whole)[step]), abs=1e-6)


def test_what_does_not_fit_raises(tmp_path):
    with pytest.raises(TrainingError, match=r"multiple of device_batch x processes = 3 x 1, got 4"):
        run_training(config(tmp_path / "a", device_batch=3), Packed())
    with pytest.raises(TrainingError, match="the train data has 3 rows of 12 tokens, at least 4"):
        run_training(config(tmp_path / "b"), Packed(train=Rows(3)))
    assert not (tmp_path / "a").exists()
    # One of two ranks had no rows, and the mean of both was NaN.
    with pytest.raises(TrainingError, match=r"valid_rows must be at least 2, .*, got 1$"):
        check_rows(config(tmp_path, batch=4, device_batch=2, valid_rows=1), Packed(), 2)
    check_rows(config(tmp_path, batch=4, device_batch=2, valid_rows=2), Packed(), 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 3}, "no such model: .* multiples of num_heads = 3, got 16 and 16"),
        ({"mixers": ("rnn", "mine")}, "mixers may hold .*got 'mine'"),
        ({"mixers": ("attention",) * 2, "num_attention_heads": 3}, "even multiple of .* 16 and 3"),
        ({"cell": "gruu"}, "there is no cell 'gruu'"),
    ],
)
def test_a_model_that_cannot_be_is_said_before_the_data_are_read(changes, message, tmp_path):
    model = LMConfig(**options("gru") | changes)
    data = DataConfig(train=str(tmp_path / "missing.txt"), sequence_length=LENGTH)
    with pytest.raises(PararnnError, match=message):
        run_training(config(tmp_path / "run", model=model, data=data))


def test_a_checkpoint_without_its_name_is_not_gone_on_from(whole, tmp_path, monkeypatch, capsys):
    out, rename = tmp_path / "run", checkpoints.os.rename

    def killed_before(old, new):
        if new.name == "checkpoint-6":
            raise Killed
        rename(old, new)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints.os, "rename", killed_before)
        with pytest.raises(Killed):
            run_training(config(out, keep=1), Packed())
    assert (out / checkpoints.NEW / "checkpoint-6" / checkpoints.MARK).exists()
    assert checkpoints.folders(out) == [(3, out / "checkpoint-3")]
    run_training(config(out, keep=1), Packed())
    assert f"resumes from {out / 'checkpoint-3'}" in capsys.readouterr().out
    same_bits(weights(out / "model"), weights(whole / "model"))
    assert checkpoints.folders(out) == [(6, out / "checkpoint-6")]


def test_old_checkpoints_lose_their_name_first(tmp_path, monkeypatch):
    def kill(path):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints.shutil, "rmtree", kill)
        with pytest.raises(Killed):
            run_training(config(tmp_path, keep=1), Packed())
    assert checkpoints.folders(tmp_path) == [(6, tmp_path / "checkpoint-6")]
    run_training(config(tmp_path, keep=1), Packed())
    assert not (tmp_path / checkpoints.NEW).exists()


def test_another_run_s_folder_raises(whole):
    other = config(whole, model=LMConfig(**options("gru") | {"num_heads": 1}))
    with pytest.raises(TrainingError, match=r"model\.num_heads = 2, and this run 1: give it a"):
        run_training(other, Packed())
    data = DataConfig(sequence_length=LENGTH, resets=True)
    with pytest.raises(TrainingError, match=r"data\.resets = False, and this run True"):
        run_training(config(whole, data=data), Packed())
    other_data = DataConfig(sequence_length=LENGTH, cache="elsewhere")
    run_training(config(whole, data=other_data, log_every=2), Packed())


def test_a_run_of_an_earlier_version_goes_on_without_the_keys_that_are_new(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    path = tmp_path / "run" / "config.json"
    record = json.loads(path.read_text())
    del record["data"]["suffixes"]
    path.write_text(json.dumps(record))
    run_training(config(tmp_path / "run"), Packed())
    data = DataConfig(sequence_length=LENGTH, suffixes=".md")
    with pytest.raises(TrainingError, match=r"data\.suffixes = '', and this run '\.md'"):
        run_training(config(tmp_path / "run", data=data), Packed())


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_nan_names_the_step_and_the_last_checkpoint(tmp_path, monkeypatch, where):
    compute = trainer_module.RunTrainer.loss

    def loss_with_nan(self, *args, **kwargs):
        loss = compute(self, *args, **kwargs)
        if self.step == 4:
            nan = torch.full_like(loss, torch.nan)
            if where == "loss":
                return loss * nan
            loss.register_hook(lambda grad: nan)
        return loss

    monkeypatch.setattr(trainer_module.RunTrainer, "loss", loss_with_nan)
    request = config(tmp_path, steps=8, log_every=4, save_every=3)
    if where == "gradient":  # the weights are NaN before any loss is
        request = dataclasses.replace(request, save_every=5, log_every=8)
    advice = "starts again" if where == "gradient" else "resumes from .*checkpoint-3"
    with pytest.raises(
        TrainingError, match=f"NaN or infinite in step 5; the same command {advice}"
    ):
        run_training(request, Packed())
    steps = [step for step, _ in checkpoints.checkpoints(tmp_path)]
    assert steps == ([] if where == "gradient" else [3])


def test_a_validation_that_is_nan_stops_the_run(tmp_path, monkeypatch):
    """It stood in the log, which was no JSON then."""
    forward = ParaRNNForCausalLM.forward

    def forward_with_nan(self, *args, **kwargs):
        out = forward(self, *args, **kwargs)
        if not self.training:
            out["loss"] = out["loss"] * torch.inf
        return out

    monkeypatch.setattr(ParaRNNForCausalLM, "forward", forward_with_nan)
    message = "the validation's loss is NaN or infinite in step 3; the same command starts again"
    with pytest.raises(TrainingError, match=message):
        run_training(config(tmp_path), Packed())
    assert "Infinity" not in (tmp_path / "log.jsonl").read_text()


@pytest.mark.parametrize("options", [{"precision": "bfloat16"}, {"checkpointing": True}])
def test_other_ways_to_compute(whole, tmp_path, options):
    run_training(config(tmp_path, steps=3, **options), Packed())
    run_losses = losses(tmp_path)
    assert float(run_losses[1]) == pytest.approx(float(losses(whole)[1]), abs=0.05)
    assert (float(run_losses[1]) == float(losses(whole)[1])) == ("checkpointing" in options)
    assert {value.dtype for value in weights(tmp_path / "model").values()} == {torch.float32}


def test_decay_is_of_matrices_and_follows_the_schedule_only():
    model = hugging("hybrid")
    optimiser = OptimiserConfig(learning_rate=5e-3, weight_decay=0.01, warmup=0.5, clip="none")
    optimizer = make_adamw(model, optimiser)
    old = {name: p.detach().clone() for name, p in model.named_parameters()}
    shrunk = 1.0
    for step in range(4):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        set_rate(optimizer, optimiser, step, 4)
        optimizer.step()
        shrunk *= 1 - 0.01 * share(step, 4, 0.5, 0.0)
    assert shrunk < 0.99
    with_decay = {id(p) for p in optimizer.param_groups[0]["params"]}
    for name, parameter in model.named_parameters():
        factor = shrunk if id(parameter) in with_decay else 1
        torch.testing.assert_close(parameter, old[name] * factor, rtol=1e-6, atol=0, msg=name)
        mixes = "rnn.proj" in name or name.endswith("_proj.weight") or ".embed" in name
        assert (id(parameter) in with_decay) == (mixes or "lm_head" in name), name


def test_the_schedule_rises_to_the_peak_and_falls_to_its_end():
    rates = [share(step, 10, 0.2, 0.1) for step in range(11)]
    assert rates[:3] == pytest.approx([0.5, 1, 1])
    assert rates[6] == pytest.approx(0.55)
    assert rates[10] == pytest.approx(0.1)
    assert share(99, 10, 0.2, 0.1) == pytest.approx(0.1)
    assert all(a > b for a, b in itertools.pairwise(rates[2:]))
    assert share(0, 10, 0.0, 0.0) == 1
    assert [share(step, 2, 1.0, 0.0) for step in (0, 1)] == [0.5, 1]


@pytest.mark.parametrize(
    ("options", "own"), [({"clip_to": 0.25}, 0.5), ({}, 0.25)], ids=["given", "the model's"]
)
@pytest.mark.parametrize("clip", ["elementwise", "norm", "none"])
def test_recurrent_vectors_are_clipped(clip, options, own):
    model = hugging("gru", recurrent_clip=own)
    optimizer = make_adamw(model, OptimiserConfig(clip=clip, **options))
    vectors = [
        vector
        for part in model.modules()
        if isinstance(part, pararnn.RecurrentLayer)
        for vector in part.recurrent_parameters()
    ]
    with torch.no_grad():
        vectors[0].copy_(torch.linspace(-1, 1, 16))
        vectors[1].fill_(0.01)
    wanted = {
        "elementwise": torch.linspace(-1, 1, 16).clamp(-0.25, 0.25),
        "norm": torch.linspace(-1, 1, 16) * 0.25 / torch.linspace(-1, 1, 16).norm(),
        "none": torch.linspace(-1, 1, 16),
    }
    optimizer.step()  # without gradients nothing moves but what is clipped
    torch.testing.assert_close(vectors[0].detach(), wanted[clip])
    assert torch.equal(vectors[1], torch.full_like(vectors[1], 0.01))


def test_a_run_clips(tmp_path):
    optimiser = OptimiserConfig(learning_rate=1e-2, clip="norm", clip_to=0.125)
    model = run_training(config(tmp_path, optimiser=optimiser, steps=2), Packed())
    norms = [value.norm() for name, value in weights(model).items() if ".cell.a_" in name]
    assert norms
    assert max(norms) == pytest.approx(0.125, rel=1e-4)


def test_an_unknown_way_to_clip_raises():
    model = hugging("gru")
    with pytest.raises(ValueError, match="by must be one of elementwise, norm, got 'value'"):
        pararnn.clip_after_step(torch.optim.SGD(model.parameters()), model, by="value")


def test_a_tokenizer_of_more_ids_than_the_model(tmp_path):
    class Larger(Tokenizer):
        vocabulary = 1000

    with pytest.raises(TrainingError, match=r"1000 ids.*set model.vocab_size"):
        run_training(config(tmp_path), Packed(tokenizer=Larger()))
