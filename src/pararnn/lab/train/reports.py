"""Reports of a run while it trains: a bar or lines, TensorBoard, other tools' integrations."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from transformers.integrations.integration_utils import (
    get_available_reporting_integrations,
    get_reporting_integration_callbacks,
)

from pararnn.base.device import has_gpu
from pararnn.base.errors import MissingExtra, TrainingError
from pararnn.base.extras import require
from pararnn.lab.progress import duration, say
from pararnn.lab.train.config import RunConfig

SHORT_NAMES = {"loss": "loss", "eval_loss": "valid", "eval_bits_per_byte": "bits/byte"}
"""Losses that are shown while a run trains, by their names in logs."""


def reporting(name: str) -> str:
    """Return the integration of transformers that is requested; "auto" is TensorBoard, if there.

    Raises TrainingError for one that is not there.
    """
    if name == "auto":
        return "none" if importlib.util.find_spec("tensorboard") is None else "tensorboard"
    there = ("auto", "none", "all", *get_available_reporting_integrations())
    if name not in there:
        raise TrainingError(
            f"report_to must be one of {', '.join(there)}, got {name!r}; others have to be "
            "installed"
        )
    return name


class Reports:
    """Whatever reads a run's figures while it trains, in its first process."""

    def __init__(
        self, name: str, config: RunConfig, model: Any, step: int, lines: Sequence[str]
    ) -> None:
        """Begin behind a step. name: see `reporting`. lines: written first."""
        say("\n".join(lines))
        self.parts: list[Any] = []
        if os.environ.get("RANK", "0") == "0":
            self.parts = [(_Bar if sys.stderr.isatty() else _Lines)(config, step)]
            names = get_available_reporting_integrations() if name == "all" else [name]
            if "tensorboard" in names and importlib.util.find_spec("tensorboard"):
                self.parts.append(_Board(config, model, step))
                names.remove("tensorboard")
            if set(names) - {"none"}:
                self.parts.append(_Integrations(names, config, model, step))

    def advance(self, step: int) -> None:
        """Show that a step has been made."""
        for part in self.parts[:1]:
            part.advance(step)

    def log(self, step: int, logs: Mapping[str, float]) -> None:
        """Report figures of a step, by name."""
        for part in self.parts:
            part.log(step, logs)

    def close(self) -> None:
        """End all reports."""
        for part in self.parts:
            with suppress(OSError):  # `log` has flushed all, and another error may be under way
                part.close()


class _Bar:
    """A progress bar with the last figures next to it."""

    def __init__(self, config: RunConfig, step: int) -> None:
        self.bar = require("tqdm").tqdm(total=config.steps, initial=step, dynamic_ncols=True)
        self.figures: dict[str, str] = {}

    def advance(self, step: int) -> None:
        self.bar.update(step - self.bar.n)

    def log(self, step: int, logs: Mapping[str, float]) -> None:
        self.figures |= _figures(logs)
        self.bar.set_postfix(self.figures)

    def close(self) -> None:
        self.bar.close()


class _Lines:
    """A line on standard error whenever there are figures: a bar would fill a file."""

    def __init__(self, config: RunConfig, step: int) -> None:
        self.steps, self.tokens = config.steps, config.batch * config.data.sequence_length

    def advance(self, step: int) -> None:
        pass

    def log(self, step: int, logs: Mapping[str, float]) -> None:
        figures = [f"{name} {value}" for name, value in _figures(logs).items()]
        if not figures:
            return
        if rate := logs.get("tokens_per_second"):
            figures += [f"{duration((self.steps - step) * self.tokens / rate)} left"]
        print(f"step {step} of {self.steps}: {', '.join(figures)}", file=sys.stderr, flush=True)

    def close(self) -> None:
        pass


def _figures(logs: Mapping[str, float]) -> dict[str, str]:
    """Return the figures that are shown while a run trains, nats a token, by short names."""
    figures = {short: f"{logs[name]:.4g}" for name, short in SHORT_NAMES.items() if name in logs}
    if "tokens_per_second" in logs:
        figures["tokens/s"] = f"{logs['tokens_per_second']:,.0f}"
    return figures


class _Board:
    """TensorBoard in the run's folder; points behind the checkpoint are hidden, as they return."""

    def __init__(self, config: RunConfig, model: Any, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = os.environ.get("TENSORBOARD_LOGGING_DIR", str(Path(config.out) / "tensorboard"))
        self.writer = SummaryWriter(os.path.expanduser(folder), purge_step=step + 1)
        self.writer.add_text("args", json.dumps(dataclasses.asdict(config), indent=1))
        self.writer.add_text("model_config", model.config.to_json_string())

    def log(self, step: int, logs: Mapping[str, float]) -> None:
        for name, value in logs.items():
            group, short = ("eval", name[5:]) if name.startswith("eval_") else ("train", name)
            self.writer.add_scalar(f"{group}/{short}", value, step)
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


class _Integrations:
    """Integrations of transformers, such as wandb, which read its Trainer's events."""

    def __init__(self, names: Sequence[str], config: RunConfig, model: Any, step: int) -> None:
        if importlib.util.find_spec("accelerate") is None:  # which TrainingArguments needs
            raise MissingExtra(f"report_to={names[0]} needs accelerate: pip install accelerate")
        from transformers import TrainerControl, TrainerState, TrainingArguments

        self.callbacks = [make() for make in get_reporting_integration_callbacks(list(names))]
        arguments = TrainingArguments(
            output_dir=config.out,
            max_steps=config.steps,
            per_device_train_batch_size=config.device_batch,
            learning_rate=config.optimiser.learning_rate,
            seed=config.seed,
            use_cpu=not has_gpu(),
            report_to=list(names),
        )
        self.state = TrainerState(max_steps=config.steps, global_step=step)
        self.events = arguments, self.state, TrainerControl()
        self.model = model
        self.send("on_init_end")
        self.send("on_train_begin")

    def send(self, event: str, **more: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, event)(*self.events, model=self.model, **more)

    def log(self, step: int, logs: Mapping[str, float]) -> None:
        self.state.global_step, self.state.epoch = step, logs["epoch"]
        self.send("on_log", logs=dict(logs))

    def close(self) -> None:
        self.send("on_train_end")
