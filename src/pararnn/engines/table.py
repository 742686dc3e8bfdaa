"""The table of engines and the choice among them."""

from __future__ import annotations

import torch

from pararnn.engines import newton_torch, sequential_torch
from pararnn.engines.base import Engine
from pararnn.errors import EngineError
from pararnn.program import Program

ANY_DEVICE = "any"

TABLE: dict[tuple[str, str, str], Engine] = {
    (engine.solver, engine.backend, ANY_DEVICE): engine
    for engine in (sequential_torch.ENGINE, newton_torch.ENGINE)
}
"""(solver, backend, device type) -> engine."""

SOLVERS = sorted({key[0] for key in TABLE})
BACKENDS = sorted({key[1] for key in TABLE})


def find(solver: str, backend: str, device: torch.device) -> Engine | None:
    """The engine of a pair on a device, if the table has one."""
    return TABLE.get((solver, backend, device.type)) or TABLE.get((solver, backend, ANY_DEVICE))


def check_names(solver: str, backend: str) -> None:
    """Raise EngineError unless both are names of the table or "auto"."""
    for what, value, known in (("solver", solver, SOLVERS), ("backend", backend, BACKENDS)):
        if value not in (*known, "auto"):
            pairs = dict.fromkeys(f"({s}, {b})" for s, b, _ in TABLE)
            raise EngineError(
                f"unknown {what} {value!r}; known: {', '.join(known)}, auto. "
                f"Pairs: {', '.join(pairs)}"
            )


def engine_for(
    program: Program, size: tuple[int, int, int], device: torch.device, solver: str, backend: str
) -> Engine:
    """The engine for a request; `size` is (B, T, D), "auto" leaves a part of the pair open.

    Depends on sizes, cell and device only. Raises EngineError naming the pairs that can run.
    """
    check_names(solver, backend)
    chosen = (_auto_solver(program, size, device) if solver == "auto" else solver, "torch")
    engine = find(chosen[0], chosen[1] if backend == "auto" else backend, device)
    reason = "no such engine" if engine is None else engine.why_not(program)
    if engine is None or reason is not None:
        raise EngineError(
            f"({solver}, {backend}) cannot run {program.cell_name} on {device.type}: {reason}. "
            f"Pairs that can: {', '.join(_able(program, device))}"
        )
    return engine


def _able(program: Program, device: torch.device) -> list[str]:
    pairs = dict.fromkeys((solver, backend) for solver, backend, _ in TABLE)
    engines = [(pair, find(*pair, device)) for pair in pairs]
    return [f"({s}, {b})" for (s, b), e in engines if e is not None and e.why_not(program) is None]


# Measured by benchmarks/auto_torch.py: Newton wins from MIN_LENGTH steps on, while the state
# entries of a step (B N D) stay under MAX_WIDTH and, where channels are coupled, N D does too.
NEWTON_MIN_LENGTH = 64
NEWTON_MAX_WIDTH = {"cpu": 512}
NEWTON_MAX_COUPLED = {"cpu": 16, "cuda": 64}


def _auto_solver(program: Program, size: tuple[int, int, int], device: torch.device) -> str:
    """The measured rule on the torch backend; devices without a figure are taken for GPUs."""
    batch, steps, channels = size
    width = program.num_states * channels
    if program.structure is None or steps < NEWTON_MIN_LENGTH:
        return "sequential"
    if program.couples_channels and width > NEWTON_MAX_COUPLED.get(device.type, 64):
        return "sequential"
    limit = NEWTON_MAX_WIDTH.get(device.type)
    return "newton" if limit is None or batch * width <= limit else "sequential"
