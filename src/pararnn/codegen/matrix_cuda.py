"""Kernels for GPUs of matrix cells: variants, and the shared memory of a block."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from pararnn.base.errors import EngineError
from pararnn.base.numerics import compute_dtype
from pararnn.codegen.matrix_blocks import Emitted, emit_block
from pararnn.codegen.mixing_cuda import SPLIT_TERMS, Launchable, shared_bytes_of
from pararnn.codegen.shares import LANES
from pararnn.codegen.source import constant_line, pass_defines, source_file
from pararnn.program.matrix import CHECKPOINT, axes_by_kind
from pararnn.program.program import Program

DIRECTIONS = ("forward", "backward")
WINDOWS = (32, 16, 8, 4, 2, 1)
"""Steps of a window of inputs in shared memory. In the backward pass a window divides the distance
of checkpoints."""
WINDOW_BYTES = 72 * 1024
"""Most bytes of the windows of a block, so that several blocks fit."""
VALUES_AT_ONCE, BLOCK_BYTES = 64, 1024
"""Values of states a lane, over all warps of a multiprocessor, for which shared memory should have
room; and the bytes of it that a block takes in addition."""
MIN_WINDOW = 4
"""Shortest window for which a chunk's states are better in shared than in global memory."""
MAX_VALUES = 64
"""Most values of states of a thread, which registers have room for, or nearly."""
MAX_PARAMS = 1024
"""Most values of parameters that do not multiply by tiles, of a thread: compilers take minutes for
thousands, and each is read from memory at every step."""
CHUNK = 16
"""Bytes of a copy, to which all arrays in shared memory are rounded up."""


class MatrixVariant(NamedTuple):
    """Specialisation of a kernel, in addition to the cell: see cuda/matrix/inputs.h.

    matrix_parts: bfloat16 terms that an entry of a matrix is split into, see `parts_of`. events:
    `seq` or `reset` is passed. shared: bytes of shared memory that a block may have.
    """

    direction: str
    dtype: torch.dtype
    matrix_parts: int
    events: bool
    shared: int
    solver: str = "sequential"


def parts_of(program: Program, dtype: torch.dtype, matrix_dtype: torch.dtype) -> int:
    """Return the number of bfloat16 terms that products split parameters of a dtype into: 1 unless
    gates are bfloat16."""
    if dtype != torch.bfloat16 or not program.params:
        return 1
    return min(2, SPLIT_TERMS[matrix_dtype])


class Memory(NamedTuple):
    """Shared memory of a block: values of matrices, steps of a window of inputs (0 for none), bytes
    of the states of a chunk of steps (0 if they are in global memory), and all bytes."""

    matrix_numbers: int
    window: int
    trajectory: int
    bytes: int


def matrix_variants(
    program: Program, dtype: torch.dtype, weight_dtype: torch.dtype, capability: tuple[int, int]
) -> list[MatrixVariant]:
    """Return the variants of a layer's training and decoding without resets, for all sizes."""
    terms, shared = parts_of(program, dtype, weight_dtype), shared_bytes_of(capability)
    return [MatrixVariant(direction, dtype, terms, False, shared) for direction in DIRECTIONS]


@lru_cache(maxsize=1024)
def emitted_for(program: Program, variant: MatrixVariant) -> Emitted:
    """Return the emitted code of a variant. Raises EngineError for ops without a spelling."""
    return emit_block(program, variant.dtype, variant.direction, variant.matrix_parts)


def memory_of(program: Program, variant: MatrixVariant) -> Memory:
    """Plan the shared memory of a block. Raises EngineError for cells that do not fit."""
    emitted, sizes = emitted_for(program, variant), program.step.head
    thread_values = trajectory_numbers(program, variant) // (emitted.layout.warps * LANES)
    if thread_values > MAX_VALUES:
        raise EngineError(
            f"{program.cell_name} has {thread_values} values of the states of a head for each "
            f"thread of the largest block; registers have room for {MAX_VALUES}. Use shorter axes, "
            "or backend='torch'"
        )
    params = [axes for axes in axes_by_kind(program.step)["param"] if len({*axes}) == len(axes)]
    if (count := sum(map(emitted.layout.count, params))) > MAX_PARAMS:
        raise EngineError(
            f"{program.cell_name} has {count} values of parameters for each thread of its block; "
            f"{MAX_PARAMS} are allowed. Use shorter axes, or backend='torch'"
        )
    number = compute_dtype(variant.dtype).itemsize
    matrix_numbers = sum(size * (size + 1) for size in emitted.in_memory)
    arrays = (2 * emitted.exchange * number, matrix_numbers * number, emitted.fragments * 4)
    base, slot = sum(map(_round_up, arrays)), (emitted.slot + emitted.ready) * number
    least = base + _round_up(slot)
    if least > variant.shared:
        lengths = ", ".join(f"{axis} = {size}" for axis, size in sizes.lengths.items())
        raise EngineError(
            f"{program.cell_name} with {lengths} needs {least:,} bytes of shared memory in its "
            f"{variant.direction} pass; this GPU has {variant.shared:,}. Use shorter axes, or "
            "backend='torch'"
        )
    step = _round_up(sizes.width * variant.dtype.itemsize + CHUNK - 1)
    if variant.direction == "backward":
        step += _round_up(sizes.output[1] * variant.dtype.itemsize + CHUNK - 1)
    room = min(variant.shared - base, WINDOW_BYTES)

    def windows(count: int) -> int:
        return _round_up(max(count, 1) * slot) + 2 * count * step

    window, trajectory = next((n for n in WINDOWS if windows(n) <= room), 0), 0
    if variant.direction == "backward":
        blocks = max(1, VALUES_AT_ONCE // (thread_values * emitted.layout.warps))
        budget = variant.shared // blocks - BLOCK_BYTES * (blocks > 1)
        states = CHECKPOINT * trajectory_numbers(program, variant) * number
        fitting = [n for n in WINDOWS if MIN_WINDOW <= n <= CHECKPOINT]
        fitting_budget = (n for n in fitting if base + windows(n) + states <= budget)
        if (most := next(fitting_budget, None)) is not None:
            window, trajectory = most, states
        window = min(window, CHECKPOINT)
    return Memory(matrix_numbers, window, trajectory, base + windows(window) + trajectory)


def _round_up(count: int) -> int:
    return -(-count // CHUNK) * CHUNK


def matrix_kernels_in(program: Program, variant: MatrixVariant) -> dict[str, Launchable]:
    """Return the kernels of a pass, by name."""
    threads = emitted_for(program, variant).layout.warps * LANES
    return {"run": Launchable((threads, 1), memory_of(program, variant).bytes)}


def trajectory_numbers(program: Program, variant: MatrixVariant) -> int:
    """Return the number of values of one step's states over all threads of a block."""
    layout, states = emitted_for(program, variant).layout, program.step.axes.states.values()
    return sum(map(layout.count, states)) * layout.warps * LANES


def source_of_matrix(program: Program, variant: MatrixVariant) -> str:
    """Return the CUDA file of a variant. Raises EngineError as `memory_of` and `source_file`."""
    emitted, memory = emitted_for(program, variant), memory_of(program, variant)
    constants = {
        "events": variant.events,
        "window": memory.window,
        "matrix_numbers": memory.matrix_numbers,
        "fragment_words": emitted.fragments,
        "trajectory_bytes": memory.trajectory,
        "shared_bytes": memory.bytes,
    }
    lines = [constant_line(name, value) for name, value in constants.items()]
    return source_file(
        program,
        variant.dtype,
        "cuda",
        variant.solver,
        defines=pass_defines(variant.dtype, variant.direction),
        constants=[*lines, ""],
        functions=emitted.text,
    )
