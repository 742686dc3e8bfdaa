"""Figures of a run while it trains: a bar or lines, and TensorBoard, wandb or trackio."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from pararnn.base.errors import TrainingError
from pararnn.lab.progress import Progress, say
from pararnn.lab.train.config import RunConfig

SHORT_NAMES = {"loss": "loss", "valid_loss": "valid", "valid_bits_per_byte": "bits/byte"}
"""Losses that are shown while a run trains, by their names in the log."""


class Writer(NamedTuple):
    """Functions that send figures of a step, and end."""

    log: Callable[[Mapping[str, float], int], None]
    close: Callable[[], None]


def _tensorboard(config: RunConfig, step: int) -> Writer:
    """Write into the run's folder; points after the checkpoint are hidden, as they return."""
    from torch.utils.tensorboard import SummaryWriter

    board = SummaryWriter(str(Path(config.out) / "tensorboard"), purge_step=step + 1)
    board.add_text("config", str(asdict(config)))

    def log(logs: Mapping[str, float], step: int) -> None:
        for name, value in logs.items():
            board.add_scalar(name, value, step)
        board.flush()

    return Writer(log, board.close)


def _service(module: str, config: RunConfig, step: int) -> Writer:
    """Send to a service by the functions that wandb and trackio share."""
    service: Any = importlib.import_module(module)
    service.init(project="pararnn", name=config.name, config=asdict(config))
    return Writer(lambda logs, step: service.log(dict(logs), step=step), service.finish)


TRACKERS = ("tensorboard", "wandb", "trackio")


def tracker_of(name: str) -> str:
    """Return the package that `report_to` names, "none" for none; "auto" is TensorBoard, if there.

    Raises TrainingError for another one, and for one that is not installed.
    """
    installed = [package for package in TRACKERS if importlib.util.find_spec(package) is not None]
    if name == "auto":
        return "tensorboard" if "tensorboard" in installed else "none"
    if name not in ("none", *installed):
        raise TrainingError(
            f"report_to must be auto, none, or one of {', '.join(TRACKERS)} that is installed "
            f"({', '.join(installed) or 'none is'}), got {name!r}"
        )
    return name


class Reports:
    """What shows a run's figures while it trains, in its first process."""

    def __init__(self, tracker: str, config: RunConfig, step: int, lines: Sequence[str]) -> None:
        """Begin after a step. tracker: see `tracker_of`. lines: written first."""
        say("\n".join(lines))
        self.progress: Progress | None = None
        self.writer: Writer | None = None
        self.figures: dict[str, str] = {}
        if os.environ.get("RANK", "0") == "0":
            self.progress = Progress(config.name, config.steps, "steps")
            if tracker == "tensorboard":
                self.writer = _tensorboard(config, step)
            elif tracker != "none":
                self.writer = _service(tracker, config, step)

    def advance(self, step: int) -> None:
        """Show that a step has been made."""
        if self.progress is not None:
            self.progress.update(step, **self.figures)

    def log(self, step: int, logs: Mapping[str, float]) -> None:
        """Report figures of a step, by name."""
        self.figures |= {
            short: f"{logs[name]:.4g}" for name, short in SHORT_NAMES.items() if name in logs
        }
        if self.writer is not None:
            self.writer.log(logs, step)

    def close(self) -> None:
        if self.progress is not None:
            self.progress.__exit__(None, None, None)
        if self.writer is not None:
            self.writer.close()
