"""Newton's method over all steps of a matrix cell with independent entries, in plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pararnn.base.numerics import FORWARD_TOLERANCE, rounding, underflow
from pararnn.program.derive import gradients, leaves_of
from pararnn.program.entries import Entries, advance_tangents, entries_of
from pararnn.solvers.boundaries import final_states
from pararnn.solvers.entry_maps import EntryScan, Jacobian, compose, pull_back
from pararnn.solvers.heads import HeadSystem, expand_mask
from pararnn.solvers.newton import DEFECT_ULPS, ERROR_SHARE, MAX_SWEEPS
from pararnn.solvers.system import running_max

States = tuple[Tensor, ...]


class EntryResult(NamedTuple):
    """States (B, T, H, ...) after all steps, Newton updates, and the number of finite rows that the
    loop recomputed, with their largest defect before it."""

    states: States
    sweeps: int
    redone: int = 0
    defect: float = 0.0


@dataclass(frozen=True)
class EntrySystem:
    """A `HeadSystem` whose steps run all at once.

    fresh: bool (B, T), steps that start from `start` (B, T, H, ...) instead of the step before.
    """

    heads: HeadSystem
    entries: Entries
    fresh: Tensor
    start: States

    @classmethod
    def of(cls, heads: HeadSystem) -> EntrySystem:
        """Return the system; differentiable by the initial states."""
        zero, boundaries = heads.zero, heads.boundaries
        batch, steps = heads.gates.shape[:2]
        nothing = heads.gates.new_zeros((batch, steps), dtype=torch.bool)
        if boundaries is None:
            begins, rows = nothing.clone(), [h.unsqueeze(1) for h in heads.initial]
            begins[:, :1] = True
        else:
            begins, rows = boundaries.begins, [*map(boundaries.initial, heads.initial)]
        begins = begins if zero is None else begins & ~zero
        start = tuple(torch.where(expand_mask(begins, row), row, 0.0) for row in rows)
        if boundaries is not None:
            pairs = zip(heads.at_padding, start, strict=True)
            start = tuple(torch.where(expand_mask(boundaries.padding, s), h, s) for h, s in pairs)
        fresh = begins if zero is None else begins | zero
        return cls(heads, entries_of(heads.program), fresh, start)

    def previous(self, states: States) -> States:
        """Return the states before each step."""
        earlier = (torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1) for x in states)
        pairs = zip(self.start, earlier, strict=True)
        return tuple(torch.where(expand_mask(self.fresh, x), s, x) for s, x in pairs)

    def sizes(self, states: States) -> States:
        """Return the largest finite |state| so far of each entry's sequence, (B, T, H, ...).

        The maximum restarts at a fresh step, with the state that it starts from.
        """

        def largest(state: Tensor, previous: Tensor) -> Tensor:
            both = torch.maximum(*(x.abs().nan_to_num(0, 0) for x in (state, previous)))
            return running_max(both, expand_mask(self.fresh, both))

        return tuple(map(largest, states, self.previous(states)))

    def inputs(self) -> tuple[States, States]:
        """Return the gates of all steps, and the parameters."""
        heads = self.heads
        return heads.program.step.head.split(heads.gates.flatten(0, 1)), tuple(heads.params)

    def advance(self, previous: States) -> States:
        """Return the states after each step; differentiable."""
        return self._by_step(self.heads.program.step(_flat(previous), *self.inputs()))

    def output(self, states: States) -> Tensor:
        """Return the outputs (B, T, H, V), zero at padding; differentiable."""
        step, boundaries = self.heads.program.step, self.heads.boundaries
        (output,) = self._by_step([step.output_of(_flat(states), *self.inputs())])
        if boundaries is None:
            return output
        return torch.where(expand_mask(boundaries.padding, output), 0.0, output)

    def final(self, states: States) -> States:
        """Return the states after each sequence, the initial ones for a sequence without steps."""
        return final_states(self.heads.initial, self.heads.boundaries, states)

    @torch.no_grad()
    def linearise(self, previous: States) -> tuple[States, Jacobian]:
        """Return the states after each step, and their derivatives by those of the step before."""
        pairs, (gates, params) = self.entries.pairs, self.inputs()
        units = [torch.full_like(previous[i], float(i == j)) for i, j in pairs]
        run = advance_tangents(self.heads.program.step, self.entries, with_adjoints=False)
        new = self._by_step(run(_flat((*previous, *units)), (*gates, *params)))
        states, derivatives = new[: len(previous)], new[len(previous) :]
        derivatives = tuple(torch.where(expand_mask(self.fresh, x), 0.0, x) for x in derivatives)
        return states, dict(zip(pairs, derivatives, strict=True))

    def _by_step(self, tensors: Sequence[Tensor]) -> States:
        return tuple(x.unflatten(0, self.heads.gates.shape[:2]) for x in tensors)


@torch.no_grad()
def solve_entries(system: EntrySystem, scan: EntryScan | None = None) -> EntryResult:
    """Find the states after all steps at once.

    A row is solved when its defect is at rounding level, relative to each entry's largest value so
    far, and its last update is within a quarter of the dtype's tolerance. Rows that are unsolved
    after MAX_SWEEPS, or that turn non-finite, run by the loop. scan: as in `compose`.
    """
    states = tuple(torch.zeros_like(x) for x in system.start)
    if not states[0].numel():
        return EntryResult(states, 0)
    states = system.advance(system.previous(states))
    tolerance = ERROR_SHARE * FORWARD_TOLERANCE[states[0].dtype]
    distance = torch.full((len(states[0]),), torch.inf, device=states[0].device)
    for sweep in range(MAX_SWEEPS + 1):
        new, jacobian = system.linearise(system.previous(states))
        gaps = [x - y for x, y in zip(new, states, strict=True)]
        sizes = system.sizes(states)
        limits = [DEFECT_ULPS * rounding(size, size.dtype) for size in sizes]
        excess = [g.abs() - limit for g, limit in zip(gaps, limits, strict=True)]
        is_solved, broken = (_largest(excess) <= 0) & (distance <= tolerance), ~_are_finite(gaps)
        if sweep == MAX_SWEEPS or bool((is_solved | broken).all()):
            break
        moves = compose(system.entries, jacobian, gaps, scan)
        pairs = zip(moves, sizes, strict=True)
        distance = _largest([m.abs() / s.clamp(min=underflow(s.dtype)) for m, s in pairs])
        states = tuple(x + move for x, move in zip(states, moves, strict=True))
    if bool(is_solved.all()):
        return EntryResult(states, sweep)
    by_loop = _loop(system)
    states = tuple(
        torch.where(expand_mask(is_solved, x), x, y) for x, y in zip(states, by_loop, strict=True)
    )
    redone = ~is_solved & _are_finite(by_loop)
    defects = _largest([gap.abs() for gap in gaps])[~is_solved].nan_to_num(torch.inf)
    return EntryResult(states, sweep, int(redone.sum()), float(defects.max()))


def _largest(tensors: Sequence[Tensor]) -> Tensor:
    """Return the largest entry of each row of all tensors."""
    return torch.stack([x.flatten(1).amax(1) for x in tensors]).amax(0)


def _are_finite(tensors: Sequence[Tensor]) -> Tensor:
    """Return whether all entries of each row are finite."""
    return torch.stack([x.flatten(1).isfinite().all(1) for x in tensors]).all(0)


def _loop(system: EntrySystem) -> States:
    """Return the states after all steps, one after the other."""
    heads, sizes = system.heads, system.heads.program.step.head
    last, trajectory = tuple(x[:, 0] for x in system.start), []
    for t in range(heads.gates.shape[1]):
        pairs = zip(system.start, last, strict=True)
        previous = tuple(
            torch.where(expand_mask(system.fresh[:, t], x), s[:, t], x) for s, x in pairs
        )
        last = heads.program.step(previous, sizes.split(heads.gates[:, t]), heads.params)
        trajectory.append(last)
    return tuple(torch.stack(steps, 1) for steps in zip(*trajectory, strict=True))


def cotangents(
    system: EntrySystem,
    states: States,
    incoming: Sequence[Tensor | None],
    output: Tensor | None,
    scan: EntryScan | None = None,
) -> States:
    """Return the total gradients of the states after each step, given the incoming gradients of the
    final states and of the outputs."""
    with torch.enable_grad():
        leaves = tuple(leaves_of(states))
        results = [system.output(leaves), *system.final(leaves)]
        pairs = zip(results, (output, *incoming), strict=True)
        with_gradient = [(x, g.to(x.dtype)) for x, g in pairs if g is not None]
        local = gradients([x for x, _ in with_gradient], leaves, [g for _, g in with_gradient])
    if not states[0].numel():
        return local
    previous = system.previous(states)
    _, jacobian = system.linearise(previous)
    # A step's states are read by the next one.
    later = {p: torch.cat([x[:, 1:], torch.zeros_like(x[:, :1])], 1) for p, x in jacobian.items()}
    total = pull_back(system.entries, later, local, scan)
    if all(bool(x.isfinite().all()) for x in total):
        return tuple(total)
    # Composed derivatives overflow, and the zeros between sequences do not stop a NaN.
    return _pull_back_by_steps(system, previous, local)


def _pull_back_by_steps(system: EntrySystem, previous: States, local: Sequence[Tensor]) -> States:
    """Return `cotangents` by the step's gradients: in its derivatives by one state, a derivative by
    another that is not finite counts as NaN, as it is multiplied by zero."""
    heads, boundaries, total = system.heads, system.heads.boundaries, list[States]()
    sizes = heads.program.step.head
    if boundaries is not None:
        local = [torch.where(expand_mask(boundaries.padding, x), 0.0, x) for x in local]
    carry = tuple(torch.zeros_like(x[:, 0]) for x in local)
    for t in reversed(range(local[0].shape[1])):
        grads = tuple(x[:, t] + y for x, y in zip(local, carry, strict=True))
        with torch.enable_grad():
            leaves = tuple(leaves_of([x[:, t] for x in previous]))
            new = heads.program.step(leaves, sizes.split(heads.gates[:, t]), heads.params)
            carry = gradients(new, leaves, grads)
        is_first = system.fresh[:, t]
        carry = tuple(x.masked_fill(expand_mask(is_first, x), 0) for x in carry)
        total.append(grads)
    return tuple(torch.stack(steps[::-1], 1) for steps in zip(*total, strict=True))


def _flat(states: Sequence[Tensor]) -> States:
    return tuple(x.flatten(0, 1) for x in states)
