"""A run of the training loop on the bytes of a corpus, within a budget of seconds."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

from pararnn.base.atomic import remove
from pararnn.base.extras import require
from pararnn.lab.tasks import Corpus
from pararnn.lab.train.config import RunConfig
from pararnn.lab.train.corpus.tokenizer import ByteTokenizer
from pararnn.lab.train.log import read_rows
from pararnn.lm import BYTES, LanguageModel
from pararnn.lm.checkpoint import BODY

WARM_UP, TIMED = 2, 5
"""Steps before the timed ones, in which kernels are compiled, and timed steps."""
FORWARD = 0.4
"""Share of a step's time that a validation's forward pass of as many rows takes."""
VALIDATION = 0.25
"""Largest share of the time that validations may take."""
POINTS = 100
"""Points of a training curve, at most."""


class Curves(NamedTuple):
    """Bits per byte by optimizer steps, and the run's steps and seconds, validation included."""

    train: list[tuple[int, float]]
    valid: list[tuple[int, float]]
    steps: int
    seconds: float


class ByteRows(Dataset[dict[str, Tensor]]):
    """Contiguous rows of `length` bytes of a text, uint8 (n,); the remainder is no row."""

    def __init__(self, text: Tensor, length: int) -> None:
        self.rows = text[: len(text) // length * length].view(-1, length)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = self.rows[index].long()
        return {"input_ids": row, "labels": row}


@dataclass(frozen=True)
class ByteData:
    """A corpus as rows, see `TrainingData`; it has no documents that end."""

    train: ByteRows
    valid: ByteRows
    tokenizer: ByteTokenizer
    bytes_per_token: float = 1.0


def train_within(
    seconds: float, config: RunConfig, corpus: Corpus, device: torch.device, validations: int
) -> tuple[LanguageModel, Curves]:
    """Train a model of bytes for about `seconds`, and at most `config.steps` steps, at least one.

    The number of steps follows from the time of some, which are not part of the run. It logs into
    `config.out`, a folder that is removed. The model is in evaluation mode on `device`.

    Raises MissingExtra without transformers, TrainingError as `run_training` does.
    """
    require("transformers")
    from pararnn.lab.train.checkpoints import whole_weights
    from pararnn.lab.train.sharding import process_group
    from pararnn.lab.train.trainer import RunTrainer

    begin, out, length = time.perf_counter(), Path(config.out), config.data.sequence_length
    train, valid = (ByteRows(text, length) for text in (corpus.train, corpus.valid))
    data = ByteData(train, valid, ByteTokenizer(vocabulary=BYTES))
    remove(out)  # left by a process that was killed
    out.mkdir(parents=True)
    try:
        with process_group():
            step_seconds = time_step(RunTrainer(config, data, device))
            steps_left = (begin + seconds - time.perf_counter()) / step_seconds
            # The cost of a row's validations, in steps.
            row_steps = FORWARD * validations / config.batch
            affordable = max(1, int(VALIDATION * steps_left / row_steps))
            rows = min(config.valid_rows, len(data.valid), affordable)
            steps = max(1, min(config.steps, int(steps_left - row_steps * rows)))
            config = replace(
                config,
                steps=steps,
                log_every=math.ceil(steps / POINTS),
                valid_every=math.ceil(steps / validations),
                save_every=steps,
                valid_rows=rows,
            )
            trainer = RunTrainer(config, data, device, deadline=begin + seconds)
            begin_run = time.perf_counter()
            trainer.run()
            run_seconds = time.perf_counter() - begin_run
            steps = trainer.step
            weights = whole_weights(trainer.model)
        log = read_rows(out / "log.csv")
    finally:
        remove(out)
    model = LanguageModel(config.model, device=device)
    model.load_state_dict({name.removeprefix(BODY): value for name, value in weights.items()})
    losses, valid_losses = (
        [(int(row["step"]), float(row[name]) / math.log(2)) for row in log if row[name]]
        for name in ("loss", "valid_loss")
    )
    return model.eval(), Curves(losses, valid_losses, steps, run_seconds)


def time_step(trainer: Any) -> float:
    """Return the seconds of an optimizer step of a trainer, which is of no use afterwards."""
    from pararnn.lab.train.feed import make_loader

    batches = iter(make_loader(replace(trainer.config, steps=10**9), trainer.data.train, 0, 1, 0))
    times = []
    for _ in range(WARM_UP + TIMED):
        begin = time.perf_counter()
        norm, _ = trainer.learn([next(batches)])
        norm.item()  # waits for the device
        times.append(time.perf_counter() - begin)
    return sorted(times[WARM_UP:])[TIMED // 2]
