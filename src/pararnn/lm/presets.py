"""The paper's language models and their training: Tables 3 and 4, as records."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from pararnn.lm.config import LMConfig

VOCAB_SIZE = 50_432
"""GPT-NeoX's tokens, padded."""

GPUS_PER_NODE = 8


class Scale(NamedTuple):
    """Values that all architectures of a size share: Table 4, and Table 3's width, blocks, decay.

    mamba2_state: the states of a Mamba2 channel, with one group. The tables do not give it; with
    these values the number of parameters is the printed one (with up to 64 for 1B too).
    """

    num_hidden_layers: int
    hidden_size: int
    weight_decay: float
    nodes: int
    batch_per_gpu: int
    steps: int
    z_loss: float
    mamba2_state: int


class Row(NamedTuple):
    """A row of Table 3 without its scale's values: parameters as printed, heads, peak rate."""

    params: str
    heads: int
    learning_rate: float


SCALES = {
    "400M": Scale(24, 1024, 1e-3, 1, 32, 20_000, 1e-4, mamba2_state=16),
    "1B": Scale(24, 2048, 1e-4, 1, 32, 55_000, 1e-4, mamba2_state=16),
    "2.9B": Scale(32, 2560, 1e-4, 4, 16, 55_000, 1e-4, mamba2_state=128),
    "7B": Scale(32, 4096, 1e-4, 32, 8, 33_000, 5e-6, mamba2_state=128),
}

TABLE_3 = {
    ("gru", "400M"): Row("406M", 4, 0.005),
    ("lstm", "400M"): Row("406M", 4, 0.003),
    ("mamba2", "400M"): Row("409M", 32, 0.005),
    ("transformer", "400M"): Row("412M", 8, 0.003),
    ("gru", "1B"): Row("1.42B", 4, 0.003),
    ("lstm", "1B"): Row("1.42B", 4, 0.003),
    ("mamba2", "1B"): Row("1.43B", 64, 0.005),
    ("transformer", "1B"): Row("1.44B", 16, 0.002),
    ("gru", "2.9B"): Row("2.90B", 2, 0.002),
    ("lstm", "2.9B"): Row("2.90B", 2, 0.002),
    ("mamba2", "2.9B"): Row("2.83B", 80, 0.003),
    ("transformer", "2.9B"): Row("2.80B", 32, 0.003),
    ("gru", "7B"): Row("6.76B", 4, 0.003),
    ("lstm", "7B"): Row("6.76B", 4, 0.003),
    ("mamba2", "7B"): Row("6.96B", 128, 0.003),
    ("transformer", "7B"): Row("6.89B", 32, 0.003),
}

PRESETS = tuple(TABLE_3)
"""Pairs of architecture and scale for `preset`."""


@dataclass(frozen=True)
class Preset:
    """A model of the paper and its training: AdamW, a cosine to 0 after the warm-up.

    model: an LMConfig; for Mamba2 the arguments of transformers' Mamba2Config. params_in_paper: the
    number of parameters as Table 3 prints it. learning_rate: at its peak. weight_decay: Table 3's,
    read as the fraction of a weight that a step at the peak rate removes; `torch_weight_decay` is
    the same for PyTorch's optimizers. z_loss: factor of the squared logsumexp.
    """

    name: str
    model: LMConfig | Mapping[str, Any]
    params_in_paper: str
    learning_rate: float
    weight_decay: float
    steps: int
    nodes: int
    batch_per_gpu: int
    z_loss: float
    sequence_length: int = 2048

    @property
    def torch_weight_decay(self) -> float:
        """`weight_decay` for torch.optim.AdamW, which multiplies it by the rate."""
        return self.weight_decay / self.learning_rate

    @property
    def warmup_steps(self) -> int:
        """A tenth of the steps."""
        return self.steps // 10

    @property
    def batch(self) -> int:
        """Sequences a step over all GPUs."""
        return self.nodes * GPUS_PER_NODE * self.batch_per_gpu

    @property
    def training_tokens(self) -> int:
        """Tokens over the whole training."""
        return self.steps * self.batch * self.sequence_length


def preset(architecture: str, scale: str) -> Preset:
    """Return the paper's "gru", "lstm", "mamba2" or "transformer" of a scale.

    Scales are "400M", "1B", "2.9B" and "7B". `dataclasses.replace(preset("gru", "400M").model,
    ...)` changes a model's parts. Raises ValueError for other names.
    """
    _check_name("architecture", architecture, dict.fromkeys(name for name, _ in PRESETS))
    _check_name("scale", scale, SCALES)
    sizes, row = SCALES[scale], TABLE_3[architecture, scale]
    return Preset(
        name=f"{architecture}-{scale}",
        model=_model(architecture, sizes, row.heads),
        params_in_paper=row.params,
        learning_rate=row.learning_rate,
        weight_decay=sizes.weight_decay,
        steps=sizes.steps,
        nodes=sizes.nodes,
        batch_per_gpu=sizes.batch_per_gpu,
        z_loss=sizes.z_loss,
    )


def _model(architecture: str, sizes: Scale, heads: int) -> LMConfig | dict[str, Any]:
    blocks = sizes.num_hidden_layers
    shared: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "hidden_size": sizes.hidden_size}
    if architecture == "mamba2":
        expand = 2
        return {
            **shared,
            "num_hidden_layers": 2 * blocks,  # without an MLP in between
            "expand": expand,
            "num_heads": heads,
            "head_dim": expand * sizes.hidden_size // heads,
            "n_groups": 1,
            "state_size": sizes.mamba2_state,
            "tie_word_embeddings": False,
        }
    options: dict[str, Any] = {"cell": architecture, "num_heads": heads}
    if architecture == "transformer":
        mixers = ("attention",) * blocks
        options = {"mixers": mixers, "norm": "layer", "num_attention_heads": heads}
    return LMConfig(num_hidden_layers=blocks, **shared, **options)


def _check_name(what: str, name: str, names: Collection[str]) -> None:
    if name in names:
        return
    in_lower_case = {entry.lower(): entry for entry in names}
    near = difflib.get_close_matches(name.lower(), in_lower_case, n=1)
    hint = f"; did you mean {in_lower_case[near[0]]!r}?" if near else ""
    raise ValueError(f"{what} must be one of {', '.join(names)}, got {name!r}{hint}")
