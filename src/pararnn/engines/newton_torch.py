"""(newton, torch): Newton's method with the affine scan in PyTorch, and its one-scan backward."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pararnn.engines.arguments import Arguments, Gradients, Solution
from pararnn.engines.engine import Arriving, Engine
from pararnn.engines.forward_time import (
    final_states,
    output_states,
    own_memory,
    state_cotangent,
    to_gradients,
    to_system,
)
from pararnn.engines.rule import Rank, Size, rank_in_torch
from pararnn.errors import ConvergenceError, ConvergenceWarning, warn_user
from pararnn.program.program import Program
from pararnn.program.structure import Structure
from pararnn.solvers.affine_scan import affine_scan
from pararnn.solvers.newton import NewtonResult, adjoint, newton

_WARNED: set[tuple[str, int]] = set()


class NewtonTorch(Engine):
    """Newton's method with an affine scan that subclasses may replace."""

    solver, backend = "newton", "torch"

    def scan(self, structure: Structure, jacobian: Tensor, rhs: Tensor) -> Tensor:
        """Solve the affine recurrence, see `affine_scan`."""
        return affine_scan(structure, jacobian, rhs)

    def why_not(self, program: Program) -> str | None:
        """Return the reason why Newton's method cannot run a cell, or None."""
        if program.structure is None:
            return f"{program.cell_name} is sequential-only: {program.why_sequential}"
        return None

    def rank(
        self, program: Program, size: Size, dtype: torch.dtype, device: torch.device
    ) -> tuple[Rank, str]:
        """Rank by the measured rule."""
        return rank_in_torch(self.solver, program, size, device)

    def forward(self, program: Program, args: Arguments) -> Solution:
        """Solve all steps at once; columns that do not converge, sequentially."""
        system, edges = to_system(program, args)
        result = newton(system, self.scan)
        if result.redone:
            _report(program, system.length, result, args.options.on_failure)
        info = torch.tensor([[result.sweeps, result.redone]], device=args.gates.device)
        by_state = result.states.unbind(2)
        states = output_states(args, by_state)
        own = own_memory([*states, *final_states(args, edges, by_state)], args)
        return Solution(own[: len(states)], own[len(states) :], info)

    def backward(
        self,
        program: Program,
        args: Arguments,
        states: tuple[Tensor, ...],
        grad_states: Arriving,
        grad_final: Arriving,
        wanted: Sequence[str],
    ) -> Gradients:
        """Return the gradients by one scan."""
        system, edges = to_system(program, args)
        all_states = torch.stack(states, 2).to(system.dtype)
        previous = system.previous(all_states.flip(1) if args.options.reverse else all_states)
        cotangent = state_cotangent(args, edges, previous, grad_states, grad_final)
        total = adjoint(system, previous, cotangent, self.scan)
        vjps = system.pull_back(previous, total, "params" in wanted)
        grads = to_gradients(args, edges, *vjps, grad_final, wanted)
        arriving = [g for g in (*grad_states, *grad_final) if g is not None]
        return _in_own_memory(grads, args, arriving)


def _in_own_memory(grads: Gradients, args: Arguments, arriving: list[Tensor]) -> Gradients:
    """Return gradients that share no memory."""
    bias = [] if grads.bias is None else [grads.bias]
    own = iter(own_memory([*bias, *grads.fields, *grads.params, *grads.initial], args, arriving))
    return Gradients(
        gates=grads.gates,
        bias=next(own) if bias else None,
        fields=tuple(next(own) for _ in grads.fields),
        params=tuple(next(own) for _ in grads.params),
        initial=tuple(own),
    )


def _report(program: Program, length: int, result: NewtonResult, on_failure: str) -> None:
    message = (
        f"Newton did not converge on {result.redone} column(s) of {program.cell_name} at "
        f"T = {length}: after {result.sweeps} sweeps the largest defect |h - f(h_prev, x)| is "
        f"{result.defect:.2e}. "
        "Smaller recurrent weights (recurrent_clip with pararnn.clip_after_step), a shorter T or "
        "float64 help; solver='sequential' needs no convergence"
    )
    if on_failure == "raise":
        raise ConvergenceError(message)
    # Once for each cell and length: a training run would repeat it at every step.
    if (program.key, length) not in _WARNED:
        _WARNED.add((program.key, length))
        warn_user(
            f"{message}. These columns were finished by the sequential solver and are exact; "
            "last_solve keeps counting them",
            ConvergenceWarning,
        )


ENGINE = NewtonTorch()
