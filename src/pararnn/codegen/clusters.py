"""Kernels for GPUs of steps with matrices of parameters: clusters of blocks run rows of a head.

The blocks of a cluster divide the entries of values, and with them the matrices that multiply them,
which all rows share: see `program/links.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import torch

from pararnn.base.private import constant_in_graphs
from pararnn.codegen.cluster_layout import (
    FEW_ROWS,
    LANES,
    MAX_ENTRIES,
    ROWS,
    ClusterVariant,
    arrays_of,
    has_lines,
    layout_of,
    lengths_in,
    line_sums_of,
    passes_in,
    reduces,
    saved_offsets,
    share_of,
    stream_offsets,
    tile_bytes,
)
from pararnn.codegen.cluster_steps import emit_matrix_entry, emit_steps
from pararnn.codegen.families import MATRIX_GRADIENTS, MATRIX_INPUTS
from pararnn.codegen.interface import Counts, Field, Interface, Structs
from pararnn.codegen.mixing_cuda import PACK_THREADS, Launchable, cluster_of, shared_bytes_of
from pararnn.codegen.source import IO_TYPES, constant_line, file_text, pass_defines
from pararnn.program.links import folded_numbers, multiplied_numbers, why_not
from pararnn.program.program import MATRIX, Program, program_by_key

MIN_LINES, BLOCKS_OF_LINES = 64, 8
"""Fewest lines of kernels for cells with memories, and blocks that divide them."""
BLOCK_NUMBERS = 2**14
"""Numbers of matrices for each block of a cluster, where there are blocks for it."""
BLOCK_ENTRIES = 2 * LANES * MAX_ENTRIES
"""Most entries of a row's value in a block, of steps with folds."""
PASSES = ("forward", "saving", "backward")
"""Passes: forward, forward for a backward pass, and backward."""


def runs_in_clusters(program: Program) -> bool:
    """Return True for steps that clusters run: with memories, values at other indices, or matrices
    that rows share."""
    return program.family == MATRIX and _runs_by_key(program.key)


@constant_in_graphs
def _runs_by_key(key: str) -> bool:
    return _runs(program_by_key(key))


@lru_cache(maxsize=1024)
def _runs(program: Program) -> bool:
    if why_not(program) is not None:
        return False
    renames = any(statements.renames for statements in program.statements.values())
    return bool(program.memory) or renames or multiplied_numbers(program) > 0


def cluster_variants(
    program: Program, dtype: torch.dtype, weight_dtype: torch.dtype, capability: tuple[int, int]
) -> list[ClusterVariant]:
    """Return the variants of a layer's training and decoding without resets, for all sizes."""
    slices, shared = slices_of(program, cluster_of(capability)), shared_bytes_of(capability)
    lines = lines_of([MIN_LINES] * len(program.step.axes.of_calls))
    has_reductions = reduces(program, dtype)
    return [
        ClusterVariant(way, dtype, weight_dtype, False, slices, shared, lines, has_reductions, rows)
        for way in PASSES
        for rows in ((ROWS,) if lines else (ROWS, FEW_ROWS))
    ]


def with_rows(program: Program, variant: ClusterVariant, batch: int, cores: int) -> ClusterVariant:
    """Return a variant for a batch on a GPU with a number of multiprocessors: with few rows where
    all clusters then run at once, and blocks hold their matrices, which more clusters would read
    from the L2 cache."""
    few = variant._replace(rows=FEW_ROWS)
    blocks = -(-batch // FEW_ROWS) * program.step.head.heads * variant.slices
    if blocks > cores or program.step.axes.of_calls:
        return variant
    layout = layout_of(program, few)
    return few if layout.held_tiles == layout.matrix_tiles else variant


def lines_of(lengths: Iterable[int]) -> tuple[int, ...]:
    """Return the lines of kernels for axes of memories of some lengths: powers of two."""
    return tuple(max(MIN_LINES, 1 << (length - 1).bit_length()) for length in lengths)


def slices_of(program: Program, cluster: int) -> int:
    """Return the blocks of a cluster for a program, where a cluster has at most `cluster`."""
    numbers, folded, slices = multiplied_numbers(program), folded_numbers(program), 1
    if folded:
        numbers = max(numbers, folded, _entries(program) * BLOCK_NUMBERS // BLOCK_ENTRIES)
    if program.step.axes.of_calls:
        numbers = max(numbers, BLOCKS_OF_LINES * BLOCK_NUMBERS)
    while slices < cluster and slices * BLOCK_NUMBERS < numbers:
        slices *= 2
    return slices


def _entries(program: Program) -> int:
    """Return the entries of the largest value of a step that has no axis of calls."""
    lengths, passes = lengths_in(program, ()), passes_in(program, torch.float32)
    axes = {axes for steps in (passes.saving, passes.backward) for axes in steps.axes}
    of_blocks = [a for a in axes if not has_lines(program, a)]
    return max(share_of([lengths[axis] for axis in a], 1).block for a in of_blocks)


_STRUCTS: Structs = {
    "Inputs": (
        *(
            field._replace(type="const weight_io*") if field.name in ("bias", "params") else field
            for field in MATRIX_INPUTS
        ),
        Field("const weight_io*", "memories", "(sequence, head, ...)", length="memories"),
        Field("int64", "lines", "entries of axes that only memories have", length="lengths"),
    ),
    "PackProblem": (
        Field("int64", "heads"),
        Field("const weight_io*", "params", length="params"),
        Field("unsigned*", "packed", "(head, slice, tile), see links.h"),
    ),
    "ForwardLaunch": (
        Field("Inputs", "in"),
        Field("io*", "output", "(row, time, head, value)"),
        Field("scalar*", "saved", "(row, time, head, saved_numbers)"),
        Field("scalar*", "final", "(sequence, head, ...)", length="states"),
        Field("scalar*", "arrays", "(cluster, array_numbers)"),
        Field("const unsigned*", "packed", "(head, slice, tile), see links.h"),
    ),
    "BackwardLaunch": (
        Field("Inputs", "in"),
        Field("const scalar*", "saved", "as the forward pass wrote it"),
        *MATRIX_GRADIENTS,
        Field("scalar*", "partial", "(row, head, numbers of gates, then of params): zero at first"),
        Field("scalar*", "grad_memories", "(sequence, head, ...)", length="memories"),
        Field("stream_io*", "streams", "(row, time, head, part, stream_numbers)"),
        Field("scalar*", "line_sums", "(cluster, slice, line_sum_numbers): zero at first"),
        Field("scalar*", "arrays", "(cluster, array_numbers)"),
        Field("const unsigned*", "packed"),
    ),
}


@lru_cache(maxsize=1024)
def interface_of_clusters(program: Program) -> Interface:
    """Return the arguments of kernels."""
    kinds = (program.states, program.gates, program.fields, program.params, program.memory)
    return Interface(_STRUCTS, Counts(*map(len, (*kinds, program.step.axes.of_calls))))


def cluster_kernels_in(program: Program, variant: ClusterVariant) -> dict[str, Launchable]:
    """Return the kernels of a pass, by name."""
    layout = layout_of(program, variant)
    kernels = {"run": Launchable((layout.warps * LANES, 1), layout.bytes)}
    if layout.matrices:
        kernels["pack"] = Launchable((PACK_THREADS, 1))
    return kernels


def source_of_clusters(program: Program, variant: ClusterVariant) -> str:
    """Return the CUDA file of a variant. Raises EngineError as `layout_of`, and for ops without a
    spelling."""
    layout = layout_of(program, variant)
    constants: dict[str, int | tuple[bool, ...]] = {
        "slices": variant.slices,
        "cluster_rows": variant.rows,
        "warps": layout.warps,
        "events": variant.events,
        "operand_parts": variant.operand_parts,
        "matrix_parts": variant.matrix_parts,
        "block_matrix_tiles": layout.matrix_tiles,
        "held_tiles": layout.held_tiles,
        "matrices_at": layout.matrices_at,
        "boxes_at": layout.boxes_at,
        "box_bytes": layout.box_bytes,
        "saved_numbers": saved_offsets(program, variant.dtype, variant.lines)["", 0],
        "array_numbers": arrays_of(program, variant)[""],
        "line_sum_numbers": line_sums_of(program, variant)[-1],
        "stream_numbers": stream_offsets(program, variant.dtype)[-1],
        "stream_parts": variant.stream_parts,
        "partial_numbers": program.step.head.width + sum(program.param_numbers),
    }
    lines = [
        f"using stream_io = {IO_TYPES[variant.stream_dtype]};",
        f"using weight_io = {IO_TYPES[variant.matrix_dtype]};",
        *(constant_line(name, value) for name, value in constants.items()),
        "",
        interface_of_clusters(program).declaration(),
        f"using Problem = {'Backward' if variant.direction == 'backward' else 'Forward'}Launch;",
        "",
    ]
    blocks = [
        (["functions.h"], lines),
        (["clusters/shares.h"], [emit_matrix_entry(program, layout)]),
        (["clusters/links.h"], [emit_steps(program, variant, layout)]),
    ]
    defines = pass_defines(variant.dtype, variant.direction, CLUSTER=int(variant.slices > 1))
    return file_text(program, variant.dtype, defines, blocks, "clusters/sequential.h")


def packed_words(program: Program, variant: ClusterVariant) -> int:
    """Return the words of 32 bits of a head's packed matrices."""
    tiles = layout_of(program, variant).matrix_tiles * variant.slices
    return tiles * tile_bytes(variant) // 4
