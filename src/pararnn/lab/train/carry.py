"""States that rows of a step take over from the step before, see `DataConfig.stateful`."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from pararnn.lm.cache import CarriedCache


class Carry:
    """States of a rank's rows: for each part of its batch a list of caches, one a layer."""

    def __init__(self, layers: int, parts: int) -> None:
        self.layers, self.parts, self.at = layers, parts, 0
        self.forget()

    def forget(self) -> None:
        """Start from zero states, as at the beginning of an epoch."""
        self.caches = [[CarriedCache() for _ in range(self.layers)] for _ in range(self.parts)]

    def take(self) -> list[CarriedCache]:
        """Return the caches of the next part; its next step starts from what they hold then."""
        part, self.at = self.at, (self.at + 1) % self.parts
        self.caches[part] = [
            CarriedCache(*cache.after) if cache.after[1] is not None else cache
            for cache in self.caches[part]
        ]
        return self.caches[part]

    def tensors(self) -> dict[str, Tensor]:
        """Return the next step's initial states, (parts, rows of a part, ...) by name."""
        lists: dict[str, list[Tensor]] = {}
        for part in self.caches:
            for layer, cache in enumerate(part):
                for name, value in zip(("inputs", "states"), cache.after, strict=True):
                    if value is not None:
                        lists.setdefault(f"{layer}.{name}", []).append(value)
        return {name: torch.stack(values) for name, values in lists.items()}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Start the next step from what `tensors` returned."""
        self.forget()
        for part, caches in enumerate(self.caches):
            for layer, cache in enumerate(caches):
                inputs = tensors.get(f"{layer}.inputs")
                after = None if inputs is None else inputs[part], tensors[f"{layer}.states"][part]
                cache.after = after


def batch_of(ranks: Tensor, parts: int) -> Tensor:
    """Return the rows of a batch in its order, from those of all ranks (ranks * parts, rows, ...).

    The rows of a part are all ranks' in turn, see `StepSampler`.
    """
    return ranks.unflatten(0, (-1, parts)).transpose(0, 1).flatten(0, 2)


def rows_of(batch: Tensor, parts: int, rank: int, world: int) -> Tensor:
    """Return a rank's rows of a batch, (parts, rows of a part, ...); undoes `batch_of`."""
    return batch.unflatten(0, (parts, world, -1))[:, rank]
