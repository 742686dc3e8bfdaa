"""(newton, scan): Jacobians in PyTorch, the affine scan by a generated kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from pararnn.cells.affine import AFFINE
from pararnn.engines.arguments import Arguments, Options
from pararnn.engines.engine import Engine
from pararnn.engines.fused import cpu, cuda
from pararnn.engines.newton_torch import NewtonTorch
from pararnn.engines.rule import Rank, Size
from pararnn.numerics import compute_dtype
from pararnn.program.program import Program, make_program
from pararnn.program.structure import BlockDiagonal, Diagonal, Structure

_KERNELS: dict[str, tuple[Engine, ...]] = {
    "cpu": (cpu.SEQUENTIAL, cpu.NEWTON),
    "cuda": (cuda.NEWTON,),
}
"""Engines for the affine recurrence, by device: the highest rank runs. On a GPU one serves all."""


def kernel_scan(structure: Structure, jacobian: Tensor, rhs: Tensor) -> Tensor:
    """Do what `affine_scan` does by a kernel: x_0 = r_0, x_l = J_l x_{l-1} + r_l.

    For diagonals and blocks of up to 4 states, in float32 and float64.
    """
    if rhs.shape[1] <= 1 or not rhs.numel():
        return rhs
    entries = jacobian.flatten(2, -2).unbind(2)
    args = Arguments(
        gates=rhs[:, 1:],
        bias=None,
        fields=tuple(entries),
        params=(),
        initial=tuple(rhs[:, 0].unbind(1)),
        sequences=rhs.shape[0],
        options=Options(on_failure="raise"),
    )
    program = _affine(structure.num_states)
    engine = _kernel(program, rhs)
    states = engine.forward(program, args).states
    return torch.cat([rhs[:, :1], torch.stack(states, 2)], 1)


def _kernel(program: Program, rhs: Tensor) -> Engine:
    """Return the engine for a recurrence (B, T, N, D)."""
    batch, steps, _, channels = rhs.shape
    problem = (program, (batch, steps, channels), rhs.dtype, rhs.device)
    return max(_KERNELS[rhs.device.type], key=lambda engine: engine.rank(*problem)[0].value)


def _affine(num_states: int) -> Program:
    return make_program(AFFINE[num_states], {})


class NewtonScan(NewtonTorch):
    """Newton's method with the scan by a kernel of a device type."""

    backend, builds = "scan", True

    def __init__(self, device: str) -> None:
        self.kernels = _KERNELS[device]

    def scan(self, structure: Structure, jacobian: Tensor, rhs: Tensor) -> Tensor:
        """Solve the affine recurrence by a kernel."""
        return kernel_scan(structure, jacobian, rhs)

    def why_not(self, program: Program) -> str | None:
        """Return the reason why the scan kernel cannot run a cell, or None."""
        reason, structure = super().why_not(program), program.structure
        if reason is not None or structure is None:
            return reason
        if not isinstance(structure, (Diagonal, BlockDiagonal)):
            return (
                f"the scan kernel takes diagonal and block-diagonal Jacobians, not {structure.name}"
            )
        if program.num_states not in AFFINE:
            return (
                f"the scan kernel takes up to {max(AFFINE)} states, {program.cell_name} has "
                f"{program.num_states}"
            )
        return None

    def rank(
        self, program: Program, size: Size, dtype: torch.dtype, device: torch.device
    ) -> tuple[Rank, str]:
        """Rank it after all engines that `auto` picks."""
        return Rank.ON_REQUEST_ONLY, "it was requested"

    def build(self, program: Program, dtype: torch.dtype) -> None:
        """Make the kernels of the affine recurrence. Raises EngineError where that fails."""
        for kernel in self.kernels:
            kernel.build(_affine(program.num_states), compute_dtype(dtype))


ENGINES = {device: NewtonScan(device) for device in _KERNELS}
