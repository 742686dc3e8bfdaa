"""A solve by a loop over the Python step: what the numerics contract holds results against."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pararnn.cells.base import Cell
from pararnn.engines.base import Arguments
from pararnn.engines.boundaries import final_states, output_states, to_system
from pararnn.program import program_of
from pararnn.solve import prepare

Named = dict[str, Tensor]


@dataclass(frozen=True)
class Problem:
    """A solve's inputs, with the leaves that gradients are taken of, and for which cotangents."""

    cell: Cell
    gates: Tensor
    bias: Tensor | None
    initial: tuple[Tensor, ...]
    fields: dict[str, Tensor]
    options: dict[str, Any]
    cotangents: tuple[Tensor, ...]

    def to(self, dtype: torch.dtype) -> Problem:
        """The same numbers in another dtype, as fresh leaves."""

        def leaf(tensor: Tensor) -> Tensor:
            return tensor.detach().to(dtype, copy=True).requires_grad_(tensor.requires_grad)

        return replace(
            self,
            cell=copy.deepcopy(self.cell).to(dtype),
            gates=leaf(self.gates),
            bias=None if self.bias is None else leaf(self.bias),
            initial=tuple(leaf(h) for h in self.initial),
            fields={name: leaf(value) for name, value in self.fields.items()},
        )

    def arguments(self) -> Arguments:
        """As the solvers take them."""
        options = {"bias": self.bias, "fields": self.fields, **self.options}
        args = prepare(self.cell, self.gates, self.initial, **options)
        return args.completed(len(self.cell.states))

    def leaves(self) -> Named:
        """Everything that has a gradient, by name."""
        named = {"gates": self.gates, **self.fields}
        if self.bias is not None:
            named["bias"] = self.bias
        names = self.cell.states
        named |= {f"initial {n}": h for n, h in zip(names, self.initial, strict=True)}
        named |= dict(self.cell.named_parameters())
        return {name: leaf for name, leaf in named.items() if leaf.requires_grad}


def by_name(cell: Cell, states: Sequence[Tensor], final: Sequence[Tensor]) -> Named:
    """The results of a solve: states and final states."""
    named = dict(zip(cell.states, states, strict=True))
    return named | {f"final {n}": f for n, f in zip(cell.states, final, strict=True)}


def gradients_of(outputs: Sequence[Tensor], problem: Problem, leaves: Named) -> Named:
    """The gradients of a problem's results by leaf."""
    pairs = zip(outputs, problem.cotangents, strict=True)
    needed = [(o, c) for o, c in pairs if o.requires_grad]
    grads = torch.autograd.grad(
        [o for o, _ in needed],
        list(leaves.values()),
        [c.to(o.dtype) for o, c in needed],
        allow_unused=True,
        materialize_grads=True,
    )
    return dict(zip(leaves, grads, strict=True))


def last_states(problem: Problem, states: Sequence[Tensor]) -> Named:
    """The final states that sequences of states end with, by name."""
    args = problem.arguments()
    _, bounds = to_system(program_of(problem.cell), args)
    ends = final_states(args, bounds, forward_order(args, states, problem.gates.dtype))
    return {f"final {name}": end for name, end in zip(problem.cell.states, ends, strict=True)}


class OtherRounding(TorchDispatchMode):
    """Rounds results of pointwise ops in `dtype` otherwise: noise of one epsilon, from a seed.

    Of the gradients' ops too: what a rounded gate leaves of 1 - gate^2 is most of their error.
    """

    def __init__(self, dtype: torch.dtype, seed: int) -> None:
        super().__init__()
        self.dtype, self.eps = dtype, torch.finfo(dtype).eps
        self.generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an op, and shake what it returns."""
        out = func(*args, **(kwargs or {}))
        if torch.Tag.pointwise not in func.tags or getattr(out, "dtype", None) != self.dtype:
            return out
        noise = torch.rand(out.shape, generator=self.generator, dtype=self.dtype).to(out.device)
        return out * (1 + self.eps * (2 * noise - 1))


def run_loop(
    problem: Problem,
    *,
    at: tuple[Tensor, ...] | None = None,
    rounding: int | None = None,
) -> tuple[Named, Named, Named]:
    """Values, gradients and gradient scales by a Python loop in the problem's dtype.

    `at`: states at which the steps are taken instead of the loop's own; gradients flow as if they
    were. `rounding`: the number of another legal rounding than PyTorch's own, see OtherRounding.
    The scale of a parameter's gradient is its largest sum of |contributions|.
    """
    if rounding is not None:
        with OtherRounding(problem.arguments().dtype, rounding):
            return run_loop(problem, at=at)
    leaves = problem.leaves()
    args = problem.arguments()
    program = program_of(problem.cell)
    system, bounds = to_system(program, args)
    given = None if at is None else forward_order(args, at, args.dtype)
    size = (len(args.gates), system.length, *system.initial.shape[1:])
    nudge = system.initial.new_zeros(size).requires_grad_()
    states, out, previous = system.initial, [], []
    for t in range(system.length):
        if system.fresh is not None and system.start is not None:
            states = torch.where(system.fresh[:, t, None], system.start[:, t], states)
        previous.append(states.detach())
        step = program.step(states.unbind(1), [x[:, t] for x in system.inputs], system.params)
        new = torch.stack(step, 1) + nudge[:, t]
        if given is not None:
            new = new + (given[:, t] - new).detach()
        if system.padding is not None:
            new = new.masked_fill(system.padding[:, t, None], 0)
        states = new
        out.append(new)
    stacked = torch.stack(out, 1) if out else torch.zeros_like(nudge)
    outputs = output_states(args, stacked)
    final = final_states(args, bounds, stacked)
    grads = gradients_of((*outputs, *final), problem, {**leaves, "nudge": nudge})
    adjoint = grads.pop("nudge")
    scales: Named = {}
    if system.length and len(args.gates):
        scales = _scales(problem, system, torch.stack(previous, 1), adjoint)
    if problem.bias is not None and problem.gates.numel():
        scales["bias"] = grads["gates"].abs().sum((0, 1)).max()
    return by_name(problem.cell, outputs, final), grads, scales


def _scales(problem: Problem, system: Any, previous: Tensor, adjoint: Tensor) -> Named:
    """The largest sum of |contributions| of each parameter's gradient."""
    cell, step = problem.cell, system.program.step
    params = tuple(p.detach() for p in system.params)

    def contribution(state: Tensor, inputs: Tensor, cotangent: Tensor) -> tuple[Tensor, ...]:
        def of_params(*values: Tensor) -> Tensor:
            return torch.stack(step(state.unbind(0), inputs.unbind(0), values))

        return torch.func.vjp(of_params, *params)[1](cotangent)

    rows = [previous, torch.stack(system.inputs, 2).detach(), adjoint]
    parts = torch.func.vmap(contribution)(*(r.flatten(0, 1) for r in rows)) if params else ()
    scales = {}
    for (name, kind), part in zip(type(cell).params.items(), parts, strict=True):
        total = part.abs().sum(0)
        if kind.shape == "H":
            total = total.unflatten(0, (cell.num_heads, -1)).sum(1)
        scales[name] = total.sum() if kind.shape == "" else total.max()
    return scales


def forward_order(args: Arguments, states: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """States (B, T, N, D) in the order of processing."""
    stacked = torch.stack(tuple(states), 2).to(dtype)
    return stacked.flip(1) if args.reverse else stacked
