"""The models that benchmarks/learn.py compares: about 60M parameters without embedding and head.

A line in MODELS adds one: a function of (device=, dtype=) that makes a `pararnn.lm.LanguageModel`.
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
from pararnn.lm import LanguageModel, preset
from pararnn.lm.backbone import Block
from pararnn.lm.config import LMConfig
from pararnn.lm.loss import Head
from pararnn.train.recipes import on_bytes

VOCABULARY = 8192
WIDTH, BLOCKS = 640, 12
HEADS = 10
"""Of attention, of cells that mix channels and of matrix cells: 64 channels each."""
KEYS = 32
"""K of matrix cells, whose V is 64."""
MATRIX_MLP = 1728
"""Hidden channels of the SwiGLU next to a matrix cell: keys and queries need parameters too."""

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


def config_of(architecture: str, **changes: Any) -> LMConfig:
    """Return the recipe of 60M for an architecture of the paper, with this vocabulary."""
    paper_model = on_bytes(architecture, architecture, width=WIDTH, blocks=BLOCKS, steps=1).model
    return replace(paper_model, vocab_size=VOCABULARY, num_attention_heads=HEADS, **changes)


def with_attention(mixer: str) -> tuple[str, ...]:
    """Return the mixers of a hybrid: three blocks of one to one of attention."""
    return (*[mixer] * 3, "attention") * (BLOCKS // 4)


def matrix_config(cell: str, mixers: Sequence[str] = ("matrix",) * BLOCKS) -> LMConfig:
    """Return the recipe for a cell with matrix states."""
    keys = {"K": KEYS}
    sizes = {"num_heads": HEADS, "cell_config": keys, "intermediate_size": MATRIX_MLP}
    return config_of("gru", cell=cell, mixers=tuple(mixers), **sizes)


MIXING: Mapping[str, Any] = {"cell": "head-lstm", "num_heads": HEADS}
CONFIGS = {
    "gru": config_of("gru"),
    "lstm": config_of("lstm"),
    "transformer": config_of("transformer"),
    "hybrid": config_of("gru", mixers=with_attention("rnn")),
    "head-lstm": config_of("lstm", **MIXING),
    "m2rnn": matrix_config("m2rnn"),
    "matrix-elementwise": matrix_config(f"{__name__}:ElementwiseMatrixCell"),
    "gated-delta": matrix_config("gated-delta"),
    "hybrid-head-lstm": config_of("lstm", **MIXING, mixers=with_attention("rnn")),
    "hybrid-m2rnn": matrix_config("m2rnn", with_attention("matrix")),
}
"""Models of this package; the hybrid's recurrent blocks are GRUs if its name names no others."""

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
Own = tuple[str, LMConfig]
"""A block's mixer, its name in `pararnn.lm.MIXERS`, and config."""
ATTENTION, HEAD_LSTM = ("attention", CONFIGS["transformer"]), ("rnn", CONFIGS["head-lstm"])
INSIDE: Mapping[str, tuple[Own, ...]] = {
    "mamba2-head-lstm": (HEAD_LSTM,),
    "mamba2-m2rnn": (("matrix", CONFIGS["m2rnn"]),),
    "mamba2-attention": (ATTENTION,) * 3,
    "mamba2-attention-head-lstm": (ATTENTION, HEAD_LSTM, ATTENTION, ATTENTION),
}
"""Stacks of Mamba2 with blocks of other mixers, evenly spaced."""


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


MODELS: dict[str, Make] = {
    **{name: partial(LanguageModel, config) for name, config in CONFIGS.items()},
    "mamba2": partial(mamba2, MAMBA2),
    **{name: partial(mamba2_with, MAMBA2, blocks) for name, blocks in INSIDE.items()},
}
"""Functions that make a model, by mixer."""


def tiny() -> dict[str, Make]:
    """Return MODELS at sizes for a CPU."""
    sizes: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 4, "intermediate_size": 64}

    def small(config: LMConfig) -> LMConfig:
        keys = {"K": 4} if "K" in config.cell_config else {}
        heads: dict[str, Any] = {"num_attention_heads": 2, "num_heads": 2, "cell_config": keys}
        return replace(config, mixers=(config.mixers or ())[:4], **sizes, **heads)

    own = {name: small(config) for name, config in CONFIGS.items()}
    peer = {**MAMBA2, **sizes, "num_heads": 4, "head_dim": 16, "state_size": 8}
    models: dict[str, Make] = {name: partial(LanguageModel, config) for name, config in own.items()}
    models |= {"mamba2": partial(mamba2, peer)}
    return models | {
        name: partial(
            mamba2_with,
            {**peer, "num_hidden_layers": 2 * len(blocks) + 2},
            [(mixer, small(config)) for mixer, config in blocks],
        )
        for name, blocks in INSIDE.items()
    }


def body_size(model: nn.Module) -> int:
    """Return the number of parameters without embedding and head."""
    ends = [part for part in model.modules() if isinstance(part, nn.Embedding | Head)]
    return sum(p.numel() for p in model.parameters()) - sum(p.weight.numel() for p in ends)
