"""Newton's method with a fixed number of updates, as the paper runs it: an option of benchmarks.

The library has no such option: its solvers end where the numerics contract holds. This takes the
guess f(0, x), a number of updates and no look at a residual, so that nothing waits for the host: it
can be compiled, and captured in a CUDA graph. The gradient is the paper's one scan in reverse.
(newton, fused) has no counterpart: its updates are of the states that segments start from.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pararnn import Cell
from pararnn.engines.newton_scan import kernel_scan
from pararnn.program.program import Program, program_of
from pararnn.solvers.affine_scan import Scan, affine_scan
from pararnn.solvers.system import System

UPDATES = 3
"""The paper's N_its."""

SCANS: dict[str, Scan] = {"torch": affine_scan, "scan": kernel_scan}
"""By backend; the second is a generated kernel, which torch.compile does not look into."""


def system_of(program: Program, gates: Tensor, params: tuple[Tensor, ...]) -> System:
    """Return the system of gates (B, T, G, D), from zero states."""
    batch, _, _, channels = gates.shape
    initial = gates.new_zeros(batch, program.num_states, channels)
    return System(program, gates.unbind(2), params, initial)


class Passes(NamedTuple):
    """States (B, T, N, D) of (gates, *params); gradients of these of (gates, states, their
    gradient, *params)."""

    forward: Callable[..., Tensor]
    backward: Callable[..., tuple[Tensor, ...]]


def passes(program: Program, backend: str, updates: int = UPDATES) -> Passes:
    """Return both passes by one of the SCANS, compiled where it is PyTorch's."""
    scan, structure = SCANS[backend], program.structure
    assert structure is not None

    def forward(gates: Tensor, *params: Tensor) -> Tensor:
        system = system_of(program, gates, params)
        batch, steps, _, channels = gates.shape
        zeros = gates.new_zeros(batch, steps, program.num_states, channels)
        states = system.advance(system.previous(zeros))
        for _ in range(updates):
            new, jacobian = system.linearise(system.previous(states))
            states = states + scan(structure, jacobian[:, 1:], new - states)
        return states

    def backward(
        gates: Tensor, states: Tensor, arriving: Tensor, *params: Tensor
    ) -> tuple[Tensor, ...]:
        system = system_of(program, gates, params)
        previous = system.previous(states)
        _, jacobian = system.linearise(previous)
        adjoint = structure.transpose(jacobian)[:, 1:].flip(1)
        total = scan(structure, adjoint, arriving.flip(1)).flip(1)
        _, inputs, grads = system.pull_back(previous, total)
        return (torch.stack(inputs, 2), *grads)

    if backend != "torch":
        return Passes(forward, backward)
    options: dict[str, Any] = {"fullgraph": True, "dynamic": False}
    return Passes(torch.compile(forward, **options), torch.compile(backward, **options))


class _Solve(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, both: Passes, gates: Tensor, *params: Tensor) -> Tensor:
        states = both.forward(gates, *params)
        ctx.passes = both
        ctx.save_for_backward(gates, states, *params)
        return states

    @staticmethod
    def backward(ctx: Any, *arriving: Tensor) -> Any:
        gates, states, *params = ctx.saved_tensors
        return (None, *ctx.passes.backward(gates, states, *arriving, *params))


def fixed_newton(cell: Cell, backend: str, updates: int = UPDATES) -> Callable[[Tensor], Tensor]:
    """Return a differentiable function of gates (B, T, G, D) to the first state (B, T, D)."""
    both = passes(program_of(cell), backend, updates)

    def run(gates: Tensor) -> Tensor:
        states = _Solve.apply(both, gates, *cell.lifted_params(gates.dtype))
        return states[:, :, 0]

    return run
