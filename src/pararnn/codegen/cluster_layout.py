"""Where the values of steps are that clusters run: shares of blocks, matrices, shared memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple, TypeVar

import torch

from pararnn.base.errors import EngineError
from pararnn.base.numerics import compute_dtype
from pararnn.base.private import constant_in_graphs
from pararnn.cells.matrix import Axes
from pararnn.codegen.mixing_cuda import SPLIT_TERMS, vector_dtype
from pararnn.program.links import (
    KEPT,
    Lengths,
    Link,
    Passes,
    Steps,
    are_divided,
    axes_in_order,
    passes_of,
    shared_axes,
)
from pararnn.program.matrix import axes_by_kind
from pararnn.program.program import Program, program_by_key
from pararnn.program.statements import Product, Value

Key = TypeVar("Key")

CLUSTERS = "clusters"
"""Name of the kernels and of their headers."""
ROWS, FEW_ROWS, COLUMNS, TILE, LANES = 8, 4, 8, 16, 32
"""Rows of a batch that a cluster runs, and where there are few; columns of what a matrix unit
multiplies; entries of a tile; lanes of a warp."""
ROW_NUMBERS = 4 * LANES
"""Most entries of a row of which a warp computes all, if a pass reduces along them."""
BARRIER_BYTES = 32
"""Bytes of the barriers of two boxes."""
MAX_ENTRIES = 16
"""Most entries of a value in a thread's registers, of steps with folds."""


class ClusterVariant(NamedTuple):
    """Specialisation of a kernel, in addition to the cell: see cuda/clusters/shares.h.

    direction: one of `PASSES`. matrix_parts: bfloat16 terms that an entry of a matrix is split
    into. events: `seq` or `reset` is passed. slices: blocks of a cluster. shared: bytes of shared
    memory that a block may have. lines: most entries of each axis that only memories have,
    multiples of the slices. reduces: a step has reductions over channels. Where values next to each
    other are almost alike, a norm enlarges their errors, and what comes back through it sums to
    nothing: products then have operands in single precision, of 16-bit gates too. rows: that a
    cluster runs.
    """

    direction: str
    dtype: torch.dtype
    matrix_dtype: torch.dtype
    events: bool
    slices: int
    shared: int
    lines: tuple[int, ...] = ()
    reduces: bool = False
    rows: int = ROWS
    solver: str = CLUSTERS

    @property
    def operand_parts(self) -> int:
        """bfloat16 terms of a value that is multiplied."""
        if self.is_wide:
            return 1
        return SPLIT_TERMS[torch.float32] if self.reduces else max(2, SPLIT_TERMS[self.dtype])

    @property
    def layers(self) -> int:
        """Operands of matrix units that a value is: of 4 rows each has two terms."""
        return 1 if self.is_wide else -(-self.operand_parts * self.rows // COLUMNS)

    @property
    def matrix_parts(self) -> int:
        """bfloat16 terms of a number of a matrix."""
        return 1 if self.is_wide else min(SPLIT_TERMS[self.matrix_dtype], self.operand_parts)

    @property
    def is_wide(self) -> bool:
        """True in double precision."""
        return compute_dtype(self.dtype) == torch.float64

    @property
    def number(self) -> int:
        """Bytes of a number."""
        return compute_dtype(self.dtype).itemsize

    @property
    def stream_dtype(self) -> torch.dtype:
        """Dtype of the vectors of outer products."""
        return vector_dtype(self.dtype, self.matrix_dtype)

    @property
    def stream_parts(self) -> int:
        """Terms of that dtype that a number of these vectors is split into."""
        return 2 if self.reduces and self.stream_dtype == torch.bfloat16 else 1


class Share(NamedTuple):
    """The entries of values with some axes, in tiles of the last one, filled up: of lengths, with
    `tiles`, of which a block has `block_tiles`. Of what has the axis of memories blocks have whole
    lines, and a tile is a number; line: numbers of one, 0 for other values."""

    lengths: tuple[int, ...]
    tiles: int
    block_tiles: int
    slices: int
    line: int = 0

    @property
    def tile(self) -> int:
        """Entries of a tile."""
        return 1 if self.line else TILE

    @property
    def row_tiles(self) -> int:
        """Tiles of a vector along the last axis."""
        return -(-(self.lengths[-1] if self.lengths else 1) // self.tile)

    @property
    def block(self) -> int:
        """Entries of a row that a block has."""
        return self.block_tiles * self.tile

    @property
    def padded(self) -> int:
        """Entries of a row."""
        return self.block * self.slices

    @property
    def numbers(self) -> int:
        """Entries of a row without filling."""
        return math.prod(self.lengths)

    @property
    def text(self) -> str:
        """The type in C++."""
        last = self.lengths[-1] if self.lengths else 1
        sizes = [self.tiles, self.block_tiles, self.row_tiles, last, self.tile, self.line]
        return f"ShareOf<{', '.join(map(str, sizes))}>"


class Matrix(NamedTuple):
    """A parameter as a block multiplies by it: of a link's product, in tiles from `first` on.

    order: axes of the parameter (0: the first behind the heads) in the order of those that source
    and result share, of the others of the result, of the others of the source; `groups`, `results`,
    `terms`: how many of each. scatters: as in `Link.kind`. out_tiles, in_tiles: of a group.
    """

    param: int
    order: tuple[int, ...]
    groups: int
    results: int
    terms: int
    scatters: bool
    out_tiles: int
    in_tiles: int
    block_tiles: int
    first: int

    @property
    def tiles(self) -> int:
        """Tiles of 16 by 16 of a block."""
        return self.block_tiles * (self.out_tiles if self.scatters else self.in_tiles)


@dataclass(frozen=True, eq=False)
class Layout:
    """Where the values of a pass are in shared memory, in bytes: what `at` has, two boxes of
    `box_bytes` from `boxes_at` on, the first matrices from `matrices_at` on, `held_tiles` of all
    `matrix_tiles`, and all `bytes`. sent: where a link's sources, or results, are in a box, and
    `received`: the bytes that a stage gets. splits: warps' sums that a product is divided into.
    in_rows: reductions that a warp makes of its numbers, in registers.
    """

    shares: dict[Axes, Share]
    matrices: dict[tuple[Link, int], Matrix]
    splits: dict[Link, int]
    at: dict[object, int]
    sent: dict[tuple[int, object], int]
    received: dict[int, int]
    boxes_at: int
    box_bytes: int
    matrices_at: int
    matrix_tiles: int
    held_tiles: int
    bytes: int
    warps: int
    in_rows: frozenset[Link]


@lru_cache(maxsize=1024)
def steps_of(program: Program, variant: ClusterVariant) -> Steps:
    """Return the pass of a variant."""
    passes = passes_of(program, compute_dtype(variant.dtype))
    steps: Steps = getattr(passes, variant.direction)
    return steps.in_one_block() if variant.slices == 1 else steps


def passes_in(program: Program, dtype: torch.dtype) -> Passes:
    """Return the passes of a program for gates of a dtype."""
    return passes_of(program, compute_dtype(dtype))


def lengths_in(program: Program, lines: Sequence[int]) -> Lengths:
    """Return the lengths of axes, with `lines` of those that only memories have, if there are."""
    of_calls = zip(program.step.axes.of_calls, lines, strict=bool(lines))
    return Lengths({**program.step.head.lengths, **dict(of_calls)})


def has_lines(program: Program, axes: Axes) -> bool:
    """Check whether blocks have whole lines of values with some axes."""
    return are_divided(axes, program.step.axes.of_calls)


def state_axes(program: Program) -> list[Axes]:
    """Return the axes of states in the order of values."""
    return [axes_in_order(program, axes) for axes in program.step.axes.states.values()]


def saved_offsets(
    program: Program, dtype: torch.dtype, lines: tuple[int, ...]
) -> dict[tuple[str, int], int]:
    """Return where states and kept values begin among the numbers of a step and head that a forward
    pass leaves, and under ("", 0) how many these are."""
    tensors = {("state", i): axes for i, axes in enumerate(state_axes(program))}
    kept = passes_in(program, dtype).kept
    tensors |= {(KEPT, i): value.axes for i, value in enumerate(kept)}
    lengths = lengths_in(program, lines)
    sizes = {key: lengths.numbers(axes) for key, axes in tensors.items()}
    end = sum(sizes.values())
    return {**_starts(sizes), ("", 0): end + end % 2}


@constant_in_graphs
def saved_numbers(key: str, dtype: torch.dtype, lines: tuple[int, ...]) -> int:
    """Return how many numbers of a step and head a forward pass leaves, of a program by its key."""
    return saved_offsets(program_by_key(key), dtype, lines)["", 0]


def stream_offsets(program: Program, dtype: torch.dtype) -> list[int]:
    """Return where the vectors of outer products begin among the numbers of a step and head, and
    how many these are."""
    lengths = Lengths(program.step.head.lengths)
    streams = passes_in(program, dtype).backward.streams
    return [*accumulate((lengths.numbers(value.axes) for value in streams), initial=0)]


def reduces(program: Program, dtype: torch.dtype) -> bool:
    """Return whether a step has norms, softmaxes or other reductions over channels."""
    return any(link.op for link in passes_in(program, dtype).forward.links)


def arrays_of(program: Program, variant: ClusterVariant) -> dict[object, int]:
    """Return where values that are in memory begin among the numbers that the blocks of a cluster
    have there, of all rows: of what has lines new states and those before by ("next", number) and
    ("state", number), other values by themselves; under "" how many these are."""
    steps, lengths = steps_of(program, variant), lengths_in(program, variant.lines)
    states = [(i, axes) for i, axes in enumerate(state_axes(program)) if has_lines(program, axes)]
    tensors: list[tuple[object, Axes]] = []
    tensors += [((name, i), axes) for name in ("state", "next") for i, axes in states]
    tensors += [
        (link.value, link.value.axes)
        for link in steps.links
        if link.kind in ("array", "rows")
        or (link.kind == "fold" and has_lines(program, link.value.axes))
    ]
    sizes: dict[object, int] = {key: variant.rows * lengths.numbers(axes) for key, axes in tensors}
    return {**_starts(sizes), "": sum(sizes.values())}


def line_sums_of(program: Program, variant: ClusterVariant) -> list[int]:
    """Return where the sums over lines begin among those of a block that gradients of parameters
    are made of, in the order of `Steps.line_outers`, and how many these are."""
    lengths = Lengths(program.step.head.lengths)
    outers = steps_of(program, variant).line_outers
    numbers = (lengths[lhs.axes[1]] * lengths[rhs.axes[1]] for _, lhs, rhs in outers)
    return [*accumulate(numbers, initial=0)]


@lru_cache(maxsize=1024)
def layout_of(program: Program, variant: ClusterVariant) -> Layout:
    """Plan the memory of a block. Raises EngineError for cells that do not fit."""
    steps, slices, row_count = steps_of(program, variant), variant.slices, variant.rows
    lengths = lengths_in(program, variant.lines)
    shares = {
        axes: share_of([lengths[axis] for axis in axes], slices, has_lines(program, axes))
        for axes in steps.axes
    }
    params = axes_by_kind(program.step)["param"]
    matrices, tiles = dict[tuple[Link, int], Matrix](), 0
    for link in steps.links:
        for i, product in enumerate(link.products if link.multiplies else ()):
            matrix = _matrix(product, link, params, shares, lengths, tiles)
            matrices[link, i] = matrix
            tiles += matrix.tiles
    entries = max(share.block for share in shares.values() if not share.line)
    most = [link for link in steps.links if link.multiplies]
    items = max((_items(shares, link) for link in most), default=1)
    rows = frozenset(link for link in steps.links if reduces_in_row(steps, link, shares))
    few = entries <= ROW_NUMBERS if rows else max(items * LANES, ROWS * entries) <= ROWS * LANES
    warps = (row_count if rows else ROWS) if few else 2 * ROWS
    _check_entries(program, variant, steps, shares, warps)
    in_rows = rows if few else frozenset()
    number, at, sent = variant.number, dict[object, int](), dict[tuple[int, object], int]()
    end = 0
    splits, received = dict[Link, int](), dict[int, int]()

    leaving: dict[int, dict[object, int]] = {}

    def place(key: object, size: int) -> None:
        nonlocal end
        if key not in at:
            at[key] = end
            end += -(-size // 16) * 16

    def leave(stage: int, key: object, size: int) -> None:
        leaving.setdefault(stage, {})[key] = -(-size // 16) * 16

    def send(stage: int, key: object, size: int) -> None:
        if (stage, key) not in sent:
            sent[stage, key] = received.get(stage, 0)
            received[stage] = sent[stage, key] + size

    for link in (link for link in steps.links if link.kind != "view"):
        result, stage = shares[link.value.axes], link.stage
        in_row = link in in_rows
        if link.kind == "gather":
            others = [x for x in steps.links if x.stage == stage and x.kind == "gather"]
            count = sum(shares[x.value.axes].block_tiles for x in others)
            splits[link] = _splits(count, link, matrices, warps)
            place(link, splits[link] * row_count * sums_stride(result) * number)
        if link.kind == "scatter":
            send(stage, link, slices * row_count * result.block * number)
        if link.kind == "lines":
            place(link, row_count * result.block * number)
        elif not in_row and link.kind == "reduce" and local_results(steps, link, shares):
            place(link, row_count * local_results(steps, link, shares) * number)
        elif not in_row and link.kind == "reduce":
            kept = result.numbers if link.whole else result.block
            send(stage, link, slices * row_count * kept * number)
        if link.whole and link not in at and not in_row:
            entries = result.padded if link.kind == "spread" else result.numbers
            place(link, row_count * entries * number)
        for i, source in enumerate(link.sources):
            share = shares[source.axes]
            if link.kind in ("gather", "spread"):
                is_number = link.kind == "spread"
                size = row_count * TILE * number if is_number else operand_bytes(variant, 1)
                leave(stage, (source, is_number), share.block_tiles * size)
                if is_number or slices > 1:
                    send(stage, (source, is_number), slices * share.block_tiles * size)
            if link.kind == "scatter":
                leave(stage, (link, i), operand_bytes(variant, share.block_tiles))
            if link.kind == "reduce" and not share.line and not in_row:
                leave(stage, (link, 0), row_count * share.block * number)
    for value in line_values(program, steps):
        if value.axes in shares:
            place(("line", value), row_count * shares[value.axes].block * number)
    # What one stage sends is no longer read when the next one is computed.
    for stage, sizes in leaving.items():
        at |= {(stage, key): end + start for key, start in _starts(sizes).items()}
    end += max((sum(sizes.values()) for sizes in leaving.values()), default=0)
    boxes_at, box_bytes = end, max(received.values(), default=0)
    end += 2 * box_bytes + BARRIER_BYTES
    if end > variant.shared:
        raise EngineError(
            f"{program.cell_name} needs {end:,} bytes of shared memory for the values of its "
            f"{variant.direction} pass; this GPU has {variant.shared:,}. Use more heads, shorter "
            "axes, or backend='torch'"
        )
    fitting = [0, *(matrix.first + matrix.tiles for matrix in matrices.values())]
    held = max(n for n in fitting if end + n * tile_bytes(variant) <= variant.shared)
    return Layout(
        shares, matrices, splits, at, sent, received, boxes_at, box_bytes, end, tiles, held,
        end + held * tile_bytes(variant), warps, in_rows,
    )  # fmt: skip


def line_values(program: Program, steps: Steps) -> list[Value]:
    """Return the numbers of lines that loops over entries in them share, each once."""
    loops: list[tuple[Axes, Sequence[Value | float]]] = []
    reductions = [link for link in steps.links if link.kind in ("lines", "reduce")]
    loops += [(link.sources[0].axes, link.sources) for link in reductions]
    loops += [
        (s.axes, (s.source,)) for s in steps.sinks if s.link is None or s.link.kind == "array"
    ]
    found = [
        value
        for axes, sources in loops
        if has_lines(program, axes)
        for value in steps.of_lines(axes, sources)
    ]
    return [*dict.fromkeys(found)]


def _check_entries(
    program: Program,
    variant: ClusterVariant,
    steps: Steps,
    shares: Mapping[Axes, Share],
    warps: int,
) -> None:
    """Check that registers have room for the matrices of a step with folds. Raises EngineError."""
    if not any(link.kind == "fold" for link in steps.links):
        return
    of_blocks = {axes: share for axes, share in shares.items() if not share.line}
    axes, share = max(of_blocks.items(), key=lambda item: item[1].block)
    count = share.block * variant.rows // (warps * LANES)
    if count > MAX_ENTRIES:
        sizes = " x ".join(map(str, share.lengths))
        raise EngineError(
            f"{program.cell_name}'s {variant.direction} pass has values of {sizes} numbers "
            f"({', '.join(axes)}), {count} for each thread of {variant.slices} blocks; registers "
            f"have room for {MAX_ENTRIES}. Use shorter axes, or backend='torch'"
        )


def _starts(sizes: Mapping[Key, int]) -> dict[Key, int]:
    """Return where things of these sizes begin that follow each other."""
    return dict(zip(sizes, accumulate(sizes.values(), initial=0), strict=False))


def local_results(steps: Steps, link: Link, shares: dict[Axes, Share]) -> int:
    """Return how many results of a reduction of a row a block has, if each is of entries of one
    block, where alone they are read; else 0."""
    source, length = link.sources[0], tiles_of_result(link, shares)
    if not link.whole or not length or shares[source.axes].line:
        return 0
    result = shares[link.value.axes]
    is_alone = result.numbers == result.slices == 1
    if not steps.readers[link.value] <= {source.axes, *([link.value.axes] if is_alone else [])}:
        return 0
    block_tiles = shares[source.axes].block_tiles
    return 0 if block_tiles % length else block_tiles // length


def reduces_in_row(steps: Steps, link: Link, shares: dict[Axes, Share]) -> bool:
    """Return whether a warp that has a block's entries of a row can make a reduction of them."""
    if link.kind != "reduce" or not local_results(steps, link, shares):
        return False
    length, block = TILE * tiles_of_result(link, shares), shares[link.sources[0].axes].block
    turn = 2 * LANES if block % (2 * LANES) == 0 else LANES
    return length == block or length % turn == 0 or turn % length == 0


def sums_stride(share: Share) -> int:
    """Return the distance of rows of sums in shared memory, whose banks then differ."""
    return share.block + 4


def tiles_of_result(link: Link, shares: dict[Axes, Share]) -> int:
    """Return the tiles that a reduction over the last axes makes one number of; 0 for others."""
    source = link.sources[0]
    if source.axes[: len(link.value.axes)] != link.value.axes:
        return 0
    return shares[source.axes].tiles // shares[link.value.axes].numbers


def share_of(lengths: Sequence[int], slices: int, has_lines: bool = False) -> Share:
    """Return the share of values with axes of these lengths, whose first is that of memories if it
    has lines."""
    if has_lines:
        numbers = math.prod(lengths)
        return Share(tuple(lengths), numbers, numbers // slices, slices, math.prod(lengths[1:]))
    tiles = math.prod(lengths[:-1]) * -(-(lengths[-1] if lengths else 1) // TILE)
    return Share(tuple(lengths), tiles, -(-tiles // slices), slices)


def tile_bytes(variant: ClusterVariant) -> int:
    """Return the bytes of a tile of a matrix."""
    return TILE * TILE * (8 if variant.is_wide else 2 * variant.matrix_parts)


def operand_bytes(variant: ClusterVariant, tiles: int) -> int:
    """Return the bytes of tiles of what is multiplied, of all rows."""
    if variant.is_wide:
        return tiles * TILE * variant.rows * 8
    return tiles * TILE * COLUMNS * 2 * variant.layers


def _items(shares: dict[Axes, Share], link: Link) -> int:
    """Return how many warps a link's products keep busy without dividing sums."""
    share = shares[link.value.axes]
    return share.tiles if link.kind == "scatter" else share.block_tiles


def _matrix(
    product: Product,
    link: Link,
    params: Sequence[Axes],
    shares: dict[Axes, Share],
    lengths: Lengths,
    first: int,
) -> Matrix:
    source, result, axes = product.source.axes, link.value.axes, params[product.param]
    shared = shared_axes(source, result) if product.to else ()
    inner, outer = source[len(shared) :], result[len(shared) :]
    order = tuple(axes.index(axis) for axis in (*shared, *outer, *inner))
    if not product.to:
        order = (0, 1) if product.transposes else (1, 0)
    groups = lengths.numbers(shared)
    scatters = link.kind == "scatter"
    out_tiles, in_tiles = shares[result].tiles // groups, shares[source].tiles // groups
    block_tiles = shares[source if scatters else result].block_tiles
    counts = len(shared), len(outer), len(inner)
    return Matrix(product.param, order, *counts, scatters, out_tiles, in_tiles, block_tiles, first)


def _splits(tiles: int, link: Link, matrices: dict[tuple[Link, int], Matrix], warps: int) -> int:
    """Return into how many warps' sums a product is divided, beside others with which a stage has a
    number of tiles."""
    terms = min(matrices[link, i].in_tiles for i in range(len(link.products)))
    splits = 1
    while 2 * splits * tiles <= warps and 4 * splits <= terms:
        splits *= 2
    return splits
