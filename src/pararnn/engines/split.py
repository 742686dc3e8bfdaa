"""How (newton, fused) cuts time into segments: how many, how long, and how they guess."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

MIN_LENGTH = 256
"""Steps below which cutting time takes longer than it saves."""
MIN_SIZE = 32
"""Steps of a segment, at least: below, its guess takes longer than the segment."""
BURN_IN = {torch.float64: 96, torch.float32: 48, torch.bfloat16: 32, torch.float16: 32}
"""Steps after which most cells have forgotten where they started, to rounding."""
WARPS_A_CORE = 4
"""Warps that a multiprocessor should have: one a scheduler."""


class Split(NamedTuple):
    """Time in `segments` pieces of `size` steps (the last may be shorter); guesses of `burn_in`."""

    segments: int
    size: int
    burn_in: int


_PINNED: list[Split | None] = [None]


@contextmanager
def pinned(split: Split | None) -> Iterator[None]:
    """Within this context, time is cut as `split` says: for measurements and tests."""
    _PINNED.append(split)
    try:
        yield
    finally:
        _PINNED.pop()


def segments_for(length: int, columns: int, cores: int) -> int:
    """How many segments `length` steps of `columns` tiles are worth: 1 where all cores are busy."""
    return max(1, min(WARPS_A_CORE * cores // max(columns, 1), length // MIN_SIZE))


def split_of(
    length: int, columns: int, dtype: torch.dtype, steps: int, cores: int, capacity: int
) -> Split:
    """The split of `length` steps for `columns` independent tiles of channels.

    Sizes and burn-ins are multiples of `steps`, what the kernel reads at once; all segments of all
    columns fit on the device at once, which holds `capacity`, on `cores` multiprocessors.
    """
    if _PINNED[-1] is not None:
        _, size, burn_in = _PINNED[-1]
    else:
        burn_in = BURN_IN[dtype]
        size = -(-length // segments_for(length, columns, cores))
    least = -(-length // max(capacity // columns, 1))
    size = _rounded_up(max(size, least), steps)
    return Split(-(-length // size), size, _rounded_up(burn_in, steps))


def _rounded_up(x: int, unit: int) -> int:
    return -(-x // unit) * unit
