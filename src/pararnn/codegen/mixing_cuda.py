"""Kernels for GPUs of steps that mix channels inside heads: variants, and the tiles of a block."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias

import torch

from pararnn.base.errors import EngineError
from pararnn.base.numerics import compute_dtype
from pararnn.cells.base import Cell
from pararnn.codegen.nvrtc import CLUSTERS, MAX_CLUSTER
from pararnn.codegen.source import IO_TYPES, chunk_of, constant_line, pass_defines, source_file
from pararnn.program.mixing import Mixing, StagedPass
from pararnn.program.program import Program
from pararnn.program.statements import sources_of

MAX_WARPS = 16
REGISTERS = 2**16
"""Registers of a multiprocessor."""
MAX_REGISTERS = 255
"""Registers of a thread."""
OTHER_REGISTERS, OTHER_WITH_HELPERS = 88, 72
"""Registers per thread not used for matrices, without and with helper warps."""
SCHEDULERS = 4
"""Warp schedulers of a multiprocessor, which divide its registers and a block's warps."""
SHARED_BYTES = {(8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227}
"""Shared memory of a block in KiB, by compute capability; 99 for others."""
FRAGMENT_BYTES = 512
"""Bytes of a fragment: a tile of 16 by 16 values in 16 bits."""
BARRIER_BYTES = 32
"""Bytes of shared memory for the barriers of slices, and for those of a slot."""
MIN_SLOTS, MAX_SLOTS = 4, 8
"""Fewest slots of steps next to matrices in shared memory, and most slots."""
SMALL_RING_SLOTS, SMALL_RING_BYTES = 16, 2**14
"""Most slots without helper warps if they take at most these bytes in a block: short steps need
more in flight."""
PACK_THREADS = 256
"""Threads of a block that packs matrices."""
CHUNK_BYTES = 16
"""Most bytes that a lane copies at once."""
FEW_WRITES = 112
"""Below this many outputs of a head a step and column, compute warps store their own results."""
COPIES_OF_HELPER, MAX_HELPERS = 384, 2
"""Copies a step per helper warp, and the most helper warps."""
SPLIT_TERMS = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3, torch.float64: 1}
"""bfloat16 terms that a value of a dtype is split into, exact to the last bit that counts."""
VECTOR_DTYPES = {torch.bfloat16: torch.bfloat16, torch.float64: torch.float64}
"""Dtypes of the vectors whose outer products are gradients of matrices. Other gates have float32:
float16 would underflow for small gradients."""


def vector_dtype(dtype: torch.dtype, matrix_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the vectors of outer products, for gates and matrices of these dtypes."""
    if dtype == torch.bfloat16 and matrix_dtype != dtype:
        return torch.float32
    return VECTOR_DTYPES.get(dtype, torch.float32)


class MixingVariant(NamedTuple):
    """Specialisation of a kernel, in addition to the cell: see cuda/mixing/block.h.

    direction: "forward" or "backward". sides: 1 or 2 rows a lane, so a block runs 4 or 8 columns.
    gate_gap: elements between gates, 0 if a launch gives it. whole: all columns of all blocks are
    rows. chunk: bytes that all rows are aligned to, 16 at most. matrix_dtype: of the matrices in
    memory. sums: the forward pass saves pre-activations. has_starts: its steps start from given
    states. vectors: those of outer products are wanted. events, broadcast, arriving: see
    `cuda.Variant`. shared: most bytes of shared memory of a block. cluster: most blocks of a
    cluster, 1 for none.
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
    sums: bool = False
    has_starts: bool = False
    vectors: bool = True
    reverse: bool = False
    events: bool = False
    broadcast: tuple[bool, ...] = ()
    arriving: tuple[bool, ...] = ()
    shared: int = SHARED_BYTES[9, 0] * 1024
    cluster: int = MAX_CLUSTER
    solver: str = "sequential"

    @property
    def has_rests(self) -> bool:
        """True if pre-activations are those of rounded states, and the pass carries exact ones."""
        carries_more = self.dtype != compute_dtype(self.dtype)
        return self.sums and not self.has_starts and carries_more


def mixing_variants(
    program: Program,
    dtype: torch.dtype,
    heads: int,
    head_width: int,
    weight_dtype: torch.dtype | None,
    capability: tuple[int, int],
    sides: int = 1,
    whole: bool = False,
) -> list[MixingVariant]:
    """Return the variants of a layer's training and decoding without resets, for one size of
    blocks."""
    weight_dtype = weight_dtype or compute_dtype(dtype)
    forward = MixingVariant(
        "forward",
        dtype,
        weight_dtype,
        weight_dtype,
        heads,
        head_width,
        sides,
        gate_gap=head_width,
        whole=whole,
        chunk=chunk_of(head_width * dtype.itemsize),
        broadcast=(False,) * len(program.fields),
        shared=shared_bytes_of(capability),
        cluster=cluster_of(capability),
    )
    arriving = tuple(n == 0 for n in range(program.num_states))
    backward = forward._replace(direction="backward", arriving=arriving)
    return [
        forward,
        forward._replace(sums=True, has_starts=not gives_sums(program, dtype)),
        backward,
    ]


def gives_sums(program: Program, dtype: torch.dtype) -> bool:
    """Return True if a forward pass on gates of a dtype can save pre-activations at the states that
    it returns: it carries these, or they are the first split terms of all operands."""
    compute = compute_dtype(dtype)
    states_are_terms = dtype == torch.bfloat16 and program.mixing[compute].forward.multiplies_states
    return dtype == compute or states_are_terms


def variants_of(
    program: Program,
    cell: Cell | None,
    dtype: torch.dtype,
    weight_dtype: torch.dtype,
    capability: tuple[int, int],
    solver: str,
) -> list[MixingVariant]:
    """Return `mixing_variants` of a cell's sizes, for all batch sizes; without a cell those of a
    small size."""
    if cell is None:
        return mixing_variants(program, dtype, 1, 32, None, capability)
    heads = next((p.shape[0] for p in cell.parameters() if p.ndim == 3), 1)
    layer = program, dtype, heads, cell.hidden_size // heads, weight_dtype, capability
    return [
        variant
        for sides in (1, 2)
        for whole in (False, True)
        for variant in mixing_variants(*layer, sides, whole)
    ]


class Tiles(NamedTuple):
    """Tiles of a block: see cuda/mixing/block.h and products.h.

    slices: blocks of a head. splits: warps with the same tiles. operand_parts, matrix_parts:
    bfloat16 terms of a value. rank: memory of the matrices that are not in registers throughout.
    register_fragments: fragments of those that a warp has there. words: of one head's packed
    matrices. fixed_bytes: shared memory of a block without slots. helpers: warps that copy for the
    others. rings: of slots, one a warp without helpers. products: of tiles, a step. slots: of
    steps, see cuda/mixing/ring.h. shared_bytes: shared memory of a block.
    """

    slices: int
    units: int
    warp_tiles: int
    warps: int
    splits: int
    operand_parts: int
    matrix_parts: int
    rank: int
    register_fragments: int
    words: int
    fixed_bytes: int
    helpers: int
    rings: int
    slot_bytes: int
    products: int
    slots: int = 0
    shared_bytes: int = 0

    @property
    def shared_matrices(self) -> bool:
        """True if the matrices that are not in registers are in shared memory."""
        return self.rank == IN_SHARED_MEMORY


def shared_bytes_of(capability: tuple[int, int]) -> int:
    """Return the shared memory that a block may have."""
    return SHARED_BYTES.get(capability, 99) * 1024


def cluster_of(capability: tuple[int, int]) -> int:
    """Return the most blocks of a cluster that a head may be sliced over."""
    return MAX_CLUSTER if capability >= CLUSTERS else 1


def _matrix_tiles(pass_: StagedPass, units: int) -> int:
    """Return the tiles of matrices of a pass's stages."""
    counts = Counter(source for product in pass_.products for source in sources_of(product))
    return sum(-(-count // (16 // units)) for count in counts.values())


def _most_sums(pass_: StagedPass, accumulators: Sequence[int]) -> int:
    """Return the most accumulators of a stage's products."""
    sums = iter(accumulators)
    return max(len({next(sums) for _ in stage.products}) for stage in pass_.stages)


IN_MEMORY, IN_SHARED_MEMORY, IN_REGISTERS = range(3)
"""Ranks of the memory for matrices that do not fit in registers, slowest first."""


Traffic: TypeAlias = tuple[tuple[int, int], ...]


class _Needs(NamedTuple):
    """Sizes on which tiles depend.

    matrices: tiles of adjacent matrices, by units of a tile. products: of all stages. scatter:
    slices send sums of products, see cuda/mixing/scatter.h. operand_parts, matrix_parts: see Tiles.
    tile_words: of a lane and a tile of 16 by 16. operand_bytes: of all operands and a unit, for
    both rounds. padding: units of an operand that no warp has. reads, writes: values of a step,
    column and unit, as counts and bytes of one. wants_helpers: returns True if helper warps should
    copy, for a number of slices. sides: rows a lane. sums: values of a lane and a tile of 8 units
    that splits add up.
    """

    matrices: dict[int, int]
    products: int
    scatter: bool
    operand_parts: int
    matrix_parts: int
    tile_words: int
    operand_bytes: int
    padding: int
    reads: Traffic
    writes: Traffic
    wants_helpers: Callable[[int], bool]
    sides: int
    sums: int


def _registers(warps: int) -> int:
    """Return the most registers of a thread, for a number of warps in a block."""
    return min(MAX_REGISTERS, REGISTERS // (-(-warps // SCHEDULERS) * SCHEDULERS * 32))


def _helpers(needs: _Needs, slices: int, slice_units: int) -> int:
    """Return the number of helper warps for a block of `slice_units` units."""
    if not needs.wants_helpers(slices):
        return 0
    ports = needs.reads + needs.writes
    copies = sum(n * 4 * needs.sides * -(-slice_units * size // CHUNK_BYTES) for n, size in ports)
    return min(MAX_HELPERS, -(-copies // COPIES_OF_HELPER))


def _ring_step(needs: _Needs, helpers: int, units: int, slice_units: int, warp_units: int) -> int:
    """Return the bytes of a slot of a ring, see Port in cuda/mixing/ring.h."""
    columns = 4 * needs.sides
    if not helpers:
        return sum(count * columns * warp_units * size for count, size in needs.reads)
    total = BARRIER_BYTES
    for count, size in needs.reads + needs.writes:
        row = slice_units * size
        spread = 32 if (size > 2 or units == 16) and needs.sides == 1 else 16
        total += count * columns * (row + (spread - row) % (2 * spread))
    return total


def _fit(needs: _Needs, width: int, slices: int, units: int, splits: int, shared: int) -> Tiles:
    """Return the tiles of a size for heads of a width."""
    tiles = -(-width // (units * slices))
    scatter = needs.scatter and slices > 1
    if scatter and units == 8:
        tiles += tiles % 2  # slices consist of whole tiles of 16
    warp_tiles = -(-tiles // (MAX_WARPS // splits))
    groups = -(-tiles // warp_tiles)
    groups += scatter and groups * warp_tiles * units % 16 > 0
    warps, count = groups * splits, needs.matrices[units]
    slice_units = groups * warp_tiles * units
    if scatter:
        depth, head_tiles = slice_units // 16, slices * slice_units // 16
        lane_words = -(-head_tiles // warps) * needs.products * depth * needs.tile_words
        operand_units, sums_bytes = slice_units, slices * slice_units // 8
    else:
        depth = -(-width // (16 * splits))
        lane_words = warp_tiles * count * depth * needs.tile_words
        operand_units = depth * splits * 16
        if slices > 1:
            operand_units = max(operand_units, -(-slices * slice_units // 16) * 16)
        sums_bytes = warps * warp_tiles * units // 8 if splits > 1 else 0
    sums_bytes *= 2 * 32 * 4 * needs.sums
    block_words = warps * lane_words * 32
    helpers = _helpers(needs, slices, slice_units)
    slot_bytes = _ring_step(needs, helpers, units, slice_units, warp_tiles * units)
    rings = 1 if helpers else warps
    fixed_bytes = (operand_units + needs.padding) * needs.operand_bytes + sums_bytes
    if slices > 1:
        fixed_bytes += BARRIER_BYTES
    other_registers = OTHER_WITH_HELPERS if helpers else OTHER_REGISTERS
    register_fragments = max(0, _registers(warps + helpers) - other_registers) // 4
    fragments, rank = lane_words // 4, IN_MEMORY
    shared_matrices = warps * max(0, fragments - register_fragments) * FRAGMENT_BYTES
    if fragments <= register_fragments:
        rank = IN_REGISTERS
    elif fixed_bytes + shared_matrices + MIN_SLOTS * rings * slot_bytes <= shared:
        rank = IN_SHARED_MEMORY
        fixed_bytes += shared_matrices
    register_fragments = 0 if rank == IN_MEMORY else min(register_fragments, fragments)
    return Tiles(
        slices=slices,
        units=units,
        warp_tiles=warp_tiles,
        warps=warps,
        splits=splits,
        operand_parts=needs.operand_parts,
        matrix_parts=needs.matrix_parts,
        rank=rank,
        register_fragments=register_fragments,
        words=slices * block_words,
        fixed_bytes=fixed_bytes,
        helpers=helpers,
        rings=rings,
        slot_bytes=slot_bytes,
        products=tiles * count,
    )


def _best_fit(needs: _Needs, variant: MixingVariant, wide: bool) -> Tiles:
    """Choose tiles with matrices in registers, by the fewest slices; if they do not fit, in the
    best memory for the most slices."""
    width, best = variant.head_width, None
    for slices in (1, 2, 4, 8, 16):
        if slices > 1 and (slices > variant.cluster or width <= 16 * slices or wide):
            break
        # Warps in excess of the tiles split the sums, where a block has few tiles.
        fits = [
            _fit(needs, width, slices, units, splits, variant.shared)
            for units in (8, 16)
            for splits in (1, 2, 4)
            if splits <= min(slices, MAX_WARPS)
        ]
        fits = [fit for fit in fits if fit.warps <= MAX_WARPS]
        # Few blocks need many warps, so narrow tiles, unless half of these is empty. Many blocks
        # need few products.
        fewest = min(fit.products for fit in [fit for fit in fits if fit.warps > 1] or fits)
        narrow = variant.sides == 1 and any(fit.rank == IN_REGISTERS for fit in fits)
        fit = max(
            fits,
            key=lambda fit: (
                fit.rank,
                fit.register_fragments * fit.warps if fit.rank == IN_SHARED_MEMORY else 0,
                -fit.splits,
                narrow and fit.products < 2 * fewest,
                fit.warps if narrow else -fit.products,
            ),
        )
        if best is None or fit.rank >= best.rank:
            best = fit
        if best.rank == IN_REGISTERS:
            break
    assert best is not None
    return best


def _traffic(program: Program, variant: MixingVariant, mixing: Mixing) -> tuple[Traffic, Traffic]:
    """Return the values that a pass reads and writes, see `_Needs`."""
    io, states, gates = variant.dtype.itemsize, program.num_states, len(program.gates)
    wide = compute_dtype(variant.dtype).itemsize
    if variant.direction == "forward":
        of_states, sums = (states, io), (mixing.num_preactivations * variant.sums, wide)
        return ((gates, io), of_states)[: 1 + variant.has_starts], (of_states, sums)[
            variant.has_starts :
        ]
    read = *(len(mixing.backward.reads(kind)) for kind in ("state", "gate")), states
    vectors = (mixing.lefts + mixing.rights) * variant.vectors
    vector_bytes = vector_dtype(variant.dtype, variant.matrix_dtype).itemsize
    return ((mixing.num_preactivations, wide), *((count, io) for count in read)), (
        (gates, io),
        (vectors, vector_bytes),
    )


def _wants_helpers(variant: MixingVariant, writes: int, slices: int) -> bool:
    """Return True if helper warps make a pass faster.

    Measured (docs/negative-results.md): backward passes gain, as they write many values. Forward
    passes gain where blocks run 8 columns and wait for memory, or write many values too.
    """
    small = variant.dtype.itemsize == 2
    if variant.direction == "forward":
        if variant.sides == 2:
            return slices <= 2
        return writes * variant.head_width >= FEW_WRITES and slices <= 8
    if variant.sides == 2:
        return small and slices <= 8
    return (small or slices <= 8) and variant.head_width <= 512


def _slots(fit: Tiles, shared: int) -> int:
    """Return the number of slots of a ring that fit in shared memory, 0 for fewer than two."""
    if not fit.slot_bytes:
        return 0
    step = fit.rings * fit.slot_bytes
    small = not fit.helpers and SMALL_RING_SLOTS * step <= SMALL_RING_BYTES
    most = SMALL_RING_SLOTS if small else MAX_SLOTS
    slots = min(most, (shared - fit.fixed_bytes) // step)
    return slots if slots > 1 else 0


def tiles_of(program: Program, variant: MixingVariant) -> Tiles:
    """Plan the tiles of a block. Raises EngineError for cells that do not fit."""
    dtype, width = variant.dtype, variant.head_width
    compute = compute_dtype(dtype)
    mixing = program.mixing[compute]
    pass_ = mixing.forward if variant.direction == "forward" else mixing.backward
    wide = compute == torch.float64
    operand_parts = 1 if wide else max(2, SPLIT_TERMS[dtype])
    matrix_parts = 1 if wide else min(SPLIT_TERMS[variant.matrix_dtype], operand_parts)
    layers = operand_parts if variant.sides == 2 else -(-operand_parts // 2)
    operands = max(stage.count("operand") for stage in pass_.stages)
    number_bytes = 8 * 4 * variant.sides if wide else 8 * 2 * layers  # of all columns
    scatter = variant.direction == "backward"
    accumulators = mixing.accumulators if scatter else range(len(pass_.products))
    reads, writes = _traffic(program, variant, mixing)
    needs = _Needs(
        matrices={units: _matrix_tiles(pass_, units) for units in (8, 16)},
        products=len(pass_.products),
        scatter=scatter,
        operand_parts=operand_parts,
        matrix_parts=matrix_parts,
        tile_words=0 if wide else matrix_parts * 4,
        operand_bytes=2 * operands * number_bytes,
        padding=8 if wide else 0,
        reads=reads,
        writes=writes,
        wants_helpers=partial(_wants_helpers, variant, sum(count for count, _ in writes)),
        sides=variant.sides,
        sums=_most_sums(pass_, accumulators) * variant.sides * (1 + variant.has_rests),
    )
    fit = _best_fit(needs, variant, wide)
    unaided = _best_fit(needs._replace(wants_helpers=lambda slices: False), variant, wide)
    slots = _slots(fit, variant.shared)
    # Helpers take registers, slots and warps, which could split sums instead.
    if fit.rank < IN_REGISTERS or (fit.helpers and (not slots or fit.splits > unaided.splits)):
        fit, slots = unaided, _slots(unaided, variant.shared)
    if fit.fixed_bytes > variant.shared:
        raise EngineError(
            f"{program.cell_name} with heads of {width} channels needs {fit.fixed_bytes:,} bytes "
            f"of shared memory in its {variant.direction} pass; this GPU has {variant.shared:,}. "
            "Use more heads, or backend='torch'"
        )
    shared_bytes = fit.fixed_bytes + fit.rings * slots * fit.slot_bytes
    return fit._replace(slots=slots, shared_bytes=shared_bytes)


class Launchable(NamedTuple):
    """Size of a kernel's block, and its shared memory in bytes."""

    block: tuple[int, int]
    shared: int = 0


def kernels_in(program: Program, variant: MixingVariant) -> dict[str, Launchable]:
    """Return the kernels of a pass, by name."""
    tiles = tiles_of(program, variant)
    kernels = {"run": Launchable(((tiles.warps + tiles.helpers) * 32, 1), tiles.shared_bytes)}
    if tiles.words:
        kernels["pack"] = Launchable((PACK_THREADS, 1))
    if variant.direction == "backward":
        kernels["sum_weights"] = Launchable((32, 8))
    return kernels


_TILES = ("slices", "units", "warp_tiles", "warps", "splits", "operand_parts", "matrix_parts",
          "register_fragments", "helpers", "slots", "slot_bytes", "shared_bytes")  # fmt: skip
"""Fields of `Tiles` that are constants of the same name in kernels."""


def source_of_mixing(program: Program, variant: MixingVariant) -> str:
    """Return the CUDA file of a variant. Raises EngineError as `tiles_of` and `source_file`."""
    tiles = tiles_of(program, variant)
    numbers = {name: getattr(tiles, name) for name in _TILES}
    numbers |= {
        "heads": variant.heads,
        "head_width": variant.head_width,
        "sides": variant.sides,
        "gate_gap": variant.gate_gap,
        "chunk": variant.chunk,
        "per_lane": tiles.warp_tiles * tiles.units // 8 * variant.sides,
        "packed_words": tiles.words,
    }
    flags = {
        "shared_matrices": tiles.shared_matrices,
        "whole": variant.whole,
        "gives_sums": variant.sums,
        "has_rests": variant.has_rests,
        "given": variant.has_starts,
        "vectors": variant.vectors,
        "reverse": variant.reverse,
        "events": variant.events,
    }
    arrays = {"broadcast": variant.broadcast, "arriving": variant.arriving}
    types = {
        "weight_io": variant.weight_dtype,
        "matrix_io": variant.matrix_dtype,
        "vector_io": vector_dtype(variant.dtype, variant.matrix_dtype),
    }
    constants = {**numbers, **flags, **arrays}
    lines = [
        *(f"using {name} = {IO_TYPES[dtype]};" for name, dtype in types.items()),
        *(constant_line(name, value) for name, value in constants.items()),
        "",
    ]
    defines = pass_defines(variant.dtype, variant.direction, CLUSTER=int(tiles.slices > 1))
    return source_file(
        program, variant.dtype, "cuda", variant.solver, defines=defines, constants=lines
    )
