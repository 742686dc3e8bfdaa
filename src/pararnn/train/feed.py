"""The batches of a run from any step on, without reading those before it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, Sampler, default_collate

from pararnn.device import has_gpu
from pararnn.train.config import RunConfig
from pararnn.train.order import RowSampler, StreamSampler


def steps_of_epoch(config: RunConfig, rows: int) -> int:
    """Whole batches in `rows`; what is left over is not learned in that epoch."""
    return rows // config.batch


def batches(config: RunConfig, rows: int, epoch: int, done: int) -> Iterable[list[int]]:
    """The rows of each step of an epoch but the first `done`, which are not looked at."""
    if config.data.stateful:
        streams = StreamSampler(rows, config.batch)
        streams.skip(done)
        return streams
    order = RowSampler(rows, config.seed)
    order.set_epoch(epoch)
    order.skip(done * config.batch)
    return BatchSampler(order, config.batch, drop_last=True)


class StepSampler(Sampler[list[int]]):
    """A rank's rows, `device_batch` at a time, from the step on that `first` says until the end.

    The place in the data is a number of steps, each of `batch` rows, however many ranks share
    them: of a batch, rank r takes rows (m * world + r) * device_batch and on as its part m.
    """

    def __init__(
        self, config: RunConfig, rows: int, rank: int, world: int, first: Callable[[], int]
    ) -> None:
        self.config, self.rows, self.rank, self.world, self.first = config, rows, rank, world, first
        self.parts = config.batch // (config.device_batch * world)

    def __len__(self) -> int:
        return self.config.steps * self.parts

    def __iter__(self) -> Iterator[list[int]]:
        step, size = self.first(), self.config.device_batch
        while step < self.config.steps:
            epoch, done = divmod(step, steps_of_epoch(self.config, self.rows))
            for rows in batches(self.config, self.rows, epoch, done):
                for part in range(self.parts):
                    start = (part * self.world + self.rank) * size
                    yield rows[start : start + size]
                step += 1
                if step == self.config.steps:
                    return


def make_loader(
    config: RunConfig, rows: Dataset[Any], rank: int, world: int, first: Callable[[], int]
) -> DataLoader[Any]:
    """Batches of a rank, see `StepSampler`; it draws nothing from torch's global generator."""
    count = len(rows)  # type: ignore[arg-type]
    return DataLoader(
        rows,
        batch_sampler=StepSampler(config, count, rank, world, first),
        collate_fn=default_collate,
        pin_memory=has_gpu(),
        generator=torch.Generator(),
    )
