"""(newton, scan): Jacobians in PyTorch, the affine scan by a generated kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from pararnn.base.numerics import compute_dtype
from pararnn.cells.affine import AFFINE
from pararnn.engines.arguments import Arguments, Options
from pararnn.engines.engine import Engine
from pararnn.engines.fused import cpu, cuda
from pararnn.engines.newton_torch import NewtonTorch
from pararnn.engines.rule import Rank
from pararnn.engines.tuned import Workload
from pararnn.program.entries import entries_of
from pararnn.program.program import Program, make_program
from pararnn.program.structure import BlockDiagonal, Diagonal, Structure
from pararnn.solvers.entry_maps import order_of

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


def scan_entries(factors: Tensor, terms: Tensor) -> Tensor:
    """Do what `EntryScan` says by a kernel: each entry (B, S, ...) is a channel."""
    one = [x.flatten(2).unsqueeze(2) for x in (factors[:, 1:], terms)]
    return kernel_scan(Diagonal(1), *one).reshape(terms.shape)


def _why_no_order(program: Program) -> str | None:
    """Return the reason why states of a matrix cell cannot be solved one by one, or None."""
    if len(order_of(entries_of(program))) == program.num_states:
        return None
    return (
        f"the scan kernel takes one state after the other, and states of {program.cell_name} "
        "depend on each other"
    )


def _kernel(program: Program, rhs: Tensor) -> Engine:
    """Return the engine for a recurrence (B, T, N, D)."""
    batch, steps, _, channels = rhs.shape
    workload = Workload(program.key, (batch, steps, channels), rhs.dtype, rhs.device)
    engines = _KERNELS[rhs.device.type]
    return max(engines, key=lambda engine: engine.rank(program, workload)[0].value)


def _affine(num_states: int) -> Program:
    return make_program(AFFINE[num_states], {})


class NewtonScan(NewtonTorch):
    """Newton's method with the scan by a kernel of a device type."""

    backend, builds = "scan", True

    def __init__(self, device: str) -> None:
        self.kernels = _KERNELS[device]

    def scan(self, structure: Structure, jacobian: Tensor, rhs: Tensor) -> Tensor:
        return kernel_scan(structure, jacobian, rhs)

    entry_scan = staticmethod(scan_entries)

    def why_not(self, program: Program) -> str | None:
        reason, structure = super().why_not(program), program.structure
        if reason is None and not program.keeps_states:
            return _why_no_order(program)
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

    def rank(self, program: Program, workload: Workload) -> tuple[Rank, str]:
        return Rank.ON_REQUEST_ONLY, "it was requested"

    def build(self, program: Program, dtype: torch.dtype, compiles: bool = True) -> None:
        """Make the kernels of the affine recurrence. Raises EngineError where that fails."""
        states = 1 if not program.keeps_states else program.num_states
        for kernel in self.kernels:
            kernel.build(_affine(states), compute_dtype(dtype), compiles)


ENGINES = {device: NewtonScan(device) for device in _KERNELS}
