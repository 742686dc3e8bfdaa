"""Check one solve against the numerics contract: the oracle of `verify` and of the tests."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pararnn.cells.base import Cell
from pararnn.engines.base import totals
from pararnn.engines.boundaries import to_system
from pararnn.engines.table import engine_for
from pararnn.numerics import (
    DEFECT_ULPS,
    FORWARD_TOLERANCE,
    SEQUENTIAL_ERRORS,
    compute_dtype,
    relative_error,
)
from pararnn.program import program_of
from pararnn.reference import (
    Named,
    Problem,
    by_name,
    forward_order,
    gradients_of,
    last_states,
    run_loop,
)
from pararnn.solve import prepare, solve_with_info

ROUNDINGS = 3
"""Other roundings of the loop that are looked at, where its own error says too little."""

CHAOTIC, CHAOTIC_PART = 100, 0.25
"""Where rounding alone moves a tensor by more than so many tolerances, or such a part of its
largest entry, its forward error says nothing: its defect and the gradients at its states do."""


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


def check_solve(
    cell: Cell,
    gates: Tensor,
    initial_state: Tensor | Sequence[Tensor] | None = None,
    *,
    solver: str = "auto",
    backend: str = "auto",
    **options: Any,
) -> SolveChecks:
    """Solve forward and backward and hold the result against the contract.

    Arguments are those of `pararnn.solve` and of `check_solves`, which does it for several pairs.
    """
    return check_solves(cell, gates, initial_state, pairs=[(solver, backend)], **options)[0]


def check_solves(
    cell: Cell,
    gates: Tensor,
    initial_state: Tensor | Sequence[Tensor] | None = None,
    *,
    pairs: Sequence[tuple[str, str]],
    bias: Tensor | None = None,
    fields: Mapping[str, Tensor | float] | None = None,
    seed: int = 0,
    on_failure: str = "warn",
    **options: Any,
) -> list[SolveChecks]:
    """Solve by each (solver, backend) and hold the results against the contract, pair by pair.

    Other arguments are those of `pararnn.solve`, with a layer's bias (G, D). The oracle is a loop
    over the Python step in float64 on the same inputs. Checked: the defect of every returned step,
    the forward error of states, final states and all gradients (for random cotangents drawn from
    `seed`), and that nothing is non-finite where the sequential run in the same dtype is finite,
    or the other way round.
    """
    given = prepare(cell, gates, initial_state, bias=bias, fields=fields, **options)
    args = given.completed(len(cell.states))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        example = args.fields[0] if args.fields else args.gates.flatten(3)[:, :, 0]
    series = [_draw(example, generator).to(gates.dtype) for _ in cell.states]
    ends = [_draw(h, generator).to(args.dtype) for h in args.initial]
    problem = Problem(
        cell=copy.deepcopy(cell),
        gates=_leaf(gates),
        bias=None if bias is None else _leaf(bias),
        initial=tuple(_leaf(h) for h in args.initial),
        fields={n: _leaf(f) for n, f in zip(cell.fields, args.fields, strict=True)},
        options=options,
        cotangents=(*series, *ends),
    )
    oracle = _Oracle(problem)
    return [oracle.judge(pair, on_failure) for pair in pairs]


class _Run(NamedTuple):
    """Values and gradients by name, the state sequences, and the solver's counts."""

    values: Named
    grads: Named
    states: tuple[Tensor, ...]
    info: Tensor


class _Oracle:
    """What a solve of a problem is held against: loops in its own dtype and in float64."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.dtype = problem, problem.gates.dtype
        self.plain = self._run("sequential", "torch", "warn")
        self.exact = problem.to(torch.float64)
        self.plain_defect = _defect(self.exact, self.plain.states, self.dtype)
        self.values, self.grads, self.scales = run_loop(self.exact)
        self.another = functools.cache(lambda k: run_loop(problem, rounding=k)[0])

    def judge(self, pair: tuple[str, str], on_failure: str) -> SolveChecks:
        """Solve by a pair, and check the result."""
        run = self._run(*pair, on_failure)
        checks = [self._check_defect(run), *self._check_values(run)]
        judged = [
            self._compare(name, value, self.plain.grads[name], self.grads[name], scales=self.scales)
            for name, value in run.grads.items()
        ]
        stray = _stray_non_finite(run.grads, self.plain.grads)
        expanding = stray > 0 or not all(check.passed for check in judged)
        if expanding:
            judged, stray = self._judge_gradients_at(run)
        checks += [replace(check, name=f"grad {check.name}") for check in judged]
        stray += _stray_non_finite(run.values, self.plain.values)
        checks.append(Check("stray non-finite entries", stray, 0.0))
        sweeps, mended = totals(run.info).tolist()
        gates, cell = self.problem.gates, self.problem.cell
        size = (*gates.shape[:2], cell.hidden_size)
        engine = engine_for(program_of(cell), size, self.dtype, gates.device, *pair)
        ran = (engine.solver, engine.backend)
        return SolveChecks(tuple(checks), sweeps, mended, expanding, ran)

    def _check_defect(self, run: _Run) -> Check:
        """The largest defect over what rounding allows, evaluated in float64."""
        defect, own = _defect(self.exact, run.states, self.dtype), self.plain_defect
        for k in range(ROUNDINGS):
            if defect > max(DEFECT_ULPS, 2 * own):
                values = self.another(k)
                states = [values[name] for name in self.problem.cell.states]
                own = max(own, _defect(self.exact, states, self.dtype))
        return Check("defect in epsilons", defect, max(float(DEFECT_ULPS), 2 * own))

    def _check_values(self, run: _Run) -> list[Check]:
        """Forward errors. Where states have none that says anything, final states are theirs."""
        checks: dict[str, Check] = {}
        for name, value in run.values.items():
            state = checks.get(name.removeprefix("final "))
            if state is not None and math.isinf(state.limit):
                end = last_states(self.problem, run.states)[name]
                error = relative_error(value.to(self.dtype), end)
                checks[name] = Check(name, error, FORWARD_TOLERANCE[self.dtype])
                continue
            loop, true = self.plain.values[name], self.values[name]
            checks[name] = self._compare(name, value, loop, true, self.another, scales=self.scales)
        return list(checks.values())

    def _judge_gradients_at(self, run: _Run) -> tuple[list[Check], float]:
        """Gradients held against those at the returned states, and their stray entries."""
        _, true, scales = run_loop(self.exact, at=run.states)
        rounded = self.problem.to(compute_dtype(self.dtype))
        _, loop, _ = run_loop(rounded, at=run.states)
        another = functools.cache(lambda k: run_loop(rounded, at=run.states, rounding=k)[1])
        judged = [
            self._compare(name, value, loop[name], true[name], another, scales=scales)
            for name, value in run.grads.items()
        ]
        overflow = _overflow(true, self.dtype)
        return judged, 0.0 if overflow else _stray_non_finite(run.grads, loop)

    def _compare(
        self,
        name: str,
        value: Tensor,
        loop: Tensor,
        reference: Tensor,
        another: Callable[[int], Named] | None = None,
        *,
        scales: Named,
    ) -> Check:
        scale, tolerance = scales.get(name), FORWARD_TOLERANCE[self.dtype]
        # A parameter kept in a lower precision than the gates has its gradient in that precision.
        allowed = max(tolerance, FORWARD_TOLERANCE[value.dtype])
        error, own = relative_error(value, reference, scale), relative_error(loop, reference, scale)
        judged = name not in self.values and self.dtype != torch.float64
        chaos = float("inf") if judged else min(CHAOTIC * tolerance, CHAOTIC_PART)
        for k in range(ROUNDINGS):
            # One run is one sample of what rounding does where the dynamics expand.
            if another is not None and chaos >= own and error > allowed + SEQUENTIAL_ERRORS * own:
                own = max(own, relative_error(another(k)[name], reference, scale))
        limit = float("inf") if own > chaos else allowed + SEQUENTIAL_ERRORS * own
        return Check(name, error, limit)

    def _run(self, solver: str, backend: str, on_failure: str) -> _Run:
        problem = self.problem
        states, final, info = solve_with_info(
            problem.cell,
            problem.gates,
            problem.initial,
            bias=problem.bias,
            fields=problem.fields,
            **problem.options,
            solver=solver,
            backend=backend,
            on_failure=on_failure,
        )
        grads = gradients_of((*states, *final), problem, problem.leaves())
        values = by_name(problem.cell, states, final)
        return _Run(values, grads, tuple(s.detach() for s in states), info)


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.is_floating_point())


def _draw(like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(like.shape, generator=generator, dtype=torch.float64).to(like.device)


def _defect(problem: Problem, states: Sequence[Tensor], dtype: torch.dtype) -> float:
    """The largest defect of states, in epsilons of `dtype`, evaluated in the problem's dtype."""
    with torch.no_grad():
        args, program = problem.arguments(), program_of(problem.cell)
        system, _ = to_system(program, args)
        at = forward_order(args, states, args.dtype)
        previous, inputs = system.previous(at).unbind(2), tuple(system.inputs)
        new = program.step(previous, inputs, system.params)
        defect = (torch.stack(new, 2) - at).abs()
        if system.padding is not None:
            defect = defect.masked_fill(system.padding.unsqueeze(2), 0)
        relative = defect / (torch.finfo(dtype).eps * (1 + at.abs()))
        finite = relative[relative.isfinite()]
        return float(finite.max()) if len(finite) else 0.0


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
