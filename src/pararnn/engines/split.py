"""How (newton, fused) cuts time into segments: how many, how long, and how they guess."""

from __future__ import annotations

from typing import NamedTuple

import torch

MIN_LENGTH = 256
"""Steps below which cutting time takes longer than it saves."""
MIN_SIZE = 32
"""Steps of a segment on a GPU, at least: below, its guess takes longer than the segment."""
BURN_IN = {torch.float64: 96, torch.float32: 48, torch.bfloat16: 32, torch.float16: 32}
"""Steps after which most cells have forgotten where they started, to rounding."""
WARPS_A_CORE = 4
"""Warps that a multiprocessor should have: one a scheduler."""
MOST = 2**30
"""What may be asked for: kernels take fewer steps."""


class Split(NamedTuple):
    """Time in `segments` pieces of `size` steps (the last may be shorter); guesses of `burn_in`."""

    segments: int
    size: int
    burn_in: int


class SplitRequest(NamedTuple):
    """What is asked of a split; None leaves a part to the rule."""

    segments: int | None = None
    burn_in: int | None = None


BY_RULE = SplitRequest()


def pin(segments: int | None, burn_in: int | None) -> SplitRequest:
    """Check `segments` (1 or more) and `burn_in` (0 or more); ValueError otherwise."""
    for what, value, least in (("segments", segments, 1), ("burn_in", burn_in, 0)):
        if value is not None and not (isinstance(value, int) and least <= value <= MOST):
            raise ValueError(
                f"{what} must be an integer from {least} to {MOST}, or None for the rule's, got "
                f"{value!r}"
            )
    return SplitRequest(segments, burn_in)


def segments_for(length: int, columns: int, cores: int, min_size: int = MIN_SIZE) -> int:
    """How many segments `length` steps of `columns` tiles are worth: 1 where all cores are busy."""
    return max(1, min(WARPS_A_CORE * cores // max(columns, 1), length // min_size))


def plan_split(
    length: int,
    columns: int,
    dtype: torch.dtype,
    steps: int,
    cores: int,
    capacity: int,
    asked: SplitRequest = BY_RULE,
    min_size: int = MIN_SIZE,
) -> Split:
    """The split of `length` steps for `columns` independent tiles of channels.

    Sizes and burn-ins are multiples of `steps`, what the kernel reads at once; all segments of all
    columns fit on the device at once, which holds `capacity`, on `cores` multiprocessors. Segments
    of fewer than `min_size` steps are not worth their guess. More segments than fit, than `length`
    has stages of `steps`, or a longer burn-in than `length`, are cut down to that, also where they
    were asked for.
    """
    segments = asked.segments or segments_for(length, columns, cores, min_size)
    burn_in = BURN_IN[dtype] if asked.burn_in is None else min(asked.burn_in, length)
    fitting = max(1, min(segments, capacity // max(columns, 1)))
    size = _rounded_up(max(_pieces(length, fitting), 1), steps)
    return Split(max(_pieces(length, size), 1), size, _rounded_up(burn_in, steps))


def _pieces(x: int, unit: int) -> int:
    return -(-x // unit)


def _rounded_up(x: int, unit: int) -> int:
    return _pieces(x, unit) * unit
