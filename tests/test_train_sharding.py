"""Training by FSDP2: two processes are one, and checkpoints are of any number of them."""

import csv
import dataclasses
import functools
import json
import shutil

import pytest
import torch
from lm_kinds import hugging, options
from processes import on_processes, with_group

pytest.importorskip("transformers")

from test_train_trainer import Packed, config, losses, same_bits, weights

from pararnn.base.errors import TrainingError
from pararnn.lab.train import checkpoints
from pararnn.lab.train.config import OptimiserConfig, read_config
from pararnn.lab.train.log import read_rows
from pararnn.lab.train.recipes import RECIPES, recipe
from pararnn.lab.train.run import export_checkpoint, run_training
from pararnn.lab.train.sharding import clip_gradients, draw_weights, process_group, shard
from pararnn.lm.config import LMConfig
from pararnn.lm.hf import ParaRNNConfig, ParaRNNForCausalLM

CPU = torch.device("cpu")
NORM = OptimiserConfig(learning_rate=1e-2, clip="norm", clip_to=0.2, grad_norm=0.5)
CASES = {
    "gru, clipped": {"optimiser": NORM},
    "gru, elementwise": {"optimiser": dataclasses.replace(NORM, clip="elementwise", clip_to=0.05)},
    "hybrid": {"model": LMConfig(**options("hybrid"))},
    "tied": {"model": LMConfig(**options("tied"))},
    "recomputed": {"checkpointing": True},
    "gathered": {"reshard": False},
    "accumulated": {"device_batch": 1},
    "checked": {"verify_every": 2},
    "bfloat16": {"precision": "bfloat16"},
}


def config_of(out, name, device_batch, **more):
    return config(out / name, **{"device_batch": device_batch} | CASES[name] | more)


def run_all(out, device_batch, rank=0):
    for name in CASES:
        run_training(config_of(out, name, device_batch), Packed())


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    single, both = (tmp_path_factory.mktemp(name) for name in ("one", "two"))
    run_all(single, 4)
    on_processes(functools.partial(run_all, both, 2))
    return single, both


@pytest.mark.parametrize("name", CASES)
def test_two_processes_are_one(runs, name):
    one, two = (folder / name for folder in runs)
    # Rows are summed in another order; in bfloat16 each half of the batch is rounded by itself.
    near = 0.03 if name == "bfloat16" else 2e-5
    for step, loss in losses(one).items():
        assert float(losses(two)[step]) == pytest.approx(float(loss), abs=near)
    norms = [[float(row["grad_norm"]) for row in rows_of(each)] for each in (one, two)]
    assert norms[0] == pytest.approx(norms[1], rel=3 * near)
    assert min(norms[0]) > 0.5  # so that clipping has had something to do
    reference = weights(one / "model")
    for key, value in weights(two / "model").items():
        torch.testing.assert_close(value, reference[key], rtol=0, atol=20 * near, msg=key)


def rows_of(out):
    with (out / "log.jsonl").open() as file:
        return [row for row in csv.DictReader(file) if row["grad_norm"]]


def test_solves_are_checked_on_both(runs):
    for folder in runs:
        rows = [row for row in read_rows(folder / "checked" / "log.jsonl") if "defect" in row]
        assert [int(row["step"]) for row in rows] == [2, 4, 6]
        assert all(0 < float(part) <= 1 for row in rows for part in row["defect"])


@pytest.mark.parametrize("name", ["gru, clipped", "gru, elementwise"])
def test_recurrent_vectors_are_clipped_on_every_process(runs, name):
    order, most = (2, 0.2) if "clipped" in name else (torch.inf, 0.05)
    model = ParaRNNForCausalLM.from_pretrained(runs[1] / name / "model")
    norms = [
        vector.norm(order)
        for layer in model.model.backbone.layers
        for parameter in layer.mixer.rnn.recurrent_parameters()
        for vector in parameter.detach().reshape(-1, parameter.shape[-1])
    ]
    assert max(norms) == pytest.approx(most, abs=1e-6)


def test_a_checkpoint_of_two_is_that_of_one(runs):
    folder = runs[1] / "gru, clipped"
    one = hugging("gru")
    checkpoints.load_state(folder / "checkpoint-6", one)
    same_bits(one.state_dict(), weights(folder / "model"))


@pytest.mark.thorough
def test_one_goes_on_from_two_and_two_from_one(runs, tmp_path):
    one, two = (folder / "gru, clipped" for folder in runs)
    reference = weights(one / "model"), losses(one)
    for folder in (one, two):
        shutil.rmtree(folder / "checkpoint-6")
    run_training(config_of(runs[1], "gru, clipped", 4), Packed())
    on_processes(functools.partial(go_on, runs[0]))
    for folder in (one, two):
        for key, value in weights(folder / "model").items():
            torch.testing.assert_close(value, reference[0][key], rtol=0, atol=2e-4, msg=key)
        for step, loss in losses(folder).items():
            assert float(loss) == pytest.approx(float(reference[1][step]), abs=2e-5)


@pytest.mark.parametrize("content", [b"half", None])
def test_a_checkpoint_that_cannot_be_read_says_what_to_do(tmp_path, content):
    run_training(config(tmp_path, steps=3), Packed())
    for path in (tmp_path / "checkpoint-3" / "state").iterdir():
        path.unlink() if content is None else path.write_bytes(content)
    (tmp_path / "checkpoint-3" / checkpoints.MARKER).write_text("")  # as earlier versions had it
    message = (
        r"state, the weights to go on from, cannot be read: .* Remove .*checkpoint-3, then the"
    )
    with pytest.raises(TrainingError, match=message):
        run_training(config(tmp_path, steps=3), Packed())


def go_on(out, rank):
    run_training(config_of(out, "gru, clipped", 2), Packed())


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_weights_are_drawn_alike_however_they_are_spread(dtype):
    plain = shard_model(None, None)
    whole = checkpoints.whole_weights(plain)
    assert whole.keys() == plain.state_dict().keys()
    on_processes(functools.partial(with_group, functools.partial(draws_alike, whole, dtype)))


def draws_alike(whole, dtype, rank):
    model = shard_model(dtype, True)
    assert all(hasattr(parameter, "full_tensor") for parameter in model.parameters())
    for name, parameter in model.named_parameters():
        value = parameter.full_tensor()
        assert value.dtype == torch.float32
        assert torch.equal(value, whole[name]), name


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
    (tmp_path / "run" / "checkpoint-6" / checkpoints.MARKER).unlink()
    with pytest.raises(TrainingError, match=r"no complete checkpoint of step 6; it has 3$"):
        export_checkpoint(tmp_path / "run", 6)
    with pytest.raises(TrainingError, match=r"no three is no run's folder: it has no config\.json"):
        export_checkpoint(tmp_path / "no three")


def test_a_config_is_read_as_it_was_written(tmp_path):
    for name in RECIPES:
        request = recipe(name)
        assert read_config(json.loads(json.dumps(dataclasses.asdict(request)))) == request
    with pytest.raises(TrainingError, match=r"config\.json is of another version: .*'speed'"):
        read_config(dataclasses.asdict(request) | {"speed": 1})
