"""A solve by a loop over the Python step: what the numerics contract holds results against."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pararnn.cells.base import Cell
from pararnn.engines.base import Arguments
from pararnn.engines.forward_time import final_states, output_states, to_system
from pararnn.program.program import program_of
from pararnn.solvers.system import System

Named = dict[str, Tensor]


@dataclass(frozen=True)
class Trial:
    """A call of a cell on trial: its leaves, and the cotangents that its gradients are taken for.

    `args` has no initial states where they are zero; its params are those of `cell`.
    """

    cell: Cell
    args: Arguments
    cotangents: tuple[Tensor, ...]

    def to(self, dtype: torch.dtype) -> Trial:
        """The same numbers in another dtype, as fresh leaves."""

        def leaf(tensor: Tensor) -> Tensor:
            if not tensor.is_floating_point():
                return tensor
            return tensor.detach().to(dtype, copy=True).requires_grad_(tensor.requires_grad)

        cell = copy.deepcopy(self.cell).to(dtype)
        return replace(self, cell=cell, args=replace(self.args, params=()).mapped(leaf))

    def call(self) -> Arguments:
        """The record, with the cell's params."""
        return replace(self.args, params=self.cell.lifted_params())

    def arguments(self) -> Arguments:
        """As the solvers take them."""
        return self.call().completed(len(self.cell.states))

    def leaves(self) -> Named:
        """Everything that has a gradient, by name."""
        args, cell = self.args, self.cell
        named = {"gates": args.gates, **dict(zip(cell.fields, args.fields, strict=True))}
        if args.bias is not None:
            named["bias"] = args.bias
        given = zip(cell.states, args.initial, strict=True) if args.initial else ()
        named |= {f"initial {n}": h for n, h in given}
        named |= dict(cell.named_parameters())
        return {name: leaf for name, leaf in named.items() if leaf.requires_grad}


def by_name(cell: Cell, states: Sequence[Tensor], final: Sequence[Tensor]) -> Named:
    """The results of a solve: states and final states."""
    named = dict(zip(cell.states, states, strict=True))
    return named | {f"final {n}": f for n, f in zip(cell.states, final, strict=True)}


def gradients_of(outputs: Sequence[Tensor], trial: Trial, leaves: Named) -> Named:
    """The gradients of a trial's results by leaf."""
    grads = _pull(outputs, list(leaves.values()), trial.cotangents)
    return dict(zip(leaves, grads, strict=True))


@torch.no_grad()
def results(trial: Trial, states: Tensor) -> Named:
    """States (B, T, N, D) in the order of processing as what a solve returns, by name."""
    args = trial.arguments()
    _, edges = to_system(program_of(trial.cell), args)
    outputs = output_states(args, states)
    return by_name(trial.cell, outputs, final_states(args, edges, states))


def last_states(cell: Cell, args: Arguments, states: Tensor) -> Named:
    """What sequences of (B, T, N, D) end with, by the final states' names."""
    _, edges = to_system(program_of(cell), args)
    ends = final_states(args, edges, states)
    return {f"final {name}": end for name, end in zip(cell.states, ends, strict=True)}


class OtherRounding(TorchDispatchMode):
    """Rounds results of pointwise ops in `dtype` otherwise: noise of one epsilon, from a seed.

    Of the gradients' ops too: what a rounded gate leaves of 1 - gate^2 is most of their error.
    `at_least`: the size of the noise, where that is more.
    """

    def __init__(self, dtype: torch.dtype, seed: int, at_least: float = 0.0) -> None:
        super().__init__()
        self.dtype, self.eps = dtype, max(torch.finfo(dtype).eps, at_least)
        self.generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an op, and shake what it returns."""
        out = func(*args, **(kwargs or {}))
        if torch.Tag.pointwise not in func.tags or getattr(out, "dtype", None) != self.dtype:
            return out
        noise = torch.rand(out.shape, generator=self.generator, dtype=self.dtype, device="cpu")
        return out * (1 + self.eps * (2 * noise.to(out.device) - 1))


@torch.no_grad()
def run_loop(trial: Trial) -> Tensor:
    """All states (B, T, N, D) by a Python loop in the trial's dtype, in the order of processing.

    Under OtherRounding it is a loop that rounds otherwise.
    """
    program = program_of(trial.cell)
    system, _ = to_system(program, trial.arguments())
    states, out = system.initial, []
    for t in range(system.length):
        if system.fresh is not None and system.start is not None:
            states = torch.where(system.fresh[:, t, None], system.start[:, t], states)
        inputs = [x[:, t] for x in system.inputs]
        states = torch.stack(program.step(states.unbind(1), inputs, system.params), 1)
        if system.padding is not None:
            states = states.masked_fill(system.padding[:, t, None], 0)
        out.append(states)
    if not out:
        batch, num_states, channels = system.initial.shape
        return system.initial.new_zeros(batch, 0, num_states, channels)
    return torch.stack(out, 1)


def steps(
    system: System, previous: Tensor, inputs: Sequence[Tensor], params: Sequence[Tensor]
) -> Tensor:
    """f(prev_l, x_l) for all l, (B, T, N, D), by the Python step; differentiable."""
    step = system.program.step
    if system.program.structure is None and system.length:  # it may branch on its state
        each = [
            torch.stack(step(previous[:, t].unbind(1), [x[:, t] for x in inputs], params), 1)
            for t in range(system.length)
        ]
        return torch.stack(each, 1)
    return torch.stack(step(previous.unbind(2), inputs, params), 2)


@torch.no_grad()
def advance(trial: Trial, states: Tensor) -> Tensor:
    """f(h_{l-1}, x_l) for all l at given states (B, T, N, D), in the trial's dtype."""
    system, _ = to_system(program_of(trial.cell), trial.arguments())
    new = steps(system, system.previous(states), system.inputs, system.params)
    return new if system.padding is None else new.masked_fill(system.padding.unsqueeze(2), 0)


def local_defects(trial: Trial, states: Tensor) -> Tensor:
    """f(h_{l-1}, x_l) - h_l at given states; 0 at padding, whose states are 0."""
    return advance(trial, states) - states


class Reverse(NamedTuple):
    """Gradients at given states, by leaf, and what errors of them are relative to.

    amounts: by leaf the |contributions| to a gradient, summed; of initial states, the largest
    |adjoint| of their channel. units: what an entry would be if every adjoint were as large as its
    channel's largest among the steps behind it, those that the reverse pass comes from.
    """

    grads: Named
    amounts: Named
    units: Named


def reverse(trial: Trial, states: Tensor, seed: int = 0) -> Reverse:
    """The reverse pass at given states (B, T, N, D), step by step in the trial's dtype.

    `seed`: 0 for PyTorch's own rounding, another for another, see OtherRounding.
    """
    leaves, args = trial.leaves(), trial.arguments()
    system, edges = to_system(program_of(trial.cell), args)
    at = states.detach().requires_grad_()
    final = final_states(args, edges, at)
    (arriving,) = _pull((*output_states(args, at), *final), [at], trial.cotangents)
    previous = system.previous(states.detach())
    coupling, size = system.program.coupling, (*at.shape[:2], at.shape[-1])
    params = [p.expand(coupling.param_sizes(p, size)) for p in system.params]
    arranged = [previous, *system.inputs, *params]
    rows = [_blank(t, system) for t in arranged[: 1 + len(system.inputs)]]
    rows = [t.detach().requires_grad_() for t in [*rows, *params]]
    walk = _walk_coupled if system.program.couples_channels else _walk
    shaken = nullcontext() if not seed else OtherRounding(system.dtype, seed)
    pulled, amounts, units = walk(system, rows, arriving.detach(), shaken)

    def to_leaves(pieces: Sequence[Tensor], cotangents: Sequence[Tensor]) -> Named:
        found = _pull((*arranged, *final), list(leaves.values()), (*pieces, *cotangents))
        return dict(zip(leaves, found, strict=True))

    ends = trial.cotangents[len(final) :]
    bare = [c.abs() for c in ends]
    return Reverse(to_leaves(pulled, ends), to_leaves(amounts, bare), to_leaves(units, bare))


Pieces = list[Tensor]


def _walk(
    system: System, rows: Pieces, arriving: Tensor, shaken: AbstractContextManager[Any]
) -> tuple[Pieces, Pieces, Pieces]:
    """Pulls back to rows (previous states, inputs, params a step), all steps' Jacobians at once."""
    count, num_states = 1 + len(system.inputs), system.program.num_states
    with shaken, torch.enable_grad():
        new = steps(system, rows[0], rows[1:count], rows[count:])
        ones = torch.ones_like(new[:, :, 0])
        jacobian = [_pull([new[:, :, n]], rows, [ones]) for n in range(num_states)]
    entries = torch.stack([row[0] for row in jacobian], 2)  # (B, T, N of new, N of previous, D)
    adjoint, carry = torch.zeros_like(arriving), torch.zeros_like(system.initial)
    cut = system.fresh
    for t in reversed(range(system.length)):
        adjoint[:, t] = _uncut(system.padding, t, arriving[:, t] + carry)
        carry = _uncut(cut, t, (entries[:, t] * adjoint[:, t].unsqueeze(2)).sum(1))
    largest = running(adjoint.abs(), cut)
    pulled = _combined(jacobian, adjoint)
    sizes = [[piece.abs() for piece in row] for row in jacobian]
    units = _combined(sizes, largest)
    amounts = [torch.maximum(largest, pulled[0].abs()), *(p.abs() for p in pulled[1:])]
    return pulled, amounts, units


def _walk_coupled(
    system: System, rows: Pieces, arriving: Tensor, shaken: AbstractContextManager[Any]
) -> tuple[Pieces, Pieces, Pieces]:
    """As `_walk` where channels mix: pulls back a step after the other, and units are amounts."""
    count, step = 1 + len(system.inputs), system.program.step
    series, params = rows[:count], rows[count:]
    pulled, amounts = ([torch.zeros_like(r) for r in rows] for _ in range(2))
    adjoint, carry = torch.zeros_like(arriving), torch.zeros_like(system.initial)
    cut = system.fresh
    for t in reversed(range(system.length)):
        adjoint[:, t] = _uncut(system.padding, t, arriving[:, t] + carry)
        here = [s[:, t].detach().requires_grad_() for s in series]
        with shaken, torch.enable_grad():
            new = torch.stack(step(here[0].unbind(1), here[1:], params), 1)
            parts = _pull([new], [*here, *params], [adjoint[:, t]])
        for i, part in enumerate(parts):
            (pulled[i][:, t] if i < count else pulled[i]).add_(part)
            (amounts[i][:, t] if i < count else amounts[i]).add_(part.abs())
        carry = _uncut(cut, t, parts[0])
    amounts[0] = torch.maximum(running(adjoint.abs(), cut), amounts[0])
    return pulled, amounts, amounts


def running(values: Tensor, cut: Tensor | None) -> Tensor:
    """The largest of (B, T, ..., D) from each step to its sequence's end; at `cut` one begins."""
    if cut is None:
        return values.flip(1).cummax(1).values.flip(1) if values.shape[1] else values
    out = values.clone()
    for t in reversed(range(values.shape[1] - 1)):
        out[:, t] = torch.maximum(out[:, t], _uncut(cut, t + 1, out[:, t + 1]))
    return out


def _uncut(mask: Tensor | None, t: int, values: Tensor) -> Tensor:
    """Values (B, ..., D) of a step, zero where the mask (B, T, 1 or D) holds."""
    if mask is None:
        return values
    here = mask[:, t]
    return values.masked_fill(here.reshape(len(here), *[1] * (values.ndim - 2), -1), 0)


def _blank(tensor: Tensor, system: System) -> Tensor:
    """Zero at padding, which may hold anything."""
    if system.padding is None:
        return tensor
    return tensor.masked_fill(
        system.padding.unsqueeze(2) if tensor.ndim == 4 else system.padding, 0
    )


def _combined(jacobian: list[Pieces], cotangent: Tensor) -> Pieces:
    """Derivatives of each new state by rows, times cotangents (B, T, N, D), summed over states."""
    out = []
    for pieces in zip(*jacobian, strict=True):
        parts = [p * _like(cotangent[:, :, n], p) for n, p in enumerate(pieces)]
        out.append(torch.stack(parts).sum(0))
    return out


def _like(tensor: Tensor, row: Tensor) -> Tensor:
    """(B, T, D) at the rank of a row of previous states or of others."""
    return tensor.unsqueeze(2) if row.ndim == 4 else tensor


def _pull(
    outputs: Sequence[Tensor],
    leaves: Sequence[Tensor],
    cotangents: Sequence[Tensor],
) -> list[Tensor]:
    """The outputs' cotangents at leaves, zero where nothing depends on one."""
    pairs = zip(outputs, cotangents, strict=True)
    needed = [(o, c.to(o.dtype)) for o, c in pairs if o.requires_grad]
    if not needed:
        return [torch.zeros_like(leaf) for leaf in leaves]
    with torch.autograd.set_multithreading_enabled(False):
        found = torch.autograd.grad(
            [o for o, _ in needed],
            leaves,
            [c for _, c in needed],
            retain_graph=True,
            allow_unused=True,
            materialize_grads=True,
        )
    return list(found)


def forward_order(args: Arguments, states: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """States (B, T, N, D) in the order of processing."""
    stacked = torch.stack(tuple(states), 2).to(dtype)
    return stacked.flip(1) if args.reverse else stacked
