"""`verify`: one call that says whether a module's solves obey the numerics contract."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any

import torch
from torch import nn

from pararnn.base.numerics import DEFECT_ULPS, rounding
from pararnn.cells.base import unwrap
from pararnn.check.claims import finite
from pararnn.check.contract import SolveChecks
from pararnn.check.matrix import check_matrix
from pararnn.check.oracle import Oracle
from pararnn.check.readout import readout_checks
from pararnn.check.reference import Trial, differentiation, forward_order, local_defects
from pararnn.engines.arguments import Arguments, totals
from pararnn.engines.forward_time import to_system
from pararnn.layers import RecurrentLayer
from pararnn.program.program import program_of
from pararnn.solve import run


@dataclass(frozen=True)
class Report:
    """`verify`'s result: true if everything passed; prints as a table."""

    layers: tuple[tuple[str, str, SolveChecks], ...]

    @property
    def passed(self) -> bool:
        """True if every check of every layer passed."""
        return all(checks.passed for _, _, checks in self.layers)

    @property
    def short(self) -> str:
        """The verdict in a line, with the check that uses up most of its limit, and its layer."""
        checks = [(check, name) for name, _, solve in self.layers for check in solve.checks]
        check, name = max(checks, key=lambda pair: (not pair[0].passed, pair[0].fraction))
        verdict = "PASS" if self.passed else "FAIL"
        failures = sum(not check.passed for check, _ in checks)
        count = (
            f"{failures} of {len(checks)} checks failed" if failures else f"{len(checks)} checks"
        )
        nearest = f"nearest to its limit is {check.name} of {name}, {check.fraction:.2g} of it"
        return f"{verdict}: {count}; {nearest}"

    def __bool__(self) -> bool:
        return self.passed

    def __str__(self) -> str:
        lines = [f"pararnn.verify: {'PASS' if self.passed else 'FAIL'}"]
        for name, what, checks in self.layers:
            lines.append(f"{name}: {what}, {checks.sweeps} sweeps, {checks.mended} columns mended")
            count, step = checks.non_finite
            if count:
                also = "as in the loop" if checks.no_strays else "and not just as in the loop"
                lines.append(f"  non-finite in {count} channels from step {step}, {also}")
            for check in checks.checks:
                verdict = "ok" if check.passed else "FAIL"
                numbers = f"{check.error:10.2e}  limit {check.limit:9.2e}  {verdict}"
                note = f"  ({check.note})" if check.note else ""
                lines.append(f"  {check.name:<26} {numbers}{note}")
        return "\n".join(lines)


def verify(module: nn.Module, *args: Any, seed: int = 0, **kwargs: Any) -> Report:
    """Run `module(*args, **kwargs)` and check every pararnn solve in it against the contract.

    For each layer, the same call that the module makes, forward and backward, on the inputs that
    the layer sees: the defect, the forward errors of states, final states and each gradient against
    a float64 loop, and the solver's counts; where the cell has a readout, also that and its
    gradients, at the states that the solver returned. The incoming gradients are as large as those
    of a mean over the layer's output. Takes a few loops over T in PyTorch.
    Of matrix cells outputs, final states and gradients are checked, and no defects.
    Raises ValueError when the call runs no pararnn layer. Parameters' .grad are left alone.
    """
    calls: list[tuple[str, RecurrentLayer, tuple[Any, ...], dict[str, Any]]] = []
    hooks = []
    for name, submodule in module.named_modules():
        if isinstance(submodule, RecurrentLayer):

            def record(submodule: Any, inputs: Any, options: Any, name: str = name) -> None:
                calls.append((name, submodule, inputs, options))

            hooks.append(submodule.register_forward_pre_hook(record, with_kwargs=True))
    try:
        with torch.no_grad():
            module(*args, **kwargs)
    finally:
        for hook in hooks:
            hook.remove()
    if not calls:
        raise ValueError(f"{type(module).__name__} ran no pararnn layer: nothing to verify")
    with differentiation():
        return Report(tuple(_check(*call, seed=seed) for call in calls))


@torch.no_grad()
def defect(
    layer: RecurrentLayer, inputs: tuple[Any, ...], options: dict[str, Any]
) -> tuple[float, int, int]:
    """Return a call's largest defect over its limit, and the solver's sweeps and repaired columns.

    This check of `verify` takes no loop over T: all steps at once in float64, against 8 eps. If
    they exceed it, `verify`'s loops run, as the sequential run's defects count too. Raises
    ValueError for a layer of a matrix cell, whose solvers store no states.
    """
    if not (cell := unwrap(layer.cell)).keeps_states:
        raise ValueError(f"no solver of {type(cell).__name__} keeps states, whose defect this is")
    args, pair = _call(layer, inputs, options)
    cell = layer.cell_with(options.get("weights"))
    result = run(program_of(cell), args.with_options(output_only=False), *pair)
    exact = Trial(cell, args, ()).to(torch.float64)
    states = forward_order(args, result.states, torch.float64)
    system = to_system(program_of(exact.cell), exact.arguments())
    limit = DEFECT_ULPS * rounding(system.sizes(states), args.gates.dtype)
    defects = finite(local_defects(exact, states).abs())
    fraction = float((defects / limit).max()) if defects.numel() else 0.0
    if fraction > 1:
        with differentiation():
            fraction = _check("", layer, inputs, options, 0)[2].checks[0].fraction
    sweeps, redone = totals(result.info).tolist()
    return fraction, int(sweeps), int(redone)


def _call(
    layer: RecurrentLayer, inputs: tuple[Any, ...], options: dict[str, Any]
) -> tuple[Arguments, tuple[str, str]]:
    """Return the record of a layer's call, and the pair that it requests."""
    arguments = signature(layer.forward).bind(*inputs, **options).arguments
    arguments.pop("keep_dtype", None)  # of what the call returns, not of the solve
    pair = layer.requested_pair(
        *(arguments.pop(argument, None) for argument in ("solver", "backend", "mode"))
    )
    with torch.no_grad():
        # On several ranks each span is checked as a separate sequence.
        return layer.arguments(**arguments).with_options(context="", no_final=False), pair


def _check(
    name: str, layer: RecurrentLayer, inputs: tuple[Any, ...], options: dict[str, Any], seed: int
) -> tuple[str, str, SolveChecks]:
    args, pair = _call(layer, inputs, options)
    cell = layer.cell_with(options.get("weights"))
    size = (*args.size[:2], cell.hidden_size)  # a matrix cell's gates are of another size
    scale = 1 / max(math.prod(size), 1)
    if not cell.keeps_states:
        checks = check_matrix(cell, args, pair, seed, scale)
    else:
        oracle = Oracle.of_call(cell, args, seed=seed, loss_scale=scale)
        ran = oracle.run(*pair)
        checks = oracle.judge(ran)
        if cell.has_readout:
            more = readout_checks(oracle.trial, ran.values, oracle.trial.cotangents[0])
            checks = replace(checks, checks=(*checks.checks[:-1], *more, checks.checks[-1]))
    what = (
        f"{type(cell).__name__} (B, T, D) = {size}, {args.gates.dtype}, "
        f"{checks.pair[0]} on {checks.pair[1]}"
    )
    return name or "module", what, checks
