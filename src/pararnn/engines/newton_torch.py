"""(newton, torch): Newton's method with the affine scan in PyTorch, and its one-scan backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from pararnn.engines.arguments import Arguments, Engine, Gradients, Pays, Solution
from pararnn.engines.forward_time import (
    final_states,
    output_states,
    own_memory,
    state_cotangent,
    to_gradients,
    to_system,
)
from pararnn.engines.rule import pays_in_torch
from pararnn.errors import ConvergenceError, ConvergenceWarning, warn_user
from pararnn.program.program import Program
from pararnn.solvers.affine_scan import Scan, affine_scan
from pararnn.solvers.newton import NewtonResult, adjoint, newton

_WARNED: set[tuple[str, int]] = set()


def _forward(scan: Scan, program: Program, args: Arguments) -> Solution:
    system, edges = to_system(program, args)
    result = newton(system, scan)
    if result.redone:
        _report(program, system.length, result, args.on_failure)
    info = torch.tensor([[result.sweeps, result.redone]], device=args.gates.device)
    by_state = result.states.unbind(2)
    states = output_states(args, by_state)
    own = own_memory([*states, *final_states(args, edges, by_state)], args)
    return Solution(own[: len(states)], own[len(states) :], info)


def _backward(
    scan: Scan,
    program: Program,
    args: Arguments,
    states: tuple[Tensor, ...],
    grad_states: tuple[Tensor | None, ...],
    grad_final: tuple[Tensor | None, ...],
    wanted: Sequence[str],
) -> Gradients:
    system, edges = to_system(program, args)
    solved = torch.stack(states, 2).to(system.dtype)
    previous = system.previous(solved.flip(1) if args.reverse else solved)
    cotangent = state_cotangent(args, edges, previous, grad_states, grad_final)
    total = adjoint(system, previous, cotangent, scan)
    pulled = system.pull_back(previous, total, "params" in wanted)
    grads = to_gradients(args, edges, *pulled, grad_final, wanted)
    arrived = [g for g in (*grad_states, *grad_final) if g is not None]
    return _own(grads, args, arrived)


def _own(grads: Gradients, args: Arguments, arrived: list[Tensor]) -> Gradients:
    """Gradients in memory of their own."""
    bias = [] if grads.bias is None else [grads.bias]
    own = iter(own_memory([*bias, *grads.fields, *grads.params, *grads.initial], args, arrived))
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
    # Once a cell and length: a training run would repeat it at every step.
    if (program.key, length) not in _WARNED:
        _WARNED.add((program.key, length))
        warn_user(
            f"{message}. These columns were finished by the sequential solver and are exact; "
            "last_solve keeps counting them",
            ConvergenceWarning,
        )


def why_not(program: Program) -> str | None:
    """The reason why Newton's method cannot take a cell, if any."""
    if program.structure is None:
        return f"{program.cell_name} is sequential-only: {program.why_sequential}"
    return None


def engine_of(
    backend: str,
    scan: Scan,
    why_not: Callable[[Program], str | None],
    pays: Pays,
    build: Callable[[Program, torch.dtype], object] | None = None,
) -> Engine:
    """Newton's method with an affine scan of one's own."""
    forward, backward = partial(_forward, scan), partial(_backward, scan)
    return Engine("newton", backend, forward, backward, why_not, pays, build)


ENGINE = engine_of("torch", affine_scan, why_not, partial(pays_in_torch, "newton"))
