"""The order of rows: shuffled, or so that rows continue those of the last batch."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from torch.utils.data import Sampler

BLOCK = 1 << 16
"""Indices that become Python's integers at once."""


class _Resumable:
    """An epoch of `length` items, from item `start` on."""

    def __init__(self, length: int) -> None:
        if length < 1:
            raise ValueError(f"length must be positive, got {length}")
        self.length, self.epoch, self.start = length, 0, 0

    def set_epoch(self, epoch: int) -> None:
        """Go to an epoch: to its beginning, unless it is the present one."""
        if epoch != self.epoch:
            self.epoch, self.start = epoch, 0

    def skip(self, count: int) -> None:
        """Leave out the first `count` items of this epoch; nothing is read to do so."""
        if not 0 <= count <= self.length:
            raise ValueError(f"this epoch has {self.length} items to skip, got {count}")
        self.start = count

    def __len__(self) -> int:
        return self.length - self.start


class RowSampler(_Resumable, Sampler[int]):
    """Every row once an epoch, in an order that depends on `seed` and the epoch only.

    It holds one array of indices. `skip` counts rows.
    """

    def __init__(self, length: int, seed: int = 0) -> None:
        super().__init__(length)
        self.seed = seed

    def __iter__(self) -> Iterator[int]:
        order = np.arange(self.length, dtype=np.min_scalar_type(self.length))
        np.random.default_rng([self.seed, self.epoch]).shuffle(order)
        for start in range(self.start, self.length, BLOCK):
            yield from order[start : start + BLOCK].tolist()


class StreamSampler(_Resumable, Sampler[list[int]]):
    """Batches for carried states: each row continues that of the last batch.

    A batch sampler over `rows` contiguous rows: row j of batch k is row j * (rows // batch) + k;
    the at most batch - 1 last rows are left out. `skip` counts batches. Where several processes
    share a batch, each must take the same places of every batch.
    """

    def __init__(self, rows: int, batch: int) -> None:
        if not 1 <= batch <= rows:
            raise ValueError(f"batch must be from 1 to the {rows} rows, got {batch}")
        super().__init__(rows // batch)
        self.batch = batch

    def __iter__(self) -> Iterator[list[int]]:
        for step in range(self.start, self.length):
            yield list(range(step, self.length * self.batch, self.length))
