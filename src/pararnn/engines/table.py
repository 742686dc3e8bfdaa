"""The table of engines and the choice among them."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple

import torch

from pararnn.cache import on_clear
from pararnn.device import type_of
from pararnn.engines import meta, newton_scan, newton_torch, sequential_torch, tuned
from pararnn.engines.arguments import Engine
from pararnn.engines.fused import cpu, cuda
from pararnn.engines.rule import Merit, Size
from pararnn.engines.split import BY_RULE, Split, SplitRequest
from pararnn.engines.tuned import Workload
from pararnn.errors import BackendWarning, EngineError, warn_user
from pararnn.program.program import Program, program_by_key

ANY_DEVICE = "any"
FIRST = "fused"
"""The backend whose pairs all rank before those of others, whatever the size."""

TABLE: dict[tuple[str, str, str], Engine] = {
    (engine.solver, engine.backend, ANY_DEVICE): engine
    for engine in (sequential_torch.ENGINE, newton_torch.ENGINE)
} | {
    ("sequential", "fused", "cpu"): cpu.SEQUENTIAL,
    ("sequential", "fused", "cuda"): cuda.SEQUENTIAL,
    ("newton", "fused", "cpu"): cpu.NEWTON,
    ("newton", "fused", "cuda"): cuda.NEWTON,
    **{("newton", "scan", device): engine for device, engine in newton_scan.ENGINES.items()},
}
"""(solver, backend, device type) -> engine."""

PAIRS = tuple(dict.fromkeys((solver, backend) for solver, backend, _ in TABLE))
OF_SHAPES = {pair: meta.engine_of_shapes(*pair) for pair in PAIRS}
"""The engines of the meta device."""
SOLVERS = sorted({key[0] for key in TABLE})
BACKENDS = sorted({key[1] for key in TABLE})


def find(solver: str, backend: str, device: torch.device) -> Engine | None:
    """The engine of a pair on a device, if the table has one."""
    if not type_of(device).computes:
        return OF_SHAPES.get((solver, backend))
    return TABLE.get((solver, backend, device.type)) or TABLE.get((solver, backend, ANY_DEVICE))


def check_names(solver: str, backend: str) -> None:
    """Raise EngineError unless both are names of the table or "auto"."""
    for what, value, known in (("solver", solver, SOLVERS), ("backend", backend, BACKENDS)):
        if value != "auto" and value not in known:
            pairs = [f"({', '.join(pair)})" for pair in PAIRS]
            raise EngineError(
                f"unknown {what} {value!r}; known: {', '.join(known)}, auto. "
                f"Pairs: {', '.join(pairs)}"
            )


class Choice(NamedTuple):
    """What runs a workload: a pair, why it, and what is asked of its split.

    It comes back with the solution. Names and numbers only: it can be kept, copied and pickled.
    """

    solver: str
    backend: str
    why: str
    asked: SplitRequest
    workload: Workload

    @property
    def pair(self) -> tuple[str, str]:
        """(solver, backend)."""
        return self.solver, self.backend

    # No property: the compiler of PyTorch 2.9 does not look into those of a NamedTuple.
    def engine(self) -> Engine:
        """The engine of the pair."""
        engine = find(self.solver, self.backend, self.workload.device)
        assert engine is not None
        return engine

    def pinned(self, asked: SplitRequest) -> Choice:
        """This choice, with what is asked of its split, if anything."""
        return self if asked == BY_RULE else self._replace(asked=asked)

    def split(self) -> Split | None:
        """How the forward pass cuts time, on gates of the usual layout; None where none is cut."""
        key, size, dtype, device = self.workload
        of = self.engine().split
        return None if of is None else of(program_by_key(key), size, dtype, device, self.asked)


def choose(
    program: Program,
    size: Size,
    dtype: torch.dtype,
    device: torch.device,
    solver: str,
    backend: str,
    follow_tuned: bool = True,
) -> Choice:
    """The choice for a request; `size` is (B, T, D), "auto" leaves a part of the pair open.

    Depends on sizes, gates' dtype, cell and device only, on whether kernels can be built here, and
    on what this process has tuned, unless `follow_tuned` is False. Raises EngineError naming the
    pairs that can run.
    """
    check_names(solver, backend)
    workload = Workload(program.key, size, dtype, device)
    found = tuned.fastest(workload, solver, backend) if follow_tuned else None
    split: dict[tuple[str, str], SplitRequest] = {}
    candidates = _candidates(program, size, dtype, device, solver, backend)
    if found is not None:
        row, why = found
        split = {(row.solver, row.backend): row.split}
        if "auto" in (solver, backend):
            candidates = chain([((row.solver, row.backend), why)], candidates)
    reason = f"there is no such engine for {device.type}"
    not_built: list[str] = []
    for pair, why in candidates:
        unable = why_never(program, pair, device)
        if unable is None:
            unable = _why_not_built(program.key, *pair, device.type, dtype)
            if unable is None:
                for other in not_built:
                    _say(f"{program.cell_name} runs by ({', '.join(pair)}): {other}")
                return Choice(*pair, why, split.get(pair, BY_RULE), workload)
            not_built.append(unable)
        reason = unable
    able = [f"({', '.join(pair)})" for pair in pairs_for(program, dtype, device)]
    raise EngineError(
        f"({solver}, {backend}) cannot run {program.cell_name} on {device.type}: {reason}. "
        f"Pairs that can: {', '.join(able) or 'none; move layer and inputs to another device'}"
    )


def _candidates(
    program: Program,
    size: Size,
    dtype: torch.dtype,
    device: torch.device,
    solver: str,
    backend: str,
) -> Iterator[tuple[tuple[str, str], str]]:
    """The pairs of the table that a request leaves open, the best first, and why each comes where
    it does.

    Those of FIRST rank before all others, which are not asked about the size until then: in
    compiled code and exports to compare a size is to hold for the like of it only.
    """
    if "auto" not in (solver, backend):
        yield (solver, backend), "it was asked for"
        return
    for first in (True, False):
        merits = []
        for pair in PAIRS:
            engine = find(*pair, device) if (pair[1] == FIRST) == first else None
            if engine is not None and solver in (pair[0], "auto") and backend in (pair[1], "auto"):
                merits.append((engine.pays(program, size, dtype, device), pair))
        merits.sort(key=_rank, reverse=True)
        for merit, pair in merits:
            yield pair, merit.why


def _rank(entry: tuple[Merit, tuple[str, str]]) -> int:
    return entry[0].rank


def why_not(
    program: Program, pair: tuple[str, str], dtype: torch.dtype, device: torch.device
) -> str | None:
    """The reason why a pair cannot run a cell here, if any."""
    reason = why_never(program, pair, device)
    return reason or _why_not_built(program.key, *pair, device.type, dtype)


def pairs_for(program: Program, dtype: torch.dtype, device: torch.device) -> list[tuple[str, str]]:
    """All pairs that run a cell here on gates of `dtype`; builds what they need."""
    return [pair for pair in PAIRS if why_not(program, pair, dtype, device) is None]


def why_never(program: Program, pair: tuple[str, str], device: torch.device) -> str | None:
    """The reason why a pair cannot run a cell, whatever can be built here, if any."""
    engine = find(*pair, device)
    if engine is not None:
        return engine.why_not(program)
    return f"there is no such engine for {device.type}"


def _why_not_built(
    key: str, solver: str, backend: str, device: str, dtype: torch.dtype
) -> str | None:
    """The reason why an engine cannot be made ready, if any."""
    return _build_failure(key, solver, backend, device, dtype)


@functools.cache
def _build_failure(
    key: str, solver: str, backend: str, device: str, dtype: torch.dtype
) -> str | None:
    engine = find(solver, backend, torch.device(device))
    assert engine is not None
    try:
        if engine.build is not None:
            engine.build(program_by_key(key), dtype)
    except EngineError as error:
        return str(error)
    return None


on_clear(_build_failure.cache_clear)


def _say(message: str) -> None:
    _say_once(message)


@functools.cache
def _say_once(message: str) -> None:
    warn_user(message, BackendWarning)


# What torch.compiler.assume_constant_result does, which would import the compiler to do it:
# compiled regions must not look into the building of a library, or warnings of it.
_why_not_built._dynamo_marked_constant = True  # type: ignore[attr-defined]
_say._dynamo_marked_constant = True  # type: ignore[attr-defined]
