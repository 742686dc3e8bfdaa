"""The paper's small models (Appendix C.2) out of the language models' mixers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pararnn.base.errors import CellError
from pararnn.base.imports import import_object, is_import_path
from pararnn.base.parameters import Draw, draw, draw_parameters
from pararnn.lab.tasks.base import Task
from pararnn.lab.tasks.deltanet import DeltaNet
from pararnn.lab.tasks.mamba2 import Mamba2
from pararnn.lm.cache import LayerCache
from pararnn.lm.config import POSITIVE, LMConfig, check_ranges
from pararnn.lm.mixers import (
    MIXERS,
    Mixer,
    input_draw,
    make_mixer,
    make_recurrent,
    neutral_fields,
    rotary_tables,
)
from pararnn.lm.rows import Rows


@dataclass(frozen=True)
class ModelConfig:
    """Parts of a model; the defaults are the paper's.

    mixer: a cell's name, the import path of a cell or a `Mixer` ("package.module:Class"), one of
    `TASK_MIXERS`, or a name in `pararnn.lm.MIXERS`. width, heads, conv: channels, heads, and taps
    of the convolution. state: of Mamba2. layers: norms and mixers, one after the other. bare: the
    cell alone instead of the full block, without a residual. positions: whether fixed sinusoids are
    added. clip: the bound of recurrent weights. norm_weights: whether the norms outside the mixers
    have weights. solver, backend: as in `pararnn.solve`. Raises ValueError for impossible values.
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
        sizes = ("width", "heads", "conv", "state", "layers")
        check_ranges(self, dict.fromkeys(sizes, POSITIVE))
        if self.width % self.heads or self.width % 2:
            raise ValueError(
                f"width must be even and a multiple of heads, got {self.width} and {self.heads}"
            )


class BareCell(Mixer):
    """A recurrent layer and nothing else."""

    scales_residual = True  # which a bare model leaves out

    def __init__(self, config: LMConfig) -> None:
        super().__init__()
        self.rnn = make_recurrent(config)
        self.fields = neutral_fields(self.rnn)

    def forward(self, x: Tensor, rows: Rows, cache: LayerCache | None = None) -> Tensor:
        return self.rnn(x, fields=self.fields)[0]

    def draws(self, layer: int) -> dict[str, Draw]:
        """Return none: the layer has drawn its parameters."""
        return {}


class TransformerLayer(Mixer):
    """Attention with biases and an MLP d to d to d, each after a norm and with a residual.

    A reading of the paper's Transformer that has its published number of parameters. The first of
    the two norms is the model's.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj, self.k_proj, self.v_proj, self.out_proj, self.up, self.down = (
            nn.Linear(width, width) for _ in range(6)
        )
        self.norm = nn.RMSNorm(width, eps=1e-5)

    def forward(self, x: Tensor, rows: Rows, cache: LayerCache | None = None) -> Tensor:
        """Return attention's output, to which the model adds the residual."""
        q, k, v = (
            proj(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        steps = x.shape[1]
        later = torch.ones(steps, steps, dtype=torch.bool, device=x.device).triu(1)
        scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(later, -math.inf)
        return self.out_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))

    def draws(self, layer: int) -> dict[str, Draw]:
        """Return none: the linear layers have drawn their parameters."""
        return {}

    def mlp(self, x: Tensor) -> Tensor:
        """Add the MLP to the residual stream."""
        return x + self.down(F.gelu(self.up(self.norm(x))))


TASK_MIXERS = ("mamba2", "deltanet", "transformer")
"""Mixers for tasks only: they read whole sequences and have no cache."""


def is_user_mixer(name: str) -> bool:
    """Return whether a name is the import path of a mixer; CellError if it cannot be imported."""
    if not is_import_path(name):
        return False
    target = import_object(name, "cell or mixer", CellError)
    return isinstance(target, type) and issubclass(target, Mixer)


def mixer_of(config: ModelConfig, lm: LMConfig) -> Mixer:
    """Build a layer's mixer: of `TASK_MIXERS`, `pararnn.lm.MIXERS` or a user, or that of a cell."""
    if config.mixer == "mamba2":
        return Mamba2(config.width, config.heads, config.state, config.conv, config.bare)
    if config.mixer == "deltanet":
        return DeltaNet(config.width, config.heads, config.conv, config.bare)
    if config.mixer == "transformer":
        return TransformerLayer(config.width, config.heads)
    if config.mixer in MIXERS or is_user_mixer(config.mixer):
        return make_mixer(config.mixer, lm)
    return BareCell(lm) if config.bare else make_mixer("rnn", lm)


class TaskModel(nn.Module):
    """Embedding, RMSNorm, mixer, RMSNorm, linear: inputs (B, T) or (B, T, F) to (B, T, classes).

    The input is added to what a mixer returns, scaled by learnable factors for mixers with
    `scales_residual`, as in the language models; not in bare models of those. The Transformer's
    linear layer has a bias, by its published number of parameters; the others' has none.
    """

    def __init__(self, task: Task, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        width, has_table = config.width, config.mixer == "transformer"
        self.embed: nn.Module = (
            nn.Linear(task.features, width) if task.features else nn.Embedding(task.symbols, width)
        )
        if isinstance(self.embed, nn.Embedding):
            draw_parameters(self.embed, {"weight": input_draw(width)})
        self.position = nn.Parameter(torch.empty(task.length, width)) if has_table else None
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
        weights = config.norm_weights or has_table
        norms = [nn.RMSNorm(width, 1e-5, weights) for _ in range(config.layers + 1)]
        self.norms = nn.ModuleList(norms)
        self.mixers = nn.ModuleList(mixer_of(config, lm) for _ in range(config.layers))
        mixers = cast(list[Mixer], list(self.mixers))
        self.has_residual = not (config.bare and mixers[0].scales_residual)
        self.scales = nn.ParameterList(
            nn.Parameter(torch.ones(width))
            for mixer in mixers
            if self.has_residual and mixer.scales_residual
        )
        self.head = nn.Linear(width, task.classes, bias=has_table)
        draw_parameters(self.head, {"weight": input_draw(width)})
        for layer, mixer in enumerate(mixers):
            for name, start in mixer.draws(layer).items():
                owner, _, parameter = name.rpartition(".")
                draw_parameters(mixer.get_submodule(owner), {parameter: start})

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.embed(inputs)
        steps, width = x.shape[1:]
        positions = torch.arange(steps, device=x.device)
        if self.position is not None:
            if steps > len(self.position):
                raise ValueError(
                    f"positions are learned up to {len(self.position)}, got {steps} steps: "
                    "mixer=attention has rotary ones"
                )
            x = x + self.position[:steps]
        elif self.config.positions:
            x = x + sinusoids(positions, width).to(x.dtype)
        rows = Rows(positions.unsqueeze(0))
        if cast(Mixer, self.mixers[0]).needs_positions:
            tables = rotary_tables(rows.positions, width // self.config.heads, 10_000.0)
            rows = rows._replace(rotary=tables)
        for index, mixer in enumerate(self.mixers):
            out = mixer(self.norms[index](x), rows)
            if self.has_residual:
                out = out + (x * self.scales[index] if self.scales else x)
            x = mixer.mlp(out) if isinstance(mixer, TransformerLayer) else out
        return self.head(self.norms[-1](x))


def sinusoids(positions: Tensor, width: int) -> Tensor:
    """Return fixed positions (T, width): sines, then cosines, of frequencies 1 to 1/10,000."""
    powers = torch.arange(0, width, 2, device=positions.device) / width
    angles = positions.unsqueeze(-1) * 10_000.0**-powers
    return torch.cat([angles.sin(), angles.cos()], -1)
