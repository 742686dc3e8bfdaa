"""How the rows of one layer's call are cut into sequences, and what those start from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pararnn.numerics import compute_dtype
from pararnn.sequences import Sequences, of_cu_seqlens, of_resets
from pararnn.solve import checked_reset
from pararnn.tensors import Given, as_states

States = Tensor | tuple[Tensor, ...]


class Cuts(NamedTuple):
    """Sequences, what they start from, and where the zero state starts; `last`: the pieces that
    sequences end with where resets have cut them, else None."""

    sequences: Sequences | None
    initial: States | None
    reset: Given | None
    last: Tensor | None = None


def restarted(
    x: Tensor, cuts: Cuts, names: Sequence[str], channels: int, given: States, reverse: bool
) -> Cuts:
    """The cuts of x (B, T, input) with resets that start from given states, (K, D) each.

    A reset begins a sequence of its own: that is exact for every engine, and differentiable.
    Raises ValueError for sizes that do not fit, with what is allowed.
    """
    sequences, initial = cuts.sequences, cuts.initial
    reset = checked_reset(x, cuts.reset)
    if reset is None:
        raise ValueError("reset_states say what resets start from: give reset, too")
    states = _of_size("reset_states", "K", names, (None, channels), given)
    total = x.shape[0] if sequences is None else sequences.total
    if initial is None:
        wide = compute_dtype(x.dtype)
        begin = tuple([x.new_zeros((total, channels), dtype=wide) for _ in states])
    else:
        begin = _of_size("initial", "S", names, (total, channels), initial)
    pieces, last = of_resets(reset, states[0].shape[0], sequences, reverse)
    if reverse:
        states = tuple([state.flip(0) for state in states])
    start = tuple([torch.cat(both) for both in zip(begin, states, strict=True)])
    return Cuts(pieces, start, None, last)


def _of_size(
    what: str, rows: str, names: Sequence[str], size: tuple[int | None, int], given: States
) -> tuple[Tensor, ...]:
    """States as a tuple of a size each; None in it is any, the same for all."""
    states = as_states(what, given)
    shapes = [tuple(state.shape) for state in states]
    count, channels = size
    if count is None and shapes and shapes[0]:
        count = shapes[0][0]
    if shapes != [(count, channels)] * len(names):
        raise ValueError(
            f"{what} must be ({rows}, {channels}) for each of {tuple(names)}, got {shapes}"
        )
    return states


def packed_into_one_row(x: Tensor, cu_seqlens: Given, sequences: Any) -> tuple[Tensor, Sequences]:
    """x and the sequences that `cu_seqlens` cuts it into."""
    if sequences is not None:
        raise ValueError("cu_seqlens and sequences both say where sequences start: give one")
    sequences = of_cu_seqlens(cu_seqlens, len(x), x.shape[1], x.device)
    return without_padding(x, sequences), sequences


def without_padding(x: Tensor, sequences: Sequences) -> Tensor:
    """x with 0 at padding: it may hold anything there, and 0 * NaN is NaN."""
    return x.masked_fill((sequences.seq < 0).unsqueeze(-1), 0)
