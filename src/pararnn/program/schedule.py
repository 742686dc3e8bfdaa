"""Statements in order: stages of nested loops, and the products between them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from pararnn.cells.matrix import Axes
from pararnn.program.statements import (
    Outer,
    Point,
    Product,
    Reduce,
    Rename,
    Statements,
    Target,
    Value,
    is_copy,
    sources_of,
)


@dataclass(eq=False)
class Nest:
    """Nested loops over axes, the last one by vectors, and the contents of their body, in order."""

    axes: Axes
    points: list[Value] = field(default_factory=list)
    reductions: list[Value] = field(default_factory=list)
    writes: list[tuple[Target, Value | float]] = field(default_factory=list)


Operation = Nest | Value | Outer
"""A nest of loops, a product or a copy (the value that it computes) or an outer product."""


@dataclass(eq=False)
class Stage:
    """Nests of loops that no product lies between, then products, with copies that move axes, and
    outer products."""

    nests: list[Nest] = field(default_factory=list)
    products: list[Value] = field(default_factory=list)
    outers: list[Outer] = field(default_factory=list)

    @property
    def points(self) -> list[Value]:
        """The pointwise values of all nests."""
        return [value for nest in self.nests for value in nest.points]

    @property
    def writes(self) -> list[tuple[Target, Value | float]]:
        """The results of all nests."""
        return [write for nest in self.nests for write in nest.writes]

    def count(self, kind: str) -> int:
        """Return the number of results of a kind."""
        return sum(target.kind == kind for target, _ in self.writes)


@dataclass(eq=False)
class LoopPlan:
    """Stages in order. arrays: values that other loops read than those that compute them."""

    stages: list[Stage]
    arrays: list[Value]

    @property
    def operations(self) -> list[Operation]:
        """The operations of all stages, in order."""
        operations: list[Operation] = []
        for stage in self.stages:
            operations += stage.nests
            operations += stage.products
            operations += stage.outers
        return operations


def schedule(statements: Statements, late: Collection[Value] = ()) -> LoopPlan:
    """Order statements into loops, as few as their dependencies allow.

    A reduction or a product ends a stage: what reads it comes in a later one. Pointwise values are
    computed in the stage that first reads them, in registers if no other loop reads them. late:
    inputs that the first stage does not wait for. It computes all that depends on none of them, and
    writes no number.
    """
    ready = {value: int(value in late) for value in statements.inputs.values()}
    stage_of: dict[Value, int] = {}
    for value in statements.values:
        stage_of[value] = max((ready[source] for source in sources_of(value)), default=0)
        ready[value] = stage_of[value] + (not isinstance(value.definition, Point))
    readers: dict[Value, list[tuple[int, Any]]] = {}

    def note(source: Value | float, stage: int, reader: Any) -> None:
        if isinstance(source, Value):
            readers.setdefault(source, []).append((stage, reader))

    def end_of(*sources: Value | float) -> int:
        """Return the first stage that can read values."""
        return max(ready[v] if isinstance(v, Value) else bool(late) for v in sources)

    for target, source in statements.writes:
        note(source, end_of(source), target.axes)
    for outer in statements.outers:
        for vector in (outer.lhs, outer.rhs):
            note(vector, end_of(outer.lhs, outer.rhs), outer)
    for value in reversed(statements.values):
        runs_ahead = late and not stage_of[value]
        if isinstance(value.definition, Point) and value in readers and not runs_ahead:
            stage_of[value] = min(stage for stage, _ in readers[value])
        for source in sources_of(value):
            note(source, stage_of[value], _loops_of(value))
    count = 1 + max([*stage_of.values(), *map(end_of, statements.results()), bool(late)])
    nests: list[dict[Axes, Nest]] = [{} for _ in range(count)]
    stages = [Stage() for _ in range(count)]

    def nest_of(stage: int, axes: Axes) -> Nest:
        return nests[stage].setdefault(axes, Nest(axes))

    for value in statements.values:
        stage = stage_of[value]
        if isinstance(value.definition, Point):
            nest_of(stage, value.axes).points.append(value)
        elif isinstance(value.definition, Reduce):
            nest_of(stage, value.definition.source.axes).reductions.append(value)
        elif isinstance(value.definition, Product) or is_copy(value):
            stages[stage].products.append(value)
    for target, source in statements.writes:
        nest_of(end_of(source), target.axes).writes.append((target, source))
    for outer in statements.outers:
        stages[end_of(outer.lhs, outer.rhs)].outers.append(outer)
    for ordered, by_axes in zip(stages, nests, strict=True):
        ordered.nests = sorted(by_axes.values(), key=lambda nest: (len(nest.axes), nest.axes))

    def escapes(value: Value) -> bool:
        home = (stage_of[value], value.axes)
        return any((stage, reader) != home for stage, reader in readers.get(value, []))

    def has_array(value: Value) -> bool:
        """Check whether a value has an array: not one that is its source's by other names."""
        if isinstance(value.definition, Rename):
            return is_copy(value)
        return not isinstance(value.definition, Point) or escapes(value)

    arrays = [value for value in statements.values if has_array(value)]
    return LoopPlan(stages, arrays)


def _loops_of(value: Value) -> Any:
    """Return the axes of the loops that compute a value, and itself for a product."""
    if isinstance(value.definition, Reduce):
        return value.definition.source.axes
    return value.axes if isinstance(value.definition, Point) else value
