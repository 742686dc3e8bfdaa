"""A layer's readout held against the same method in float64, a row of one step at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from pararnn.base.numerics import FORWARD_TOLERANCE, compute_dtype, underflow
from pararnn.check.claims import Check, compare, exempt, finite, gap, near_overflow, peak
from pararnn.check.reference import Named, Trial, gradients_of
from pararnn.engines.forward_time import step_inputs
from pararnn.layers.readout import read_out
from pararnn.program.program import program_of

OUTPUT = "readout"


def readout_checks(trial: Trial, values: Named, cotangent: Tensor) -> list[Check]:
    """Check values and gradients of the readout as in layers, at the states that a solve returned.

    `cotangent` (B, T, D) is the incoming gradient. These checks and those of the solve, which gets
    the states' gradients from here, cover all of a layer's gradients.
    """
    states = [values[name].detach().requires_grad_() for name in trial.cell.states]
    output = read_out(program_of(trial.cell), trial.call(), states)
    leaves = {**trial.leaves(), **_states(trial, states)}
    ours = gradients_of([output], replace(trial, cotangents=(cotangent,)), leaves)
    got = {OUTPUT: output.detach(), **_with_prefix(ours)}
    wide = compute_dtype(output.dtype)
    exact, sizes = _by_rows(trial.to(torch.float64), states, cotangent)
    loop, _ = _by_rows(trial.to(wide), states, cotangent)
    checks = []
    for name, value in got.items():
        series = value.ndim > 2
        error, noise = (
            peak(gap(one[name], exact[name], loop[name]), series) for one in (got, loop)
        )
        size = peak(sizes[name].abs().cpu().double(), series)
        error = exempt(error, size, near_overflow(wide, value.dtype))
        if name != OUTPUT and not bool(size.any() or error.any()):
            continue  # what the readout does not read
        tolerance = max(FORWARD_TOLERANCE[d] for d in (output.dtype, value.dtype))
        checks.append(compare(name, error, size, [noise], tolerance, underflow(value.dtype)))
    return checks


def _states(trial: Trial, states: Sequence[Tensor]) -> Named:
    return dict(zip(trial.cell.states, states, strict=True))


def _with_prefix(grads: Named) -> Named:
    return {f"{OUTPUT} grad {name}": grad for name, grad in grads.items()}


def _by_rows(trial: Trial, states: Sequence[Tensor], cotangent: Tensor) -> tuple[Named, Named]:
    """Return values and gradients of the method on rows (R, D), those of true steps only, by name;
    and the sizes that their errors are relative to: of parameters the summed |contributions|."""
    args, program = trial.arguments().with_options(reverse=False), program_of(trial.cell)
    states = [s.detach().to(args.dtype).requires_grad_() for s in states]
    batch, steps, channels = args.size
    every = torch.ones(batch, steps, dtype=torch.bool, device=cotangent.device)
    real = every if args.seq is None else args.seq >= 0
    rows = [x[real] for x in (*states, *step_inputs(args))]
    params = [p.expand(len(rows[0]), channels) if p.ndim < 2 else p for p in args.params]
    sources, count = (*rows, *params), len(states)
    detached = [t.detach().requires_grad_() for t in sources]
    groups = detached[:count], detached[count : len(rows)], detached[len(rows) :]
    output = program.step.call(OUTPUT, *groups)
    arriving = cotangent[real].to(args.dtype)
    leaf_grads = gradients_of(
        [output],
        replace(trial, cotangents=(arriving,)),
        dict(enumerate(detached)),  # type: ignore[arg-type]
    )
    leaves = {**trial.leaves(), **_states(trial, states)}

    def of_leaves(cotangents: Sequence[Tensor]) -> Named:
        return gradients_of(sources, replace(trial, cotangents=tuple(cotangents)), leaves)

    grads = of_leaves(list(leaf_grads.values()))
    amounts = of_leaves([finite(grad).abs() for grad in leaf_grads.values()])
    whole = output.detach().new_zeros(args.size)
    whole[real] = output.detach()
    return {OUTPUT: whole, **_with_prefix(grads)}, {OUTPUT: whole, **_with_prefix(amounts)}
