"""When engines pay: what each says of a problem, by which `auto` ranks them."""

from __future__ import annotations

from typing import NamedTuple

import torch

from pararnn.program.program import Program

Size = tuple[int, int, int]
"""(B, T, D)."""

NEWTON_MIN_LENGTH = 64
NEWTON_MAX_WIDTH = {"cpu": 512}
NEWTON_MAX_COUPLED = {"cpu": 16, "cuda": 64}
"""Measured by benchmarks/auto_torch.py: Newton wins in PyTorch from so many steps on, while the
state entries of a step (B N D) stay under the width and, where channels are coupled, those too that
hang together (N D, of a row).
"""

MIN_SEGMENTS = {"cpu": 4, "cuda": 6}
MIN_SEGMENTS_AFFINE = 4
"""Segments side by side from which on `auto` cuts time: with fewer, running channels that do not
forget again costs what the others gain, by benchmarks/parallel_cpu.py on a CPU. On a GPU it is the
least of the worst ratios to the better engine over trained layers, forward + backward: 2.0 with
time cut from 4 segments on, 1.35 from 6, 2.3 from 8 (benchmarks/segments.py). An affine step's
channels run again once at most, whatever was trained.
"""


class Merit(NamedTuple):
    """How an engine ranks on a problem, the highest first, and why it comes where it does."""

    rank: int
    why: str


def on_request_only(
    program: Program, size: Size, dtype: torch.dtype, device: torch.device
) -> Merit:
    """Return the rank of engines that `auto` never picks."""
    return Merit(0, "it was asked for")


def loop_pays(program: Program, size: Size, dtype: torch.dtype, device: torch.device) -> Merit:
    """(sequential, fused): before all but segments of time side by side."""
    return Merit(4, "a compiled loop beats every solver in PyTorch")


def segments_pay(program: Program, segments: int, device: torch.device) -> Merit:
    """(newton, fused), where so many segments of time run side by side on what would be idle."""
    if segments >= (MIN_SEGMENTS_AFFINE if program.affine else MIN_SEGMENTS[device.type]):
        return Merit(5, "there is room to run segments of time side by side")
    return Merit(3, "it was asked for, though there is no room for enough segments of time to pay")


def pays_in_torch(
    solver: str, program: Program, size: Size, dtype: torch.dtype, device: torch.device
) -> Merit:
    """A solver in PyTorch: the one that the measured rule takes comes before the other."""
    best, why = _fastest_in_torch(program, size, device)
    if solver == best:
        return Merit(2, why)
    return Merit(1, f"{solver} was asked for, and torch takes every cell")


def _fastest_in_torch(program: Program, size: Size, device: torch.device) -> tuple[str, str]:
    """The measured rule, and its reason. Devices without a figure are taken for GPUs."""
    batch, steps, channels = size
    width = program.num_states * channels
    if program.structure is None:
        return "sequential", program.why_sequential or "its step has no Jacobian"
    if steps < NEWTON_MIN_LENGTH:
        return "sequential", f"Newton pays from T = {NEWTON_MIN_LENGTH} on"
    most = NEWTON_MAX_COUPLED.get(device.type, 64)
    if program.num_states * program.coupling.reach(channels) > most:
        return "sequential", f"Newton on dense Jacobians pays up to N D = {most}"
    limit = NEWTON_MAX_WIDTH.get(device.type)
    if limit is not None and batch * width > limit:
        return "sequential", f"Newton on {device.type} pays up to B N D = {limit}"
    return "newton", "Newton beats the loop in PyTorch at such sizes"
