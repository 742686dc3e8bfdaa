"""Claims of the numerics contract: errors, their limits, and what was not judged."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pararnn.base.numerics import (
    CHANNEL_FACTOR,
    MAX_RELATIVE_TOLERANCE,
    NEAR_OVERFLOW,
    SEQUENTIAL_ERRORS,
    underflow,
)

Array = NDArray[Any]

QUIET = MAX_RELATIVE_TOLERANCE / SEQUENTIAL_ERRORS
"""Largest relative change by rounding alone for which a value has a forward error."""


@dataclass(frozen=True)
class Check:
    """One claim: a measured error and its limit; `note` says what was not judged, and why."""

    name: str
    error: float
    limit: float
    note: str = ""

    @property
    def passed(self) -> bool:
        """True if the error is a number within the limit."""
        return self.error <= self.limit

    @property
    def fraction(self) -> float:
        """The fraction of the limit that is used up."""
        if self.error == 0:
            return 0.0
        return self.error / self.limit if self.limit else float("inf")


@dataclass(frozen=True)
class SolveChecks:
    """All checks of one solve, with the solver's counts.

    `expanding`: rounding moves gradients by more than the tolerance, so that some are judged at the
    returned states only. `pair`: the (solver, backend) that ran. `non_finite`: in how many channels
    the sequential run is not finite, and from which step on.
    """

    checks: tuple[Check, ...]
    sweeps: int
    mended: int
    expanding: bool
    pair: tuple[str, str]
    non_finite: tuple[int, int]

    @property
    def passed(self) -> bool:
        """True if every check passed."""
        return all(check.passed for check in self.checks)

    @property
    def no_strays(self) -> bool:
        """Check that values that are not finite are so in the sequential run too."""
        return self.checks[-1].passed


def finite(values: Tensor) -> Tensor:
    """Return the values, 0 where they are not finite."""
    return values.nan_to_num(0.0, 0.0, 0.0)


def peak(values: Tensor, series: bool) -> Tensor:
    """Return a series' largest of each channel over time, (B, 1, ...); others as they are."""
    return values.amax(1, keepdim=True) if series and values.shape[1] else values


def gap(value: Tensor, truth: Tensor, loop: Tensor) -> Tensor:
    """Return |value - truth| in float64 where the truth and the loop are finite: inf if the value
    is not.

    Elsewhere 0: values that are not finite are compared separately.
    """
    value, truth, loop = (t.detach().double().cpu() for t in (value, truth, loop))
    distance = (value - truth).abs().nan_to_num(float("inf"), float("inf"))
    return distance.masked_fill(~(truth.isfinite() & loop.isfinite()), 0.0)


def near_overflow(*dtypes: torch.dtype) -> float:
    """Return the size above which results in these dtypes may overflow by the order of evaluation
    alone."""
    return NEAR_OVERFLOW * min(torch.finfo(dtype).max for dtype in dtypes)


def exempt(error: Tensor, size: Tensor, near: float) -> Tensor:
    """Return errors with 0 for those that are infinite where sizes exceed `near`, as
    `near_overflow` gives it."""
    return error.masked_fill(~error.isfinite() & (size > near), 0)


def stored_rounding(dtype: torch.dtype, true: Tensor, carry: torch.dtype) -> Tensor:
    """Return the rounding error of a gradient that is stored in a lower precision."""
    half = torch.finfo(dtype).eps / 2 if torch.finfo(dtype).eps > torch.finfo(carry).eps else 0.0
    return half * finite(true.double().cpu().abs()) + underflow(dtype)


def compare(
    name: str,
    error: Tensor,
    size: Tensor,
    noises: Iterable[Tensor],
    tolerance: float,
    floor: Tensor | float,
    what: str = "channels",
    quiet: float = QUIET,
) -> Check:
    """Compare errors with sizes: of the whole tensor, and of each channel (or entry) alone.

    noises: errors by rounding alone, one sample at a time, read until the check passes.
    """
    check, noise = Check(name, 0.0, tolerance), np.zeros(error.shape)
    # By NumPy, whose operations cost a third of PyTorch's where tensors are small.
    wrong, scale = _excess(error, floor), size.numpy()
    with np.errstate(all="ignore"):
        for sample in noises:
            noise = np.maximum(noise, _excess(sample, floor))
            check = _check(name, wrong, scale, noise, tolerance, what, quiet)
            if check.passed:
                break
    return check


def _excess(values: Tensor, floor: Tensor | float) -> Array:
    """Return by how much values exceed the floor, 0 below it."""
    return np.maximum(values.numpy() - (floor.numpy() if isinstance(floor, Tensor) else floor), 0)


def _check(
    name: str, error: Array, size: Array, noise: Array, tolerance: float, what: str, most: float
) -> Check:
    is_finite = np.isfinite(size) & np.isfinite(noise)
    has_error = is_finite & (noise <= most * size)
    checks = [Check(name, 0.0, tolerance)]
    for mask in (has_error, has_error & (noise <= tolerance * size)):
        scale = _largest(size, mask)
        if scale > 0:
            limit = tolerance + SEQUENTIAL_ERRORS * _largest(noise, mask) / scale
            checks.append(Check(name, _largest(error, mask) / scale, limit))
    if error.size:
        limits = CHANNEL_FACTOR * (tolerance * size + SEQUENTIAL_ERRORS * noise)
        limits = np.minimum(limits, MAX_RELATIVE_TOLERANCE * size)
        checks.append(_worst(name, np.where(has_error, error, 0), limits, size))
    noisy = int((is_finite & ~has_error).sum())
    why = f"{noisy} of {has_error.size} {what} not judged: rounding alone moves them"
    return replace(max(checks, key=lambda c: c.fraction), note=why if noisy else "")


def _largest(values: Array, mask: Array) -> float:
    """Return the largest of non-negative values where the mask holds, 0 if it holds nowhere."""
    return float(np.max(values, initial=0.0, where=mask))


def worst(name: str, error: Tensor, limit: Tensor, unit: Tensor) -> Check:
    """Return the entry that uses up most of its limit, both in its unit."""
    with np.errstate(all="ignore"):
        return _worst(name, *(t.cpu().numpy() for t in (error, limit, unit)))


def _worst(name: str, error: Array, limit: Array, unit: Array) -> Check:
    index = int(np.where(error > 0, error / limit, 0).argmax())
    worst, most, scale = (float(t.flat[index]) for t in (error, limit, unit))
    scale = scale or most or 1.0
    return Check(name, worst / scale, most / scale)
