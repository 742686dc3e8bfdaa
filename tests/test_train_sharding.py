"""Training by FSDP2: two processes are one, and checkpoints are of any number of them."""

import dataclasses
import functools
import json
import os
import shutil
import signal
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from lm_kinds import hugging, options
from processes import on_processes

pytest.importorskip("transformers")

import test_train_stateful as stateful
from test_train_trainer import Packed, config, losses, same_bits, weights

from pararnn.base.errors import TrainingError
from pararnn.lab.train import checkpoints
from pararnn.lab.train.config import OptimiserConfig, RunConfig, read_config
from pararnn.lab.train.initial import load_initial
from pararnn.lab.train.log import read_rows
from pararnn.lab.train.recipes import RECIPES, recipe
from pararnn.lab.train.run import export_checkpoint, run_training
from pararnn.lab.train.setup import bare_model, prepare_model
from pararnn.lab.train.sharding import clip_gradients, draw_weights, process_group, shard
from pararnn.lab.train.trainer import RunTrainer
from pararnn.lm import LanguageModel, LMConfig, save_checkpoint
from pararnn.lm.hf import ParaRNNConfig, ParaRNNForCausalLM

CPU = torch.device("cpu")
NORM = OptimiserConfig(learning_rate=1e-2, clip="norm", clip_to=0.2, grad_norm=0.5)
CASES = {
    "gru, clipped": {"optimiser": NORM},
    "tied, elementwise, accumulated, gathered": {
        "model": LMConfig(**options("tied")),
        "optimiser": dataclasses.replace(NORM, clip="elementwise", clip_to=0.05),
        "device_batch": 1,
        "reshard": False,
    },
    "hybrid, recomputed, checked": {
        "model": LMConfig(**options("hybrid")),
        "checkpointing": True,
        "verify_every": 2,
    },
    "bfloat16": {"precision": "bfloat16"},
    "stateful": {"resets": True, "optimiser": NORM},
}
GOES_ON = ("tied, elementwise, accumulated, gathered", "stateful")
DTYPES = {"float32": None, "bfloat16": torch.bfloat16}


class Runs(NamedTuple):
    """Folders of runs: of one process and of two; two that go on from one, and one from two."""

    one: Path
    two: Path
    one_two: Path
    two_one: Path


def train(out, name, device_batch):
    many = {"device_batch": device_batch} | CASES[name]
    if name == "stateful":
        run_training(stateful.config(out / name, **many), stateful.make_data(documents=True))
    else:
        run_training(config(out / name, **many), Packed())


def copy_half(old, new):
    for name in GOES_ON:
        shutil.copytree(old / name, new / name, ignore=shutil.ignore_patterns("*-6", "model"))


def initial_config(out) -> RunConfig:
    model = LMConfig(**options("hybrid"))
    return config(out / "run", model=model, init_from=str(out / "initial"))


def on_two(runs, rank):
    """All that two processes do, in one launch: it takes seconds."""
    for name in CASES:
        train(runs.two, name, 2)
    for name in GOES_ON:
        train(runs.one_two, name, 2)
    for name, dtype in DTYPES.items():
        save_whole(shard_model(dtype, True), runs.two / f"{name}.pt", rank)
    request = initial_config(runs.one)
    model = prepare_model(bare_model(request), request, CPU)
    load_initial(request, model)
    save_whole(model, runs.two / "initial.pt", rank)
    learn = RunTrainer.learn

    def stopping(self, parts):
        if rank == 1 and self.step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return learn(self, parts)

    RunTrainer.learn = stopping
    with pytest.raises(KeyboardInterrupt, match=r"SIGTERM: .* from .*checkpoint-4"):
        run_training(config(runs.two / "stopped", device_batch=2), Packed())


def save_whole(model, path, rank):
    parameters = dict(model.named_parameters())
    assert all(hasattr(each, "full_tensor") for each in parameters.values())
    whole = {name: each.full_tensor() for name, each in parameters.items()}
    if rank == 0:
        torch.save(whole, path)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    runs = Runs(*map(tmp_path_factory.mktemp, Runs._fields))
    for name in CASES:
        train(runs.one, name, 4)
    torch.manual_seed(3)
    model = LanguageModel(LMConfig(**options("hybrid")), dtype=torch.bfloat16)
    save_checkpoint(model, runs.one / "initial")
    copy_half(runs.one, runs.one_two)
    on_processes(functools.partial(on_two, runs))
    copy_half(runs.two, runs.two_one)
    for name in GOES_ON:
        train(runs.two_one, name, 4)
    return runs


@pytest.mark.parametrize("name", CASES)
def test_two_processes_are_one(runs, name):
    one, two = runs.one / name, runs.two / name
    # Rows are summed in another order; in bfloat16 each half of the batch is rounded by itself.
    near = 0.03 if name == "bfloat16" else 2e-5
    for step, loss in losses(one).items():
        assert float(losses(two)[step]) == pytest.approx(float(loss), abs=near)
    rows = [read_rows(folder / "log.jsonl") for folder in (one, two)]
    norms = [[row["grad_norm"] for row in each if "grad_norm" in row] for each in rows]
    assert norms[0] == pytest.approx(norms[1], rel=3 * near)
    assert min(norms[0]) > 0.5  # so that clipping has had something to do
    reference = weights(one / "model")
    for key, value in weights(two / "model").items():
        torch.testing.assert_close(value, reference[key], rtol=0, atol=20 * near, msg=key)


def test_solves_are_checked_on_both(runs):
    for folder in (runs.one, runs.two):
        rows = [
            row
            for row in read_rows(folder / "hybrid, recomputed, checked" / "log.jsonl")
            if "defect" in row
        ]
        assert [int(row["step"]) for row in rows] == [2, 4, 6]
        assert all(0 < float(part) <= 1 for row in rows for part in row["defect"])


@pytest.mark.parametrize("name", ["gru, clipped", "tied, elementwise, accumulated, gathered"])
def test_recurrent_vectors_are_clipped_on_every_process(runs, name):
    order, most = (2, 0.2) if "clipped" in name else (torch.inf, 0.05)
    model = ParaRNNForCausalLM.from_pretrained(runs.two / name / "model")
    norms = [
        vector.norm(order)
        for layer in model.model.backbone.layers
        for parameter in layer.mixer.rnn.recurrent_parameters()
        for vector in parameter.detach().reshape(-1, parameter.shape[-1])
    ]
    assert max(norms) == pytest.approx(most, abs=1e-6)


def test_a_checkpoint_of_two_is_that_of_one(runs):
    folder = runs.two / "gru, clipped"
    one = hugging("gru")
    checkpoints.load_weights(folder / "checkpoint-6", one)
    same_bits(one.state_dict(), weights(folder / "model"))


@pytest.mark.parametrize("name", GOES_ON)
def test_one_goes_on_from_two_and_two_from_one(runs, name):
    reference = weights(runs.one / name / "model")
    for folder in (runs.one_two / name, runs.two_one / name):
        for key, value in weights(folder / "model").items():
            torch.testing.assert_close(value, reference[key], rtol=0, atol=4e-4, msg=key)
        assert losses(folder).keys() == losses(runs.one / name).keys()
        for step, loss in losses(folder).items():
            assert loss == pytest.approx(losses(runs.one / name)[step], abs=2e-5)


def test_ranks_stop_after_the_same_step(runs):
    """Only one of them gets a signal."""
    out = runs.two / "stopped"
    assert checkpoints.last_complete(out) == (4, out / "checkpoint-4")
    run_training(config(out), Packed())
    assert losses(out).keys() == {1, 2, 3, 4, 5, 6}


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_are_drawn_alike_however_they_are_spread(runs, dtype):
    whole = checkpoints.whole_weights(shard_model(None, False))
    spread = torch.load(runs.two / f"{dtype}.pt")
    assert {value.dtype for value in spread.values()} == {torch.float32}
    same_bits(spread, whole)


def test_initial_weights_are_the_same_however_they_are_spread(runs):
    """Here in 16 bits, as plain PyTorch saves them."""
    request = initial_config(runs.one)
    with process_group():
        model = prepare_model(bare_model(request), request, CPU)
        load_initial(request, model)
        single = {name: each.full_tensor() for name, each in model.named_parameters()}
    same_bits(torch.load(runs.two / "initial.pt"), single)


def shard_model(dtype, use_fsdp):
    with torch.device("meta"):
        model = ParaRNNForCausalLM(ParaRNNConfig.of_lm(LMConfig(**options("hybrid"))))
    if use_fsdp:
        shard(model, CPU, dtype=dtype, reshard=True)
    else:
        model.to_empty(device=CPU)
    draw_weights(model, CPU, 5)
    return model


def test_no_buffer_is_left_without_a_value():
    """`to_empty` gives them none, and `draw_weights` draws parameters."""
    assert not list(shard_model(None, False).buffers())


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e6])
@pytest.mark.parametrize("largest", [0.3, 1e9, float("inf")])
def test_gradients_are_clipped_as_torch_does(scale, largest):
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.zeros(size)) for size in ((3, 4), (5,), (2, 2, 2), ())]
    idle = torch.nn.Parameter(torch.zeros(2))
    gradients = [scale * torch.randn_like(parameter) for parameter in parameters]
    results = []
    for clip in (torch.nn.utils.clip_grad_norm_, clip_gradients):
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.clone()
        norm = clip([*parameters, idle], largest)
        results.append([norm, *(parameter.grad for parameter in parameters)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)


def test_a_process_group_of_one_is_closed_again():
    assert not torch.distributed.is_initialized()
    with process_group():
        assert torch.distributed.get_world_size() == 1
        with process_group():
            assert torch.distributed.get_world_size() == 1
        assert torch.distributed.is_initialized()
    assert not torch.distributed.is_initialized()


def test_a_checkpoint_is_exported_before_its_run_has_ended(tmp_path):
    request = config(tmp_path / "run", model=LMConfig(**options("hybrid")))
    run_training(request, Packed())
    same_bits(weights(export_checkpoint(tmp_path / "run")), weights(tmp_path / "run" / "model"))
    folder = export_checkpoint(tmp_path / "run", 3, tmp_path / "three")
    assert folder == tmp_path / "three"
    assert (folder / "tokenizer.json").exists()
    three, six = weights(folder), weights(tmp_path / "run" / "model")
    assert not any(torch.equal(three[name], six[name]) for name in three)
    assert ParaRNNForCausalLM.from_pretrained(folder).config.use_cache
    shutil.rmtree(tmp_path / "run" / "checkpoint-6")
    with pytest.raises(TrainingError, match=r"no whole checkpoint of step 6; its checkpoints: 3$"):
        export_checkpoint(tmp_path / "run", 6)
    with pytest.raises(TrainingError, match=r"no three is no run's folder: it has no config\.json"):
        export_checkpoint(tmp_path / "no three")


def test_a_config_is_read_as_it_was_written(tmp_path):
    for name in RECIPES:
        request = recipe(name)
        assert read_config(json.loads(json.dumps(dataclasses.asdict(request)))) == request
    with pytest.raises(TrainingError, match=r"config\.json is of another version: .*'speed'"):
        read_config(dataclasses.asdict(request) | {"speed": 1})
