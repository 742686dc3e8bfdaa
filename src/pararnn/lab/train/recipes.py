"""Recipes: names, and functions that return all that a training run depends on.

A recipe of one's own is a function without arguments that returns a `RunConfig`: by its import
path, "package.module:function", or with a line in RECIPES.

The paper's name its data: SlimPajama without its books, streamed and tokenised once, no more of it
than they learn. The small ones name none: `data.train=FILE` does.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from pararnn.base.errors import TrainingError
from pararnn.base.imports import import_object, is_import_path
from pararnn.lab.train.config import DataConfig, OptimiserConfig, RunConfig
from pararnn.lm.config import LMConfig
from pararnn.lm.presets import PRESETS, preset

PAPER_TOKENIZER = "EleutherAI/gpt-neox-20b"
PAPER_DATA = "cerebras/SlimPajama-627B"
PAPER_DROP = "meta.redpajama_set_name=RedPajamaBook"

NO_MAMBA2 = (
    "Mamba2 is transformers' model and has no LMConfig; transformers.Trainer trains it, from "
    "the arguments that pararnn.lm.preset('mamba2', scale).model has"
)

BYTE_VOCAB = 260
"""The 256 bytes, and room for marks such as a document's end."""


def paper(architecture: str, scale: str) -> RunConfig:
    """Return a model of the paper as it trains it: Tables 3 and 4, Appendix C.

    device_batch is a GPU's part of the batch on the paper's nodes. On fewer GPUs the batch stays,
    and gradients are accumulated; where memory is short, a smaller device_batch gives the same.

    Not for "mamba2": that model is transformers' own and has no LMConfig, which a RunConfig holds.
    transformers' Trainer trains it, from `preset("mamba2", scale).model`.
    """
    paper_preset = preset(architecture, scale)
    if not isinstance(paper_preset.model, LMConfig):
        raise ValueError(f"there is no recipe for {architecture}: {NO_MAMBA2}")
    name = paper_preset.name.lower()
    return RunConfig(
        name,
        paper_preset.model,
        DataConfig(
            train=PAPER_DATA,
            holdout=0.001,
            drop=PAPER_DROP,
            tokens=paper_preset.training_tokens,
            tokenizer=PAPER_TOKENIZER,
            sequence_length=paper_preset.sequence_length,
        ),
        OptimiserConfig(
            learning_rate=paper_preset.learning_rate,
            weight_decay=paper_preset.weight_decay,
            warmup=paper_preset.warmup_steps / paper_preset.steps,
            z_loss=paper_preset.z_loss,
        ),
        steps=paper_preset.steps,
        batch=paper_preset.batch,
        device_batch=paper_preset.batch_per_gpu,
        out=f"runs/{name}",
    )


def on_bytes(name: str, architecture: str, width: int, blocks: int, steps: int) -> RunConfig:
    """Return a small version of the paper's 400M model, on bytes, for a single device."""
    model = preset(architecture, "400M").model
    assert isinstance(model, LMConfig)
    small = replace(
        model,
        hidden_size=width,
        num_hidden_layers=blocks,
        vocab_size=BYTE_VOCAB,
        intermediate_size=None,
        mixers=(model.mixers or ())[:blocks],
    )
    return RunConfig(name, small, steps=steps, out=f"runs/{name}")


def tiny() -> RunConfig:
    """Return a GRU that two CPU cores train in two minutes."""
    run = on_bytes("tiny", "gru", width=128, blocks=2, steps=300)
    return replace(
        run,
        data=replace(run.data, sequence_length=256),
        optimiser=replace(run.optimiser, learning_rate=8e-3),
        precision="float32",
        compile=False,
        save_every=100,
        valid_every=50,
        valid_rows=32,
    )


RECIPES: dict[str, Callable[[], RunConfig]] = {
    "tiny": tiny,
    "gru-30m": partial(on_bytes, "gru-30m", "gru", width=512, blocks=9, steps=2000),
    "gru-60m": partial(on_bytes, "gru-60m", "gru", width=640, blocks=12, steps=4000),
    "transformer-30m": partial(
        on_bytes, "transformer-30m", "transformer", width=512, blocks=9, steps=2000
    ),
    "transformer-60m": partial(
        on_bytes, "transformer-60m", "transformer", width=640, blocks=12, steps=4000
    ),
    **{
        f"{architecture}-{scale}".lower(): partial(paper, architecture, scale)
        for architecture, scale in PRESETS
        if architecture != "mamba2"
    },
}
"""Functions without arguments, by the recipe's name."""


def recipe(name: str) -> RunConfig:
    """Return the config of a name in RECIPES, or of a function's import path.

    Raises ValueError, with the nearest names, for a name that is not there; TrainingError for a
    path without a function, or whose function returns no `RunConfig`.
    """
    if is_import_path(name):
        return _user_recipe(name)
    if name not in RECIPES:
        near = difflib.get_close_matches(name.lower(), RECIPES)
        hint = f"did you mean {', '.join(near)}?" if near else f"name one of {', '.join(RECIPES)}"
        raise ValueError(f"there is no recipe {name!r}: {NO_MAMBA2 if 'mamba' in name else hint}")
    return RECIPES[name]()


def _user_recipe(path: str) -> RunConfig:
    make = import_object(path, "recipe", TrainingError)
    module, _, name = path.partition(":")
    if not callable(make):
        problem = "nothing" if make is None else f"a {type(make).__name__}"
        raise TrainingError(
            f"the recipe {path!r} cannot be used: {module} has {problem} called {name!r}; it must "
            "be a function without arguments that returns a RunConfig"
        )
    try:
        inspect.signature(make).bind()
    except TypeError as error:
        raise TrainingError(
            f"the recipe {path!r} must be called without arguments: {error}"
        ) from error
    config = make()
    if not isinstance(config, RunConfig):
        raise TrainingError(
            f"the recipe {path!r} must return a pararnn.lab.train.config.RunConfig, "
            f"got {config!r:.60}"
        )
    return config


def summary(config: RunConfig) -> str:
    """Return a line on a run: its model's parts, its steps and their tokens."""
    model, data = config.model, config.data
    mixers = dict.fromkeys(model.cell if name == "rnn" else name for name in model.mixers or ())
    names = " and ".join(mixers)
    return (
        f"{names}, {model.num_hidden_layers} blocks of {model.hidden_size} channels; "
        f"{config.steps:,} steps of {config.batch:,} x {data.sequence_length:,} tokens"
    )
