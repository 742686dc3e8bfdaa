"""`explain`: which solver and backend would run a layer, and why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from pararnn.base.device import type_of
from pararnn.cells import Cell
from pararnn.cells.base import unwrap
from pararnn.engines.fused.layout import heads_of_matrices
from pararnn.engines.request import Request, loop_of, request, resolve, split_of_context
from pararnn.engines.split import Split
from pararnn.engines.table import PAIRS, choose, why_not
from pararnn.layers import ParaRNN, RecurrentLayer
from pararnn.program.program import Program, program_of
from pararnn.scan import scan, workload_of_scan


@dataclass(frozen=True)
class Explanation:
    """`explain`'s result; prints as a table.

    `solver` and `backend` would run, for the reason `why`. `others`: for every other pair the
    reason why it cannot run here, None where it can; `costs`: its cost then. size: (B, T, D).
    split: segments of (newton, fused) in the forward pass, requests reduced to what fits; None for
    pairs without segments. form: the normal form of a matrix cell's step that is affine in its
    states (`AffineForm.description`), None for others.
    """

    cell: str
    size: tuple[int, int, int]
    dtype: torch.dtype
    device: torch.device
    solver: str
    backend: str
    why: str
    others: dict[tuple[str, str], str | None]
    split: Split | None = None
    costs: dict[tuple[str, str], str] = field(default_factory=dict)
    form: str | None = None

    def __str__(self) -> str:
        head = f"{self.cell}, (B, T, D) = {self.size}, {self.dtype} on {self.device}"
        lines = [head, f"  ({self.solver}, {self.backend}) runs: {self.why}"]
        if self.split is not None:
            segments, steps, burn_in = self.split
            lines.append(f"    segments {segments}, steps of each {steps}, burn-in {burn_in}")
        if self.form is not None:
            lines.append(f"    affine in its states, {self.form}")
        for pair, reason in self.others.items():
            text = reason or f"could run: {self.costs[pair]}"
            lines.append(f"  ({', '.join(pair)}) {text}")
        return "\n".join(lines)


def explain(
    module: ParaRNN | RecurrentLayer | Cell | Callable[..., Any],
    shape: tuple[int, ...],
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    solver: str | None = None,
    backend: str | None = None,
    mode: str | None = None,
) -> Explanation:
    """Say what would run a layer, `solve` of a cell, or `scan`, on an input of a shape, and why.

    Args:
        module: a layer; or a cell, for `solve`; or `pararnn.scan` itself.
        shape: of the layer's input (or of `solve`'s gates), which gives batch and time. Of b, for
            `scan`.
        dtype: of the gates; the parameters' by default. Under autocast it is autocast's. Of b, for
            `scan`; where that is complex, a is taken to be so too.
        device: the parameters' by default; for `scan` PyTorch's.
        solver, backend, mode: as in a call.

    Builds the kernels of the pair that runs. Where that pair needs none, it builds the others';
    else it only generates their code. Raises ValueError for an impossible shape, EngineError where
    the request cannot run.
    """
    default, heads = Request(), 1
    if module is scan:
        program, size = workload_of_scan(tuple(shape), dtype or torch.get_default_dtype())
        empty = torch.empty(0, dtype=dtype, device=device)
        dtype, device = empty.real.dtype, type_of(empty.device).with_index(empty.device)
    else:
        assert isinstance(module, (ParaRNN, RecurrentLayer, Cell))
        program, size, dtype, device, heads = workload_of(module, shape, dtype, device)
        if not isinstance(module, Cell):
            default = Request(module.solver, module.backend)
    invariant = isinstance(module, RecurrentLayer) and module.batch_invariant
    pair = resolve(request(solver, backend, mode), default)
    pair = loop_of(pair) if invariant else pair
    choice = choose(program, size, dtype, device, *pair, heads).with_split(split_of_context())
    # If kernels of the pair that runs are built, others are not: each takes a second.
    others = {
        p: why_not(program, p, dtype, device, compiles=not choice.engine().builds)
        for p in PAIRS
        if p != choice.pair
    }
    if invariant:
        choice = choice._replace(why="batch_invariant=True takes the kernels of the loop alone")
        others = {p: reason or "batch_invariant=True: bits would depend on the batch"
                  for p, reason in others.items()}  # fmt: skip
    costs = {p: _cost(program, p, size) for p, reason in others.items() if reason is None}
    form = program.affine_form()
    description = None if isinstance(form, str) else form.description
    result = (*choice.pair, choice.why, others, choice.split(), costs, description)
    return Explanation(program.cell_name, size, dtype, device, *result)


def _cost(program: Program, pair: tuple[str, str], size: tuple[int, int, int]) -> str:
    """Return the cost of a pair that can run, in addition to its time."""
    batch, steps, channels = size
    solver, backend = pair
    if backend == "fused":
        return "kernels, compiled in some seconds at the first call unless the cache has them"
    if solver == "chunks":
        return "matrices of pairs of steps within chunks, in memory"
    if solver == "sequential":
        return f"a loop in Python over {steps:,} steps"
    entries = program.num_states**2 * channels * max(1, program.coupling.reach(channels))
    return f"Jacobians of {batch * steps * entries:,} numbers in memory"


def workload_of(
    module: ParaRNN | RecurrentLayer | Cell,
    shape: tuple[int, ...],
    dtype: torch.dtype | None,
    device: torch.device | str | None,
) -> tuple[Program, tuple[int, int, int], torch.dtype, torch.device, int]:
    """Return the program, (B, T, D), dtype, device and heads of `explain`'s arguments.

    Heads are as in `Workload`. Raises as `explain`.
    """
    cell = unwrap(module if isinstance(module, Cell) else module.cell)
    batch_first = not isinstance(module, ParaRNN) or module.batch_first
    if isinstance(shape, torch.Tensor):
        raise ValueError("shape must be a tuple of sizes, such as x.shape, got a tensor")
    if len(shape) < 2:
        raise ValueError(f"shape must hold batch and time, or time and channels, got {shape}")
    if len(shape) == 2:
        batch, steps = 1, shape[0]
    else:
        batch, steps = shape[:2] if batch_first else (shape[1], shape[0])
    parameter = next(module.parameters(), torch.empty(0))
    device = torch.device(device) if device is not None else parameter.device
    device = type_of(device).with_index(device)
    size = (batch, steps, cell.hidden_size)
    heads = heads_of_matrices(cell.lifted_params()) or 1
    return program_of(cell), size, dtype or parameter.dtype, device, heads
