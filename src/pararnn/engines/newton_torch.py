"""(newton, torch): Newton's method with the affine scan in PyTorch, and its one-scan backward."""

from __future__ import annotations

import torch
from torch import Tensor

from pararnn.base.errors import ConvergenceError, ConvergenceWarning, warn_user
from pararnn.engines.arguments import LEAVES, Arguments, Gradients, Solution
from pararnn.engines.engine import BackwardInputs, Engine
from pararnn.engines.forward_time import (
    in_order,
    output_states,
    own_memory,
    state_cotangent,
    to_gradients,
    to_head_system,
    to_system,
)
from pararnn.engines.rule import Rank, rank_in_torch
from pararnn.engines.tuned import Workload
from pararnn.program.derive import gradients
from pararnn.program.entries import why_entries_couple, why_no_derivatives
from pararnn.program.matrix import CHECKPOINT
from pararnn.program.program import Program
from pararnn.program.structure import Structure
from pararnn.solvers.affine_scan import affine_scan
from pararnn.solvers.boundaries import final_states
from pararnn.solvers.entry_maps import EntryScan
from pararnn.solvers.entry_newton import EntrySystem, cotangents, solve_entries
from pararnn.solvers.newton import NewtonResult, adjoint, newton

_WARNED: set[tuple[str, int]] = set()


class NewtonTorch(Engine):
    """Newton's method with an affine scan that subclasses may replace."""

    solver, backend = "newton", "torch"

    def scan(self, structure: Structure, jacobian: Tensor, rhs: Tensor) -> Tensor:
        """Solve the affine recurrence, see `affine_scan`."""
        return affine_scan(structure, jacobian, rhs)

    entry_scan: EntryScan | None = None
    """Scan of the entries of matrix states, see `compose`."""

    def why_not(self, program: Program) -> str | None:
        if not program.keeps_states and why_entries_couple(program) is None:
            return why_no_derivatives(program)
        if program.structure is None:
            return f"{program.cell_name} is sequential-only: {program.why_sequential}"
        return None

    def rank(self, program: Program, workload: Workload) -> tuple[Rank, str]:
        return rank_in_torch(self.solver, program, workload.size, workload.device)

    def forward(self, program: Program, args: Arguments) -> Solution:
        """Solve all steps at once; columns that do not converge, sequentially."""
        if not program.keeps_states:
            return _solve_entries(program, args, self.entry_scan)
        system = to_system(program, args)
        result = newton(system, self.scan)
        if result.redone:
            _report(program, system.length, result, args.options.on_failure)
        info = torch.tensor([[result.sweeps, result.redone]], device=args.gates.device)
        by_state = result.states.unbind(2)
        states = output_states(args, by_state)
        final = final_states(args.initial, system.boundaries, by_state)
        results = own_memory([*states, *final], args)
        return Solution(results[: len(states)], results[len(states) :], info)

    def backward(self, program: Program, args: Arguments, inputs: BackwardInputs) -> Gradients:
        """Return the gradients by one scan."""
        states, grad_states, grad_final, wanted = inputs
        if not program.keeps_states:
            return _differentiate_entries(program, args, inputs, self.entry_scan)
        system = to_system(program, args)
        all_states = torch.stack(states, 2).to(system.dtype)
        previous = system.previous(all_states.flip(1) if args.options.reverse else all_states)
        cotangent = state_cotangent(args, system.boundaries, previous, grad_states, grad_final)
        total = adjoint(system, previous, cotangent, self.scan)
        vjps = system.pull_back(previous, total, "params" in wanted)
        grads = to_gradients(args, system.boundaries, *vjps, grad_final, wanted)
        incoming = [g for g in (*grad_states, *grad_final) if g is not None]
        return _in_own_memory(grads, args, incoming)


def _solve_entries(program: Program, args: Arguments, scan: EntryScan | None) -> Solution:
    """Solve all steps of a matrix cell with independent entries."""
    system = EntrySystem.of(to_head_system(program, args))
    result = solve_entries(system, scan)
    states = result.states
    if result.redone:
        newton = NewtonResult(states[0], *result[1:])
        _report(program, args.size[1], newton, args.options.on_failure)
    info = torch.tensor([[result.sweeps, result.redone]], device=args.gates.device)
    output = in_order(system.output(states), args.options.reverse).to(args.gates.dtype)
    chunks = [x[:, ::CHECKPOINT] for x in system.previous(states)]
    memory = program.step.head.join_states(chunks)
    results = own_memory([output, memory, *system.final(states)], args)
    return Solution(results[:2], results[2:], info)


def _differentiate_entries(
    program: Program, args: Arguments, inputs: BackwardInputs, scan: EntryScan | None
) -> Gradients:
    """Return the gradients of a matrix cell, of the states that it is solved for again."""
    (grad_output, *_), grad_final = inputs.grad_states, inputs.grad_final
    if grad_output is not None:
        grad_output = in_order(grad_output, args.options.reverse)
    system = EntrySystem.of(to_head_system(program, args))
    states = solve_entries(system, scan).states
    total = cotangents(system, states, grad_final, grad_output, scan)
    with torch.enable_grad():
        args = args.map(lambda t: t.detach().requires_grad_(t.is_floating_point()))
        leaves = args.leaves()
        system = EntrySystem.of(to_head_system(program, args))
        results = [*system.advance(system.previous(states)), system.output(states)]
        results += system.final(states)
        pairs = zip(results, (*total, grad_output, *grad_final), strict=True)
        outputs, grads = zip(*((x, g.to(x.dtype)) for x, g in pairs if g is not None), strict=True)
        of_gates, *others = gradients(outputs, leaves, grads)
    of_gates = torch.empty_like(args.gates).copy_(of_gates)
    incoming = [g for g in (grad_output, *grad_final) if g is not None]
    return _in_own_memory(Gradients.of(args, [of_gates, *others]), args, incoming)


def _in_own_memory(grads: Gradients, args: Arguments, incoming: list[Tensor]) -> Gradients:
    """Return gradients that share no memory."""
    of_gates, *others = grads.leaves(LEAVES)
    return Gradients.of(grads, [of_gates, *own_memory(others, args, incoming)])


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
