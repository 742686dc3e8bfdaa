"""Statements for kernels that read values at any index: all axes in one order.

A value is a function of the indices of its axes, so that there a copy in another order is the value
itself. Products that such kernels have no matrix units for are sums of pointwise products.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import fx

from pararnn.cells.matrix import Axes
from pararnn.program.statements import (
    Definition,
    Outer,
    Point,
    Product,
    Reduce,
    Rename,
    Statements,
    Target,
    Value,
    alias_of,
    axis_of_alias,
    distinct,
    sorted_axes,
    with_sources,
)

MULTIPLY = torch.ops.aten.mul.Tensor


class Order:
    """The order of all axes and their aliases: those of calls are first."""

    def __init__(self, axes: Axes, of_calls: Axes) -> None:
        bases = [axis for axis in axes if axis_of_alias(axis) == axis]
        self.bases = (*of_calls, *(axis for axis in bases if axis not in of_calls))

    def __call__(self, axes: Iterable[str]) -> Axes:
        """Return axes in this order."""
        return sorted_axes(axes, self.bases)


def indexed(
    statements: Statements,
    order: Order,
    squares: dict[tuple[str, int], Axes],
    sums_product: Callable[[Value], bool],
    sums_outer: Callable[[Outer], bool],
) -> Statements:
    """Return statements with all axes in an order, without copies that only reorder them.

    squares: axes of the parameters and memories with one axis twice, by kind and number.
    sums_product, sums_outer: whether a product, or an outer product, becomes a sum.
    """
    return _Copy(statements, order, squares).run(sums_product, sums_outer)


@dataclass
class _Copy:
    """Copies of statements on a graph of their own."""

    source: Statements
    order: Order
    squares: dict[tuple[str, int], Axes]
    copies: dict[Value, Value] = field(default_factory=dict)
    nodes: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.out = Statements(order=self.order(self.source.order))

    def run(
        self, sums_product: Callable[[Value], bool], sums_outer: Callable[[Outer], bool]
    ) -> Statements:
        """Return the statements."""
        for key, value in self.source.inputs.items():
            self.out.inputs[key] = self.copies[value] = Value(
                self._node(value.node), self.order(value.axes)
            )
        for value in self.source.values:
            self.copies[value] = self._copy(value, sums_product)
            self.nodes[value.node] = self.copies[value].node
        for target, result in self.source.writes:
            number = self.copies[result] if isinstance(result, Value) else result
            self.out.writes.append((target._replace(axes=self.order(target.axes)), number))
        for outer in self.source.outers:
            copy = outer.of(self.copies.__getitem__)
            if sums_outer(copy):
                self._write_outer(copy)
            else:
                self.out.outers.append(copy)
        return self.out

    def _node(self, node: fx.Node | None = None) -> fx.Node:
        """Return a node of what is no call."""
        copy = self.out.graph.placeholder(f"value_{len(self.out.graph.nodes)}")
        copy.meta = {"dtype": torch.float32} if node is None else node.meta.copy()
        if node is not None:
            self.nodes[node] = copy
        return copy

    def _copy(self, value: Value, sums_product: Callable[[Value], bool]) -> Value:
        if isinstance(value.definition, Rename):
            source, names = value.definition.source, value.definition.names
            by_name = dict(zip(source.axes, names, strict=True))
            return self._renamed(self.copies[source], by_name, value.node)
        definition = with_sources(value.definition, self.copies.__getitem__)
        assert definition is not None
        if isinstance(definition, Point):
            node = self.out.graph.node_copy(value.node, self.nodes.__getitem__)
            return self._add(node, value.axes, definition)
        if isinstance(definition, Product):
            product = Value(value.node, self.order(value.axes), definition)
            if sums_product(product):
                return self._sum_of_products(definition, product.axes)
        return self._add(self._node(value.node), value.axes, definition)

    def _add(self, node: fx.Node, axes: Iterable[str], definition: Definition) -> Value:
        value = Value(node, self.order(axes), definition)
        self.out.values.append(value)
        return value

    def _renamed(self, value: Value, names: dict[str, str], node: fx.Node | None = None) -> Value:
        """Return a value by other names of some axes: itself, if these are the same."""
        axes = tuple(names.get(axis, axis) for axis in value.axes)
        if axes == value.axes:
            return value
        return self._add(self._node(node or value.node), axes, Rename(value, axes))

    def _product(self, a: Value, b: Value) -> Value:
        node = self.out.graph.call_function(MULTIPLY, (a.node, b.node))
        node.meta["dtype"] = torch.float32
        return self._add(node, {*a.axes, *b.axes}, Point((a, b)))

    def _sum(self, value: Value, kept: Iterable[str]) -> Value:
        """Return the sum over all axes but some."""
        for axis in reversed([axis for axis in value.axes if axis not in kept]):
            axes = [a for a in value.axes if a != axis]
            value = self._add(self._node(), axes, Reduce("sum", value, axis))
        return value

    def _square(self, kind: str, number: int) -> Value:
        """Return the input that is a matrix with one axis twice."""
        if (kind, number) not in self.out.inputs:
            axes = distinct(self.squares[kind, number])
            self.out.inputs[kind, number] = Value(self._node(), axes)
        return self.out.inputs[kind, number]

    def _sum_of_products(self, product: Product, axes: Axes) -> Value:
        x = product.source
        if product.to:
            return self._sum(self._product(x, self.out.inputs["param", product.param]), axes)
        matrix, axis = self._square(product.kind, product.param), product.axis
        summed = _unused(axis, x.axes)
        first, second = matrix.axes
        rows, columns = (axis, summed) if product.transposes else (summed, axis)
        terms = self._product(
            self._renamed(x, {axis: summed}), self._renamed(matrix, {first: rows, second: columns})
        )
        return self._sum(terms, axes)

    def _write_outer(self, outer: Outer) -> None:
        target, rhs = self.squares.get((outer.kind, outer.param)), outer.rhs
        if target is None:
            axes = self.out.inputs[outer.kind, outer.param].axes
            total = self._sum(self._product(outer.lhs, rhs), axes)
        else:
            axes = distinct(target)
            column = _unused(outer.axis, {*outer.lhs.axes, *rhs.axes})
            rhs = self._renamed(rhs, {outer.axis: column})
            total = self._sum(self._product(outer.lhs, rhs), (outer.axis, column))
            total = self._renamed(total, {column: axes[1]})
        kind = f"grad_{outer.kind}"
        self.out.writes.append((Target(kind, outer.param, axes, adds=True), total))


def _unused(axis: str, axes: Iterable[str]) -> str:
    """Return an alias of an axis that is not among others."""
    base, number = axis_of_alias(axis), 1
    while alias_of(base, number) in {axis, *axes}:
        number += 1
    return alias_of(base, number)
