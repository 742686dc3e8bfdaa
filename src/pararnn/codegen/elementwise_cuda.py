"""Kernels for GPUs of elementwise steps: variants, and the ring that feeds a warp."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from pararnn.base.errors import EngineError
from pararnn.base.numerics import compute_dtype
from pararnn.cells.base import Cell
from pararnn.codegen.board import LANES, board_of
from pararnn.codegen.emit import reads_gates
from pararnn.codegen.families import FAMILIES
from pararnn.codegen.mixing_cuda import Launchable
from pararnn.codegen.nvrtc import CLUSTERS
from pararnn.codegen.source import IO_TYPES, chunk_of, constant_line, pass_defines, source_file
from pararnn.program.program import ELEMENTWISE, Program

SHARED_BYTES = 48 * 1024
"""Shared memory that a block may have without a request."""
RING_BYTES = 18 * 1024
"""Shared memory of a warp's ring: enough bytes in flight, with room for at least four warps."""
MAX_STAGES = 6

KERNELS: Mapping[str, Mapping[str, tuple[int, int]]] = {
    "forward": {"run": (LANES, 1)},
    "backward": {"run": (LANES, 1), "sum_weights": (LANES, 8)},
}
"""Kernels and their block sizes, by pass."""
SOLVERS = FAMILIES[ELEMENTWISE].solvers
INFO_SLOTS = {"sequential": 1, "newton": 256}
"""Rows of counts that a solver's forward pass writes: one for each tile of channels, at most."""


class ElementwiseVariant(NamedTuple):
    """Specialisation of a kernel, in addition to the cell: see cuda/elementwise/problem.h.

    direction: the pass, a key of KERNELS. solver: one of SOLVERS. chunk: bytes that all rows are
    aligned to, 16 at most; field_chunk: the same for fields. adjacent_gates: gates of a step and
    head are contiguous. events: `seq` or `reset` is passed. broadcast, by field: one value a step.
    arriving, by state: it has an incoming gradient (none in the forward pass). cluster: Newton's
    segments are the blocks of a cluster.
    """

    direction: str
    dtype: torch.dtype
    weight_dtype: torch.dtype
    channels: int
    head_width: int
    per_lane: int
    chunk: int = 16
    field_chunk: int = 16
    adjacent_gates: bool = True
    reverse: bool = False
    events: bool = False
    broadcast: tuple[bool, ...] = ()
    arriving: tuple[bool, ...] = ()
    solver: str = "sequential"
    cluster: bool = False


class Ring(NamedTuple):
    """Ring of shared memory that feeds a warp: steps of a stage, and stages."""

    steps: int
    stages: int


def ring_of(program: Program, variant: ElementwiseVariant) -> Ring:
    """Return the ring of a variant. Raises EngineError for cells whose rows do not fit.

    A stage holds the steps that two instructions copy (one in the backward pass). Usual cells then
    keep the bytes in flight within RING_BYTES at MAX_STAGES.
    """
    row = LANES * variant.per_lane * variant.dtype.itemsize
    scalar = compute_dtype(variant.dtype).itemsize
    fields = sum(scalar * (1 if b else LANES * variant.per_lane) for b in variant.broadcast)
    rows = len(program.gates)
    sums = 0
    if variant.direction == "backward":
        rows += program.num_states + sum(variant.arriving)
        sums = (rows + len(program.params)) * LANES * variant.per_lane * scalar
    step_bytes = rows * row + fields
    together = max(1, LANES * 16 // row)
    for steps in (2 * together if variant.direction == "forward" else max(4, together), together):
        stages = min(MAX_STAGES - (steps <= 4), RING_BYTES // (steps * step_bytes))
        if stages >= 3:
            return Ring(steps, stages)
    for steps in (together, max(1, together // 2), 1):
        if 2 * steps * step_bytes + sums <= SHARED_BYTES:
            return Ring(steps, 2)
    raise EngineError(
        f"{program.cell_name} reads {step_bytes} bytes a step and warp in its {variant.direction} "
        f"pass; kernels have {SHARED_BYTES - sums} for two steps. Use fewer gates or states, or "
        "backend='torch'"
    )


_INTEGERS = ("channels", "head_width", "per_lane", "chunk", "field_chunk")
_FLAGS = ("adjacent_gates", "reverse", "events")
"""Fields of a variant that are constants of the same name in kernels."""


def source_of_elementwise(program: Program, variant: ElementwiseVariant) -> str:
    """Return the CUDA file of a variant. Raises EngineError as `ring_of` and `source_file`."""
    constants: dict[str, int | tuple[bool, ...]] = {
        **{name: getattr(variant, name) for name in _INTEGERS},
        **ring_of(program, variant)._asdict(),
        "info_slots": INFO_SLOTS[variant.solver],
    }
    if variant.solver == "newton":
        constants |= board_of(program, variant.dtype, variant.per_lane)._asdict()
    constants |= {name: getattr(variant, name) for name in _FLAGS}
    constants["backward_reads_gates"] = reads_gates(program, variant.dtype)
    constants["broadcast"] = variant.broadcast
    if variant.direction == "backward":
        constants["arriving"] = variant.arriving
    lines = [f"using weight_io = {IO_TYPES[variant.weight_dtype]};"]
    lines += [constant_line(name, value) for name, value in constants.items()]
    defines = pass_defines(variant.dtype, variant.direction, CLUSTER=int(variant.cluster))
    return source_file(
        program, variant.dtype, "cuda", variant.solver, defines=defines, constants=[*lines, ""]
    )


def blocks_in(program: Program, variant: ElementwiseVariant) -> dict[str, Launchable]:
    """Return the kernels of a pass, by name."""
    return {name: Launchable(block) for name, block in KERNELS[variant.direction].items()}


def usual_variants(
    program: Program,
    dtype: torch.dtype,
    channels: int,
    head_width: int,
    weight_dtype: torch.dtype | None = None,
    solver: str = "sequential",
    clusters: bool = False,
) -> list[ElementwiseVariant]:
    """Return the variants of a layer's training and decoding without resets, for all batch sizes.

    `clusters`: include Newton's variants whose segments synchronise in clusters.
    """
    first = tuple(n == 0 for n in range(program.num_states))
    return [
        ElementwiseVariant(
            direction,
            dtype,
            weight_dtype or compute_dtype(dtype),
            channels,
            head_width,
            per_lane,
            chunk=chunk_of(head_width * dtype.itemsize),
            field_chunk=chunk_of(channels * compute_dtype(dtype).itemsize),
            broadcast=(False,) * len(program.fields),
            arriving=first if direction == "backward" else (),
            solver=solver,
            cluster=cluster,
        )
        for cluster in ((False, True) if clusters and solver == "newton" else (False,))
        for direction in KERNELS
        for per_lane in sorted({1, most_per_lane(dtype)})
        if solver == "sequential" or per_lane == most_per_lane(dtype)
    ]


def most_per_lane(dtype: torch.dtype) -> int:
    """Return the channels of a lane if there are enough of them: two words of memory at most."""
    return 1 if dtype.itemsize == 8 else 2


def variants_of(
    program: Program,
    cell: Cell | None,
    dtype: torch.dtype,
    weight_dtype: torch.dtype,
    capability: tuple[int, int],
    solver: str,
) -> list[ElementwiseVariant]:
    """Return `usual_variants` of a cell's sizes; without a cell those of a small size, which fail
    if any size does. Raises EngineError as `ring_of`."""
    if cell is not None:
        size, clusters = cell.hidden_size, capability >= CLUSTERS
        width = size // cell.num_heads
        return usual_variants(program, dtype, size, width, weight_dtype, solver, clusters)
    variants = usual_variants(program, dtype, LANES, LANES, solver=solver)
    for variant in variants:  # with many gates only some fit: the largest must
        backward = variant.direction == "backward"
        ring_of(program, variant._replace(arriving=(backward,) * program.num_states))
    return [v for v in variants if solver != "sequential" or v.per_lane == 1]
