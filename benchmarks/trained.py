"""A trained language model, what its recurrent layers' solves are given, and how they forget."""

from __future__ import annotations

import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import pararnn
from pararnn import Cell
from pararnn.base.device import default_device
from pararnn.engines.arguments import Arguments
from pararnn.lab.tasks import Corpus
from pararnn.lab.train.config import RunConfig
from pararnn.lab.train.demo import with_text
from pararnn.lab.train.log import LOG, read_rows
from pararnn.lab.train.run import run_training
from pararnn.layers import RecurrentLayer
from pararnn.lm import LanguageModel, load_checkpoint
from pararnn.solve import prepare

STARTS = 16
WINDOW = 1024
"""Steps within which a channel has to forget where it started, or is a latch."""
MERGED = 1e-6


def train_on_library(config: RunConfig) -> tuple[LanguageModel, Corpus, dict[str, Any]]:
    """Train on the source of Python's standard library, in a folder that does not stay.

    Returns the model for inference, the text, and seconds, steps and bits per byte as columns.
    """
    with tempfile.TemporaryDirectory() as folder:
        config, corpus = with_text(replace(config, out=f"{folder}/run", report_to="none"))
        begin = time.perf_counter()
        model = load_checkpoint(run_training(config), default_device()).eval()
        seconds = time.perf_counter() - begin
        rows = read_rows(Path(config.out) / LOG)
    bits = [row["valid_bits_per_byte"] for row in rows if "valid_bits_per_byte" in row]
    about = {"train_seconds": round(seconds, 1), "train_steps": config.steps}
    return model, corpus, about | {"bits_validation": round(bits[-1], 3)}


@torch.no_grad()
def solves_of(model: LanguageModel, tokens: Tensor) -> list[Arguments]:
    """Return the arguments of each recurrent layer's solve for tokens (B, T)."""
    solves: list[Arguments] = []

    def record(layer: RecurrentLayer, inputs: tuple[Tensor, ...]) -> None:
        solves.append(prepare(layer.cell, layer.proj(inputs[0]), bias=layer.bias))

    hooks = [layer.register_forward_pre_hook(record) for layer in model.recurrent_layers()]
    try:
        model(tokens)
    finally:
        for hook in hooks:
            hook.remove()
    return solves


def part_of(args: Arguments, channels: slice, dtype: torch.dtype) -> Arguments:
    """Return the solve of some of the channels, with gates of a dtype."""
    assert args.bias is not None
    return replace(
        args,
        gates=args.gates[..., channels].to(dtype).contiguous(),
        bias=args.bias.detach()[:, channels].contiguous(),
        params=tuple(param.detach()[channels].contiguous() for param in args.params),
    )


@torch.no_grad()
def steps_to_merge(
    cell: Cell, args: Arguments, starts: int = STARTS, window: int = WINDOW
) -> Tensor:
    """Return the steps after which trajectories from zero meet the true one: int64 (starts, D).

    They start in the second half of the first row. Merged is a channel once all its states stay
    within MERGED of the true ones up to `window` steps; `window` itself stands for never, a latch.
    In float64, as rounding keeps large states in float32 at larger distances.
    """
    assert args.bias is not None
    gates = args.gates[:1].double() + args.bias.double()
    first = torch.linspace(gates.shape[1] // 2, gates.shape[1] - window, starts).long()
    places = first[:, None] + torch.arange(window)
    true = _states(cell, gates)[0, places]
    fresh = _states(cell, gates[0, places])
    differs = ((true - fresh).abs() > MERGED).any(-1)
    steps = torch.arange(1, window + 1, device=differs.device)
    return (differs * steps[:, None]).amax(1)


def _states(cell: Cell, gates: Tensor) -> Tensor:
    """Return all states by the loop, (B, T, D, N)."""
    states, _ = pararnn.solve(cell, gates, solver="sequential")
    return torch.stack([states] if isinstance(states, Tensor) else states, -1)
