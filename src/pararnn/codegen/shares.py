"""Shares of a head's tensors in a block of a GPU: the entries of each axis that a thread has.

A warp's lanes form a grid over two axes, rows and columns, and so do the warps of a block. A thread
has some entries of each, and of a tensor those whose indices it has along all axes. What lacks an
axis is in all threads along it, so that elementwise operations need no other thread. Sums along an
axis go over its lanes by shuffles, and over its warps by shared memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from pararnn.cells.matrix import Axes
from pararnn.program.statements import Nest, Outer, Product, Reduce, Schedule, Value

LANES = 32
WARPS = (1, 2, 4, 8, 16)
"""Sizes of a block, in warps."""
ENTRIES = 32
"""Entries of the largest tensor that a thread has registers for, where a block can be so large."""
TILE = 16
"""Rows of a tile of the matrix units; in fragments of results a lane has pairs of columns."""
SHUFFLE, BARRIER, FMA = 25, 90, 4
"""Cycles of latency, about: an exchange inside a warp, one by shared memory, an operation."""
SCHEDULERS = 4
"""Warps of a multiprocessor whose instructions are instructions at once."""


class AxisShare(NamedTuple):
    """An axis of `size` entries over `lanes` and `warps` groups; `lane_step`, `warp_step`:
    neighbouring groups are so far apart. entries: of a thread. pairs: neighbours in twos.
    """

    size: int
    lanes: int = 1
    lane_step: int = 1
    warps: int = 1
    warp_step: int = 1
    entries: int = 1
    pairs: bool = False


class Shares(NamedTuple):
    """Shares of all axes, and the warps of a block. tiles: rows and columns are those of fragments
    of the matrix units."""

    axes: Mapping[str, AxisShare]
    rows: str | None
    columns: str
    warps: int
    tiles: bool = False

    def count(self, axes: Axes) -> int:
        """Return the entries that a thread has of a tensor."""
        return math.prod(self.axes[axis].entries for axis in axes)


def main_axes(tensors: list[Axes], lengths: Mapping[str, int]) -> tuple[str | None, str]:
    """Return the axes of the largest tensor: rows, None for a vector, and columns."""
    largest = max(tensors, key=lambda axes: math.prod(lengths[axis] for axis in axes))
    if not largest:
        return None, next(iter(lengths))
    return (largest[-2] if len(largest) > 1 else None), largest[-1]


def shares_of(
    lengths: Mapping[str, int],
    main: tuple[str | None, str],
    schedules: list[Schedule],
    links: AbstractSet[Value],
    with_tiles: bool,
) -> Shares:
    """Choose the shares for a pass over a step: by tiles where they fit, else those that take the
    least time by an estimate. links: reductions that a step leaves in pieces."""
    rows, columns = main
    if with_tiles and rows is not None and not (lengths[rows] % TILE or lengths[columns] % TILE):
        count = lengths[rows] // TILE
        warps = max(n for n in WARPS if count % n == 0 and n <= 8)
        return _shares(lengths, main, (8, 4), (warps, 1), tiles=True)
    grids = [
        ((LANES // lanes, lanes), (all_warps // warps, warps))
        for lanes in (1, 2, 4, 8, 16, 32)
        for all_warps in WARPS
        for warps in WARPS
        if warps <= all_warps and (rows is not None or (lanes == LANES and warps == all_warps))
    ]
    options = [_shares(lengths, main, *grid) for grid in grids]
    axes = tuple(axis for axis in main if axis is not None)

    def rank(own: Shares) -> tuple[int, float]:
        return max(0, own.count(axes) - ENTRIES), sum(
            _cycles(own, plan, links) for plan in schedules
        )

    return min(options, key=rank)


def _shares(
    lengths: Mapping[str, int],
    main: tuple[str | None, str],
    lanes: tuple[int, int],
    warps: tuple[int, int],
    tiles: bool = False,
) -> Shares:
    rows, columns = main
    axes = {axis: AxisShare(size, entries=size) for axis, size in lengths.items()}
    grid = ((rows, lanes[0], lanes[1], warps[0], warps[1]), (columns, lanes[1], 1, warps[1], 1))
    for axis, n, step, groups, group_step in grid:
        if axis is not None:
            count = -(-lengths[axis] // (n * groups))
            pairs = tiles and axis == columns
            axes[axis] = AxisShare(lengths[axis], n, step, groups, group_step, count, pairs)
    return Shares(axes, rows, columns, warps[0] * warps[1], tiles)


def lanes_only(shares: Shares) -> Shares:
    """Return the shares of the same axes where each warp has all vectors."""
    axes = {
        axis: AxisShare(own.size, LANES, entries=-(-own.size // LANES))
        for axis, own in shares.axes.items()
    }
    return Shares(axes, None, shares.columns, 1)


def _cycles(own: Shares, plan: Schedule, links: AbstractSet[Value]) -> float:
    """Return the time of a step, about: its exchanges one after the other, and all instructions."""
    latency, instructions = 0.0, 0.0
    for part in plan.parts:
        if isinstance(part, Nest):
            instructions += own.count(part.axes) * (len(part.points) + len(part.reductions))
            exchanges = [_exchange(own, v) for v in part.reductions if v not in links]
            latency += max((time for time, _ in exchanges), default=FMA)
            instructions += sum(count for _, count in exchanges)
        elif isinstance(part, Outer):
            size = own.axes[part.axis].size
            others = math.prod(own.axes[a].size for a in part.lhs.axes if a != part.axis)
            instructions += 2 * size * size * others / (LANES * own.warps)
        else:
            latency += BARRIER
            instructions += _product(own, part)
    return latency + instructions * max(1.0, own.warps / SCHEDULERS)


def _exchange(own: Shares, value: Value) -> tuple[float, float]:
    """Return the latency of a reduction, and its instructions."""
    reduction = value.definition
    assert isinstance(reduction, Reduce)
    axis, count = own.axes[reduction.axis], own.count(value.axes)
    levels = int(math.log2(axis.lanes))
    latency = axis.entries * FMA + levels * SHUFFLE + (axis.warps > 1) * BARRIER
    return latency, count * (2 * levels + (axis.warps > 1) * (axis.warps + 1))


def _product(own: Shares, value: Value) -> float:
    """Return the instructions of a product by shared memory."""
    product = value.definition
    assert isinstance(product, Product)
    axis, count = own.axes[product.axis], own.count(value.axes)
    loads = axis.entries + count // max(1, axis.entries)
    return axis.size * (count + loads)
