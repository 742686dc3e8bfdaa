"""Solves of matrix cells against the contract: outputs, final states and all gradients."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from pararnn.base.numerics import FORWARD_TOLERANCE, compute_dtype, underflow
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
)
from pararnn.check.readout import OUTPUT
from pararnn.check.reference import (
    ROUNDINGS,
    Named,
    OtherRounding,
    Trial,
    as_leaf,
    gradients_of,
    least_noise,
    running,
)
from pararnn.engines.arguments import Arguments, totals
from pararnn.engines.forward_time import in_order, to_head_system
from pararnn.engines.table import Choice
from pararnn.program.program import program_of
from pararnn.solve import run
from pararnn.solvers.system import running_max

LOOP = ("sequential", "torch")
GRAD_BIAS, GRAD_GATES = "grad bias", "grad gates"


def check_matrix(
    cell: Cell, call: Arguments, pair: tuple[str, str], seed: int, loss_scale: float
) -> SolveChecks:
    """Run a call by a pair, forward and backward, and hold it against the loop in float64.

    Errors may be a tolerance and 4 times those of the loop in the compute dtype, and of three loops
    that round otherwise where that does not suffice: of each tensor over its largest entry, of each
    entry over its largest in time, and of a head at each step over its largest entry so far in the
    sequence: for outputs from the first step on, for gradients of a gate from the last one on. So
    later steps excuse no error. Contributions to a gradient of a
    parameter may cancel in an entry. So errors of the bias are compared with the sum of the
    contributions' sizes, and those of other parameters with the largest entry of their head. So are
    those of final states and of the gradients of initial ones, whose entries may be close to zero.
    Entries of which exact values, of a head so far, are near the largest number may be infinite.
    No defects are checked, as no solver stores states. The incoming gradients are drawn from
    N(0, 1) by `seed`, times `loss_scale`.
    """
    call = replace(call, params=Trial(cell, call, ()).memory).map(as_leaf)
    trial = Trial(copy.deepcopy(cell), call, ())
    with torch.no_grad():
        program = program_of(cell)
        states, final, _, _ = run(program, trial.call(), *LOOP)
    generator = torch.Generator().manual_seed(seed)
    # In the results' dtypes: the loop in float64 gets what a call's backward pass does.
    trial = replace(
        trial,
        cotangents=tuple(
            (loss_scale * torch.randn(t.shape, generator=generator, dtype=torch.float64)).to(t)
            for t in (states[0], *final)
        ),
    )
    ours, choice, sweeps = _results(trial, pair)
    exact, _, _ = _results(trial.to(torch.float64), LOOP)
    loops, so_far = _Loops(trial), _so_far(trial)
    loop = loops[0]
    near = {k: near_overflow(compute_dtype(call.gates.dtype), v.dtype) for k, v in ours.items()}
    strays = [_strays(v, loop[k], exact[k], near[k], so_far.get(k)) for k, v in ours.items()]
    bad = ~loop[OUTPUT].isfinite().all(-1)
    first = int(bad.any(2).any(0).int().argmax()) if bad.numel() else 0
    return SolveChecks(
        checks=(
            *_compare(cell, ours, exact, loops, call.gates.dtype, so_far, near),
            Check("values not finite elsewhere", float(sum(strays)), 0.0),
        ),
        sweeps=sweeps,
        mended=0,
        expanding=False,
        pair=choice.pair,
        non_finite=(int(bad.any(1).sum()), first),
    )


def _results(trial: Trial, pair: tuple[str, str]) -> tuple[Named, Choice, int]:
    """Return outputs, final states and gradients by name, what ran, and its sweeps."""
    cell = trial.cell
    states, final, info, choice = run(program_of(cell), trial.call(), *pair)
    grads = gradients_of((states[0], *final), trial, trial.leaves())
    values = {OUTPUT: states[0].detach()}
    values |= {f"final {n}": h.detach() for n, h in zip(cell.states, final, strict=True)}
    values |= {f"grad {name}": grad for name, grad in grads.items()}
    return values, choice, int(totals(info)[0])


class _Loops:
    """Results of loops in the compute dtype by number: 0 is the loop, others round otherwise."""

    def __init__(self, trial: Trial) -> None:
        gates = trial.args.gates
        self.trial, self.least_noise = trial.to(compute_dtype(gates.dtype)), least_noise(gates)
        self.results = [_results(self.trial, LOOP)[0]]

    def __getitem__(self, number: int) -> Named:
        while len(self.results) <= number:
            seed = len(self.results)
            with OtherRounding(self.trial.args.gates.dtype, seed, self.least_noise):
                self.results.append(_results(self.trial, LOOP)[0])
        return self.results[number]


Sizes = Callable[[Tensor], Tensor]
"""Function of the sizes of a series (B, T, ...) to those that its errors are compared with."""


def _compare(
    cell: Cell,
    ours: Named,
    exact: Named,
    loops: _Loops,
    dtype: torch.dtype,
    so_far: Mapping[str, Sizes],
    near: Mapping[str, float],
) -> Iterator[Check]:
    """Yield the check of each result. so_far: the size functions of series. near: the sizes above
    which a result may be infinite."""

    def noises(name: str) -> Iterator[Tensor]:
        for number in range(ROUNDINGS + 1):
            yield gap(loops[number][name], exact[name], loops[0][name])

    first = {f"grad {name}": 1 for name, _ in cell.named_parameters()}  # (H, ...), (B, H, ...)
    for name, value in ours.items():
        error = gap(value, exact[name], loops[0][name])
        size = _sums(exact, name) if name == GRAD_BIAS else finite(exact[name].cpu().double()).abs()
        if name not in so_far and name != GRAD_BIAS:
            size = _largest_of_head(size, first.get(name, 2))
        cases: list[tuple[Sizes, str]] = [(partial(peak, series=name in so_far), "entries")]
        if name in so_far:
            cases.append((so_far[name], "steps of heads"))
        tolerance = max(FORWARD_TOLERANCE[d] for d in (dtype, value.dtype))
        floor = underflow(value.dtype)
        checks = []
        for of, what in cases:
            sizes = of(size)
            errors = exempt(of(error), sizes, near[name])
            check = compare(name, errors, sizes, map(of, noises(name)), tolerance, floor, what)
            checks.append(check)
        yield max(checks, key=lambda check: check.fraction)


def _strays(value: Tensor, loop: Tensor, exact: Tensor, near: float, so_far: Sizes | None) -> int:
    """Count entries that are finite in only one of two results; of a series, the steps of heads
    from the first such entry on.

    Where exact values are near the largest number, either may overflow earlier than the other.
    """
    differs = (value.isfinite() != loop.isfinite()).cpu()
    size = exact.cpu().double().abs().nan_to_num(0.0, math.inf)
    if so_far is None:
        return int((differs & (size <= near)).sum())
    return int(((so_far(differs.double()) > 0) & (so_far(size) <= near)).sum())


def _so_far(trial: Trial) -> dict[str, Sizes]:
    """Return the functions of sizes of outputs and of gradients of gates to the largest of each
    head so far, in the order in which a pass computes them."""
    args, program = trial.arguments(), program_of(trial.cell)
    system, sizes = to_head_system(program, args), program.step.head
    fresh = torch.zeros(system.gates.shape[:2], dtype=torch.bool, device=args.gates.device)
    for mask in (system.zero, None if system.boundaries is None else system.boundaries.begins):
        fresh = fresh if mask is None else fresh | mask
    begins, reverse = fresh.unsqueeze(2).cpu(), args.options.reverse

    def of_outputs(values: Tensor) -> Tensor:
        return running_max(in_order(values, reverse).amax(-1), begins)

    def of_gates(values: Tensor) -> Tensor:
        by_head = in_order(sizes.by_head(values), reverse)
        gates = by_head.split([math.prod(size) for size in sizes.gates], -1)
        return running(torch.cat([gate.amax(-1) for gate in gates], 2), begins)

    return {OUTPUT: of_outputs, GRAD_GATES: of_gates}


def _sums(exact: Named, name: str) -> Tensor:
    """Return the sum over rows and steps of the |contributions| to the bias's gradient."""
    return exact[GRAD_GATES].abs().cpu().double().sum((0, 1)).reshape(exact[name].shape)


def _largest_of_head(size: Tensor, first: int) -> Tensor:
    """Return sizes with each entry replaced by its head's largest; heads' axes begin at `first`."""
    dims = tuple(range(first, size.ndim))
    return size.amax(dims, keepdim=True).expand(size.shape) if dims else size
