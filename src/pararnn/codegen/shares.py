"""Thread layout of a head's tensors in a block of a GPU: the indices of each axis in a thread.

The lanes of a warp form a grid over two axes, rows and columns. So do the warps of a block. A
thread holds some indices of every axis, and the entries of a tensor at these indices. A tensor
without an axis is replicated over that axis's threads, so elementwise operations exchange nothing.
A sum along an axis is exchanged between lanes by shuffles, and between warps by shared memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from pararnn.cells.matrix import Axes
from pararnn.program.schedule import LoopPlan, Nest
from pararnn.program.statements import Outer, Product, Reduce, Value

LANES = 32
WARPS = (1, 2, 4, 8, 16)
"""Sizes of a block, in warps."""
ENTRIES = 32
"""Most entries of the largest tensor in a thread's registers, if blocks can be large enough."""
TILE = 16
"""Rows and columns of a tile of the matrix units. A lane holds pairs of columns of a result."""
SHUFFLE, BARRIER, FMA = 25, 90, 4
"""Estimated latencies in cycles: a shuffle, an exchange by shared memory, an operation."""
SCHEDULERS = 4
"""Warp schedulers of a multiprocessor: each issues an instruction of one warp a cycle."""


class AxisLayout(NamedTuple):
    """Layout of an axis of `size` indices over threads.

    lanes, warps: groups of lanes in a warp and of warps in a block, between which the axis is
    divided. lane_step, warp_step: distance of neighbouring groups, in lanes and in warps. entries:
    indices in a thread. pairs: True if a thread holds neighbouring indices in pairs.
    """

    size: int
    lanes: int = 1
    lane_step: int = 1
    warps: int = 1
    warp_step: int = 1
    entries: int = 1
    pairs: bool = False


class ThreadLayout(NamedTuple):
    """Layout of all axes, and the number of warps in a block.

    rows, columns: axes of the grid. tiles: True if the layout is that of the matrix units.
    """

    axes: Mapping[str, AxisLayout]
    rows: str | None
    columns: str
    warps: int
    tiles: bool = False

    def count(self, axes: Axes) -> int:
        """Return the number of a tensor's entries in a thread."""
        return math.prod(self.axes[axis].entries for axis in axes)

    def numbers(self, axes: Axes) -> int:
        """Return the number of a tensor's entries."""
        return math.prod(self.axes[axis].size for axis in axes)


def main_axes(tensors: list[Axes], lengths: Mapping[str, int]) -> tuple[str | None, str]:
    """Return the last two axes of the largest tensor: rows (None for a vector) and columns."""
    largest = max(tensors, key=lambda axes: math.prod(lengths[axis] for axis in axes))
    if not largest:
        return None, next(iter(lengths))
    return (largest[-2] if len(largest) > 1 else None), largest[-1]


def layout_of(
    lengths: Mapping[str, int],
    main: tuple[str | None, str],
    schedules: list[LoopPlan],
    links: AbstractSet[Value],
    with_tiles: bool,
) -> ThreadLayout:
    """Choose the layout for a pass over a step: tiles where they fit, else the fastest estimate.

    links: reductions whose partial results wait for the end of a window.
    """
    rows, columns = main
    if with_tiles and rows is not None and not (lengths[rows] % TILE or lengths[columns] % TILE):
        count = lengths[rows] // TILE
        warps = max(n for n in WARPS if count % n == 0 and n <= 8)
        return _layout(lengths, main, (8, 4), (warps, 1), tiles=True)
    grids = [
        ((LANES // lanes, lanes), (all_warps // warps, warps))
        for lanes in (1, 2, 4, 8, 16, 32)
        for all_warps in WARPS
        for warps in WARPS
        if warps <= all_warps and (rows is not None or (lanes == LANES and warps == all_warps))
    ]
    options = [_layout(lengths, main, *grid) for grid in grids]
    axes = tuple(axis for axis in main if axis is not None)

    def rank(layout: ThreadLayout) -> tuple[int, float]:
        cycles = sum(_cycles(layout, plan, links) for plan in schedules)
        return max(0, layout.count(axes) - ENTRIES), cycles

    return min(options, key=rank)


def _layout(
    lengths: Mapping[str, int],
    main: tuple[str | None, str],
    lanes: tuple[int, int],
    warps: tuple[int, int],
    tiles: bool = False,
) -> ThreadLayout:
    rows, columns = main
    axes = {axis: AxisLayout(size, entries=size) for axis, size in lengths.items()}
    grid = ((rows, lanes[0], lanes[1], warps[0], warps[1]), (columns, lanes[1], 1, warps[1], 1))
    for axis, n, step, groups, group_step in grid:
        if axis is not None:
            count = -(-lengths[axis] // (n * groups))
            pairs = tiles and axis == columns
            axes[axis] = AxisLayout(lengths[axis], n, step, groups, group_step, count, pairs)
    return ThreadLayout(axes, rows, columns, warps[0] * warps[1], tiles)


def lanes_only(layout: ThreadLayout) -> ThreadLayout:
    """Return the layout of the same axes in which each warp holds whole vectors."""
    axes = {
        axis: AxisLayout(axis_layout.size, LANES, entries=-(-axis_layout.size // LANES))
        for axis, axis_layout in layout.axes.items()
    }
    return ThreadLayout(axes, None, layout.columns, 1)


def _cycles(layout: ThreadLayout, plan: LoopPlan, links: AbstractSet[Value]) -> float:
    """Return the estimated cycles of a step: its exchanges, which follow each other, and the issue
    of its instructions."""
    latency, instructions = 0.0, 0.0
    for operation in plan.operations:
        if isinstance(operation, Nest):
            calls = len(operation.points) + len(operation.reductions)
            instructions += layout.count(operation.axes) * calls
            exchanges = [_exchange(layout, v) for v in operation.reductions if v not in links]
            latency += max((cycles for cycles, _ in exchanges), default=FMA)
            instructions += sum(count for _, count in exchanges)
        elif isinstance(operation, Outer):
            size = layout.axes[operation.axis].size
            free = [layout.axes[a].size for a in operation.lhs.axes if a != operation.axis]
            instructions += 2 * size * size * math.prod(free) / (LANES * layout.warps)
        else:
            latency += BARRIER
            instructions += _product(layout, operation)
    return latency + instructions * max(1.0, layout.warps / SCHEDULERS)


def _exchange(layout: ThreadLayout, value: Value) -> tuple[float, float]:
    """Return the latency of a reduction, and its number of instructions."""
    reduction = value.definition
    assert isinstance(reduction, Reduce)
    axis, count = layout.axes[reduction.axis], layout.count(value.axes)
    levels = int(math.log2(axis.lanes))
    latency = axis.entries * FMA + levels * SHUFFLE + (axis.warps > 1) * BARRIER
    return latency, count * (2 * levels + (axis.warps > 1) * (axis.warps + 1))


def _product(layout: ThreadLayout, value: Value) -> float:
    """Return the number of instructions of a product by shared memory."""
    product = value.definition
    assert isinstance(product, Product)
    axis, count = layout.axes[product.axis], layout.count(value.axes)
    loads = axis.entries + count // max(1, axis.entries)
    return axis.size * (count + loads)
