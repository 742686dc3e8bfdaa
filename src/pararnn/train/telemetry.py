"""What one looks at: progress, reports, and what the recurrent layers' solvers do."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from transformers.integrations.integration_utils import (
    TensorBoardCallback,
    get_available_reporting_integrations,
)
from transformers.trainer_callback import ProgressCallback, TrainerCallback

from pararnn.check.verify import defect
from pararnn.device import current_gpus, type_of
from pararnn.errors import TrainingError
from pararnn.layers import RecurrentLayer
from pararnn.progress import duration, say
from pararnn.train.config import RunConfig
from pararnn.tune.timing import device_name

if TYPE_CHECKING:
    from pararnn.train.setup import TrainingData

NAMES = ("defect", "sweeps", "mended")
"""Of what `checked` finds: a number each for every recurrent layer."""
NATS = {"loss": "loss", "eval_loss": "valid", "eval_bits_per_byte": "bits/byte"}
"""Of the losses that are shown on the way: their short names."""


@torch.no_grad()
def checked(model: nn.Module, inputs: dict[str, Tensor]) -> dict[str, list[Any]]:
    """The defect of every recurrent layer over its limit, and its solver's counts; see `defect`.

    Layers are checked within a forward pass, where parameters are whole, and eagerly: compiled
    blocks record nothing. Random numbers and the layers' own records stay as they were.
    """
    layers = [part for part in model.modules() if isinstance(part, RecurrentLayer)]
    kept = [layer.counts for layer in layers]
    found: list[tuple[float, int, int]] = []

    def look(layer: Any, args: Any, options: Any, _: Any) -> None:
        found.append(defect(layer, args, options))

    hooks = [layer.register_forward_hook(look, with_kwargs=True) for layer in layers]
    try:
        with torch.random.fork_rng(current_gpus()), torch.compiler.set_stance("force_eager"):
            model(**inputs, use_cache=False, logits_to_keep=1)
    finally:
        for hook in hooks:
            hook.remove()
        for layer, counts in zip(layers, kept, strict=True):
            layer.__dict__["counts"] = counts
    return dict(zip(NAMES, map(list, zip(*found, strict=True)), strict=True)) if found else {}


def solves(model: nn.Module) -> dict[str, list[int]]:
    """Sweeps and mended columns of every recurrent layer's last call, {} where none are known."""
    infos = [part.last_solve for part in model.modules() if isinstance(part, RecurrentLayer)]
    known = [info for info in infos if info is not None]
    if not known:
        return {}
    return {name: [int(getattr(info, name).sum()) for info in known] for name in known[0]._fields}


def reporting(asked: str) -> str:
    """Of transformers' integrations, the one that is asked for; "auto" is TensorBoard, if there.

    Raises TrainingError for one that is not there.
    """
    if asked != "auto":
        there = ("auto", "none", "all", *get_available_reporting_integrations())
        if asked not in there:
            raise TrainingError(
                f"report_to must be one of {', '.join(there)}, got {asked!r}; others have to be "
                "installed"
            )
        return asked
    return "none" if importlib.util.find_spec("tensorboard") is None else "tensorboard"


class Board(TensorBoardCallback):
    """TensorBoard in the run's folder, without what a killed run wrote behind its checkpoint."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.logging_dir = self.logging_dir or str(folder)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Open the file of events; those of later steps are hidden, as they come again."""
        there = importlib.util.find_spec("tensorboard")  # or tensorboardX, which theirs opens
        if there and state.is_world_process_zero and self.tb_writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self.tb_writer = SummaryWriter(self.logging_dir, purge_step=state.global_step + 1)
        super().on_train_begin(args, state, control, **kwargs)


def start_lines(config: RunConfig, data: TrainingData, model: nn.Module, world: int) -> list[str]:
    """What a run says at its start: data, model, device, and how long it is to be."""
    length, tokens = config.data.sequence_length, config.batch * config.data.sequence_length
    rows, held_out = (len(cast(Any, part)) for part in (data.train, data.valid))
    weights = list(model.parameters())
    device, blocks = weights[0].device, config.model
    kinds = dict.fromkeys(config.model.cell if m == "rnn" else m for m in blocks.mixers or ())
    several = f"{world} x " if world > 1 else ""
    count = type_of(device).threads()
    threads = "" if count is None else f", {count} threads"
    return [
        f"data: {config.data.train or 'given'}: {rows * length:,} tokens to learn, "
        f"{held_out * length:,} held out, {data.bytes_per_token:.2f} bytes a token",
        f"model: {' and '.join(kinds)}, {blocks.num_hidden_layers} blocks of {blocks.hidden_size} "
        f"channels, {sum(weight.numel() for weight in weights):,} parameters, {config.precision}, "
        f"on {several}{device_name(device)}{threads}",
        f"run: {config.steps:,} steps of {config.batch:,} x {length:,} tokens, "
        f"{config.steps * tokens / (rows * length):.3g} epochs, into {config.out}",
    ]


def progress(lines: Sequence[str], tokens: int) -> TrainerCallback:
    """What shows how far a run is: a bar on a terminal, lines in a file.

    lines: said when training begins. tokens: of a step.
    """
    return _Bar(lines, tokens) if sys.stderr.isatty() else _Lines(lines, tokens)


class _Bar(ProgressCallback):
    """Trainer's progress bar, with the last figures beside it and nothing else."""

    def __init__(self, lines: Sequence[str], tokens: int) -> None:
        super().__init__()
        self.lines, self.shown = lines, dict[str, str]()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        say("\n".join(self.lines))
        super().on_train_begin(args, state, control, **kwargs)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if self.training_bar is None:
            return
        self.shown |= _shown(logs)
        self.training_bar.set_postfix(self.shown)


class _Lines(TrainerCallback):
    """A line on standard error whenever there are figures: a bar would fill a file."""

    def __init__(self, lines: Sequence[str], tokens: int) -> None:
        self.lines, self.tokens = lines, tokens

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        say("\n".join(self.lines))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        figures = [f"{name} {value}" for name, value in _shown(logs).items()]
        if not (figures and state.is_world_process_zero):
            return
        rate = logs.get("tokens_per_second")
        if rate:
            left = (state.max_steps - state.global_step) * self.tokens / rate
            figures += [f"{duration(left)} left"]
        at = f"step {state.global_step} of {state.max_steps}"
        print(f"{at}: {', '.join(figures)}", file=sys.stderr, flush=True)


def _shown(logs: dict[str, Any]) -> dict[str, str]:
    """The figures that are shown on the way, nats a token, by short names."""
    shown = {short: f"{logs[name]:.4g}" for name, short in NATS.items() if name in logs}
    if "tokens_per_second" in logs:
        shown["tokens/s"] = f"{logs['tokens_per_second']:,.0f}"
    return shown
