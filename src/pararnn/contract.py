"""Check one solve against the numerics contract: the oracle of `verify` and of the tests."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pararnn.cells.base import Cell
from pararnn.engines.base import Arguments, totals
from pararnn.engines.boundaries import final_states, output_states, to_system
from pararnn.engines.table import engine_for
from pararnn.numerics import (
    DEFECT_ULPS,
    FORWARD_TOLERANCE,
    SEQUENTIAL_ERRORS,
    relative_error,
)
from pararnn.program import program_of
from pararnn.solve import prepare, solve_with_info

Named = dict[str, Tensor]

JITTER = 2.0
"""Relative noise, in epsilons, that stands for another legal rounding of a sequential run."""

CHAOTIC = 100
"""Where rounding alone moves a tensor by more than this many tolerances, its forward error says
nothing, and only the defect and the gradients at its states are judged."""


@dataclass(frozen=True)
class Check:
    """One claim: a measured error and its limit."""

    name: str
    error: float
    limit: float

    @property
    def passed(self) -> bool:
        """Whether the error is a number within the limit."""
        return self.error <= self.limit


@dataclass(frozen=True)
class SolveChecks:
    """All checks of one solve, with the solver's counts.

    `expanding`: gradients were judged at the returned states, because rounding moves the states
    (and so the gradients) by more than the tolerance. `pair`: the (solver, backend) that ran.
    """

    checks: tuple[Check, ...]
    sweeps: int
    mended: int
    expanding: bool
    pair: tuple[str, str]

    @property
    def passed(self) -> bool:
        """Whether every check passed."""
        return all(check.passed for check in self.checks)


@dataclass(frozen=True)
class _Problem:
    """A solve's inputs, with the leaves that gradients are taken of."""

    cell: Cell
    gates: Tensor
    bias: Tensor | None
    initial: tuple[Tensor, ...]
    fields: dict[str, Tensor]
    options: dict[str, Any]

    def to(self, dtype: torch.dtype) -> _Problem:
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


def check_solve(
    cell: Cell,
    gates: Tensor,
    initial_state: Tensor | Sequence[Tensor] | None = None,
    *,
    bias: Tensor | None = None,
    fields: Mapping[str, Tensor | float] | None = None,
    solver: str = "auto",
    backend: str = "auto",
    seed: int = 0,
    **options: Any,
) -> SolveChecks:
    """Solve forward and backward and hold the result against the contract.

    Arguments are those of `pararnn.solve`, with a layer's bias (G, D). The oracle is a loop over
    the Python step in float64 on the same inputs. Checked: the defect of every returned step, the
    forward error of states, final states and all gradients (for random cotangents drawn from
    `seed`), and that nothing is non-finite where the sequential run in the same dtype is finite,
    or the other way round.
    """
    on_failure = options.pop("on_failure", "warn")
    given = prepare(cell, gates, initial_state, bias=bias, fields=fields, **options)
    args = given.completed(len(cell.states))
    problem = _Problem(
        cell=copy.deepcopy(cell),
        gates=_leaf(gates),
        bias=None if bias is None else _leaf(bias),
        initial=tuple(_leaf(h) for h in args.initial),
        fields={n: _leaf(f) for n, f in zip(cell.fields, args.fields, strict=True)},
        options=options,
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        example = args.fields[0] if args.fields else args.gates.flatten(3)[:, :, 0]
    series = [_draw(example, generator).to(gates.dtype) for _ in cell.states]
    ends = [_draw(h, generator).to(args.dtype) for h in args.initial]
    pair: dict[str, Any] = {"solver": solver, "backend": backend, "on_failure": on_failure}
    plain = {"solver": "sequential", "backend": "torch"}

    values, grads, states, info = _run(problem, series, ends, pair)
    plain_values, plain_grads, loop_states, _ = _run(problem, series, ends, plain)
    exact = problem.to(torch.float64)
    true_values, true_grads, scales = _reference(exact, series, ends)
    if gates.dtype == torch.float64:
        loop_values, loop_grads, _ = _reference(exact, series, ends, jitter=JITTER)
        loop_states = tuple(loop_values[name] for name in cell.states)
    else:
        loop_values, loop_grads = plain_values, plain_grads
    tolerance = FORWARD_TOLERANCE[gates.dtype]
    jittered = functools.cache(lambda: _reference(problem, series, ends, jitter=JITTER)[0])

    def compare(
        name: str,
        value: Tensor,
        loop: Tensor,
        reference: Tensor,
        second: Callable[[], Named] | None = None,
    ) -> Check:
        scale = scales.get(name)
        # A parameter kept in a lower precision than the gates has its gradient in that precision.
        allowed = max(tolerance, FORWARD_TOLERANCE[value.dtype])
        error, own = relative_error(value, reference, scale), relative_error(loop, reference, scale)
        if error > allowed + SEQUENTIAL_ERRORS * own and second is not None:
            # One run is one sample of what rounding does where the dynamics expand.
            own = max(own, relative_error(second()[name], reference, scale))
        chaotic = name in values or gates.dtype == torch.float64
        if chaotic and own > CHAOTIC * tolerance:
            return Check(name, error, float("inf"))
        return Check(name, error, allowed + SEQUENTIAL_ERRORS * own)

    checks = [_check_defect(exact, gates.dtype, states, loop_states)]
    checks += [compare(n, v, loop_values[n], true_values[n], jittered) for n, v in values.items()]
    judged = [compare(n, v, loop_grads[n], true_grads[n]) for n, v in grads.items()]
    stray = _stray_non_finite(grads, plain_grads)
    expanding = stray > 0 or not all(check.passed for check in judged)
    if expanding:
        _, here, scales = _reference(exact, series, ends, at=states)
        rounded = problem.to(args.dtype)

        def gradients(jitter: float) -> Named:
            return _reference(rounded, series, ends, at=states, jitter=jitter)[1]

        noisy = functools.cache(lambda: gradients(JITTER))
        loop = noisy() if gates.dtype == torch.float64 else gradients(0.0)
        judged = [compare(n, v, loop[n], here[n], noisy) for n, v in grads.items()]
        stray = 0.0 if _overflow(here, gates.dtype) else _stray_non_finite(grads, loop)
    checks += [replace(check, name=f"grad {check.name}") for check in judged]
    stray += _stray_non_finite(values, plain_values)
    checks.append(Check("stray non-finite entries", stray, 0.0))
    sweeps, mended = totals(info).tolist()
    size = (*gates.shape[:2], cell.hidden_size)
    engine = engine_for(program_of(cell), size, gates.dtype, gates.device, solver, backend)
    ran = (engine.solver, engine.backend)
    return SolveChecks(tuple(checks), sweeps, mended, expanding, ran)


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.is_floating_point())


def _draw(like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(like.shape, generator=generator, dtype=torch.float64).to(like.device)


def _run(
    problem: _Problem, series: list[Tensor], ends: list[Tensor], pair: dict[str, Any]
) -> tuple[Named, Named, tuple[Tensor, ...], Tensor]:
    """Values and gradients by name, the state sequences, and the solver's counts."""
    states, final, info = solve_with_info(
        problem.cell,
        problem.gates,
        problem.initial,
        bias=problem.bias,
        fields=problem.fields,
        **problem.options,
        **pair,
    )
    grads = _gradients((*states, *final), (*series, *ends), problem.leaves())
    return _named(problem.cell, states, final), grads, tuple(s.detach() for s in states), info


def _named(cell: Cell, states: Sequence[Tensor], final: Sequence[Tensor]) -> Named:
    named = dict(zip(cell.states, states, strict=True))
    return named | {f"final {n}": f for n, f in zip(cell.states, final, strict=True)}


def _gradients(outputs: Sequence[Tensor], cotangents: Sequence[Tensor], leaves: Named) -> Named:
    needed = [(o, c) for o, c in zip(outputs, cotangents, strict=True) if o.requires_grad]
    grads = torch.autograd.grad(
        [o for o, _ in needed],
        list(leaves.values()),
        [c.to(o.dtype) for o, c in needed],
        allow_unused=True,
        materialize_grads=True,
    )
    return dict(zip(leaves, grads, strict=True))


def _reference(
    problem: _Problem,
    series: list[Tensor],
    ends: list[Tensor],
    *,
    at: tuple[Tensor, ...] | None = None,
    jitter: float = 0.0,
) -> tuple[Named, Named, Named]:
    """Values, gradients and gradient scales by a Python loop in the problem's dtype.

    `at`: states at which the steps are taken instead of the loop's own; gradients flow as if they
    were. `jitter`: relative noise on states, inputs and parameters, in epsilons. The scale of a
    parameter's gradient is its largest sum of |contributions|.
    """
    leaves = problem.leaves()
    args = problem.arguments()
    program = program_of(problem.cell)
    system, bounds = to_system(program, args)
    noise = _noise(jitter, args.dtype)
    inputs = [noise(x) for x in system.inputs]
    params = [noise(p) for p in system.params]
    given = None if at is None else _forward_order(args, at, args.dtype)
    size = (len(args.gates), system.length, *system.initial.shape[1:])
    nudge = system.initial.new_zeros(size).requires_grad_()
    states, out, previous = system.initial, [], []
    for t in range(system.length):
        if system.fresh is not None and system.start is not None:
            states = torch.where(system.fresh[:, t, None], system.start[:, t], states)
        previous.append(states.detach())
        step = program.step(states.unbind(1), [x[:, t] for x in inputs], params)
        new = noise(torch.stack(step, 1)) + nudge[:, t]
        if given is not None:
            new = new + (given[:, t] - new).detach()
        if system.padding is not None:
            new = new.masked_fill(system.padding[:, t, None], 0)
        states = new
        out.append(new)
    stacked = torch.stack(out, 1) if out else torch.zeros_like(nudge)
    outputs = output_states(args, stacked)
    final = final_states(args, bounds, stacked)
    grads = _gradients((*outputs, *final), (*series, *ends), {**leaves, "nudge": nudge})
    adjoint = grads.pop("nudge")
    scales: Named = {}
    if system.length and len(args.gates):
        scales = _scales(problem, system, torch.stack(previous, 1), adjoint)
    if problem.bias is not None and problem.gates.numel():
        scales["bias"] = grads["gates"].abs().sum((0, 1)).max()
    return _named(problem.cell, outputs, final), grads, scales


def _noise(jitter: float, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """Multiply by 1 + noise of `jitter` epsilons, or leave alone."""
    generator = torch.Generator().manual_seed(0)

    def noisy(tensor: Tensor) -> Tensor:
        if not jitter:
            return tensor
        factor = torch.rand(tensor.shape, generator=generator, dtype=dtype).to(tensor.device)
        return tensor * (1 + jitter * torch.finfo(dtype).eps * (2 * factor - 1))

    return noisy


def _scales(problem: _Problem, system: Any, previous: Tensor, adjoint: Tensor) -> Named:
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


def _forward_order(args: Arguments, states: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    stacked = torch.stack(tuple(states), 2).to(dtype)
    return stacked.flip(1) if args.reverse else stacked


def _check_defect(
    problem: _Problem, dtype: torch.dtype, states: Sequence[Tensor], loop_states: Sequence[Tensor]
) -> Check:
    """The largest defect over what rounding allows, evaluated in float64 at the returned states."""
    with torch.no_grad():
        args = problem.arguments()
        program = program_of(problem.cell)
        system, _ = to_system(program, args)
        both = []
        for given in (states, loop_states):
            at = _forward_order(args, given, torch.float64)
            inputs = tuple(system.inputs)
            new = program.step(system.previous(at).unbind(2), inputs, system.params)
            defect = (torch.stack(new, 2) - at).abs()
            if system.padding is not None:
                defect = defect.masked_fill(system.padding.unsqueeze(2), 0)
            relative = defect / (torch.finfo(dtype).eps * (1 + at.abs()))
            finite = relative[relative.isfinite()]
            both.append(float(finite.max()) if len(finite) else 0.0)
    return Check("defect in epsilons", both[0], max(float(DEFECT_ULPS), 2 * both[1]))


def _stray_non_finite(values: Named, loop_values: Named) -> float:
    """How many entries are finite in one and not in the other."""
    differs = (v.isfinite() != loop_values[name].isfinite() for name, v in values.items())
    return float(sum(int(entries.sum()) for entries in differs))


def _overflow(grads: Named, dtype: torch.dtype) -> bool:
    """Whether finite gradients come near the largest number of `dtype`.

    Then sums and products on the way to them may overflow in one order of evaluation and not in
    another.
    """
    largest = 1e-3 * torch.finfo(dtype).max
    return any(bool(((g.abs() > largest) & g.isfinite()).any()) for g in grads.values())
