"""The table of engines and the choice among them."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from pararnn.engines import (
    fused_cpu,
    fused_cuda,
    newton_scan,
    newton_torch,
    sequential_torch,
    tuned,
)
from pararnn.engines.base import Engine
from pararnn.engines.split import BY_RULE, MIN_SEGMENTS, Pin
from pararnn.errors import BackendWarning, EngineError, warn_user
from pararnn.program import Program, program_by_key

ANY_DEVICE = "any"

TABLE: dict[tuple[str, str, str], Engine] = {
    (engine.solver, engine.backend, ANY_DEVICE): engine
    for engine in (sequential_torch.ENGINE, newton_torch.ENGINE)
} | {
    ("sequential", "fused", "cpu"): fused_cpu.SEQUENTIAL,
    ("sequential", "fused", "cuda"): fused_cuda.SEQUENTIAL,
    ("newton", "fused", "cpu"): fused_cpu.NEWTON,
    ("newton", "fused", "cuda"): fused_cuda.NEWTON,
    **{("newton", "scan", device): engine for device, engine in newton_scan.ENGINES.items()},
}
"""(solver, backend, device type) -> engine."""

PAIRS = tuple(dict.fromkeys((solver, backend) for solver, backend, _ in TABLE))
SOLVERS = sorted({key[0] for key in TABLE})
BACKENDS = sorted({key[1] for key in TABLE})


def find(solver: str, backend: str, device: torch.device) -> Engine | None:
    """The engine of a pair on a device, if the table has one."""
    return TABLE.get((solver, backend, device.type)) or TABLE.get((solver, backend, ANY_DEVICE))


def check_names(solver: str, backend: str) -> None:
    """Raise EngineError unless both are names of the table or "auto"."""
    for what, value, known in (("solver", solver, SOLVERS), ("backend", backend, BACKENDS)):
        if value not in (*known, "auto"):
            pairs = [f"({', '.join(pair)})" for pair in PAIRS]
            raise EngineError(
                f"unknown {what} {value!r}; known: {', '.join(known)}, auto. "
                f"Pairs: {', '.join(pairs)}"
            )


class Choice(NamedTuple):
    """The engine for a request, why it, and what autotune found to ask of its split."""

    engine: Engine
    why: str
    split: Pin = BY_RULE


def engine_for(
    program: Program,
    size: tuple[int, int, int],
    dtype: torch.dtype,
    device: torch.device,
    solver: str,
    backend: str,
) -> Engine:
    """The engine of `choose`."""
    return choose(program, size, dtype, device, solver, backend).engine


def choose(
    program: Program,
    size: tuple[int, int, int],
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
    candidates = _candidates(program, size, dtype, device, solver, backend)
    split: dict[tuple[str, str], Pin] = {}
    problem = tuned.Problem(program.key, size, dtype, device)
    found = tuned.fastest(problem, solver, backend) if follow_tuned else None
    if found is not None:
        row, why = found
        first = (row.solver, row.backend)
        split = {first: row.split}
        if "auto" in (solver, backend):
            candidates = {first: why} | {p: w for p, w in candidates.items() if p != first}
    not_built: list[str] = []
    for pair, why in candidates.items():
        engine, reason = find(*pair, device), _why_not(program, pair, device)
        if engine is None or reason is not None:
            continue
        reason = _why_not_built(program.key, *pair, device.type, dtype)
        if reason is None:
            for other in not_built:
                _say(f"{program.cell_name} runs by ({', '.join(pair)}): {other}")
            return Choice(engine, why, split.get(pair, BY_RULE))
        not_built.append(reason)
    able = [f"({', '.join(p)})" for p in PAIRS if p != pair and not _why_not(program, p, device)]
    raise EngineError(
        f"({solver}, {backend}) cannot run {program.cell_name} on {device.type}: {reason}. "
        f"Pairs that can: {', '.join(able)}"
    )


def why_not(
    program: Program, pair: tuple[str, str], dtype: torch.dtype, device: torch.device
) -> str | None:
    """The reason why a pair cannot run a cell here, if any."""
    reason = _why_not(program, pair, device)
    return reason or _why_not_built(program.key, *pair, device.type, dtype)


def pairs_for(program: Program, dtype: torch.dtype, device: torch.device) -> list[tuple[str, str]]:
    """All pairs that run a cell here on gates of `dtype`; builds what they need."""
    return [pair for pair in PAIRS if why_not(program, pair, dtype, device) is None]


def _candidates(
    program: Program,
    size: tuple[int, int, int],
    dtype: torch.dtype,
    device: torch.device,
    solver: str,
    backend: str,
) -> dict[tuple[str, str], str]:
    """The pairs that a request leaves open, the best first, and why each comes where it does."""
    pairs: dict[tuple[str, str], str] = {}
    if "auto" not in (solver, backend):
        return {(solver, backend): "it was asked for"}
    if backend in ("fused", "auto"):
        order = {"sequential": "a compiled loop beats every solver in PyTorch"}
        if device.type in _PARALLEL:
            what, segments_of = _PARALLEL[device.type]
            first = {"newton": f"{what} room to run segments of time side by side"}
            later = {"newton": "it was asked for, though the loop would leave little idle"}
            room = segments_of(size, dtype, device) >= MIN_SEGMENTS
            order = {**first, **order} if room else {**order, **later}
        pairs |= {(s, "fused"): why for s, why in order.items() if solver in (s, "auto")}
    if backend in ("torch", "auto"):
        by_size, why = _auto_solver(program, size, device)
        if solver == "auto":
            pairs[by_size, "torch"] = why
        else:
            pairs[solver, "torch"] = f"{solver} was asked for, and torch takes every cell"
    return pairs or {(solver, backend): "it was asked for"}


_PARALLEL = {
    "cpu": ("threads have", fused_cpu.segments_of),
    "cuda": ("the GPU has", fused_cuda.segments_of),
}


def _why_not(program: Program, pair: tuple[str, str], device: torch.device) -> str | None:
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


def _say(message: str) -> None:
    _say_once(message)


@functools.cache
def _say_once(message: str) -> None:
    warn_user(message, BackendWarning)


# What torch.compiler.assume_constant_result does, which would import the compiler to do it:
# compiled regions must not look into the building of a library, or warnings of it.
_why_not_built._dynamo_marked_constant = True  # type: ignore[attr-defined]
_say._dynamo_marked_constant = True  # type: ignore[attr-defined]


# Measured by benchmarks/auto_torch.py: Newton wins from MIN_LENGTH steps on, while the state
# entries of a step (B N D) stay under MAX_WIDTH and, where channels are coupled, N D does too.
NEWTON_MIN_LENGTH = 64
NEWTON_MAX_WIDTH = {"cpu": 512}
NEWTON_MAX_COUPLED = {"cpu": 16, "cuda": 64}


def _auto_solver(
    program: Program, size: tuple[int, int, int], device: torch.device
) -> tuple[str, str]:
    """The measured rule on the torch backend, and its reason.

    Devices without a figure are taken for GPUs.
    """
    batch, steps, channels = size
    width = program.num_states * channels
    if program.structure is None:
        return "sequential", program.why_sequential or "its step has no Jacobian"
    if steps < NEWTON_MIN_LENGTH:
        return "sequential", f"Newton pays from T = {NEWTON_MIN_LENGTH} on"
    most = NEWTON_MAX_COUPLED.get(device.type, 64)
    if program.couples_channels and width > most:
        return "sequential", f"Newton on dense Jacobians pays up to N D = {most}"
    limit = NEWTON_MAX_WIDTH.get(device.type)
    if limit is not None and batch * width > limit:
        return "sequential", f"Newton on {device.type} pays up to B N D = {limit}"
    return "newton", "Newton beats the loop in PyTorch at such sizes"
