"""Newton's method over ranks: where a span starts, given the spans' ends and their maps.

Tensors are (N, B, D), N states of D channels; those of all ranks (ranks, N, B, D), in the order of
processing. A map is (N, N, B, D): the derivative of each state at the end of a span by each state
that the span starts from.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def is_settled(starts: Tensor, ends: Tensor, sizes: Tensor, tolerance: float) -> Tensor:
    """Return whether each span has started from the end of the one before, to a tolerance.

    starts, ends, sizes: for each rank after the first, its start, the end of the rank before, and
    the size that the tolerance is relative to.
    """
    distance = (starts - ends).abs()
    same = (starts == ends) | (starts.isnan() & ends.isnan())
    limit = tolerance * torch.maximum(sizes, torch.maximum(starts.abs(), ends.abs()))
    return same | ((distance <= limit) & limit.isfinite())


def next_starts(
    starts: Tensor, ends: Tensor, maps: Tensor | None, apply: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """Return the next starts of spans by Newton's update, which makes one more rank exact each
    time.

    apply(map, vector): the map of a rank applied to a change of its start. maps: None for two
    ranks, where no start depends on another one. Where an update is not finite, or larger than the
    states, the end of the rank before is the start.
    """
    new = [starts[0]]
    for rank in range(len(starts) - 1):
        end, change = ends[rank], new[rank] - starts[rank]
        if maps is None or rank == 0:
            new.append(end)
            continue
        update = apply(maps[rank], change)
        bound = 4 * torch.maximum(end.abs(), starts[rank + 1].abs())
        # 0 times an infinite entry of a map is NaN: a start that has not changed changes nothing.
        fits = update.isfinite() & (update.abs() <= bound) & (change != 0).any(0)
        new.append(torch.where(fits, end + update, end))
    return torch.stack(new)


def push_forward(derivative: Tensor, change: Tensor) -> Tensor:
    """Apply a map to a change of a span's start."""
    return (derivative * change.unsqueeze(0)).sum(1)


def pull_back(derivative: Tensor, change: Tensor) -> Tensor:
    """Apply a transposed map to a change of the gradient at a span's end."""
    return (derivative * change.unsqueeze(1)).sum(0)
