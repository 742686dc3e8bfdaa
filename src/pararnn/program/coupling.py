"""Coupling of a step's channels: the sizes that graphs run on, and the columns of a solve.

A column solves independently: it is a whole batch row, or a channel of one. Flags and numbers of
columns are tensors (B, ...), one entry a column. Another kind of column is another subclass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class Coupling:
    """All channels of a batch row couple: a column is a row, graphs run on rows (R, D)."""

    def reach(self, channels: int) -> int:
        """Return the number of channels that a next state may depend on, 0 for its channel only."""
        return channels

    def sizes(self, size: Sequence[int]) -> tuple[int, ...]:
        """Return the sizes that graphs take states and inputs (B, T, D) in, channels last."""
        batch, steps, channels = size
        return (batch * steps, channels)

    def representation(self, entries: Sequence[Any], like: Tensor, num_states: int) -> Tensor:
        """Return a Jacobian at states as `like`, from what a graph returns after the new states."""
        representation: Tensor = entries[0]
        return representation

    def param_sizes(self, param: Tensor, size: Sequence[int]) -> tuple[int, ...]:
        """Return the sizes in which a graph returns a parameter's gradient for steps (B, T, D)."""
        return tuple(param.shape)

    def total(self, gradient: Tensor, padding: Tensor | None) -> Tensor:
        """Return a parameter's gradient, from a graph's result: the graph sums over rows."""
        return gradient

    def any(self, mask: Tensor) -> Tensor:
        """Check, by column, whether a mask (B, T, N, D) holds anywhere."""
        return mask.flatten(1).any(1)

    def largest(self, values: Tensor) -> Tensor:
        """Return the largest of (B, T, N, D) by column."""
        return values.flatten(1).amax(1)

    def spread(self, columns: Tensor, like: Tensor) -> Tensor:
        """Expand entries of columns to the size of `like` (B, T, N, D)."""
        return columns.reshape(-1, 1, 1, 1).expand_as(like)

    def take(self, whole: Tensor, columns: Tensor) -> Tensor:
        """Return the n columns of `whole` (B, ..., D or 1) that a mask of columns selects."""
        return whole[columns]

    def put(self, whole: Tensor, columns: Tensor, values: Tensor) -> Tensor:
        """Return `whole` with the mask's columns replaced by `values`, in the layout of `take`."""
        out = whole.clone()
        out[columns] = values
        return out

    def take_params(self, params: tuple[Tensor, ...], columns: Tensor) -> tuple[Tensor, ...]:
        """Return the parameters of the columns that `take` gives."""
        return params


class Apart(Coupling):
    """No channels couple: a column is a channel of a row, graphs run on any sizes."""

    def reach(self, channels: int) -> int:
        return 0

    def sizes(self, size: Sequence[int]) -> tuple[int, ...]:
        return tuple(size)

    def representation(self, entries: Sequence[Any], like: Tensor, num_states: int) -> Tensor:
        out = torch.stack([expand_entry(entry, like, like.shape) for entry in entries], -2)
        return out if num_states == 1 else out.unflatten(-2, (num_states, num_states))

    def param_sizes(self, param: Tensor, size: Sequence[int]) -> tuple[int, ...]:
        return tuple(size)

    def total(self, gradient: Tensor, padding: Tensor | None) -> Tensor:
        real = gradient if padding is None else gradient.masked_fill(padding, 0)
        return real.sum((0, 1))

    def any(self, mask: Tensor) -> Tensor:
        return mask.any(2).any(1)

    def largest(self, values: Tensor) -> Tensor:
        return values.amax((1, 2))

    def spread(self, columns: Tensor, like: Tensor) -> Tensor:
        return columns.reshape(len(columns), 1, 1, -1).expand_as(like)

    def take(self, whole: Tensor, columns: Tensor) -> Tensor:
        """Return the n channels in which the mask holds, as those of a single row: (1, ..., n)."""
        batch, channel = columns.nonzero(as_tuple=True)
        full = whole.expand(*whole.shape[:-1], columns.shape[1])
        return full[batch, ..., channel].movedim(0, -1).unsqueeze(0).contiguous()

    def put(self, whole: Tensor, columns: Tensor, values: Tensor) -> Tensor:
        out = whole.clone()
        batch, channel = columns.nonzero(as_tuple=True)
        out[batch, ..., channel] = values.squeeze(0).movedim(-1, 0)
        return out

    def take_params(self, params: tuple[Tensor, ...], columns: Tensor) -> tuple[Tensor, ...]:
        channel = columns.nonzero(as_tuple=True)[1]
        return tuple(param[channel] for param in params)


TOGETHER, APART = Coupling(), Apart()


def expand_entry(entry: Any, like: Tensor, size: Sequence[int]) -> Tensor:
    """Return a graph's output (a tensor that may need broadcasting, or a number) at full size."""
    if not isinstance(entry, Tensor):
        return like.new_full((), float(entry)).expand(*size)
    return entry.expand(*size)
