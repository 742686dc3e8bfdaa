"""The models that benchmarks/learn.py compares: about 60M parameters without embedding and head.

A line in MODELS adds one: a function of (device=, dtype=) that makes a `pararnn.lm.LanguageModel`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, cast

from torch import nn

from pararnn.lm import LanguageModel, preset
from pararnn.lm.config import LMConfig
from pararnn.lm.loss import Head
from pararnn.train.recipes import on_bytes

VOCABULARY = 8192
WIDTH, BLOCKS = 640, 12
HEADS = 10
"""Of attention: 64 channels each, which its kernels are made for."""

Make = Callable[..., LanguageModel]


def config_of(architecture: str, **changes: Any) -> LMConfig:
    """Return the recipe of 60M for an architecture of the paper, with this vocabulary."""
    paper_model = on_bytes(architecture, architecture, width=WIDTH, blocks=BLOCKS, steps=1).model
    return replace(paper_model, vocab_size=VOCABULARY, num_attention_heads=HEADS, **changes)


CONFIGS = {
    "gru": config_of("gru"),
    "lstm": config_of("lstm"),
    "transformer": config_of("transformer"),
    "hybrid": config_of("gru", mixers=("rnn", "rnn", "rnn", "attention") * (BLOCKS // 4)),
}
"""Models of this package; the hybrid's recurrent blocks are GRUs."""

MAMBA2: Mapping[str, Any] = {
    **cast(Mapping[str, Any], preset("mamba2", "400M").model),
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": 2 * BLOCKS - 1,
    "num_heads": 2 * WIDTH // 64,
    "head_dim": 64,
    "state_size": 128,
}
"""Mamba2 as its authors stack it, without an MLP in between, and with the state and the heads that
they recommend; one block less than twice ours, as 128 states have parameters too."""


def mamba2(sizes: Mapping[str, Any], **factory: Any) -> LanguageModel:
    """Mamba2 on the kernels that the peers' module lends it, which GPUs need only."""
    model: LanguageModel = importlib.import_module("mamba2").language_model(sizes, **factory)
    return model


MODELS: dict[str, Make] = {
    **{name: partial(LanguageModel, config) for name, config in CONFIGS.items()},
    "mamba2": partial(mamba2, MAMBA2),
}
"""Functions that make a model, by mixer."""


def tiny() -> dict[str, Make]:
    """Return MODELS at sizes for a CPU."""
    sizes: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 4, "intermediate_size": 64}
    changes = sizes | {"num_attention_heads": 2}
    own = {n: replace(c, mixers=(c.mixers or ())[:4], **changes) for n, c in CONFIGS.items()}
    peer = {**MAMBA2, **sizes, "num_heads": 4, "head_dim": 16, "state_size": 8}
    models: dict[str, Make] = {name: partial(LanguageModel, config) for name, config in own.items()}
    return models | {"mamba2": partial(mamba2, peer)}


def body_size(model: nn.Module) -> int:
    """Return the number of parameters without embedding and head."""
    ends = [part for part in model.modules() if isinstance(part, nn.Embedding | Head)]
    return sum(p.numel() for p in model.parameters()) - sum(p.weight.numel() for p in ends)
