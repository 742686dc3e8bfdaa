"""Segments of time of (newton, fused): requested, and planned."""

from __future__ import annotations

from typing import NamedTuple

import torch

MIN_LENGTH = 256
"""Steps below which cutting time takes longer than it saves."""
MIN_SIZE = 32
"""Least steps of a segment on a GPU: below, its burn-in takes longer than the segment."""
BURN_IN = {torch.float64: 96, torch.float32: 48, torch.bfloat16: 32, torch.float16: 32}
"""Steps after which most cells have forgotten their start, to rounding."""
WARPS_A_CORE = 4
"""Warps that a multiprocessor should have: one a scheduler."""
MAX_REQUEST = 2**30
"""Largest accepted `segments` and `burn_in`."""


class Split(NamedTuple):
    """Time in `segments` pieces of `size` steps (the last may be shorter), each of which guesses
    its start by `burn_in` steps."""

    segments: int
    size: int
    burn_in: int


class SplitRequest(NamedTuple):
    """Requested segments and burn-in; None defers to the rule."""

    segments: int | None = None
    burn_in: int | None = None

    @classmethod
    def check(cls, segments: int | None, burn_in: int | None) -> SplitRequest:
        """Check for `segments` of 1 or more and `burn_in` of 0 or more. Raises ValueError."""
        for name, value, least in (("segments", segments, 1), ("burn_in", burn_in, 0)):
            fits = isinstance(value, int) and least <= value <= MAX_REQUEST
            if value is not None and not fits:
                raise ValueError(
                    f"{name} must be an integer from {least} to {MAX_REQUEST}, or None for the "
                    f"rule's, got {value!r}"
                )
        return cls(segments, burn_in)


NO_REQUEST = SplitRequest()
"""Request that defers both parts to the rule."""


def useful_segments(length: int, columns: int, cores: int, min_size: int = MIN_SIZE) -> int:
    """Return how many segments of `length` steps keep all cores busy with `columns` tiles; 1 where
    the tiles alone do."""
    return max(1, min(WARPS_A_CORE * cores // max(columns, 1), length // min_size))


def plan_split(
    length: int,
    columns: int,
    dtype: torch.dtype,
    steps: int,
    cores: int,
    capacity: int,
    request: SplitRequest = NO_REQUEST,
    min_size: int = MIN_SIZE,
) -> Split:
    """Plan the split of `length` steps for `columns` independent tiles of channels.

    Sizes and burn-ins are multiples of `steps`, the stage that a kernel reads at once. All segments
    of all columns fit at once on the device, which holds `capacity` on `cores` multiprocessors. The
    rule makes no segments of fewer than `min_size` steps. Requests are reduced to what fits: the
    capacity, one segment a stage, and a burn-in of `length`.
    """
    segments = request.segments or useful_segments(length, columns, cores, min_size)
    burn_in = BURN_IN[dtype] if request.burn_in is None else min(request.burn_in, length)
    fitting = max(1, min(segments, capacity // max(columns, 1)))
    size = _round_up(max(_pieces(length, fitting), 1), steps)
    return Split(max(_pieces(length, size), 1), size, _round_up(burn_in, steps))


def _pieces(x: int, unit: int) -> int:
    return -(-x // unit)


def _round_up(x: int, unit: int) -> int:
    return _pieces(x, unit) * unit
