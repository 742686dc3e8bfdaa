"""Newton's method over the whole sequence (paper, Algorithm 1a), stopped by the contract."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from pararnn.base.numerics import FORWARD_TOLERANCE, rounding, underflow
from pararnn.program.coupling import Coupling
from pararnn.solvers.affine_scan import Scan, affine_scan
from pararnn.solvers.sequential import unroll
from pararnn.solvers.system import System

MAX_SWEEPS = 32
"""Newton updates after which an unconverged column is finished sequentially."""

DEFECT_ULPS = 4
"""Half the contract's bound, as the solver evaluates the defect in the compute dtype."""

GAP_ULPS, FIRST_STEP = 5, 1.3
"""Largest distance of a segment's start from the end of the one before, in roundings of the largest
state there; and of the next step's states from both, in GAP_ULPS. The rest of the contract's bound
is for that step's rounding."""

ERROR_SHARE = 0.25
"""Fraction of the forward tolerance allowed to the estimated distance to the solution."""


SHRINK_AFTER = 3
"""Sweeps after which a solve drops its converged columns, once they are half of all."""


@dataclass(frozen=True)
class NewtonResult:
    """States (B, T, N, D), Newton updates, columns redone and their largest defect.

    `redone` counts the columns that Newton did not solve although their sequential run is finite;
    `defect` is the largest defect among the redone columns when Newton gave up.
    """

    states: Tensor
    sweeps: int
    redone: int
    defect: float


@torch.no_grad()
def newton(system: System, scan: Scan = affine_scan) -> NewtonResult:
    """Solve h_l = f(prev_l, x_l) for all l at once.

    A column is a channel of a batch row, or a whole row where channels are coupled. It has
    converged when its defect is at rounding level everywhere and its estimated distance to the
    solution is at most a quarter of the dtype's forward tolerance. The distance before an update
    is the update itself; after it, the update times the observed rate of convergence. Columns that
    do not converge, or turn non-finite, are redone by the sequential solver.
    """
    batch, num_states, channels = system.initial.shape
    zeros = system.initial.new_zeros(batch, system.length, num_states, channels)
    if zeros.numel() == 0:
        return NewtonResult(zeros, 0, 0, 0.0)
    guess = system.advance(system.previous(zeros))  # the paper's guess, f(0, x_l)
    states, sweeps_by_hand = guess, 0
    if system.program.step.has_jacobian:
        # A hand-written Jacobian may be wrong at untested inputs, and so may its estimate of the
        # distance to the solution. The derived Jacobian continues from its result.
        end = _iterate(replace(system, by_hand=True), scan, guess, MAX_SWEEPS)
        states = torch.where(end.states.isfinite(), end.states, guess)
        sweeps_by_hand = int(end.sweeps)
    end = _iterate(system, scan, states, MAX_SWEEPS)
    sweeps, failures = sweeps_by_hand + int(end.sweeps), ~end.is_solved
    if not bool(failures.any()):
        return NewtonResult(end.states, sweeps, 0, 0.0)
    coupling = system.program.coupling
    by_loop = unroll(system.columns(failures))
    finite = ~coupling.any(~by_loop.isfinite())
    worst = end.defect[failures].nan_to_num(float("inf")).max()
    states = coupling.put(end.states, failures, by_loop)
    return NewtonResult(states, sweeps, int(finite.sum()), float(worst))


class _Iterate(NamedTuple):
    """Result of an iteration: states, updates, and each column's flag of convergence and defect."""

    states: Tensor
    sweeps: Tensor
    is_solved: Tensor
    defect: Tensor


def _iterate(system: System, scan: Scan, states: Tensor, budget: int) -> _Iterate:
    """Update until every column has converged or is broken, or the budget is used up."""
    structure = system.program.structure
    assert structure is not None
    coupling = structure.coupling
    tolerance = ERROR_SHARE * FORWARD_TOLERANCE[system.dtype]
    is_solved = broken = coupling.any(torch.zeros_like(states, dtype=torch.bool))
    distance = last_size = torch.full_like(is_solved, float("inf"), dtype=system.dtype)
    sweeps = torch.zeros((), dtype=torch.int64, device=states.device)
    better, keep_update = states, torch.zeros_like(is_solved)
    for sweep in range(budget + 1):
        new, jacobian = system.linearise(system.previous(states))
        residual = new - states
        defect = coupling.largest(residual.abs())
        broken = broken | ~defect.isfinite()
        sizes = system.sizes(states)
        at_rounding = _at_rounding(coupling, residual, sizes) & ~broken
        is_solved = is_solved | (at_rounding & (distance <= tolerance))
        open_columns = ~(is_solved | broken)
        count = int(open_columns.sum())
        if sweep == budget or count == 0:
            break
        if sweep >= SHRINK_AFTER and 2 * count <= open_columns.numel():
            open_states = coupling.take(states, open_columns)
            end = _iterate(system.columns(open_columns), scan, open_states, budget - sweep)
            best = _best(system, states, better, keep_update)
            return _Iterate(
                coupling.put(best, open_columns, end.states),
                sweeps + end.sweeps,
                coupling.put(is_solved, open_columns, end.is_solved),
                coupling.put(defect, open_columns, end.defect),
            )
        update = scan(structure, jacobian[:, 1:], residual)
        size = coupling.largest(update.abs() / sizes.clamp(min=underflow(system.dtype)))
        # If the defect is at rounding level and the update negligible, the column had converged
        # before: this sweep confirms it.
        confirms = open_columns & at_rounding & (size <= tolerance)
        is_solved, keep_update = is_solved | confirms, keep_update | confirms
        better = torch.where(coupling.spread(confirms, states), states + update, better)
        sweeps = sweeps + (open_columns & ~confirms).any()
        rate = (size / last_size).nan_to_num(0.5).clamp(max=0.5)
        distance, last_size = size * rate / (1 - rate), size
        states = torch.where(coupling.spread(is_solved, states), states, states + update)
    return _Iterate(_best(system, states, better, keep_update), sweeps, is_solved, defect)


def _at_rounding(coupling: Coupling, residual: Tensor, sizes: Tensor) -> Tensor:
    """Return the columns whose defect is at rounding level everywhere."""
    limit = DEFECT_ULPS * rounding(sizes, sizes.dtype)
    return ~coupling.any(residual.abs() > limit)


def _best(system: System, states: Tensor, better: Tensor, keep_update: Tensor) -> Tensor:
    """Return the updates that confirmed a column, where their defect is still at rounding level.

    A discontinuous step may exceed it: there the confirmed states are returned.
    """
    if not bool(keep_update.any()):
        return states
    coupling = system.program.coupling
    residual = system.advance(system.previous(better)) - better
    at_rounding = _at_rounding(coupling, residual, system.sizes(better))
    return torch.where(coupling.spread(keep_update & at_rounding, states), better, states)


@torch.no_grad()
def adjoint(
    system: System, previous: Tensor, cotangent: Tensor, scan: Scan = affine_scan
) -> Tensor:
    """Return the states' total gradients, l_t = g_t + J_{t+1}^T l_{t+1} (paper, eq. rnn_bwd_seq).

    `previous`, `cotangent` and the result are (B, T, N, D); the result is zero at padding. Columns
    that are not finite are redone step by step: composed Jacobians may overflow, and the zeros
    between sequences do not stop a NaN.
    """
    structure = system.program.structure
    assert structure is not None
    _, jacobian = system.linearise(previous)
    backward = structure.transpose(jacobian)[:, 1:].flip(1)
    cotangent = system.blank(cotangent)
    total = scan(structure, backward, cotangent.flip(1)).flip(1)
    coupling = structure.coupling
    mask = coupling.any(~total.isfinite())
    if bool(mask.any()):
        columns = (coupling.take(previous, mask), coupling.take(cotangent, mask))
        total = coupling.put(total, mask, _adjoint_loop(system.columns(mask), *columns))
    return total


def _adjoint_loop(system: System, previous: Tensor, cotangent: Tensor) -> Tensor:
    """Compute `adjoint` step by step: NaN and inf appear exactly where the loop's gradients have
    them.

    Uses the step's gradient, not its Jacobian: an entry of zero multiplies in the gradient and is
    absent from the Jacobian.
    """
    out, carry = [], torch.zeros_like(cotangent[:, :1])
    for t in reversed(range(system.length)):
        total = cotangent[:, t : t + 1] + carry
        step = system.one_step(t)
        carry = step.pull_back(previous[:, t : t + 1], total)[0]
        if step.fresh is not None:
            carry = carry.masked_fill(step.fresh.unsqueeze(2), 0)
        out.append(total)
    return torch.cat(out[::-1], 1)
