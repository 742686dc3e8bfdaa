"""Products of vectors with matrices of two axes, found among a step's statements.

Statements have them as a pointwise product of both and a sum over one axis, and their gradients as
an array to which a pointwise product of two vectors is added. Kernels may do better: rows of a
batch share a matrix.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from pararnn.program.statements import (
    Outer,
    Point,
    Product,
    Reduce,
    Statements,
    Target,
    Value,
    sources_of,
)

MULTIPLY = torch.ops.aten.mul.Tensor


def with_rectangles(statements: Statements) -> Statements:
    """Return statements with a `Product` for each product of a vector with a parameter of two axes,
    and an `Outer` for each outer product of vectors that is added to one's gradient."""
    kinds = {target.kind for target, _ in statements.writes} | {"grad_param"}
    matrices = {v: n for n, v in statements.inputs_of("param").items() if len(v.axes) == 2}
    copies: dict[Value, Value] = {}

    def copy_of(value: Value) -> Value:
        return copies.get(value, value)

    for value in statements.values:
        definition = value.definition
        product = _product(value, matrices)
        if product is not None:
            definition = replace(product, source=copy_of(product.source))
        elif isinstance(definition, Point):
            definition = Point(tuple(map(copy_of, definition.values)))
        elif definition is not None:
            definition = replace(definition, source=copy_of(definition.source))
        copies[value] = Value(value.node, value.axes, definition)
    writes, outers = list[tuple[Target, Value | float]](), statements.outers.copy()
    for target, source in statements.writes:
        found = _outers(target, source)
        outers += found
        if not found:
            writes.append((target, copy_of(source) if isinstance(source, Value) else source))
    outers = [outer._replace(lhs=copy_of(outer.lhs), rhs=copy_of(outer.rhs)) for outer in outers]
    values = [copies[value] for value in statements.values]
    return replace(statements, values=values, writes=writes, outers=outers).only(kinds)


def _operands(value: Value, op: Any) -> tuple[Value, ...]:
    """Return the two values of which one is the pointwise `op`; none for another value."""
    sources = sources_of(value)
    is_op = isinstance(value.definition, Point) and value.node.target is op
    return sources if is_op and len(sources) == 2 and not value.node.kwargs else ()


def _product(value: Value, matrices: dict[Value, int]) -> Product | None:
    """Return the product of a vector and a matrix that a sum is, or None."""
    reduction = value.definition
    if not isinstance(reduction, Reduce) or reduction.op != "sum":
        return None
    factors = _operands(reduction.source, MULTIPLY)
    for vector, matrix in zip(factors, reversed(factors), strict=True):
        sums = reduction.axis in matrix.axes and vector.axes == (reduction.axis,)
        if sums and matrix in matrices:
            transposes = matrix.axes[1] == reduction.axis
            to = matrix.axes[0] if transposes else matrix.axes[1]
            return Product(vector, matrices[matrix], transposes, reduction.axis, to)
    return None


def _outers(target: Target, source: Value | float) -> list[Outer]:
    """Return the outer products whose sum is added to a matrix's gradient; none for other terms."""
    if target.kind != "grad_param" or len(target.axes) != 2 or not isinstance(source, Value):
        return []
    factors = _operands(source, MULTIPLY)
    for lhs, rhs in zip(factors, reversed(factors), strict=True):
        if (lhs.axes, rhs.axes) == ((target.axes[0],), (target.axes[1],)):
            return [Outer(target.number, lhs, rhs, *target.axes)]
    terms = [_outers(target, term) for term in _operands(source, torch.ops.aten.add.Tensor)]
    return [outer for outers in terms for outer in outers] if all(terms) else []
