"""The models that benchmarks/learn.py compares: of one size without embedding and head.

A line in `stacks` adds one. The hidden channels of the SwiGLU make up for what mixers differ in;
Mamba2 in its authors' stack has none, and more blocks. Heads stay as they are from size to size,
and their number grows.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, cast

from learn_mixers import Own
from torch import nn

from pararnn.lab.train.recipes import on_bytes
from pararnn.lm import LanguageModel, preset
from pararnn.lm.backbone import Block
from pararnn.lm.config import LMConfig
from pararnn.lm.loss import Head

VOCABULARY = 8192


class Size(NamedTuple):
    """Parameters of a model without embedding and head, its width and its blocks."""

    parameters: float
    width: int
    blocks: int


SIZES = {
    "4M": Size(4e6, 256, 4),
    "15M": Size(15e6, 384, 8),
    "30M": Size(30e6, 448, 12),
    "60M": Size(60e6, 640, 12),
    "150M": Size(150e6, 1024, 12),
}
TINY = Size(0, 32, 4)
"""A size for a CPU, with heads of 16 channels."""
HEAD = 64
"""Channels of a head of attention and of cells that mix channels; keys and values of cells with
matrix states, which chunks on tensor cores take."""
M2RNN_KEYS = 32
"""Keys of M2RNN, whose kernels are those of the loop."""
HIDDEN = 32
"""Hidden channels of a SwiGLU are a multiple of it."""

Make = Callable[..., LanguageModel]


def long(name: str) -> str:
    """Return the import path of a cell or mixer of learn_mixers.py."""
    return f"learn_mixers:{name}"


def config_of(size: Size, architecture: str = "gru", **changes: Any) -> LMConfig:
    """Return the recipe for an architecture of the paper, with this vocabulary."""
    width, blocks = size.width, size.blocks
    paper_model = on_bytes(architecture, architecture, width=width, blocks=blocks, steps=1).model
    heads = width // (HEAD if size != TINY else 16)
    return replace(paper_model, vocab_size=VOCABULARY, num_attention_heads=heads, **changes)


def matrix_config(size: Size, cell: str, keys: int = HEAD, mixer: str = "matrix") -> LMConfig:
    """Return the recipe for a cell with matrix states."""
    heads = size.width // (HEAD if size != TINY else 16)
    cells: dict[str, Any] = {"cell": cell, "num_heads": heads, "cell_config": {"K": keys}}
    if size == TINY:
        cells["cell_config"] = {"K": 4}
    return config_of(size, mixers=(mixer,) * size.blocks, **cells)


CHUNKED = {
    "gated-delta": "LongGatedDelta",
    "gated-delta-skip": "SkipGatedDelta",
    "gated-delta-product": "LongGatedDeltaProduct",
    "kda": "LongKDA",
    "rwkv7": "LongRWKV7",
    "mlstm": "LongMLSTM",
    "mamba2-cell": "LongMamba2",
}
"""Cells whose steps are affine in their states, which run by chunks."""
DESIGNS = {
    "gated-delta-beside-gru": ("LongGatedDelta", long("BesideMixer")),
    "gated-delta-beside-lstm": ("LongGatedDelta", long("BesideLSTMMixer")),
    "gated-delta-beside-min-gru": ("LongGatedDelta", long("BesideMinGRUMixer")),
    "gated-delta-driven": ("LongGatedDelta", long("DrivenMixer")),
    "kda-beside-gru": ("LongKDA", long("BesideMixer")),
}
"""Cells and mixers of designs of our own, which run by chunks too."""


def pure(size: Size, device: str = "cuda") -> dict[str, LMConfig]:
    """Return the configs of models of one kind of block; the device chooses pairs."""
    mixing: dict[str, Any] = {"num_heads": size.width // (HEAD if size != TINY else 16)}
    chunks: dict[str, Any] = {"solver": "chunks", "backend": "fused"} if device == "cuda" else {}
    attention = ("attention",) * size.blocks
    return {
        "transformer": config_of(size, "transformer", mixers=attention),
        "transformer-conv": config_of(
            size, "transformer", mixers=(long("ConvAttention"),) * size.blocks
        ),
        "conv": config_of(size, "gru", mixers=(long("ConvMixer"),) * size.blocks),
        "gru": config_of(size, "gru"),
        "gru-long": config_of(size, "gru", cell=long("LongGRU")),
        "lstm": config_of(size, "lstm"),
        "min-gru": config_of(size, "gru", cell="min-gru"),
        "head-lstm": config_of(size, "lstm", cell="head-lstm", **mixing),
        "head-lstm-long": config_of(size, "lstm", cell=long("LongHeadLSTM"), **mixing),
        "m2rnn": matrix_config(size, long("LongM2RNN"), M2RNN_KEYS),
        "matrix-elementwise": matrix_config(size, long("ElementwiseMatrixCell"), M2RNN_KEYS),
        "gated-delta-short": replace(matrix_config(size, "gated-delta"), **chunks),
        **{n: replace(matrix_config(size, long(c)), **chunks) for n, c in CHUNKED.items()},
        **{
            name: replace(matrix_config(size, long(cell), mixer=mixer), **chunks)
            for name, (cell, mixer) in DESIGNS.items()
        },
    }


HYBRIDS = (
    *("conv", "gru", "lstm", "min-gru", "head-lstm", "m2rnn", *CHUNKED),
    *(name for name in DESIGNS if "gated-delta-beside" in name),
)
"""Mixers of which three blocks stand before one of attention in `hybrid-NAME`."""
BETWEEN = ("gru", "lstm")
"""Mixers of which two blocks stand around one of the gated delta rule, before one of attention, in
`hybrid-NAME-and-gated-delta`."""
REPLACED = ("m2rnn", "head-lstm")
"""Mixers of which one block takes the place of one in `hybrid-gated-delta-NAME`."""
BOTTOMS = ("gated-delta", "kda")
"""Mixers below which one block of head-lstm stands in `NAME-on-head-lstm`."""
PEERS = ("mamba2", "hybrid-mamba2")
"""Mamba2 in its authors' stack, alone and with as much attention as other hybrids."""


def stacks(size: Size, device: str = "cuda") -> dict[str, list[Own]]:
    """Return by name the mixer and config of every block of our models, from the first on."""
    own = {name: _block(config) for name, config in pure(size, device).items()}
    hybrid = {name: ([own[name]] * 3 + [own["transformer"]]) * (size.blocks // 4) for name in own}
    gated, middle = hybrid["gated-delta"], size.blocks // 2
    return {
        **{name: [block] * size.blocks for name, block in own.items()},
        **{f"hybrid-{name}": hybrid[name] for name in HYBRIDS},
        **{
            f"hybrid-{name}-and-gated-delta": [
                *(own[name], own["gated-delta"], own[name], own["transformer"])
            ]
            * (size.blocks // 4)
            for name in BETWEEN
        },
        **{
            f"hybrid-gated-delta-{name}": [*gated[:middle], own[name], *gated[middle + 1 :]]
            for name in REPLACED
        },
        **{
            f"{name}-on-head-lstm": [own["head-lstm"], *[own[name]] * (size.blocks - 1)]
            for name in BOTTOMS
        },
    }


def _block(config: LMConfig) -> Own:
    assert config.mixers is not None
    return config.mixers[0], config


MIXERS = [*stacks(SIZES["4M"]), *PEERS]
"""Names of all."""


def stacked(blocks: Sequence[Own], hidden: int, **factory: Any) -> LanguageModel:
    """Return a model of blocks with these mixers and configs, and hidden channels of SwiGLUs."""
    configs = [replace(config, intermediate_size=hidden) for _, config in blocks]
    names = tuple(name for name, _ in blocks)
    # The model's own config has the sizes of the rotary positions and what stands around blocks.
    model = LanguageModel(replace(configs[0], mixers=names[:1], num_hidden_layers=1), **factory)
    pairs = zip(names, configs, strict=True)
    model.backbone.layers = nn.ModuleList(Block(name, config, **factory) for name, config in pairs)
    model.reset_parameters()
    return model


def hidden_of(blocks: Sequence[Own], size: Size) -> int:
    """Return the hidden channels with which a model has a size's parameters."""
    if size == TINY:
        return 64
    least = body_size(stacked(blocks, HIDDEN, device="meta"))
    missing = (size.parameters - least) / (3 * size.width * size.blocks)
    return HIDDEN + max(0, round(missing / HIDDEN)) * HIDDEN


def peer_sizes(size: Size) -> dict[str, Any]:
    """Return Mamba2 as its authors stack it, without an MLP in between, and with the state and the
    heads that they recommend."""
    width, state = size.width, 128
    heads = 2 * width // HEAD
    layer = 6 * width**2 + (2 * state + heads) * width
    shapes: dict[str, Any] = {"num_heads": heads, "head_dim": HEAD, "state_size": state}
    shapes["num_hidden_layers"] = round(size.parameters / layer)
    if size == TINY:
        shapes = {"num_heads": 4, "head_dim": 16, "state_size": 8, "num_hidden_layers": 4}
    paper = cast(Mapping[str, Any], preset("mamba2", "400M").model)
    return {**paper, "vocab_size": VOCABULARY, "hidden_size": width, **shapes}


def peer(size: Size, with_attention: bool, **factory: Any) -> LanguageModel:
    """Return Mamba2 on the kernels that the peers' module lends it, which GPUs need only.

    with_attention: blocks of attention, evenly spaced, make room for as many parameters.
    """
    module = importlib.import_module("mamba2")
    sizes, count = peer_sizes(size), size.blocks // 4
    if not with_attention:
        return cast(LanguageModel, module.language_model(sizes, **factory))
    attention = config_of(size, "transformer", mixers=("attention",) * size.blocks)
    left = int(sizes["num_hidden_layers"] * (1 - count / size.blocks))
    model = module.language_model({**sizes, "num_hidden_layers": left}, **factory)
    # The MLPs beside attention make up for whole blocks of Mamba2.
    missing = (size.parameters - body_size(model)) / count - 4 * size.width**2
    hidden = max(1, round(missing / (3 * size.width * HIDDEN))) * HIDDEN
    attention = replace(attention, intermediate_size=hidden)
    for number in range(1, count + 1):
        place = number * left // count + number - 1
        model.backbone.layers.insert(place, Block("attention", attention, **factory))
    config = replace(model.backbone.config, num_attention_heads=attention.num_attention_heads)
    model.backbone.config = config
    model.reset_parameters()
    return cast(LanguageModel, model)


def models(size: Size, device: str = "cuda") -> dict[str, Make]:
    """Return functions of (device=, dtype=) that make a model, by mixer."""

    def make(blocks: Sequence[Own], **factory: Any) -> LanguageModel:
        return stacked(blocks, hidden_of(blocks, size), **factory)

    return {
        **{name: partial(make, blocks) for name, blocks in stacks(size, device).items()},
        "mamba2": partial(peer, size, False),
        "hybrid-mamba2": partial(peer, size, True),
    }


def body_size(model: nn.Module) -> int:
    """Return the number of parameters without embedding and head."""
    ends = [part for part in model.modules() if isinstance(part, nn.Embedding | Head)]
    return sum(p.numel() for p in model.parameters()) - sum(p.weight.numel() for p in ends)


def model_flops(model: nn.Module) -> int:
    """Return the floating-point operations of matrix products for a token of training."""
    return 6 * sum(p.numel() for p in model.parameters() if p.ndim == 2)
