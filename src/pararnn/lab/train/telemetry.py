"""Facts of a run: its size at the start, and how its recurrent layers' solvers do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from pararnn.base.device import current_gpus, type_of
from pararnn.cells.base import unwrap
from pararnn.check.verify import defect
from pararnn.lab.provenance import provenance
from pararnn.lab.train.config import RunConfig
from pararnn.layers import RecurrentLayer
from pararnn.tune.timing import device_name

if TYPE_CHECKING:
    from pararnn.lab.train.setup import TrainingData

NAMES = ("defect", "sweeps", "mended")
"""Figures that `check_solves` returns: a number for every recurrent layer."""


@torch.no_grad()
def check_solves(model: nn.Module, inputs: dict[str, Tensor]) -> dict[str, list[Any]]:
    """Return each recurrent layer's defect over its limit and its solver's counts, see `defect`.

    Layers are checked within a forward pass, where parameters are whole, and eagerly: compiled
    blocks record nothing. Random number generators and the layers' counts are restored.
    """
    layers = [module for module in model.modules() if isinstance(module, RecurrentLayer)]
    # Solvers of matrix cells store no states to compute defects from.
    layers = [layer for layer in layers if unwrap(layer.cell).keeps_states]
    counts_before = [layer.counts for layer in layers]
    results: list[tuple[float, int, int]] = []

    def look(layer: Any, args: Any, options: Any, _: Any) -> None:
        results.append(defect(layer, args, options))

    hooks = [layer.register_forward_hook(look, with_kwargs=True) for layer in layers]
    try:
        with torch.random.fork_rng(current_gpus()), torch.compiler.set_stance("force_eager"):
            model(**inputs, use_cache=False, logits_to_keep=1)
    finally:
        for hook in hooks:
            hook.remove()
        for layer, counts in zip(layers, counts_before, strict=True):
            layer.__dict__["counts"] = counts
    return dict(zip(NAMES, map(list, zip(*results, strict=True)), strict=True)) if results else {}


def solves(model: nn.Module) -> dict[str, list[int]]:
    """Sweeps and repaired columns of every recurrent layer's last call, {} if there are none."""
    calls = [module.last_solve for module in model.modules() if isinstance(module, RecurrentLayer)]
    infos = [info for info in calls if info is not None]
    names = infos[0]._fields if infos else ()
    return {name: [int(getattr(info, name).sum()) for info in infos] for name in names}


def start_facts(model: nn.Module, world: int, step: int) -> dict[str, Any]:
    """Return the facts of a start for a run's record: step, device and versions."""
    weights = list(model.parameters())
    device = weights[0].device
    return {
        "step": step,
        "device": device_name(device),
        "processes": world,
        "threads": type_of(device).threads(),
        "parameters": sum(weight.numel() for weight in weights),
        **provenance(),
    }


def start_lines(config: RunConfig, data: TrainingData, model: nn.Module, world: int) -> list[str]:
    """Return the lines at a run's start: data, model, device, and its length."""
    length, tokens = config.data.sequence_length, config.batch * config.data.sequence_length
    rows, valid_rows = (len(cast(Any, dataset)) for dataset in (data.train, data.valid))
    weights = list(model.parameters())
    device, blocks = weights[0].device, config.model
    mixers = dict.fromkeys(config.model.cell if m == "rnn" else m for m in blocks.mixers or ())
    several = f"{world} x " if world > 1 else ""
    count = type_of(device).threads()
    threads = "" if count is None else f", {count} threads"
    return [
        f"data: {config.data.train or 'given'}: {rows * length:,} tokens to learn, "
        f"{valid_rows * length:,} held out, {data.bytes_per_token:.2f} bytes a token",
        f"model: {' and '.join(mixers)}, {blocks.num_hidden_layers} blocks of {blocks.hidden_size} "
        f"channels, {sum(weight.numel() for weight in weights):,} parameters, {config.precision}, "
        f"on {several}{device_name(device)}{threads}",
        *([f"weights: those of {config.init_from} at first"] if config.init_from else []),
        f"run: {config.steps:,} steps of {config.batch:,} x {length:,} tokens, "
        f"{config.steps * tokens / (rows * length):.3g} epochs, into {config.out}",
    ]
