"""Kernels for GPUs: a program and a variant (dtypes, sizes, layout) in, compiled CUDA out."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from pararnn.base import cache as disk
from pararnn.base.errors import EngineError
from pararnn.base.numerics import compute_dtype
from pararnn.cells.base import Cell
from pararnn.codegen import headers
from pararnn.codegen.board import LANES, board_of
from pararnn.codegen.chunks import ChunkVariant, launchable, source_of_chunks
from pararnn.codegen.emit import reads_gates
from pararnn.codegen.families import FAMILIES
from pararnn.codegen.matrix_cuda import (
    MatrixVariant,
    matrix_kernels_in,
    matrix_variants,
    source_of_matrix,
)
from pararnn.codegen.mixing_cuda import (
    Launchable,
    MixingVariant,
    kernels_in,
    mixing_variants,
    source_of_mixing,
    usual_mixing_variants,
)
from pararnn.codegen.nvrtc import (
    CLUSTERS,
    OLDEST,
    Kernel,
    ToolchainError,
    architecture,
    capability_of,
    compile_cubin,
    identity,
    load_module,
    too_old,
)
from pararnn.codegen.source import IO_TYPES, chunk_of, constant_line, source_file
from pararnn.program.program import MATRIX, MIXING, Program

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
SOLVERS = FAMILIES["elementwise"].solvers
INFO_SLOTS = {"sequential": 1, "newton": 256}
"""Rows of counts that a solver's forward pass writes: one for each tile of channels, at most."""

APPROXIMATE = frozenset({torch.bfloat16})
"""I/O dtypes that hide the error of the hardware's tanh."""

_LOG = logging.getLogger("pararnn")


class Variant(NamedTuple):
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


AnyVariant = Variant | MixingVariant | MatrixVariant | ChunkVariant
"""Specialisation of a kernel of any family."""


class Ring(NamedTuple):
    """Ring of shared memory that feeds a warp: steps of a stage, and stages."""

    steps: int
    stages: int


def ring_of(program: Program, variant: Variant) -> Ring:
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


def source_of(program: Program, variant: AnyVariant) -> str:
    """Return the CUDA file of a variant. Raises EngineError as `ring_of`, `tiles_of` and
    `source_file`."""
    if isinstance(variant, MixingVariant):
        return source_of_mixing(program, variant)
    if isinstance(variant, MatrixVariant):
        return source_of_matrix(program, variant)
    if isinstance(variant, ChunkVariant):
        return source_of_chunks(program, variant)
    backward = variant.direction == "backward"
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
    if backward:
        constants["arriving"] = variant.arriving
    lines = [f"using weight_io = {IO_TYPES[variant.weight_dtype]};"]
    lines += [constant_line(name, value) for name, value in constants.items()]
    defines = {
        "BACKWARD": int(backward),
        "CLUSTER": int(variant.cluster),
        "APPROXIMATE": int(variant.dtype in APPROXIMATE),
        "REFINED": int(variant.dtype == torch.float32 and backward),
    }
    return source_file(
        program, variant.dtype, "cuda", variant.solver, defines=defines, constants=[*lines, ""]
    )


def blocks_of(program: Program, variant: AnyVariant) -> Mapping[str, Launchable]:
    """Return the kernels of a pass by name: the size of a block, and its shared memory."""
    if isinstance(variant, MixingVariant):
        return kernels_in(program, variant)
    if isinstance(variant, MatrixVariant):
        return matrix_kernels_in(program, variant)
    if isinstance(variant, ChunkVariant):
        return {"run": launchable(program, variant)}
    return {name: Launchable(block) for name, block in KERNELS[variant.direction].items()}


def usual_variants(
    program: Program,
    dtype: torch.dtype,
    channels: int,
    head_width: int,
    weight_dtype: torch.dtype | None = None,
    solver: str = "sequential",
    clusters: bool = False,
) -> list[Variant]:
    """Return the variants of a layer's training and decoding without resets, for all batch sizes.

    `clusters`: include Newton's variants whose segments synchronise in clusters.
    """
    return [
        Variant(
            direction,
            dtype,
            weight_dtype or compute_dtype(dtype),
            channels,
            head_width,
            per_lane,
            chunk=chunk_of(head_width * dtype.itemsize),
            field_chunk=chunk_of(channels * compute_dtype(dtype).itemsize),
            broadcast=(False,) * len(program.fields),
            arriving=tuple(n == 0 and direction == "backward" for n in range(program.num_states)),
            solver=solver,
            cluster=cluster,
        )
        for cluster in ((False, True) if clusters and solver == "newton" else (False,))
        for direction in KERNELS
        for per_lane in sorted({1, most_per_lane(dtype)})
        if solver == "sequential" or per_lane == most_per_lane(dtype)
    ]


def usual(
    program: Program,
    cell: Cell,
    dtype: torch.dtype,
    weight_dtype: torch.dtype,
    device: torch.device | tuple[int, int],
) -> dict[object, Callable[[], object]]:
    """Return the jobs for `usual_variants` of a cell, by key, for all solvers.

    For a compute capability in place of a device, GPUs may be absent: device code is cached on disk
    and not loaded. Raises ToolchainError for GPUs that are too old.
    """
    make: Make = kernels_of
    if isinstance(device, torch.device):
        capability = capability_of(device)
    else:
        capability, make = device, _code_of
        if capability < OLDEST:
            raise ToolchainError(too_old("the requested GPU", capability))
    jobs = dict[object, Callable[[], object]]()
    if program.family == MATRIX:
        matrix = matrix_variants(program, dtype, weight_dtype, capability)
        return {(program.key, v): partial(make, program, v, capability) for v in matrix}
    if program.family == MIXING:
        heads = next((p.shape[0] for p in cell.parameters() if p.ndim == 3), 1)
        width = cell.hidden_size // heads
        variants = usual_mixing_variants(program, dtype, heads, width, weight_dtype, capability)
        jobs = {(program.key, v): partial(make, program, v, capability) for v in variants}
        check = partial(check_buildable, program, dtype, capability, "sequential", make)
        return {(program.key, dtype, "sequential"): check, **jobs}
    size, clusters = cell.hidden_size, capability >= CLUSTERS
    width = size // cell.num_heads
    for solver in SOLVERS:
        jobs[program.key, dtype, solver] = partial(
            check_buildable, program, dtype, capability, solver, make
        )
        for variant in usual_variants(program, dtype, size, width, weight_dtype, solver, clusters):
            jobs[program.key, variant] = partial(make, program, variant, capability)
    return jobs


Make = Callable[[Program, AnyVariant, tuple[int, int]], object]
"""Function that compiles the kernels of a pass for a compute capability: `kernels_of`, or
`_code_of`, which only fills the cache on disk."""


def check_buildable(
    program: Program,
    dtype: torch.dtype,
    capability: tuple[int, int],
    solver: str = "sequential",
    make: Make | None = None,
) -> None:
    """Compile kernels of a small size, which fail if any size does, or those of a cell that has one
    size. Raises EngineError."""
    if program.family == MATRIX:
        for matrix_variant in matrix_variants(program, dtype, dtype, capability):
            (make or kernels_of)(program, matrix_variant, capability)
        return
    if program.family == MIXING:
        for mixing_variant in mixing_variants(program, dtype, 1, LANES, None, capability):
            (make or kernels_of)(program, mixing_variant, capability)
        return
    variants = usual_variants(program, dtype, LANES, LANES, solver=solver)
    for variant in variants:  # with many gates only some fit: the largest must
        backward = variant.direction == "backward"
        ring_of(program, variant._replace(arriving=(backward,) * program.num_states))
    for variant in variants:
        if solver != "sequential" or variant.per_lane == 1:
            (make or kernels_of)(program, variant, capability)


def most_per_lane(dtype: torch.dtype) -> int:
    """Return the channels of a lane if there are enough of them: two words of memory at most."""
    return 1 if dtype.itemsize == 8 else 2


_KERNELS: dict[tuple[str, AnyVariant, tuple[int, int]], dict[str, Kernel] | EngineError] = {}
disk.on_clear(lambda: _KERNELS.clear())


def kernels_of(
    program: Program, variant: AnyVariant, capability: tuple[int, int]
) -> dict[str, Kernel]:
    """Return the kernels of a pass by name, compiled at the first use and cached on disk.

    Raises EngineError without NVRTC, if NVRTC fails, for cells that do not fit, and for ops without
    a spelling. A failure is cached for the life of the process.
    """

    def build() -> dict[str, Kernel]:
        module = load_module(_code_of(program, variant, capability))
        blocks = blocks_of(program, variant)
        return {name: Kernel(module, name, *block) for name, block in blocks.items()}

    return disk.cached_or_error(_KERNELS, (program.key, variant, capability), build)


def _code_of(program: Program, variant: AnyVariant, capability: tuple[int, int]) -> bytes:
    return cubin_of(program, variant, architecture(capability))


def headers_of(program: Program, variant: AnyVariant) -> str | None:
    """Return the folder of the headers of a variant's kernels."""
    return "chunks" if isinstance(variant, ChunkVariant) else program.family


def cubin_of(program: Program, variant: AnyVariant, arch: str) -> bytes:
    """Return the device code of a variant. Raises EngineError as `kernels_of`."""
    source = source_of(program, variant)
    name = (
        f"{program.cell_name}-{variant.solver}-{variant.direction}-{IO_TYPES[variant.dtype]}-{arch}"
    )
    key = "\n".join((source, headers.text("cuda", headers_of(program, variant)), arch))

    def build(file: Path, out: Path) -> None:
        _LOG.warning(
            "compiling %s's %s %s kernel for %s (once; cached in %s)",
            program.cell_name,
            variant.solver,
            variant.direction,
            arch,
            disk.cache_folder(),
        )
        compile_cubin(file, headers.folder("cuda"), out, arch)

    try:
        return disk.load(disk.CUDA, name, key, source, build, identity)
    except ToolchainError as error:
        digest = hashlib.sha256(key.encode()).hexdigest()[:12]
        file = disk.write_failed(f"{name}-{digest}.cu", source)
        raise ToolchainError(f"{error}\nThe source is {file}") from error
