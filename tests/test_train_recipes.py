"""Recipes: the paper's numbers, sizes that names promise, and names."""

from dataclasses import replace

import pytest
import torch

from pararnn.base.errors import TrainingError
from pararnn.lab.train.corpus.sources import conditions_of
from pararnn.lab.train.recipes import RECIPES, paper, recipe, summary
from pararnn.lm import PRESETS, LanguageModel, preset

PAPER = [pair for pair in PRESETS if pair[0] != "mamba2"]
SMALL = {"gru-30m": 30e6, "gru-60m": 60e6, "transformer-30m": 30e6, "transformer-60m": 60e6}


def parameters(run) -> int:
    model = LanguageModel(run.model, device="meta")
    return sum(parameter.numel() for parameter in model.parameters())


def test_there_are_the_papers_twelve_three_sizes_and_no_more():
    twelve = {f"{architecture}-{scale}".lower() for architecture, scale in PAPER}
    assert len(twelve) == 12
    assert set(RECIPES) == twelve | set(SMALL) | {"tiny"}


@pytest.mark.parametrize("pair", PAPER, ids="-".join)
def test_the_papers_recipes_are_its_presets(pair):
    values, run = preset(*pair), recipe("-".join(pair).lower())
    assert run.model == values.model
    assert (run.steps, run.batch, run.device_batch) == (
        values.steps,
        values.batch,
        values.batch_per_gpu,
    )
    assert run.data.sequence_length == 2048
    assert run.steps * run.batch * run.data.sequence_length == values.training_tokens
    optimiser = run.optimiser
    assert (optimiser.learning_rate, optimiser.z_loss) == (values.learning_rate, values.z_loss)
    assert optimiser.weight_decay == values.weight_decay  # of a step, as the config has it
    assert round(optimiser.warmup * run.steps) == values.warmup_steps
    assert (optimiser.final, optimiser.beta1, optimiser.beta2) == (0, 0.9, 0.95)
    assert (run.precision, run.compile) == ("bfloat16", True)
    assert (optimiser.clip, optimiser.clip_to) == ("elementwise", None)
    assert run.model.recurrent_clip == 0.5


def test_the_papers_data_are_slimpajama_without_books():
    data = recipe("gru-1b").data
    assert (data.train, data.valid) == ("cerebras/SlimPajama-627B", "")
    assert conditions_of(data.drop) == [("meta.redpajama_set_name", "RedPajamaBook")]
    assert data.tokens == preset("gru", "1B").training_tokens


def test_a_number_of_the_paper_reaches_its_recipe():
    run = recipe("gru-7b")
    assert (run.optimiser.learning_rate, run.optimiser.weight_decay) == (3e-3, 1e-4)
    assert (run.batch, run.device_batch, run.steps, run.optimiser.z_loss) == (2048, 8, 33_000, 5e-6)
    assert recipe("lstm-400m").optimiser.learning_rate == 3e-3
    assert recipe("transformer-1b").optimiser.learning_rate == 2e-3


@pytest.mark.parametrize("name", SMALL)
def test_small_models_have_the_size_of_their_names(name):
    run = recipe(name)
    assert abs(parameters(run) / SMALL[name] - 1) < 0.1
    assert set(run.model.mixers) == {"rnn" if name.startswith("gru") else "attention"}
    like = preset(name.split("-")[0], "400M").model  # but for sizes, the paper's
    sizes = ("hidden_size", "num_hidden_layers", "vocab_size", "intermediate_size", "mixers")
    assert run.model == replace(like, **{size: getattr(run.model, size) for size in sizes})


def test_tiny_is_for_a_cpu():
    run = recipe("tiny")
    assert (run.precision, run.compile, run.data.sequence_length) == ("float32", False, 256)
    assert (run.model.hidden_size, run.model.num_hidden_layers) == (128, 2)
    assert 200 <= run.steps <= 500
    assert run.save_every < run.steps
    assert run.valid_every < run.steps


def test_tiny_makes_a_step():
    run = recipe("tiny")
    torch.manual_seed(run.seed)
    model = LanguageModel(run.model)
    loss = model.loss(torch.randint(256, (2, 32)), z_loss=run.optimiser.z_loss)
    loss.backward()
    assert loss.isfinite()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_are_whole(name):
    run = recipe(name)
    assert run == RECIPES[name]()
    assert (run.name, run.out) == (name, f"runs/{name}")
    small = name in SMALL or name == "tiny"
    assert (run.data.train == "") == small  # the user's to name
    assert run.batch % run.device_batch == 0
    in_bytes = run.data.tokenizer == "bytes"
    assert in_bytes == small
    assert run.model.vocab_size >= (257 if in_bytes else 50_277)
    line = summary(run)
    assert "\n" not in line
    assert f"{run.model.num_hidden_layers} blocks of {run.model.hidden_size}" in line


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gru-400", "'gru-400': did you mean gru-400m"),
        ("GRU-1B", "'GRU-1B': did you mean gru-1b"),
        ("tinny", "'tinny': did you mean tiny?"),
        ("transformer", "did you mean transformer-"),
        ("zzz", "'zzz': name one of tiny, gru-30m"),
        ("mamba2-1b", "transformers.Trainer trains it"),
    ],
)
def test_unknown_names_raise_with_the_nearest(name, message):
    with pytest.raises(ValueError, match="there is no recipe") as error:
        recipe(name)
    assert message in str(error.value)


def test_mamba2_is_no_recipe():
    assert not any("mamba" in name for name in RECIPES)
    with pytest.raises(ValueError, match="has no LMConfig"):
        paper("mamba2", "400M")
    with pytest.raises(ValueError, match="scale must be one of"):
        paper("gru", "400m3")


def test_a_recipe_of_one_s_own_is_named_by_its_import_path():
    assert recipe("user_study:small") == recipe("user_study:Study.small")
    assert recipe("user_study:small").model.hidden_size == 16


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_such_study:small", "recipe 'no_such_study:small' cannot be imported (No module named"),
        ("no_such_study:small", "put the folder that holds no_such_study on PYTHONPATH"),
        ("user_study:smal", "user_study has nothing called 'smal'; it must be a function without"),
        ("user_study:", "user_study has nothing called ''"),
        (":small", "is no import path, such as 'mypackage.module:name'"),
        ("runs/own.py:small", "is no import path"),
        ("user_study:VALUE", "user_study has a int called 'VALUE'; it must be a function"),
        ("user_study:of_width", "called without arguments: missing a required argument: 'width'"),
        ("user_study:empty", "must return a pararnn.lab.train.config.RunConfig, got None"),
        (
            "user_study:Study",
            "must return a pararnn.lab.train.config.RunConfig, got <user_study.Study",
        ),
    ],
)
def test_a_recipe_that_is_none_says_so(path, message):
    with pytest.raises(TrainingError) as error:
        recipe(path)
    assert message in str(error.value)
