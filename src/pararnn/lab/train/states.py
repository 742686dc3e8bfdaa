"""States that rows of a step continue from the step before, see `DataConfig.stateful`."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from pararnn.lm.cache import CarriedCache


class RowStates:
    """States of a rank's rows: for each micro-batch a list of caches, one a layer."""

    def __init__(self, layers: int, count: int) -> None:
        self.layers, self.count, self.position = layers, count, 0
        self.forget()

    def forget(self) -> None:
        """Start from zero states, as at the beginning of an epoch."""
        self.caches = [[CarriedCache() for _ in range(self.layers)] for _ in range(self.count)]

    def take(self) -> list[CarriedCache]:
        """Return the caches of the next micro-batch, from which its next step starts."""
        index, self.position = self.position, (self.position + 1) % self.count
        self.caches[index] = [
            CarriedCache(*cache.after) if cache.after[1] is not None else cache
            for cache in self.caches[index]
        ]
        return self.caches[index]

    def tensors(self) -> dict[str, Tensor]:
        """Return the next step's initial states, (micro-batches, rows of one, ...) by name."""
        lists: dict[str, list[Tensor]] = {}
        for caches in self.caches:
            for layer, cache in enumerate(caches):
                for name, value in zip(("inputs", "states"), cache.after, strict=True):
                    if value is not None:
                        lists.setdefault(f"{layer}.{name}", []).append(value)
        return {name: torch.stack(values) for name, values in lists.items()}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Start the next step from what `tensors` returned."""
        self.forget()
        for index, caches in enumerate(self.caches):
            for layer, cache in enumerate(caches):
                inputs = tensors.get(f"{layer}.inputs")
                after = None if inputs is None else inputs[index], tensors[f"{layer}.states"][index]
                cache.after = after


def batch_of(ranks: Tensor, count: int) -> Tensor:
    """Return a batch's rows in order, from those of all ranks (ranks * micro-batches, rows, ...).

    A micro-batch holds the rows of rank 0, then those of rank 1 and so on, see `StepSampler`.
    """
    return ranks.unflatten(0, (-1, count)).transpose(0, 1).flatten(0, 2)


def rows_of(batch: Tensor, count: int, rank: int, world: int) -> Tensor:
    """Return a rank's rows of a batch, (micro-batches, rows of one, ...): inverse of `batch_of`."""
    return batch.unflatten(0, (count, world, -1))[:, rank]
