"""The oracle that solves are held against, for `verify` and for the tests."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pararnn.base.numerics import (
    DEFECT_ULPS,
    FORWARD_TOLERANCE,
    REVERSE_QUIET,
    REVERSE_TOLERANCE,
    compute_dtype,
    rounding,
    underflow,
)
from pararnn.cells.base import Cell
from pararnn.check.claims import (
    Check,
    SolveChecks,
    compare,
    exempt,
    finite,
    gap,
    near_overflow,
    peak,
    stored_rounding,
    worst,
)
from pararnn.check.reference import (
    ROUNDINGS,
    Named,
    OtherRounding,
    Reverse,
    Trial,
    advance,
    as_leaf,
    by_name,
    forward_order,
    gradients_of,
    last_states,
    least_noise,
    local_defects,
    results,
    reverse,
    run_loop,
    running,
)
from pararnn.engines.arguments import Arguments, totals
from pararnn.engines.forward_time import to_system
from pararnn.engines.table import Choice
from pararnn.program.program import program_of
from pararnn.solve import prepare, run

LOOP = ("sequential", "torch")
"""The pair that corresponds to the oracle's loop."""


class Run(NamedTuple):
    """Values and gradients by name, counts, and the engine's choice; None for the oracle's loop."""

    values: Named
    grads: Named
    info: Tensor
    choice: Choice | None = None


class Oracle:
    """Reference for solves of a trial: loops in the trial's dtype and in float64."""

    def __init__(self, trial: Trial) -> None:
        self.trial = trial
        self._names = trial.cell.states
        gates = trial.args.gates
        self._least_noise = least_noise(gates)
        self.dtype, self.carry = gates.dtype, compute_dtype(gates.dtype)
        self.exact, self.carry_trial = trial.to(torch.float64), trial.to(self.carry)
        with torch.no_grad():
            self.args = self.exact.arguments()
            self.system = to_system(program_of(trial.cell), self.args)
        self._near_overflow = near_overflow(self.dtype, self.carry)
        self.loop_states = run_loop(self.carry_trial)
        self.states = run_loop(self.exact) if self.carry != torch.float64 else self.loop_states
        self.truth = results(self.exact, self.states)
        self.loop = self._as_results(self.loop_states)
        self._all_passes: list[_Passes] = []
        self._loops, self._reverses = {0: self.loop}, dict[int, Named]()
        self._grad_noises: dict[tuple[str, int], Tensor] = {}
        self._noises: dict[tuple[str, int], Tensor] = {}
        self.stored_states = self._states_of(self.loop)
        sizes = results(self.exact, self.system.sizes(self.states))
        self.sizes = {
            name: peak(finite(size.abs().cpu()), self._series(name)) for name, size in sizes.items()
        }

    @classmethod
    def of(
        cls,
        cell: Cell,
        gates: Tensor,
        initial_state: Tensor | Sequence[Tensor] | None = None,
        *,
        seed: int = 0,
        loss_scale: float = 1.0,
        **options: Any,
    ) -> Oracle:
        """Return the oracle of a call of `pararnn.solve`; options as of `pararnn.solve.prepare`."""
        args = prepare(cell, gates, initial_state, **options)
        return cls.of_call(cell, args, seed=seed, loss_scale=loss_scale)

    @classmethod
    def of_call(
        cls, cell: Cell, call: Arguments, *, seed: int = 0, loss_scale: float = 1.0
    ) -> Oracle:
        """Return the oracle of a call as a layer makes it.

        The incoming gradients are drawn from N(0, 1) by `seed`, times `loss_scale`.
        """
        args = call.complete(program_of(cell))
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            example = args.fields[0] if args.fields else args.gates.flatten(3)[:, :, 0]

        def draw(like: Tensor, scale: float) -> Tensor:
            noise = torch.randn(like.shape, generator=generator, dtype=torch.float64, device="cpu")
            return (scale * noise).to(like.device)

        whole = not call.options.output_only
        read = [loss_scale if n == 0 or whole else 0.0 for n in range(len(cell.states))]
        series = [draw(example, scale).to(args.gates.dtype) for scale in read]
        ends = [draw(h, loss_scale).to(args.dtype) for h in args.initial]
        detached = replace(call, params=()).map(as_leaf)
        return cls(Trial(copy.deepcopy(cell), detached, (*series, *ends)))

    def run(self, solver: str, backend: str) -> Run:
        """Solve by a pair, forward and backward."""
        trial, cell = self.trial, self.trial.cell
        states, final, info, choice = run(program_of(cell), trial.call(), solver, backend)
        grads = gradients_of((*states, *final), trial, trial.leaves())
        values = by_name(cell, states, final)
        return Run({name: v.detach() for name, v in values.items()}, grads, info, choice)

    def judge(self, run: Run) -> SolveChecks:
        """Hold a run against the contract."""
        bad = ~self.loop_states.isfinite().all(2)
        first = int(bad.any(2).any(0).int().argmax()) if bad.numel() else 0
        return SolveChecks(
            checks=tuple(self.checks(run)),
            sweeps=int(totals(run.info)[0]),
            mended=int(totals(run.info)[1]),
            expanding=any(self._expands(name) for name in run.grads),
            pair=LOOP if run.choice is None else run.choice.pair,
            non_finite=(int(bad.any(1).sum()), first),
        )

    def checks(self, run: Run) -> Iterator[Check]:
        """Yield every claim of the contract on a run, the cheapest first."""
        states, choice = self._states_of(run.values), run.choice
        yield self._check_defect(states)
        yield from self._check_values(run.values, states)
        program = program_of(self.trial.cell)
        if choice is not None and not choice.engine().linearises_returned(program):
            states = self.loop_states.double()
        yield from self._check_gradients(run, states)

    def _check_defect(self, states: Tensor) -> Check:
        """Return the defect that is largest over its limit by rounding, evaluated in float64."""
        defect = finite(local_defects(self.exact, states).abs())
        unit = rounding(self.system.sizes(states), self.dtype)
        loop_defect = finite(local_defects(self.exact, self.stored_states).abs())
        check = Check("defect in epsilons", 0.0, float(DEFECT_ULPS))
        for k in range(ROUNDINGS + 1 if defect.numel() else 0):
            limit = torch.maximum(DEFECT_ULPS * unit, 2 * loop_defect.amax(1, keepdim=True))
            check = worst(check.name, defect, limit, unit)
            if check.passed:
                break
            loop_defect = torch.maximum(loop_defect, self._shaken_defect(states, k))
        return check

    def _shaken_defect(self, states: Tensor, seed: int) -> Tensor:
        """Return the defects of a loop with another rounding, each step from the given states.

        Where the returned states are rounded to 16 bits, so are the states that a step starts from.
        """
        half = torch.finfo(self.dtype).eps / 2 if self.carry != self.dtype else 0.0
        generator = torch.Generator().manual_seed(seed)
        noise = torch.rand(states.shape, generator=generator, dtype=states.dtype, device="cpu")
        starts = (states * (1 + half * (2 * noise.to(states.device) - 1))).to(self.carry)
        with OtherRounding(self.carry, seed):
            shaken = advance(self.carry_trial, starts)
        return finite((shaken.double() - advance(self.exact, states)).abs() + half * states.abs())

    def _check_values(self, values: Named, states: Tensor) -> Iterator[Check]:
        """Forward errors; final states are also those that the returned sequences end with."""
        ends = results(self.exact, states)
        tolerance = FORWARD_TOLERANCE[self.dtype]
        for name, value in values.items():
            size, floor = self.sizes[name], underflow(value.dtype)
            error = exempt(self._gap(name, value), size, self._near_overflow)
            check = compare(name, error, size, self._noise(name), tolerance, floor)
            if not self._series(name):
                distance = gap(value.to(self.dtype), ends[name], self.loop[name])
                distance = exempt(distance, size, self._near_overflow)
                exactly = compare(name, distance, size, [0 * size], tolerance, floor)
                check = replace(max(check, exactly, key=lambda c: c.fraction), note=check.note)
            yield check

    def _gap(self, name: str, value: Tensor) -> Tensor:
        return peak(gap(value, self.truth[name], self.loop[name]), self._series(name))

    def _noise(self, name: str) -> Iterator[Tensor]:
        """Return the error of a value by rounding: in the loop, and in loops with other roundings.

        For a final state it is the largest error of its channel up to the end.
        """
        for seed in range(ROUNDINGS + 1):
            if (name, seed) not in self._noises:
                self._noises |= self._noises_of(seed)
            yield self._noises[name, seed]

    def _noises_of(self, seed: int) -> dict[tuple[str, int], Tensor]:
        nowhere = tuple(torch.zeros_like(h) for h in self.args.initial)
        args, another = replace(self.args, initial=nowhere), self._another(seed)
        system = to_system(self.system.program, args)
        gaps = [gap(another[name], self.truth[name], self.loop[name]) for name in self._names]
        distances = forward_order(args, gaps, torch.float64).to(args.gates.device)
        ends = last_states(self.trial.cell, args, system.sizes(distances))
        errors = {name: self._gap(name, value) for name, value in another.items()}
        errors |= {name: torch.maximum(end.cpu(), errors[name]) for name, end in ends.items()}
        return {(name, seed): noise for name, noise in errors.items()}

    def _another(self, seed: int) -> Named:
        """Return a loop with another rounding; 0 is the loop itself."""
        if seed not in self._loops:
            with OtherRounding(self.carry, seed, self._least_noise):
                self._loops[seed] = self._as_results(run_loop(self.carry_trial))
        return self._loops[seed]

    @cached_property
    def true(self) -> Reverse:
        return reverse(self.exact, self.states, sizes=True)

    @cached_property
    def _size(self) -> Named:
        """By leaf, the sizes that its gradient's forward errors are relative to, by channel."""
        sizes = {}
        for name, grad in self.true.grads.items():
            series = self._series(name)
            sizes[name] = peak((grad if series else self.true.amounts[name]).abs().cpu(), series)
        return sizes

    def loop_grads(self, seed: int) -> Named:
        """Return the gradients of a loop; 0 is the loop itself."""
        if seed not in self._reverses:
            states = self._states_of(self._another(seed))
            same = not seed and torch.equal(states, self.states)
            self._reverses[seed] = self.grads_at(states, seed, self.true if same else None)
        return self._reverses[seed]

    def grads_at(self, states: Tensor, seed: int, true: Reverse | None) -> Named:
        """Return gradients at given states in the trial's dtype, with a rounding of derivatives.

        In float64 with rounding 0, PyTorch's, they are the true ones, if these are known.
        """
        if true is None or seed or self.carry != torch.float64:
            true = reverse(self.carry_trial, states.to(self.carry), seed)
        return {name: true.grads[name].to(leaf.dtype) for name, leaf in self.trial.leaves().items()}

    def _grad_noise(self, name: str, seed: int = 0) -> Tensor:
        """Return a loop's error of a gradient, by channel."""
        if (name, seed) not in self._grad_noises:
            grads = (self.loop_grads(seed), self.true.grads, self.loop_grads(0))
            self._grad_noises[name, seed] = peak(gap(*(g[name] for g in grads)), self._series(name))
        return self._grad_noises[name, seed]

    def _expands(self, name: str) -> bool:
        noise, size = self._grad_noise(name), finite(self._size[name])
        return bool(noise.numel() and noise.max() > FORWARD_TOLERANCE[self.dtype] * size.max())

    def _check_gradients(self, run: Run, states: Tensor) -> Iterator[Check]:
        """Compare gradients with those at the true states, where rounding hardly moves them, and
        with those at the returned states; then count entries that are finite in one run only."""
        passes = self._passes_at(states)
        for name, value in run.grads.items():
            error = self._in_order(name, gap(value, passes.true.grads[name], passes.loop(0)[name]))
            carry, true = self.carry, passes.true.grads[name]
            floor = self._in_order(name, stored_rounding(value.dtype, true, carry))
            tolerance, units = REVERSE_TOLERANCE[self.dtype], passes.units[name]
            error = exempt(error, units, self._near_overflow)
            noise = (passes.noise(name, k) for k in range(ROUNDINGS + 1))
            both = (
                self._check_forward_gradient(name, value),
                compare(name, error, units, noise, tolerance, floor, "entries", REVERSE_QUIET),
            )
            most = max(both, key=lambda c: c.fraction)
            yield replace(most, name=f"grad {name}", note=both[1].note)
        yield self._check_strays(run, passes)

    def _passes_at(self, states: Tensor) -> _Passes:
        """Return the reverse passes at given states; equal states share them."""
        for passes in self._all_passes:
            if torch.equal(passes.states, states):
                return passes
        self._all_passes.append(_Passes(self, states))
        return self._all_passes[-1]

    def _check_forward_gradient(self, name: str, value: Tensor) -> Check:
        """Return the forward error of a gradient, in the channels that rounding hardly moves."""
        true, loop = self.true.grads[name], self.loop_grads(0)[name]
        # A parameter in a lower precision than the gates has its gradient in that precision.
        tolerance = max(FORWARD_TOLERANCE[self.dtype], FORWARD_TOLERANCE[value.dtype])
        error = peak(gap(value, true, loop), self._series(name))
        noise = (self._grad_noise(name, seed) for seed in range(ROUNDINGS + 1))
        floor, size = underflow(value.dtype), self._size[name]
        error = exempt(error, size, self._near_overflow)
        check = compare(name, error, size, noise, tolerance, floor, quiet=tolerance)
        return replace(check, note="")  # what it leaves out is judged at the returned states

    def _check_strays(self, run: Run, passes: _Passes) -> Check:
        """Count the entries that are finite in only one of the run and the sequential run.

        Near the largest number either may overflow a step earlier than the other.
        """
        beyond = self.system.sizes(self.stored_states) > self._near_overflow
        near = results(self.exact, beyond.double())
        stray = 0
        for name, value in run.values.items():
            differs = value.isfinite() != self.loop[name].isfinite()
            stray += int((differs & (near[name] == 0)).sum())
        overflows = any(bool(mask.any()) for mask in near.values())
        finite_states = bool(passes.states.isfinite().all())
        loop = passes.loop(0) if finite_states else self.run("sequential", "torch").grads
        for name, value in run.grads.items():
            unit = passes.units[name]
            exempt = unit > self._near_overflow
            if overflows:
                exempt |= ~unit.isfinite()
            differs = self._in_order(name, value.isfinite() != loop[name].isfinite()).cpu()
            stray += int((differs & ~exempt).sum())
        return Check("stray non-finite entries", float(stray), 0.0)

    def _series(self, name: str) -> bool:
        """Check whether a value or gradient has a time axis, its second one."""
        return name in (*self.trial.cell.states, *self.trial.cell.fields, "gates")

    def _in_order(self, name: str, values: Tensor) -> Tensor:
        """Return a series in the order of processing, with flat channels; others as they are."""
        if not self._series(name):
            return values
        flat = values.flatten(3) if values.ndim == 5 else values
        return flat.flip(1) if self.args.options.reverse else flat

    def largest_later(self, name: str, values: Tensor) -> Tensor:
        """Return a series' largest from each step to its sequence's end; others as they are."""
        values = self._in_order(name, values)
        if not self._series(name):
            return values
        cut = self.system.fresh
        return running(values, None if cut is None else cut.to(values.device))

    def _states_of(self, values: Named) -> Tensor:
        states = [values[name] for name in self.trial.cell.states]
        return forward_order(self.args, states, torch.float64)

    def _as_results(self, states: Tensor) -> Named:
        """Return a loop's states as an engine returns them, and its final states."""
        values = results(self.carry_trial, states)
        return {n: v.to(self.dtype) if self._series(n) else v for n, v in values.items()}


class _Passes:
    """Reverse passes at given states: the true one, and others with rounding."""

    def __init__(self, oracle: Oracle, states: Tensor) -> None:
        self.oracle, self.states = oracle, states
        same = torch.equal(states, oracle.states)
        self.true = oracle.true if same else reverse(oracle.exact, states, sizes=True)
        self.units = {n: oracle.largest_later(n, unit.cpu()) for n, unit in self.true.units.items()}
        is_loop = torch.equal(states, oracle.stored_states)
        self._loops = {0: oracle.loop_grads(0)} if is_loop else dict[int, Named]()
        self._noises: dict[tuple[str, int], Tensor] = {}

    def loop(self, seed: int) -> Named:
        """Gradients in the trial's dtype, by a rounding of the step's derivatives."""
        if seed not in self._loops:
            self._loops[seed] = self.oracle.grads_at(self.states, seed, self.true)
        return self._loops[seed]

    def noise(self, name: str, seed: int) -> Tensor:
        """Return a gradient's largest error by such a rounding, at a step or after it."""
        if (name, seed) not in self._noises:
            distance = gap(self.loop(seed)[name], self.true.grads[name], self.loop(0)[name])
            self._noises[name, seed] = self.oracle.largest_later(name, distance)
        return self._noises[name, seed]
