"""Batches of a run from any step on, without reading those before it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, Sampler, default_collate

from pararnn.base.device import has_gpu
from pararnn.lab.train.config import RunConfig
from pararnn.lab.train.order import RowSampler, StreamSampler
from pararnn.lm.loss import IGNORED
from pararnn.messages.group import span_of


def steps_of_epoch(config: RunConfig, rows: int) -> int:
    """Return the number of whole batches in `rows`; other rows are not learned in that epoch."""
    return rows // config.batch


def batches(config: RunConfig, rows: int, epoch: int, start: int) -> Iterable[list[int]]:
    """Return the rows of each step of an epoch from step `start` on, without reading others."""
    if config.data.stateful:
        streams = StreamSampler(rows, config.batch)
        streams.skip(start)
        return streams
    order = RowSampler(rows, config.seed)
    order.set_epoch(epoch)
    order.skip(start * config.batch)
    return BatchSampler(order, config.batch, drop_last=True)


def local_span(batch: Mapping[str, Tensor], rank: int, ranks: int) -> dict[str, Tensor]:
    """Return a rank's span of rows (B, T), with the labels that its positions predict: the last
    position predicts the next rank's first token."""
    if ranks == 1:
        return dict(batch)
    rows = dict(batch)
    labels = rows.pop("labels")
    rows["shift_labels"] = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
    span = span_of(labels.shape[1], rank, ranks)
    return {name: value[:, span].contiguous() for name, value in rows.items()}


def label_count(inputs: Mapping[str, Tensor]) -> Tensor:
    """Return the number of labels with a loss."""
    targets = inputs["shift_labels"] if "shift_labels" in inputs else inputs["labels"][:, 1:]
    return (targets != IGNORED).sum()


class StepSampler(Sampler[list[int]]):
    """A rank's rows, `device_batch` at a time, from the step `first` to the last one.

    The position in the data is a number of steps of `batch` rows, for any number of ranks. Ranks
    that share each row count as one. Micro-batch m of rank r begins at row
    (m * world + r) * device_batch of a batch.
    """

    def __init__(self, config: RunConfig, rows: int, rank: int, world: int, first: int) -> None:
        self.config, self.rows, self.rank, self.world, self.first = config, rows, rank, world, first
        self.micro_batches = config.batch // (config.device_batch * world)

    def __len__(self) -> int:
        return self.config.steps * self.micro_batches

    def __iter__(self) -> Iterator[list[int]]:
        step, size = self.first, self.config.device_batch
        while step < self.config.steps:
            epoch, start = divmod(step, steps_of_epoch(self.config, self.rows))
            for rows in batches(self.config, self.rows, epoch, start):
                for micro_batch in range(self.micro_batches):
                    begin = (micro_batch * self.world + self.rank) * size
                    yield rows[begin : begin + size]
                step += 1
                if step == self.config.steps:
                    return


def make_loader(
    config: RunConfig, rows: Dataset[Any], rank: int, world: int, first: int
) -> DataLoader[Any]:
    """Return a rank's batches, see `StepSampler`, without use of torch's global generator."""
    count = len(rows)  # type: ignore[arg-type]
    return DataLoader(
        rows,
        batch_sampler=StepSampler(config, count, rank, world, first),
        collate_fn=default_collate,
        pin_memory=has_gpu(),
        generator=torch.Generator(),
    )
