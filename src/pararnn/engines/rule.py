"""Ranks of engines, by which `auto` chooses."""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import IntEnum

import torch

from pararnn.program.program import Program

Size = tuple[int, int, int]
"""(B, T, D)."""

NEWTON_MIN_LENGTH = 64
NEWTON_MAX_WIDTH = {"cpu": 512}
NEWTON_MAX_COUPLED = {"cpu": 16, "cuda": 64}
"""Measured by benchmarks/auto_torch.py. Newton wins in PyTorch from NEWTON_MIN_LENGTH steps on,
while a step has at most NEWTON_MAX_WIDTH state entries (B N D) and, where channels couple, at most
NEWTON_MAX_COUPLED coupled entries (N D of a row).
"""

MIN_SEGMENTS = {"cpu": 4, "cuda": 6}
MIN_SEGMENTS_AFFINE = 4
"""Concurrent segments from which on `auto` cuts time. With fewer, channels that do not forget run
again and cost more than the others gain: by benchmarks/parallel_cpu.py on a CPU. On a GPU the
figure minimises the worst ratio to the better engine over trained layers, forward + backward: 2.0
with time cut from 4 segments on, 1.35 from 6, 2.3 from 8 (benchmarks/segments.py). Channels of an
affine step run again once at most, whatever the training.
"""
MATRIX_MIN_LENGTH = {"cuda": 16_384}
"""Steps from which on `auto` cuts the time of matrix cells on a GPU, with MIN_SEGMENTS segments or
more. By benchmarks/matrix_segments.py both passes are faster at 8,192 steps already, but a forward
pass alone is not for every cell: the host waits for each sweep, which longer rows hide.
"""
CHUNKS_MIN_LENGTH = {"cpu": 64}
"""Steps from which on chunks beat the loop in PyTorch, forward and with the backward pass, by
benchmarks/chunks.py. On other devices they are not measured, and run on request."""


MEASURED = ("cpu", "cuda")
"""Device types of the tables above. One that a table of them lacks has no limit there."""


def measured(limits: Mapping[str, int], device: torch.device) -> float:
    """Return a device's limit of a table, infinity for none. Unmeasured devices count as GPUs."""
    return limits.get(device.type if device.type in MEASURED else "cuda", math.inf)


class Rank(IntEnum):
    """Order in which `auto` tries engines, the highest first."""

    ON_REQUEST_ONLY = 0
    """Rank of engines that `auto` never picks."""
    SLOWER_IN_TORCH = 1
    FASTER_IN_TORCH = 2
    CHUNKS_IN_TORCH = 3
    FEW_SEGMENTS = 4
    LOOP = 5
    MANY_SEGMENTS = 6
    CHUNKS = 7


def rank_of_segments(program: Program, segments: int, device: torch.device) -> tuple[Rank, str]:
    """Rank (newton, fused), which runs `segments` of time at once on otherwise idle hardware."""
    least = MIN_SEGMENTS_AFFINE if program.affine else measured(MIN_SEGMENTS, device)
    if segments >= least:
        return Rank.MANY_SEGMENTS, "there is room to run segments of time side by side"
    return (
        Rank.FEW_SEGMENTS,
        "it was requested, though there is no room for enough segments of time to pay",
    )


def rank_of_matrix_segments(segments: int, length: int, device: torch.device) -> tuple[Rank, str]:
    """Rank (newton, fused) for matrix cells with independent entries."""
    least, count = measured(MATRIX_MIN_LENGTH, device), measured(MIN_SEGMENTS, device)
    if least == math.inf:
        return Rank.ON_REQUEST_ONLY, "it was requested"
    if length >= least and segments >= count:
        return Rank.MANY_SEGMENTS, "there is room to run segments of a long time side by side"
    return (
        Rank.ON_REQUEST_ONLY,
        f"it was requested, though segments pay from T = {least} on, and {count} of them",
    )


def rank_of_chunks(program: Program, length: int, device: torch.device) -> tuple[Rank, str]:
    """Rank (chunks, torch): before the loop in PyTorch, where it is measured to win."""
    least = CHUNKS_MIN_LENGTH.get(device.type, math.inf)
    if not program.keeps_states and length >= least:
        return Rank.CHUNKS_IN_TORCH, f"chunks beat the loop in PyTorch from T = {least} on"
    return Rank.ON_REQUEST_ONLY, "it was requested"


def rank_in_torch(
    solver: str, program: Program, size: Size, device: torch.device
) -> tuple[Rank, str]:
    """Rank a solver in PyTorch: the faster one by measurement before the other."""
    best, why = _fastest_in_torch(program, size, device)
    if solver == best:
        return Rank.FASTER_IN_TORCH, why
    return Rank.SLOWER_IN_TORCH, f"{solver} was requested, and torch takes every cell"


def _fastest_in_torch(program: Program, size: Size, device: torch.device) -> tuple[str, str]:
    """Return the faster solver by measurement, and the reason."""
    batch, steps, channels = size
    width = program.num_states * channels
    if program.structure is None:
        return "sequential", program.why_sequential or "its step has no Jacobian"
    if steps < NEWTON_MIN_LENGTH:
        return "sequential", f"Newton pays from T = {NEWTON_MIN_LENGTH} on"
    most = measured(NEWTON_MAX_COUPLED, device)
    if program.num_states * program.coupling.reach(channels) > most:
        return "sequential", f"Newton on dense Jacobians pays up to N D = {most}"
    limit = measured(NEWTON_MAX_WIDTH, device)
    if batch * width > limit:
        return "sequential", f"Newton on {device.type} pays up to B N D = {limit}"
    return "newton", "Newton beats the loop in PyTorch at such sizes"
