"""States that rows of a step take over from the step before, see `DataConfig.stateful`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from pararnn.base.extras import require
from pararnn.lab.train.checkpoints import reading
from pararnn.lm.cache import CarriedCache

FILE = "streams.safetensors"
"""In a checkpoint: the states of all rows of the batch, in its order."""


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

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Start the next step from what `tensors` returned."""
        self.forget()
        for part, caches in enumerate(self.caches):
            for layer, cache in enumerate(caches):
                inputs, states = (tensors.get(f"{layer}.{name}") for name in ("inputs", "states"))
                assert states is not None, layer
                cache.after = None if inputs is None else inputs[part], states[part]


def save(carry: Carry, folder: Path, gather: Callable[[Tensor], Tensor], first: bool) -> None:
    """Write the states of all ranks' rows, in the batch's order; every rank must call it.

    gather: (parts, ...) of each rank to (ranks * parts, ...). first: True in the rank that writes.
    """
    batch = {name: gather(value.contiguous()) for name, value in carry.tensors().items()}
    if not first:
        return
    rows = {
        # The rows of a part are all ranks' in turn, see `StepSampler`.
        name: value.unflatten(0, (-1, carry.parts)).transpose(0, 1).flatten(0, 2).cpu().contiguous()
        for name, value in batch.items()
    }
    require("safetensors.torch").save_file(rows, folder / FILE)


def load(carry: Carry, folder: Path, rank: int, world: int, device: torch.device) -> None:
    """Read a rank's rows of what `save` wrote, on any number of ranks.

    Raises TrainingError if the file is missing or cannot be read.
    """
    with reading(folder, FILE, "the states that rows go on from"):
        batch = require("safetensors.torch").load_file(folder / FILE)
    size = (carry.parts, world, -1)
    carry.restore(
        {name: value.unflatten(0, size)[:, rank].to(device) for name, value in batch.items()}
    )
