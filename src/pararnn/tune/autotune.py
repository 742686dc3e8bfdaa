"""`autotune`: measures the pairs that can run a layer, and has `auto` use the fastest."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pararnn.base.device import type_of
from pararnn.base.version import __version__
from pararnn.cells import Cell
from pararnn.cells.base import unwrap
from pararnn.engines import tuned
from pararnn.engines.engine import Engine
from pararnn.engines.split import NO_REQUEST, Split, SplitRequest
from pararnn.engines.table import pairs_for
from pararnn.engines.tuned import Measured, Workload
from pararnn.layers import ParaRNN, RecurrentLayer
from pararnn.program.program import program_by_key
from pararnn.solve import prepare, run_engine
from pararnn.tune.candidates import engines_for
from pararnn.tune.explain import check_module, workload_of
from pararnn.tune.timing import device_name, median_seconds, settled_seconds

SECONDS = 0.2
"""Time spent on a candidate that is not hopeless."""
HOPELESS = 4.0
"""Multiple of the best candidate's time above which a candidate is timed by one call."""
MEMORY_LENGTH = 64
"""Entries of an axis of a memory whose length a call decides."""


@dataclass(frozen=True)
class Tuning:
    """`autotune`'s result; prints as a table.

    `measured`: times in ms, `auto`'s new choice first. `by_rule`: that of the rule's choice.
    size: (B, T, D). `path`: the file of the record. `anew`: whether this call measured it, rather
    than read it.
    """

    cell: str
    size: tuple[int, int, int]
    dtype: torch.dtype
    device: torch.device
    backward: bool
    measured: tuple[Measured, ...]
    by_rule: Measured
    path: Path
    anew: bool

    @property
    def solver(self) -> str:
        """Solver that `auto` uses from now on."""
        return self.measured[0].solver

    @property
    def backend(self) -> str:
        """Backend that `auto` uses from now on."""
        return self.measured[0].backend

    def __str__(self) -> str:
        passes = "forward + backward" if self.backward else "forward"
        source = "measured" if self.anew else f"as measured before, {self.path}"
        head = f"{self.cell}, (B, T, D) = {self.size}, {self.dtype} on {self.device}"
        lines = [f"{head}, {passes}, {source}"]
        for row in self.measured:
            split = "" if row.split == NO_REQUEST else " segments {}, burn-in {}".format(*row.split)
            origin = ", by the rule" if row == self.by_rule else ""
            lines.append(f"  ({row.solver}, {row.backend}){split}: {row.ms:.4g} ms{origin}")
        return "\n".join(lines)


def autotune(
    module: ParaRNN | RecurrentLayer | Cell,
    shape: tuple[int, ...],
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    backward: bool = True,
    remeasure: bool = False,
) -> Tuning:
    """Measure the pairs that can run a layer, or `solve` of a cell, on an input of a shape.

    From then on, in this process, "auto" uses the fastest for this cell (its class and config),
    size, heads of its matrices, dtype and device, among the pairs that a request allows. A split
    requested by `using` takes precedence. The rule's choice stays unless another is 5% faster. The
    record is written to the cache's folder, by cell, size, heads, dtype, device, versions and pairs
    that can run. A later process reads it when it calls `autotune`, and measures nothing.

    Gates are random, N(0, 1), parameters the cell's own. Times are those of eager calls, host
    time included.

    Args:
        module, shape, dtype, device: as in `explain`.
        backward: measure forward and backward, else forward only.
        remeasure: measure even if there is a record.

    Raises as `explain`, and ValueError for the meta device. Warns with BackendWarning where a
    record cannot be used or written.
    """
    check_module(module)
    program, size, dtype, device, heads = workload_of(module, shape, dtype, device)
    if not type_of(device).computes:
        raise ValueError("the meta device takes no time: move the layer, or name another device")
    cell = unwrap(module if isinstance(module, Cell) else module.cell)
    workload = Workload(program.key, size, dtype, device, heads)
    about = {
        "cell": program.key,
        "size": list(size),
        "heads": heads,
        "dtype": str(dtype),
        "device": device_name(device),
        "threads": type_of(device).threads(),
        "backward": backward,
        "pairs": [list(pair) for pair in pairs_for(program, dtype, device)],
        "versions": [__version__, torch.__version__],
    }
    path = tuned.path_of(program.cell_name, about)
    rows = None if remeasure else tuned.read(path, about)
    anew = rows is None
    if rows is None:
        with torch.inference_mode(False):  # in which no backward pass runs
            rows = _measure(cell, workload, backward)
        tuned.write(path, about, rows)
    ranking = tuned.remember(workload, rows)
    name = program.cell_name
    return Tuning(name, size, dtype, device, backward, ranking, rows[0], path, anew)


def candidates(workload: Workload) -> list[tuple[Engine, SplitRequest]]:
    """Return the engines and splits to measure, the rule's choice first.

    Engines that split time also have half and twice the rule's segments and burn-in.
    """
    engines = engines_for(workload)
    return [(e, request) for e in engines for request in _split_requests(e, workload)]


def _split_requests(engine: Engine, workload: Workload) -> list[SplitRequest]:
    """Return the splits of an engine to measure, the rule's first."""
    by_rule = NO_REQUEST
    if not engine.cuts_time:
        return [by_rule]
    plan_split = partial(engine.plan_split, program_by_key(workload.key), workload)
    rule = plan_split(by_rule)
    requests: dict[Split, SplitRequest] = {rule: by_rule}
    for segments in (rule.segments // 2, rule.segments, 2 * rule.segments):
        for burn_in in (rule.burn_in // 2, rule.burn_in, 2 * rule.burn_in):
            request = SplitRequest(max(2, segments), burn_in)
            requests.setdefault(plan_split(request), request)
    return list(requests.values())


def _measure(cell: Cell, workload: Workload, backward: bool) -> list[Measured]:
    """Measure all candidates."""
    cell = copy.deepcopy(cell).to(workload.device)
    rows: list[Measured] = []
    best = float("inf")
    for engine, request in candidates(workload):
        call = _call(cell, workload, engine, request, backward)
        seconds = median_seconds(call, workload.device, 1)
        best = min(best, seconds)
        if seconds <= HOPELESS * best:
            seconds = settled_seconds(call, workload.device, SECONDS)
        rows.append(Measured(engine.solver, engine.backend, request, seconds * 1e3))
    return rows


def _call(
    cell: Cell, workload: Workload, engine: Engine, request: SplitRequest, backward: bool
) -> Callable[[], Any]:
    """Return a function that runs one pass, or both, on random inputs."""
    (batch, steps, _), device = workload.size, workload.device
    generator = torch.Generator(device).manual_seed(0)

    def random(*size: int) -> Tensor:
        normal = torch.randn(size, generator=generator, device=device)
        return normal.to(workload.dtype)

    # In the strides of a layer's projection.
    by_head = random(
        cell.num_heads, batch, steps, cell.num_gates, cell.gate_channels // cell.num_heads
    )
    gates = by_head.permute(1, 2, 3, 0, 4).requires_grad_(backward)
    fields = {name: random(batch, steps).abs() for name in cell.fields}
    heads, memory = cell.head_sizes, {}
    if heads is not None:
        of_calls = {a for axes in heads.memory for a in axes if a not in heads.lengths}
        sizes = heads.of_call(dict.fromkeys(of_calls, MEMORY_LENGTH)).memory_sizes
        memory = {k: random(batch, *s) for k, s in zip(cell.memory, sizes, strict=True)}
    program, leaves = program_by_key(workload.key), [gates, *cell.parameters()]
    leaves = [leaf for leaf in leaves if leaf.requires_grad]
    grad = random(batch, steps, *cell.tensor_sizes.output)

    def call() -> None:
        with torch.set_grad_enabled(backward):
            args = prepare(
                cell, gates, fields=fields, memory=memory, output_only=not cell.has_readout
            ).with_options(**request._asdict())
            states = run_engine(program, engine, args).states
            if backward:
                read = states if cell.has_readout and cell.keeps_states else states[:1]
                torch.autograd.grad(read, leaves, [grad] * len(read), allow_unused=True)

    return call
