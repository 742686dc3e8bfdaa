"""The paper's small models (Appendix C.2) out of the language models' mixers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pararnn.cells import CELLS
from pararnn.cells.find import find_cell
from pararnn.layers import RecurrentLayer
from pararnn.lm.cache import LayerCache
from pararnn.lm.config import LMConfig
from pararnn.lm.mixers import Mixer, input_draw, make_mixer, rotary_tables
from pararnn.lm.rows import Rows
from pararnn.parameters import Draw, draw, draw_anew
from pararnn.tasks.base import Task, need
from pararnn.tasks.mamba2 import Mamba2


@dataclass(frozen=True)
class ModelConfig:
    """A model's parts; the defaults are the paper's.

    mixer: a cell's name or import path ("package.module:Class"), or a name in `MIXERS`. width,
    heads, conv: channels, heads, and taps of the convolution. state: of Mamba2. layers: norms and
    mixers, one behind the other. bare: the cell alone instead of the full block, without a
    residual. positions: whether fixed sinusoids are added. clip: the bound of recurrent weights.
    norm_weights: whether the norms outside the mixers have weights. solver, backend: as in
    `pararnn.solve`.
    """

    mixer: str = "gru"
    width: int = 64
    heads: int = 4
    conv: int = 4
    state: int = 64
    layers: int = 1
    bare: bool = False
    positions: bool = False
    clip: float | None = 0.9
    norm_weights: bool = True
    solver: str = "auto"
    backend: str = "auto"

    def __post_init__(self) -> None:
        for name in ("width", "heads", "conv", "state", "layers"):
            need(getattr(self, name) > 0, f"{name} must be positive, got {getattr(self, name)}")
        need(
            self.width % self.heads == 0 and self.width % 2 == 0,
            f"width must be even and a multiple of heads, got {self.width} and {self.heads}",
        )


class BareCell(Mixer):
    """A recurrent layer and nothing else."""

    def __init__(self, config: LMConfig) -> None:
        super().__init__()
        cell_class = find_cell(config.cell, CELLS)
        self.rnn = RecurrentLayer(
            cell_class,
            config.hidden_size,
            config.hidden_size,
            num_heads=config.num_heads,
            solver=config.solver,
            backend=config.backend,
            recurrent_clip=config.recurrent_clip,
            **config.cell_config,
        )
        self.fields = dict.fromkeys(cell_class.fields, 1.0)  # as `RNNMixer.fields`

    def forward(self, x: Tensor, rows: Rows, cache: LayerCache | None = None) -> Tensor:
        return self.rnn(x, fields=self.fields)[0]

    def draws(self, layer: int) -> dict[str, Draw]:
        """None: its parts have started by themselves."""
        return {}


class TransformerLayer(Mixer):
    """Attention with biases and an MLP d to d to d, each behind a norm and beside a residual.

    A reading of the paper's Transformer that has its published number of parameters; the first of
    the two norms is the model's own.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj, self.k_proj, self.v_proj, self.out_proj, self.up, self.down = (
            nn.Linear(width, width) for _ in range(6)
        )
        self.norm = nn.RMSNorm(width, eps=1e-5)

    def forward(self, x: Tensor, rows: Rows, cache: LayerCache | None = None) -> Tensor:
        """What a residual is to be added to: see `TaskModel.forward`."""
        q, k, v = (
            part(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        steps = x.shape[1]
        later = torch.ones(steps, steps, dtype=torch.bool, device=x.device).triu(1)
        scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(later, -math.inf)
        return self.out_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))

    def draws(self, layer: int) -> dict[str, Draw]:
        """None: its parts have started by themselves."""
        return {}

    def after(self, x: Tensor) -> Tensor:
        """The MLP, on the residual stream."""
        return x + self.down(F.gelu(self.up(self.norm(x))))


def _bare(config: ModelConfig, lm: LMConfig) -> Mixer:
    return BareCell(lm) if config.bare else make_mixer("rnn", lm)


MIXERS: dict[str, Callable[[ModelConfig, LMConfig], Mixer]] = {
    "attention": lambda config, lm: make_mixer("attention", lm),
    "mamba2": lambda c, lm: Mamba2(c.width, c.heads, c.state, c.conv, c.bare),
    "transformer": lambda config, lm: TransformerLayer(config.width, config.heads),
}
"""Mixers beside the cells: the language models' attention (rotary positions, no MLP), Mamba2, and
the paper's Transformer, whose learned positions end at the task's length."""


class TaskModel(nn.Module):
    """Embedding, RMSNorm, mixer, RMSNorm, linear: inputs (B, T) or (B, T, F) to (B, T, classes).

    A full block adds its input, scaled by learnable factors, as in the language models; so do
    attention and the Transformer, unscaled. Its linear layer alone has a bias, by its published
    number of parameters.
    """

    def __init__(self, task: Task, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        width, learned = config.width, config.mixer == "transformer"
        self.embed: nn.Module = (
            nn.Linear(task.features, width) if task.features else nn.Embedding(task.symbols, width)
        )
        if isinstance(self.embed, nn.Embedding):
            draw_anew(self.embed, {"weight": input_draw(width)})
        self.position = nn.Parameter(torch.empty(task.length, width)) if learned else None
        if self.position is not None:
            draw(self.position.data, input_draw(width))
        lm = LMConfig(
            hidden_size=width,
            num_hidden_layers=config.layers,
            cell=config.mixer,
            num_heads=config.heads,
            conv_kernel_size=config.conv,
            num_attention_heads=config.heads,
            recurrent_clip=config.clip,
            solver=config.solver,
            backend=config.backend,
        )
        make = MIXERS.get(config.mixer, _bare)
        weights = config.norm_weights or learned
        norms = [nn.RMSNorm(width, 1e-5, weights) for _ in range(config.layers + 1)]
        self.norms = nn.ModuleList(norms)
        self.mixers = nn.ModuleList(make(config, lm) for _ in range(config.layers))
        self.scales = nn.ParameterList(
            nn.Parameter(torch.ones(width))
            for mixer in self.mixers
            if not config.bare and mixer.scales_residual
        )
        self.head = nn.Linear(width, task.classes, bias=learned)
        draw_anew(self.head, {"weight": input_draw(width)})
        for layer, mixer in enumerate(cast(list[Mixer], list(self.mixers))):
            for name, how in mixer.draws(layer).items():
                owner, _, part = name.rpartition(".")
                draw_anew(mixer.get_submodule(owner), {part: how})

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.embed(inputs)
        steps, width = x.shape[1:]
        places = torch.arange(steps, device=x.device)
        if self.position is not None:
            need(
                steps <= len(self.position),
                f"positions are learned up to {len(self.position)}, got {steps} steps: "
                "mixer=attention has rotary ones",
            )
            x = x + self.position[:steps]
        if self.config.positions and self.position is None:
            x = x + sinusoids(places, width).to(x.dtype)
        rows = Rows(places.unsqueeze(0))
        if self.config.mixer == "attention":
            tables = rotary_tables(rows.positions, width // self.config.heads, 10_000.0)
            rows = rows._replace(rotary=tables)
        for index, mixer in enumerate(self.mixers):
            mixed = mixer(self.norms[index](x), rows)
            if self.scales:
                mixed = mixed + x * self.scales[index]
            elif self.config.mixer in ("attention", "transformer"):
                mixed = mixed + x
            x = mixer.after(mixed) if isinstance(mixer, TransformerLayer) else mixed
        return self.head(self.norms[-1](x))


def sinusoids(places: Tensor, width: int) -> Tensor:
    """Fixed positions (T, width): sines, then cosines, of frequencies from 1 to 1/10,000."""
    powers = torch.arange(0, width, 2, device=places.device) / width
    angles = places.unsqueeze(-1) * 10_000.0**-powers
    return torch.cat([angles.sin(), angles.cos()], -1)
