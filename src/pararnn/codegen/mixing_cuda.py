"""Kernels for GPUs of steps that mix channels inside heads: variants, and the tiles of a block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from pararnn.codegen.source import IO_TYPES, source_file
from pararnn.errors import EngineError
from pararnn.numerics import compute_dtype
from pararnn.program.mixing import Pass
from pararnn.program.program import Program

MAX_WARPS = 16
REGISTERS = 2**16
"""Registers of a multiprocessor."""
MAX_REGISTERS = 255
"""Registers of a thread."""
OTHER_REGISTERS = 88
"""Registers of a thread that hold no matrices."""
SHARED_BYTES = {(8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227}
"""Shared memory of a block in KiB, by compute capability; 99 for others."""
MAX_STEPS_AHEAD = 7
PARTS = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3, torch.float64: 1}
"""Numbers in bfloat16 that add up to one of a dtype, to the last bit that counts."""
VECTOR_DTYPES = {torch.bfloat16: torch.bfloat16, torch.float64: torch.float64}
"""Dtypes of the vectors whose outer products are gradients of matrices; float32 for other gates:
float16 has no room for small gradients."""


def vector_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the vectors of outer products, for gates of a dtype."""
    return VECTOR_DTYPES.get(dtype, torch.float32)


class MixingVariant(NamedTuple):
    """Specialisation of a kernel, in addition to the cell: see cuda/mixing/block.h.

    direction: "forward", "backward", or "recompute" for the products that only the step needs, of
    all steps at once. sides: a block runs 4 or 8 columns. gate_gap: elements between gates, 0 if a
    launch says. whole: all columns of all blocks are rows. chunk: bytes that all rows are aligned
    to, 16 at most. matrix_dtype: of the matrices in memory. events, broadcast, arriving: see `cuda.Variant`.
    shared: bytes of shared memory that a block may have.
    """

    direction: str
    dtype: torch.dtype
    weight_dtype: torch.dtype
    matrix_dtype: torch.dtype
    heads: int
    head_width: int
    sides: int = 2
    gate_gap: int = 0
    whole: bool = False
    chunk: int = 16
    reverse: bool = False
    events: bool = False
    broadcast: tuple[bool, ...] = ()
    arriving: tuple[bool, ...] = ()
    shared: int = SHARED_BYTES[9, 0] * 1024
    solver: str = "sequential"


def usual_mixing_variants(
    program: Program,
    dtype: torch.dtype,
    heads: int,
    head_width: int,
    weight_dtype: torch.dtype | None,
    capability: tuple[int, int],
) -> list[MixingVariant]:
    """Return the variants of a layer's training and decoding without resets."""
    weight_dtype = weight_dtype or compute_dtype(dtype)
    bits = 16 | head_width * dtype.itemsize
    own = MixingVariant(
        "forward",
        dtype,
        weight_dtype,
        weight_dtype,
        heads,
        head_width,
        gate_gap=head_width,
        chunk=bits & -bits,
        broadcast=(False,) * len(program.fields),
        shared=shared_bytes_of(capability),
    )
    arriving = tuple(n == 0 for n in range(program.num_states))
    return [
        variant
        for sides in (1, 2)
        for forward in [own._replace(sides=sides)]
        for variant in variants_of_pass(program, forward)
        + variants_of_pass(program, forward._replace(direction="backward", arriving=arriving))
    ]


def variants_of_pass(program: Program, variant: MixingVariant) -> list[MixingVariant]:
    """Return the variants whose kernels a pass runs: its own, and in the backward pass the one that
    computes the step's own products first, if there are any."""
    own = program.mixing[compute_dtype(variant.dtype)].backward
    if variant.direction == "forward" or not own.recomputed_stages:
        return [variant]
    first = variant._replace(direction="recompute", sides=2, arriving=())
    return [variant, first]


class Tiles(NamedTuple):
    """Tiles of a block: see cuda/mixing/block.h and products.h.

    resident: True if registers hold the matrices for the whole sequence. words: of one head's
    packed matrices. shared_bytes: shared memory of a block.
    """

    units: int
    warp_tiles: int
    warps: int
    operand_parts: int
    matrix_parts: int
    resident: bool
    steps_ahead: int
    words: int
    shared_bytes: int


def shared_bytes_of(capability: tuple[int, int]) -> int:
    """Return the shared memory that a block may have."""
    return SHARED_BYTES.get(capability, 99) * 1024


def _matrix_tiles(own: Pass, units: int, first: int, last: int) -> int:
    """Return the tiles of matrices of a pass's stages from `first` to `last` - 1."""
    count = 0
    for stage in own.stages[first:last]:
        operands = [product.operand for product in stage.products]
        each = [operands.count(operand) for operand in dict.fromkeys(operands)]
        count += sum(-(-n // (16 // units)) for n in each)
    return count


class _Fit(NamedTuple):
    """Tiles of a size. products: of tiles of matrices and operands, a step and 16 numbers."""

    units: int
    warp_tiles: int
    warps: int
    resident: bool
    products: int


def _fit(own: Pass, split: tuple[int, int], width: int, units: int, registers: int) -> _Fit:
    """Return the tiles for heads of a width; `registers`: of a tile of matrices."""
    tiles = -(-width // units)
    warp_tiles = -(-tiles // MAX_WARPS)
    warps = -(-tiles // warp_tiles)
    count = _matrix_tiles(own, units, *split)
    there = min(MAX_REGISTERS, REGISTERS // (warps * 32))
    resident = warp_tiles * count * registers + OTHER_REGISTERS <= there
    return _Fit(units, warp_tiles, warps, resident, tiles * count)


def tiles_of(program: Program, variant: MixingVariant) -> Tiles:
    """Plan the tiles of a block. Raises EngineError for cells that do not fit."""
    dtype, width = variant.dtype, variant.head_width
    compute = compute_dtype(dtype)
    mixing = program.mixing[compute]
    own = mixing.forward if variant.direction == "forward" else mixing.backward
    split = {
        "forward": (0, len(own.stages)),
        "backward": (own.recomputed_stages, len(own.stages)),
        "recompute": (0, own.recomputed_stages),
    }[variant.direction]
    wide = compute == torch.float64
    operand_parts = 1 if wide else max(2, PARTS[dtype])
    matrix_parts = 1 if wide else min(PARTS[variant.matrix_dtype], max(2, PARTS[dtype]))
    depth = -(-width // 16)
    options = [_fit(own, split, width, units, depth * matrix_parts * 4) for units in (8, 16)]
    # Registers first. Few blocks need many warps, which narrow tiles have; many the fewest products.
    fit = min(options, key=lambda fit: (not fit.resident, variant.sides == 2 and fit.products))
    units, warp_tiles, warps, resident, _ = fit
    count = _matrix_tiles(own, units, *split)

    operands = max(stage.count("operand") for stage in own.stages)
    layers = operand_parts if variant.sides == 2 else -(-operand_parts // 2)
    number_bytes = 8 if wide else 2 * layers
    operand_bytes = 2 * operands * 8 * (depth * 16 + 8) * number_bytes
    numbers = 0  # of bytes a step, channel and row, that come through the ring
    if variant.direction != "recompute":
        numbers = len(program.gates) * dtype.itemsize
    if variant.direction == "backward":
        recomputed = sum(len(stage.products) for stage in own.stages[: own.recomputed_stages])
        numbers += 2 * program.num_states * dtype.itemsize + recomputed * compute.itemsize
    step_bytes = warps * numbers * 4 * variant.sides * warp_tiles * units
    steps_ahead = MAX_STEPS_AHEAD
    if step_bytes:
        steps_ahead = min(steps_ahead, (variant.shared - operand_bytes) // step_bytes - 1)
    if steps_ahead < 1:
        raise EngineError(
            f"{program.cell_name} with heads of {width} channels needs "
            f"{operand_bytes + 2 * step_bytes:,} bytes of shared memory in its "
            f"{variant.direction} pass; this GPU has {variant.shared:,}. Use more heads, or "
            "backend='torch'"
        )
    return Tiles(
        units=units,
        warp_tiles=warp_tiles,
        warps=warps,
        operand_parts=operand_parts,
        matrix_parts=matrix_parts,
        resident=resident,
        steps_ahead=steps_ahead,
        words=0 if wide else warps * warp_tiles * count * depth * matrix_parts * 32 * 4,
        shared_bytes=operand_bytes + (steps_ahead + 1) * step_bytes,
    )


class Launchable(NamedTuple):
    """Size of a kernel's block, and its shared memory in bytes."""

    block: tuple[int, int]
    shared: int = 0


def kernels_in(program: Program, variant: MixingVariant) -> dict[str, Launchable]:
    """Return the kernels of a pass, by name."""
    tiles = tiles_of(program, variant)
    kernels = {"run": Launchable((tiles.warps * 32, 1), tiles.shared_bytes)}
    if tiles.words:
        kernels["pack"] = Launchable((256, 1))
    if variant.direction == "backward":
        kernels["sum_weights"] = Launchable((32, 8))
    return kernels


_TILES = ("units", "warp_tiles", "warps", "operand_parts", "matrix_parts", "steps_ahead",
          "shared_bytes")  # fmt: skip
"""Fields of `Tiles` that are constants of the same name in kernels."""


def source_of_mixing(program: Program, variant: MixingVariant) -> str:
    """Return the CUDA file of a variant. Raises EngineError as `tiles_of` and `source_file`."""
    tiles, backward = tiles_of(program, variant), variant.direction != "forward"
    numbers = {name: getattr(tiles, name) for name in _TILES}
    numbers |= {
        "heads": variant.heads,
        "head_width": variant.head_width,
        "sides": variant.sides,
        "gate_gap": variant.gate_gap,
        "chunk": variant.chunk,
        "per_lane": tiles.warp_tiles * tiles.units // 8 * variant.sides,
    }
    flags = {
        "resident": tiles.resident,
        "whole": variant.whole,
        "reverse": variant.reverse,
        "events": variant.events,
    }
    arrays = {"broadcast": variant.broadcast, "arriving": variant.arriving}
    types = {
        "weight_io": variant.weight_dtype,
        "matrix_io": variant.matrix_dtype,
        "vector_io": vector_dtype(variant.dtype),
    }
    lines = [
        *(f"using {name} = {IO_TYPES[dtype]};" for name, dtype in types.items()),
        *(f"constexpr int {name} = {value};" for name, value in numbers.items()),
        *(f"constexpr bool {name} = {str(value).lower()};" for name, value in flags.items()),
        *(f"constexpr bool {name}[] = {{{_flags(value)}}};" for name, value in arrays.items()),
        "",
    ]
    defines = {
        "BACKWARD": int(backward),
        "RECOMPUTE": int(variant.direction == "recompute"),
        "CLUSTER": 0,
        "APPROXIMATE": int(variant.dtype == torch.bfloat16),
        "REFINED": int(variant.dtype == torch.float32 and backward),
    }
    return source_file(
        program, variant.dtype, "cuda", variant.solver, defines=defines, constants=lines
    )


def _flags(values: Sequence[bool]) -> str:
    return ", ".join(str(value).lower() for value in values) or "false"
