"""(newton, scan): Jacobians in PyTorch, the affine scan by a generated kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from pararnn.cells.affine import AFFINE
from pararnn.engines import newton_torch
from pararnn.engines.arguments import Arguments, Engine
from pararnn.engines.fused import cpu, cuda
from pararnn.engines.rule import on_request_only
from pararnn.program.program import Program, make_program
from pararnn.program.structure import BlockDiagonal, Diagonal, Structure

_KERNELS = {"cpu": (cpu.SEQUENTIAL, cpu.NEWTON), "cuda": (cuda.NEWTON,)}
"""By device: what may run a recurrence, the one that pays more; on a GPU one serves all."""


def kernel_scan(structure: Structure, jacobian: Tensor, rhs: Tensor) -> Tensor:
    """`affine_scan` of the solvers by a kernel: x_0 = r_0, x_l = J_l x_{l-1} + r_l.

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
        on_failure="raise",
    )
    program = _affine(structure.num_states)
    engine = _kernel(program, rhs)
    states = engine.forward(program, args).states
    return torch.cat([rhs[:, :1], torch.stack(states, 2)], 1)


def _kernel(program: Program, rhs: Tensor) -> Engine:
    """What runs the recurrence (B, T, N, D)."""
    batch, steps, _, channels = rhs.shape
    problem = (program, (batch, steps, channels), rhs.dtype, rhs.device)
    return max(_KERNELS[rhs.device.type], key=lambda engine: engine.pays(*problem).rank)


def _affine(num_states: int) -> Program:
    return make_program(AFFINE[num_states], {})


def _why_not(program: Program) -> str | None:
    reason, structure = newton_torch.why_not(program), program.structure
    if reason is not None or structure is None:
        return reason
    if not isinstance(structure, (Diagonal, BlockDiagonal)):
        return f"the scan kernel takes diagonal and block-diagonal Jacobians, not {structure.name}"
    if program.num_states not in AFFINE:
        return (
            f"the scan kernel takes up to {max(AFFINE)} states, {program.cell_name} has "
            f"{program.num_states}"
        )
    return None


def _engine(device: str) -> Engine:
    def build(program: Program, dtype: torch.dtype) -> None:
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        for kernel in _KERNELS[device]:
            assert kernel.build is not None
            kernel.build(_affine(program.num_states), wide)

    return newton_torch.engine_of("scan", kernel_scan, _why_not, on_request_only, build)


ENGINES = {device: _engine(device) for device in _KERNELS}
