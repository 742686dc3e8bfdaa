"""What one looks at: progress, reports, and what the recurrent layers' solvers do."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.integration_utils import get_available_reporting_integrations
from transformers.trainer_callback import ProgressCallback, TrainerCallback

from pararnn.check.verify import defect
from pararnn.errors import TrainingError
from pararnn.layers import RecurrentLayer

NAMES = ("defect", "sweeps", "mended")
"""Of what `checked` finds: a number each for every recurrent layer."""


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
    cuda = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    try:
        with torch.random.fork_rng(cuda), torch.compiler.set_stance("force_eager"):
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


def progress() -> TrainerCallback:
    """What shows how far a run is: a bar on a terminal, lines in a file."""
    return _Bar() if sys.stderr.isatty() else _Lines()


class _Bar(ProgressCallback):
    """Trainer's progress bar, with the last figures beside it and nothing else."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if self.training_bar is None:
            return
        self.shown = getattr(self, "shown", {}) | _shown(logs)
        self.training_bar.set_postfix(self.shown)


class _Lines(TrainerCallback):
    """A line on standard error whenever there are figures: a bar would fill a file."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        shown = _shown(logs)
        if shown and state.is_world_process_zero:
            figures = ", ".join(f"{name} {value}" for name, value in shown.items())
            at = f"step {state.global_step} of {state.max_steps}"
            print(f"{at}: {figures}", file=sys.stderr, flush=True)


def _shown(logs: dict[str, Any]) -> dict[str, str]:
    """The figures that are shown on the way, nats a token, by short names."""
    names = {"loss": "loss", "eval_loss": "valid"}
    return {short: f"{logs[name]:.4g}" for name, short in names.items() if name in logs}
