"""The models that benchmarks/learn.py compares: of one size without embedding and head.

A line in `configs` or `insides` adds one. Sizes differ in width alone: heads stay as they are, and
their number grows.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from pararnn.cells import Cell, Param
from pararnn.lab.train.recipes import on_bytes
from pararnn.lm import LanguageModel, preset
from pararnn.lm.backbone import Block
from pararnn.lm.config import LMConfig
from pararnn.lm.loss import Head

VOCABULARY = 8192
WIDTHS = {"60M": 640, "150M": 1024}
"""Widths by size, which is about a model's parameters."""
BLOCKS = 12
HEAD = 64
"""Channels of a head of attention, of cells that mix channels and of matrix cells."""
KEYS = 32
"""K of matrix cells, whose V is a head."""
MATRIX_MLP = 2.7
"""Hidden channels, in widths, of the SwiGLU next to a matrix cell: keys and queries need parameters
too."""

Make = Callable[..., LanguageModel]


class ElementwiseMatrixCell(Cell):
    """M2RNN with a weight for each value in place of its matrix: H' = f H + (1 - f) tanh(w H + k
    v^T), y = H'^T q. What it learns less than M2RNN is what the matrix is good for.
    """

    states = {"H": ("K", "V")}
    gates = {"k": "K", "q": "K", "v": "V", "f": ""}
    params = {"w": Param("H,V")}

    def step(self, state: Any, gate: Any, param: Any) -> Tensor:
        values = gate.k[..., :, None] * gate.v[..., None, :]
        new = torch.tanh(state.H * param.w[..., None, :] + values)
        f = torch.sigmoid(gate.f)[..., None, None]
        return f * state.H + (1 - f) * new

    def readout(self, state: Any, gate: Any, param: Any) -> Tensor:
        return (gate.q[..., None, :] @ state.H).squeeze(-2)


def config_of(architecture: str, width: int, **changes: Any) -> LMConfig:
    """Return the recipe of a width for an architecture of the paper, with this vocabulary."""
    paper_model = on_bytes(architecture, architecture, width=width, blocks=BLOCKS, steps=1).model
    heads = width // HEAD
    return replace(paper_model, vocab_size=VOCABULARY, num_attention_heads=heads, **changes)


def with_attention(mixer: str) -> tuple[str, ...]:
    """Return the mixers of a hybrid: three blocks of one to one of attention."""
    return (*[mixer] * 3, "attention") * (BLOCKS // 4)


def matrix_config(cell: str, width: int, mixers: Sequence[str] = ("matrix",) * BLOCKS) -> LMConfig:
    """Return the recipe for a cell with matrix states."""
    hidden = round(MATRIX_MLP * width / HEAD) * HEAD
    sizes: dict[str, Any] = {
        "num_heads": width // HEAD,
        "cell_config": {"K": KEYS},
        "intermediate_size": hidden,
    }
    return config_of("gru", width, cell=cell, mixers=tuple(mixers), **sizes)


def configs(width: int) -> dict[str, LMConfig]:
    """Return models of this package; recurrent blocks of `hybrid` are GRUs."""
    mixing: Mapping[str, Any] = {"cell": "head-lstm", "num_heads": width // HEAD}
    return {
        "gru": config_of("gru", width),
        "lstm": config_of("lstm", width),
        "transformer": config_of("transformer", width),
        "hybrid": config_of("gru", width, mixers=with_attention("rnn")),
        "head-lstm": config_of("lstm", width, **mixing),
        "m2rnn": matrix_config("m2rnn", width),
        "matrix-elementwise": matrix_config(f"{__name__}:ElementwiseMatrixCell", width),
        "gated-delta": matrix_config("gated-delta", width),
        "hybrid-head-lstm": config_of("lstm", width, **mixing, mixers=with_attention("rnn")),
        "hybrid-m2rnn": matrix_config("m2rnn", width, with_attention("matrix")),
    }


CONFIGS = configs(WIDTHS["60M"])
Own = tuple[str, LMConfig]
"""A block's mixer, its name in `pararnn.lm.MIXERS`, and config."""


def mamba2_sizes(width: int) -> dict[str, Any]:
    """Return Mamba2 as its authors stack it, without an MLP in between, and with the state and the
    heads that they recommend; one block less than twice ours, as 128 states have parameters too.
    """
    return {
        **cast(Mapping[str, Any], preset("mamba2", "400M").model),
        "vocab_size": VOCABULARY,
        "hidden_size": width,
        "num_hidden_layers": 2 * BLOCKS - 1,
        "num_heads": 2 * width // HEAD,
        "head_dim": HEAD,
        "state_size": 128,
    }


def insides(own: Mapping[str, LMConfig]) -> dict[str, list[Own]]:
    """Return blocks of others, evenly spaced in stacks of Mamba2."""
    attention, head_lstm = ("attention", own["transformer"]), ("rnn", own["head-lstm"])
    return {
        "mamba2-head-lstm": [head_lstm],
        "mamba2-m2rnn": [("matrix", own["m2rnn"])],
        "mamba2-attention": [attention] * 3,
        "mamba2-attention-head-lstm": [attention, head_lstm, attention, attention],
    }


def mamba2(sizes: Mapping[str, Any], **factory: Any) -> LanguageModel:
    """Mamba2 on the kernels that the peers' module lends it, which GPUs need only."""
    model: LanguageModel = importlib.import_module("mamba2").language_model(sizes, **factory)
    return model


def mamba2_with(sizes: Mapping[str, Any], blocks: Sequence[Own], **factory: Any) -> LanguageModel:
    """Mamba2 of which two blocks make room for each of ours, which has an MLP."""
    count = sizes["num_hidden_layers"] - len(blocks)
    model = mamba2({**sizes, "num_hidden_layers": count}, **factory)
    backbone = model.backbone
    for number, (mixer, config) in enumerate(blocks, 1):
        backbone.layers[number * count // (len(blocks) + 1)] = Block(mixer, config, **factory)
        heads = config.num_attention_heads
    backbone.config = replace(backbone.config, num_attention_heads=heads)
    model.reset_parameters()
    return model


def models(size: str) -> dict[str, Make]:
    """Return functions of (device=, dtype=) that make a model, by mixer."""
    own, peer = configs(WIDTHS[size]), mamba2_sizes(WIDTHS[size])
    return {
        **{name: partial(LanguageModel, config) for name, config in own.items()},
        "mamba2": partial(mamba2, peer),
        **{name: partial(mamba2_with, peer, blocks) for name, blocks in insides(own).items()},
    }


MIXERS = [*CONFIGS, "mamba2", *insides(CONFIGS)]
"""Names of all."""


def tiny() -> dict[str, Make]:
    """Return `models` at sizes for a CPU."""
    sizes: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 4, "intermediate_size": 64}

    def small(config: LMConfig) -> LMConfig:
        keys = {"K": 4} if "K" in config.cell_config else {}
        heads: dict[str, Any] = {"num_attention_heads": 2, "num_heads": 2, "cell_config": keys}
        return replace(config, mixers=(config.mixers or ())[:4], **sizes, **heads)

    own = {name: small(config) for name, config in CONFIGS.items()}
    peer = {**mamba2_sizes(32), **sizes, "num_heads": 4, "head_dim": 16, "state_size": 8}
    makers: dict[str, Make] = {name: partial(LanguageModel, config) for name, config in own.items()}
    makers |= {"mamba2": partial(mamba2, peer)}
    return makers | {
        name: partial(mamba2_with, {**peer, "num_hidden_layers": 2 * len(blocks) + 2}, blocks)
        for name, blocks in insides(own).items()
    }


def body_size(model: nn.Module) -> int:
    """Return the number of parameters without embedding and head."""
    ends = [part for part in model.modules() if isinstance(part, nn.Embedding | Head)]
    return sum(p.numel() for p in model.parameters()) - sum(p.weight.numel() for p in ends)
