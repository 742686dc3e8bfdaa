"""Wall-clock times of calls on a device, and its name."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

BLOCK_SECONDS = 2e-3
"""Least length of a block of calls: waiting for the device at its end then counts little."""


def median_seconds(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """The median wall-clock seconds of `run()` over `repeats` calls after a warm-up call."""
    _block_seconds(run, device, 1)
    return statistics.median(_block_seconds(run, device, 1) for _ in range(repeats))


def settled_seconds(run: Callable[[], object], device: torch.device, budget: float) -> float:
    """The median wall-clock seconds of `run()` over blocks of calls that fill `budget` seconds.

    Three blocks at least, after one that is left out; the device is waited for after each.
    """
    calls = max(1, round(BLOCK_SECONDS / max(_block_seconds(run, device, 1), 1e-9)))
    times: list[float] = []
    while len(times) < 3 or sum(times) * calls < budget:
        times.append(_block_seconds(run, device, calls))
    return statistics.median(times)


def device_name(device: torch.device) -> str:
    """The processor's name, as measurements should quote it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _block_seconds(run: Callable[[], object], device: torch.device, calls: int) -> float:
    """Seconds of one call among `calls` without a pause between them."""
    _wait_for(device)
    start = time.perf_counter()
    for _ in range(calls):
        run()
    _wait_for(device)
    return (time.perf_counter() - start) / calls


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
