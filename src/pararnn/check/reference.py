"""A solve by a loop over the Python step: the reference of the numerics contract."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pararnn.base.numerics import APPROXIMATED
from pararnn.base.private import TorchDispatchMode
from pararnn.cells.base import Cell
from pararnn.cells.products import MIX, OUTER, outer, product
from pararnn.codegen.targets import approximate_dtypes
from pararnn.engines.arguments import Arguments
from pararnn.engines.forward_time import output_states, to_system
from pararnn.program.derive import gradients
from pararnn.program.program import program_of
from pararnn.solvers.boundaries import final_states
from pararnn.solvers.system import System

Named = dict[str, Tensor]


@dataclass(frozen=True)
class Trial:
    """A call of a cell on trial: its leaves, and the cotangents that its gradients are taken for.

    `args` has no initial states where they are zero; its params are those of `cell`, and behind
    them the memories.
    """

    cell: Cell
    args: Arguments
    cotangents: tuple[Tensor, ...]

    @property
    def memory(self) -> tuple[Tensor, ...]:
        """The cell's memories."""
        return self.args.params[len(self.args.params) - len(self.cell.memory) :]

    def to(self, dtype: torch.dtype) -> Trial:
        """Return the same numbers in another dtype, as fresh leaves."""

        def leaf(tensor: Tensor) -> Tensor:
            if not tensor.is_floating_point():
                return tensor
            return tensor.detach().to(dtype, copy=True).requires_grad_(tensor.requires_grad)

        cell = copy.deepcopy(self.cell).to(dtype)
        return replace(self, cell=cell, args=replace(self.args, params=self.memory).map(leaf))

    def call(self) -> Arguments:
        """Return the record, with the cell's params."""
        return replace(self.args, params=self.cell.lifted_params() + self.memory)

    def arguments(self) -> Arguments:
        """Return the record as solvers read it."""
        return self.call().complete(program_of(self.cell))

    @cached_property
    def problem(self) -> tuple[Arguments, System]:
        """This call's arguments with everything filled in, and their conversion to a System,
        differentiable and the same at any states."""
        with torch.enable_grad():
            args = self.arguments()  # lifts parameters, which is part of the graph
            return args, to_system(program_of(self.cell), args)

    def leaves(self) -> Named:
        """Everything that has a gradient, by name."""
        args, cell = self.args, self.cell
        tensors = {"gates": args.gates, **dict(zip(cell.fields, args.fields, strict=True))}
        if args.bias is not None:
            tensors["bias"] = args.bias
        initial = zip(cell.states, args.initial, strict=True) if args.initial else ()
        tensors |= {f"initial {n}": h for n, h in initial}
        tensors |= {f"memory {n}": m for n, m in zip(cell.memory, self.memory, strict=True)}
        tensors |= dict(cell.named_parameters())
        return {name: leaf for name, leaf in tensors.items() if leaf.requires_grad}


def as_leaf(tensor: Tensor) -> Tensor:
    """Return a tensor as a leaf that requires a gradient, if it is of floating point."""
    leaf = tensor.detach().clone() if tensor.is_inference() else tensor.detach()
    return leaf.requires_grad_(leaf.is_floating_point())


@contextmanager
def differentiation() -> Iterator[None]:
    """Have autograd record what runs inside, whatever the caller's mode: without a graph all
    gradients would be zero, and so equal."""
    with torch.inference_mode(False), torch.enable_grad():
        yield


def by_name(cell: Cell, states: Sequence[Tensor], final: Sequence[Tensor]) -> Named:
    """Return the results of a solve: states and final states."""
    values = dict(zip(cell.states, states, strict=True))
    return values | {f"final {n}": f for n, f in zip(cell.states, final, strict=True)}


def gradients_of(outputs: Sequence[Tensor], trial: Trial, leaves: Named) -> Named:
    """Return the gradients of a trial's results by leaf."""
    grads = _pull(outputs, list(leaves.values()), trial.cotangents)
    return dict(zip(leaves, grads, strict=True))


@torch.no_grad()
def results(trial: Trial, states: Tensor) -> Named:
    """States (B, T, N, D) in the order of processing as what a solve returns, by name."""
    args, system = trial.problem
    by_state = states.unbind(2)
    outputs = output_states(args, by_state)
    final = final_states(args.initial, system.boundaries, by_state)
    return by_name(trial.cell, outputs, final)


def last_states(cell: Cell, args: Arguments, states: Tensor) -> Named:
    """Return the last states of sequences of (B, T, N, D), by the final states' names."""
    boundaries = to_system(program_of(cell), args).boundaries
    ends = final_states(args.initial, boundaries, states.unbind(2))
    return {f"final {name}": end for name, end in zip(cell.states, ends, strict=True)}


DRAWN = 1 << 14
"""Numbers of noise that are drawn at once: steps are small, and many."""


PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.bmm.default, MIX, OUTER)
"""Ops that sum products, of their first two arguments."""


ROUNDINGS = 3
"""Further loops, each with another rounding, that may be run to sample the loop's error."""


def least_noise(gates: Tensor) -> float:
    """Return the least noise of OtherRounding for a call: that of the approximate functions of its
    device and dtype, or 0."""
    return APPROXIMATED if gates.dtype in approximate_dtypes(gates.device) else 0.0


class OtherRounding(TorchDispatchMode):
    """Rounds results of pointwise ops in `dtype` otherwise: noise of one epsilon, from a seed.

    Of matrix products, which may sum their terms in any order, it is one epsilon of the sum of
    |terms|. Of the gradients' ops too: what a rounded gate leaves of 1 - gate^2 is most of their
    error.
    `at_least`: the size of the noise, where that is more.
    """

    def __init__(self, dtype: torch.dtype, seed: int, at_least: float = 0.0) -> None:
        super().__init__()
        self.dtype, self.eps = dtype, max(torch.finfo(dtype).eps, at_least)
        self.generator = torch.Generator().manual_seed(seed)
        self.factors, self.position = torch.empty(0, dtype=dtype, device="cpu"), 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # its guard takes as long as an op of a small step

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an op, and shake what it returns."""
        out = func(*args, **(kwargs or {}))
        if func in PRODUCTS and out.dtype == self.dtype:
            terms = func(args[0].abs(), args[1].abs(), *args[2:])
            return out + self._signs(out.numel()).view(out.shape).to(out.device) * terms
        if not _pointwise(func) or getattr(out, "dtype", None) != self.dtype:
            return out
        factor = self._factor(out.numel()).view(out.shape)
        return out * (factor if out.is_cpu else factor.to(out.device))

    def _signs(self, count: int) -> Tensor:
        """Return one epsilon with random signs: a small draw would make a limit by chance."""
        signs = torch.randint(0, 2, (count,), generator=self.generator, device="cpu")
        return ((2 * signs - 1) * torch.finfo(self.dtype).eps).to(self.dtype)

    def _factor(self, count: int) -> Tensor:
        """Return the next numbers of 1 + eps * U(-1, 1)."""
        remainder = self.factors.shape[0] - self.position
        if count > remainder:
            more = max(count - remainder, DRAWN)
            noise = torch.rand(more, generator=self.generator, dtype=self.dtype, device="cpu")
            new = 1 + self.eps * (2 * noise - 1)
            self.factors, self.position = torch.cat([self.factors[self.position :], new]), 0
        self.position += count
        return self.factors[self.position - count : self.position]


class Products:
    """A step's products, which record the vectors whose outer products are their matrices'
    gradients. What else a step makes of a matrix has its gradient by autograd."""

    def __init__(self, matrices: Sequence[Tensor]) -> None:
        self._matrices = matrices
        self._pairs: list[list[tuple[Tensor, Tensor]]] = [[] for _ in matrices]
        self._by_id = {id(m): pairs for m, pairs in zip(matrices, self._pairs, strict=True)}

    def __call__(self, x: Tensor, matrix: Tensor, transpose: bool) -> Tensor:
        """Return `product`, as `cells.base.Step.by_ops` takes it."""
        if not x.requires_grad:
            return product(x, matrix, transpose)
        out = product(x, matrix.detach(), transpose)
        pairs, rows = self._by_id[id(matrix)], x.detach()
        out.register_hook(lambda grad: pairs.append((grad, rows) if transpose else (rows, grad)))
        return out

    def totals(self, of: Callable[[Tensor], Tensor]) -> list[Tensor]:
        """Return by matrix the sum of the outer products of `of` all vectors."""
        totals = [torch.zeros_like(matrix) for matrix in self._matrices]
        for total, pairs in zip(totals, self._pairs, strict=True):
            if pairs:
                rows, columns = (torch.cat(vectors) for vectors in zip(*pairs, strict=True))
                total += outer(of(rows), of(columns), total)
        return totals


@cache
def _pointwise(func: Any) -> bool:
    return torch.Tag.pointwise in func.tags


@torch.no_grad()
def run_loop(trial: Trial) -> Tensor:
    """All states (B, T, N, D) by a Python loop in the trial's dtype, in the order of processing.

    Under OtherRounding it is a loop that rounds otherwise.
    """
    program = program_of(trial.cell)
    system = to_system(program, trial.arguments())
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
        new_states = [
            torch.stack(step(previous[:, t].unbind(1), [x[:, t] for x in inputs], params), 1)
            for t in range(system.length)
        ]
        return torch.stack(new_states, 1)
    return torch.stack(step(previous.unbind(2), inputs, params), 2)


@torch.no_grad()
def advance(trial: Trial, states: Tensor) -> Tensor:
    """f(h_{l-1}, x_l) for all l at given states (B, T, N, D), in the trial's dtype."""
    system = to_system(program_of(trial.cell), trial.arguments())
    return system.blank(steps(system, system.previous(states), system.inputs, system.params))


def local_defects(trial: Trial, states: Tensor) -> Tensor:
    """f(h_{l-1}, x_l) - h_l at given states; 0 at padding, whose states are 0."""
    return advance(trial, states) - states


class Reverse(NamedTuple):
    """Gradients at given states, by leaf, and the sizes that their errors are relative to.

    amounts: by leaf the |contributions| to a gradient, summed; of initial states, the largest
    |adjoint| of their channel. units: the size of an entry if every adjoint were as large as its
    channel's largest among later steps. Both are empty if no sizes were requested.
    """

    grads: Named
    amounts: Named
    units: Named


def reverse(trial: Trial, states: Tensor, seed: int = 0, sizes: bool = False) -> Reverse:
    """Return the reverse pass at given states (B, T, N, D), step by step in the trial's dtype.

    `seed`: 0 for PyTorch's rounding, another number for another, see OtherRounding. `sizes`:
    whether to compute amounts and units.
    """
    leaves, (args, system) = trial.leaves(), trial.problem
    leaf = states.detach().requires_grad_()
    by_state = leaf.unbind(2)
    final = final_states(args.initial, system.boundaries, by_state)
    (arriving,) = _pull((*output_states(args, by_state), *final), [leaf], trial.cotangents)
    previous = system.previous(states.detach())
    coupling, size = system.program.coupling, (*leaf.shape[:2], leaf.shape[-1])
    params = [p.expand(coupling.param_sizes(p, size)) for p in system.params]
    sources = [previous, *system.inputs, *params]
    rows = [t.detach().requires_grad_() for t in sources]
    walk = _walk_coupled if system.program.couples_channels else _walk
    shaken = nullcontext() if not seed else OtherRounding(system.dtype, seed)
    row_grads, *row_sizes = walk(system, rows, arriving.detach(), shaken, sizes)

    def to_leaves(row_grads: Sequence[Tensor], cotangents: Sequence[Tensor]) -> Named:
        grads = _pull((*sources, *final), list(leaves.values()), (*row_grads, *cotangents))
        return dict(zip(leaves, grads, strict=True))

    ends = trial.cotangents[len(final) :]
    grads, bare = to_leaves(row_grads, ends), [c.abs() for c in ends]
    amounts, units = (to_leaves(m, bare) for m in row_sizes) if sizes else ({}, {})
    return Reverse(grads, amounts, units)


def _walk(
    system: System,
    rows: list[Tensor],
    arriving: Tensor,
    shaken: AbstractContextManager[Any],
    sizes: bool,
) -> tuple[list[Tensor], ...]:
    """Pull back to rows (previous states, inputs, params a step), all steps' Jacobians at once.

    Returns the gradients of rows and, with sizes, amounts and units, see Reverse.
    """
    count, num_states = 1 + len(system.inputs), system.program.num_states
    with shaken, torch.enable_grad():
        new = steps(system, rows[0], rows[1:count], rows[count:])
        ones = torch.ones_like(new[:, :, 0])
        jacobian = [_pull([new[:, :, n]], rows, [ones]) for n in range(num_states)]
    # Of each step, (B, N of new, N of previous, D).
    slopes = torch.stack([row[0] for row in jacobian], 2).unbind(1)

    def back(t: int, adjoint: Tensor) -> Tensor:
        return (slopes[t] * adjoint.unsqueeze(2)).sum(1)

    adjoint = _adjoints(system, arriving, back)
    grads = _combine(jacobian, adjoint)
    if not sizes:
        return (grads,)
    largest = running(adjoint.abs(), system.fresh)
    units = _combine([[entry.abs() for entry in row] for row in jacobian], largest)
    amounts = [torch.maximum(largest, grads[0].abs()), *(p.abs() for p in grads[1:])]
    return grads, amounts, units


def _walk_coupled(
    system: System,
    rows: list[Tensor],
    arriving: Tensor,
    shaken: AbstractContextManager[Any],
    sizes: bool,
) -> tuple[list[Tensor], ...]:
    """Pull back as `_walk`, for coupled channels: step by step, and units are amounts."""
    count, step = 1 + len(system.inputs), system.program.step
    series, params = [row.unbind(1) for row in rows[:count]], rows[count:]
    products = Products(params)
    run = partial(step.by_ops, multiply=products) if sizes else step
    step_grads: list[list[Tensor]] = []
    param_grads, amounts = ([torch.zeros_like(p) for p in params] for _ in range(2))

    def back(t: int, adjoint: Tensor) -> Tensor:
        here = [s[t].detach().requires_grad_() for s in series]
        with shaken, torch.enable_grad():
            new = torch.stack(run(here[0].unbind(1), here[1:], params), 1)
            grads = _pull([new], [*here, *params], [adjoint])
        step_grads.append(grads[:count])
        for i, grad in enumerate(grads[count:]):
            param_grads[i].add_(grad)
            amounts[i].add_(grad.abs())
        return grads[0]

    adjoint = _adjoints(system, arriving, back)
    param_grads = [a + b for a, b in zip(param_grads, products.totals(lambda v: v), strict=True)]
    amounts = [a + b for a, b in zip(amounts, products.totals(torch.abs), strict=True)]
    in_time = [torch.stack(p[::-1], 1) for p in zip(*step_grads, strict=True)]
    row_grads = in_time or [torch.zeros_like(row) for row in rows[:count]]
    sizes_of_rows = [p.abs() for p in row_grads]
    sizes_of_rows[0] = torch.maximum(running(adjoint.abs(), system.fresh), sizes_of_rows[0])
    return [*row_grads, *param_grads], [*sizes_of_rows, *amounts], [*sizes_of_rows, *amounts]


def _adjoints(system: System, arriving: Tensor, back: Callable[[int, Tensor], Tensor]) -> Tensor:
    """Return the gradients at states (B, T, N, D): `back` pulls a step's to the state before."""
    carry, adjoints = torch.zeros_like(system.initial), []
    cut, padding = (_where(mask) for mask in (system.fresh, system.padding))
    for t, here in reversed(list(enumerate(arriving.unbind(1)))):
        adjoints.append(_mask(padding, t, here + carry))
        carry = _mask(cut, t, back(t, adjoints[-1]))
    return torch.stack(adjoints[::-1], 1) if adjoints else torch.zeros_like(arriving)


def running(values: Tensor, cut: Tensor | None) -> Tensor:
    """Return the largest of (B, T, ..., D) from each step to its end; sequences begin at `cut`."""
    if cut is None:
        return values.flip(1).cummax(1).values.flip(1) if values.shape[1] else values
    # By doubling: `ends` says whether a sequence begins in the `reach` steps after each.
    ends = cut.roll(-1, 1).reshape(*cut.shape[:2], *[1] * (values.ndim - 3), cut.shape[2])
    reach = 1
    while reach < values.shape[1]:
        later = values[:, reach:].masked_fill(ends[:, :-reach], 0)
        values = torch.cat([torch.maximum(values[:, :-reach], later), values[:, -reach:]], 1)
        ends = torch.cat([ends[:, :-reach] | ends[:, reach:], ends[:, -reach:]], 1)
        reach *= 2
    return values


Masks = dict[int, Tensor]
"""Masks (B, 1, 1 or D) that hold somewhere, by their step."""


def _where(mask: Tensor | None) -> Masks:
    if mask is None:
        return {}
    steps = mask.flatten(2).any(2).any(0).nonzero().flatten().tolist()
    return {t: mask[:, t].unsqueeze(1) for t in steps}


def _mask(masks: Masks, t: int, values: Tensor) -> Tensor:
    """Return values (B, N, D) of a step, zero where its mask holds."""
    return values.masked_fill(masks[t], 0) if t in masks else values


def _combine(jacobian: list[list[Tensor]], cotangent: Tensor) -> list[Tensor]:
    """Return derivatives of new states by rows, times cotangents (B, T, N, D), summed over N."""
    out = []
    for entries in zip(*jacobian, strict=True):
        terms = [p * _like(cotangent[:, :, n], p) for n, p in enumerate(entries)]
        out.append(torch.stack(terms).sum(0))
    return out


def _like(tensor: Tensor, row: Tensor) -> Tensor:
    """Return (B, T, D) with the rank of `row`: of previous states, or of inputs and params."""
    return tensor.unsqueeze(2) if row.ndim == 4 else tensor


def _pull(
    outputs: Sequence[Tensor], leaves: Sequence[Tensor], cotangents: Sequence[Tensor]
) -> list[Tensor]:
    """Return the outputs' cotangents at leaves, zero where nothing depends on one."""
    arriving = [c.to(o.dtype) for o, c in zip(outputs, cotangents, strict=True)]
    with torch.autograd.set_multithreading_enabled(False):
        return list(gradients(outputs, leaves, arriving))


def forward_order(args: Arguments, states: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Return states (B, T, N, D) in the order of processing."""
    out = torch.stack(tuple(states), 2).to(dtype)
    return out.flip(1) if args.options.reverse else out
