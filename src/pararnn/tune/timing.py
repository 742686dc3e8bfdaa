"""Wall-clock times of calls on a device, and its name."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

from pararnn.base.device import type_of

BLOCK_SECONDS = 2e-3
"""Least duration of a block of calls, so that waiting for the device at its end counts little."""

MOST_CALLS = 20
"""Calls after which the least time of a short one is known."""


def median_seconds(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Return the median wall-clock seconds of `run()` over `repeats` calls after a warm-up call."""
    _block_seconds(run, device, 1)
    return statistics.median(_block_seconds(run, device, 1) for _ in range(repeats))


def settled_seconds(run: Callable[[], object], device: torch.device, budget: float) -> float:
    """Return the median wall-clock seconds of `run()` over blocks of calls in `budget` seconds.

    Three blocks at least, after one warm-up block; each ends by waiting for the device.
    """
    calls = max(1, round(BLOCK_SECONDS / max(_block_seconds(run, device, 1), 1e-9)))
    times: list[float] = []
    while len(times) < 3 or sum(times) * calls < budget:
        times.append(_block_seconds(run, device, calls))
    return statistics.median(times)


def least_seconds(
    phases: Sequence[Callable[[], object]], device: torch.device, budget: float
) -> list[float]:
    """Return the least wall-clock seconds of each of some phases, which run one after the other.

    They repeat within `budget` seconds, twice at least and MOST_CALLS times at most.
    """
    times: list[list[float]] = []
    while len(times) < 2 or (len(times) < MOST_CALLS and sum(map(sum, times)) < budget):
        times.append([_block_seconds(phase, device, 1) for phase in phases])
    return [min(some) for some in zip(*times, strict=True)]


def device_name(device: torch.device) -> str:
    """Return the processor's name, as measurements should quote it."""
    return type_of(device).name_of(device)


def _block_seconds(run: Callable[[], object], device: torch.device, calls: int) -> float:
    """Return the mean seconds of `calls` calls without a pause between them."""
    wait = type_of(device).wait
    wait(device)
    start = time.perf_counter()
    for _ in range(calls):
        run()
    wait(device)
    return (time.perf_counter() - start) / calls
