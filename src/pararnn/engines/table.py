"""Table of engines, and the choice among them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple

import torch

from pararnn.base.device import type_of
from pararnn.base.errors import BackendWarning, EngineError, warn_user
from pararnn.base.private import constant_in_graphs
from pararnn.engines import chunks_torch, meta, newton_scan, newton_torch, sequential_torch, tuned
from pararnn.engines.engine import Engine
from pararnn.engines.fused import chunks, cpu, cuda
from pararnn.engines.rule import Size
from pararnn.engines.split import NO_REQUEST, Split, SplitRequest
from pararnn.engines.tuned import Workload
from pararnn.program.program import Program, program_by_key

ANY_DEVICE = "any"
FIRST = "fused"
"""Backend whose pairs all rank before those of others, whatever the size."""

TABLE: dict[tuple[str, str, str], Engine] = {
    (engine.solver, engine.backend, ANY_DEVICE): engine
    for engine in (sequential_torch.ENGINE, newton_torch.ENGINE, chunks_torch.ENGINE)
} | {
    **{
        (solver, "fused", device): engine
        for device, engines in (("cpu", cpu.ENGINES), ("cuda", cuda.ENGINES))
        for solver, engine in engines.items()
    },
    ("chunks", "fused", "cuda"): chunks.ENGINE,
    **{("newton", "scan", device): engine for device, engine in newton_scan.ENGINES.items()},
}
"""Engines by (solver, backend, device type)."""

PAIRS = tuple(dict.fromkeys((solver, backend) for solver, backend, _ in TABLE))
META = {pair: meta.MetaEngine(*pair) for pair in PAIRS}
SOLVERS = sorted({key[0] for key in TABLE})
BACKENDS = sorted({key[1] for key in TABLE})


def find(solver: str, backend: str, device: torch.device) -> Engine | None:
    """Return the engine of a pair on a device, if the table has one."""
    if not type_of(device).computes:
        return META.get((solver, backend))
    return TABLE.get((solver, backend, device.type)) or TABLE.get((solver, backend, ANY_DEVICE))


def check_names(solver: str, backend: str) -> None:
    """Raise EngineError unless both are names of the table or "auto"."""
    for what, value, names in (("solver", solver, SOLVERS), ("backend", backend, BACKENDS)):
        if value != "auto" and value not in names:
            pairs = [f"({', '.join(pair)})" for pair in PAIRS]
            raise EngineError(
                f"unknown {what} {value!r}; known: {', '.join(names)}, auto. "
                f"Pairs: {', '.join(pairs)}"
            )


class Choice(NamedTuple):
    """Choice of a pair for a workload, with the reason and the requested split.

    `solve` returns it with the solution. It has names and numbers only, and can be copied and
    pickled.
    """

    solver: str
    backend: str
    why: str
    split_request: SplitRequest
    workload: Workload

    @property
    def pair(self) -> tuple[str, str]:
        """(solver, backend)."""
        return self.solver, self.backend

    # No property: the compiler of PyTorch 2.9 does not look into those of a NamedTuple.
    def engine(self) -> Engine:
        """Return the engine of the pair."""
        engine = find(self.solver, self.backend, self.workload.device)
        assert engine is not None
        return engine

    def with_split(self, request: SplitRequest) -> Choice:
        """Return this choice with a requested split, if anything is requested."""
        return self if request == NO_REQUEST else self._replace(split_request=request)

    def split(self) -> Split | None:
        """Plan the split of a forward pass on gates of the usual layout; None without one."""
        engine, workload = self.engine(), self.workload
        if not engine.cuts_time:
            return None
        return engine.plan_split(program_by_key(workload.key), workload, self.split_request)


def choose(
    program: Program,
    size: Size,
    dtype: torch.dtype,
    device: torch.device,
    solver: str,
    backend: str,
    heads: int = 1,
    follow_tuned: bool = True,
) -> Choice:
    """Choose the pair for a request, in which "auto" may stand for solver and backend.

    `size` is (B, T, D), `heads` as in `Workload`. The choice depends on sizes, gates' dtype, cell
    and device only, on whether kernels can be built here, and on this process's tuning, unless
    `follow_tuned` is False. Raises EngineError naming the pairs that can run.
    """
    check_names(solver, backend)
    workload = Workload(program.key, size, dtype, device, heads)
    tuning = tuned.fastest(workload, solver, backend) if follow_tuned else None
    splits: dict[tuple[str, str], SplitRequest] = {}
    candidates = _candidates(program, workload, solver, backend)
    if tuning is not None:
        row, why = tuning
        splits = {(row.solver, row.backend): row.split}
        if "auto" in (solver, backend):
            candidates = chain([((row.solver, row.backend), why)], candidates)
    reason: str | None = None
    not_built: list[str] = []
    for pair, why in candidates:
        unable = why_never(program, pair, device)
        if unable is None:
            unable = _why_not_built(program.key, *pair, device.type, dtype)
            if unable is None:
                for other in not_built:
                    _warn_once(f"{program.cell_name} runs by ({', '.join(pair)}): {other}")
                return Choice(*pair, why, splits.get(pair, NO_REQUEST), workload)
            not_built.append(unable)
        reason = reason or unable
    reason = reason or f"there is no such engine for {device.type}"
    able = [f"({', '.join(pair)})" for pair in pairs_for(program, dtype, device)]
    raise EngineError(
        f"({solver}, {backend}) cannot run {program.cell_name} on {device.type}: {reason}. "
        f"Pairs that can: {', '.join(able) or 'none; move layer and inputs to another device'}"
    )


def _candidates(
    program: Program, workload: Workload, solver: str, backend: str
) -> Iterator[tuple[tuple[str, str], str]]:
    """Yield the pairs that a request allows, by descending rank, and the reason for each rank.

    Pairs of FIRST rank before all others. The others rank themselves only when they are reached: a
    comparison of sizes would specialise compiled code and exports.
    """
    if "auto" not in (solver, backend):
        yield (solver, backend), "it was requested"
        return
    for first in (True, False):
        ranks = []
        for pair in PAIRS:
            engine = find(*pair, workload.device) if (pair[1] == FIRST) == first else None
            if engine is not None and solver in (pair[0], "auto") and backend in (pair[1], "auto"):
                rank, why = engine.rank(program, workload)
                ranks.append((rank.value, pair, why))
        ranks.sort(key=_rank, reverse=True)
        for _, pair, why in ranks:
            yield pair, why


def _rank(entry: tuple[int, tuple[str, str], str]) -> int:
    return entry[0]


def why_not(
    program: Program,
    pair: tuple[str, str],
    dtype: torch.dtype,
    device: torch.device,
    compiles: bool = True,
) -> str | None:
    """Return the reason why a pair cannot run a cell here, or None; without `compiles` one that is
    known before its code is compiled."""
    reason = why_never(program, pair, device)
    return reason or _why_not_built(program.key, *pair, device.type, dtype, compiles)


def pairs_for(program: Program, dtype: torch.dtype, device: torch.device) -> list[tuple[str, str]]:
    """Return all pairs that run a cell here on gates of `dtype`; build what they need."""
    return [pair for pair in PAIRS if why_not(program, pair, dtype, device) is None]


def why_never(program: Program, pair: tuple[str, str], device: torch.device) -> str | None:
    """Return the reason why a pair cannot run a cell, whatever can be built here, or None."""
    engine = find(*pair, device)
    if engine is not None:
        return engine.why_not(program)
    return f"there is no such engine for {device.type}"


# Compiled regions must not look into the building of a library, or into warnings of it.
@constant_in_graphs
def _why_not_built(
    key: str, solver: str, backend: str, device: str, dtype: torch.dtype, compiles: bool = True
) -> str | None:
    """Return the reason why an engine cannot be built, or None. Its kernels, or errors, are cached
    by process."""
    engine = find(solver, backend, torch.device(device))
    assert engine is not None
    try:
        engine.build(program_by_key(key), dtype, compiles)
    except EngineError as error:
        return str(error)
    return None


_messages: set[str] = set()


@constant_in_graphs
def _warn_once(message: str) -> None:
    if message not in _messages:
        _messages.add(message)
        warn_user(message, BackendWarning)
