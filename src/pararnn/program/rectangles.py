"""Products of values with parameters of two axes or more, found among a step's statements.

Statements have them as a pointwise product of both and sums over axes, and their gradients as an
array to which a pointwise product of two values is added. Kernels may do better: rows of a batch
share a matrix. A parameter of more axes is a matrix for each index of the others.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from pararnn.cells.matrix import Axes
from pararnn.program.statements import (
    Outer,
    Product,
    Reduce,
    Rename,
    Statements,
    Target,
    Value,
    operands,
    with_sources,
)

MULTIPLY = torch.ops.aten.mul.Tensor
OTHER_AXES = 2
"""Most axes of a parameter in addition to those of a matrix."""


def with_rectangles(statements: Statements) -> Statements:
    """Return statements with a `Product` for each product of a value with a parameter of two axes
    or more, and an `Outer` for each outer product that is added to one's gradient."""
    kinds = {target.kind for target, _ in statements.writes} | {"grad_param"}
    matrices = {v: n for n, v in statements.inputs_of("param").items() if len(v.axes) > 1}
    copies: dict[Value, Value] = {}

    def copy_of(value: Value) -> Value:
        return copies.get(value, value)

    for value in statements.values:
        definition = _product(value, matrices) or value.definition
        copies[value] = Value(value.node, value.axes, with_sources(definition, copy_of))
    writes, outers = list[tuple[Target, Value | float]](), statements.outers.copy()
    for target, source in statements.writes:
        found = _outers(target, source)
        outers += found
        if not found:
            writes.append((target, copy_of(source) if isinstance(source, Value) else source))
    outers = [outer.of(copy_of) for outer in outers]
    values = [copies[value] for value in statements.values]
    return replace(statements, values=values, writes=writes, outers=outers).only(kinds)


def _in_memory(value: Value) -> Value:
    """Return the value of which one is a copy with its axes in another order, or itself."""
    definition = value.definition
    is_copy = isinstance(definition, Rename) and definition.names == definition.source.axes
    return definition.source if isinstance(definition, Rename) and is_copy else value


def _product(value: Value, matrices: dict[Value, int]) -> Product | None:
    """Return the product of a value and a parameter that a sum over axes is, or None.

    Vectors of a kernel run along the result's last axis, and sums along the other factor's.
    """
    terms, sums = value, set[str]()
    while isinstance(terms.definition, Reduce) and terms.definition.op == "sum":
        sums.add(terms.definition.axis)
        terms = terms.definition.source
    if not sums:
        return None
    factors = tuple(map(_in_memory, operands(terms, MULTIPLY)))
    for source, matrix in zip(factors, reversed(factors), strict=True):
        if matrix not in matrices or not value.axes or not sums <= {*source.axes} & {*matrix.axes}:
            continue
        axis, to = source.axes[-1], value.axes[-1]
        is_new = to in matrix.axes and to not in source.axes
        if axis in sums and is_new and matrix.axes[-1] in (axis, to) and _few(matrix.axes):
            axes = matrix.axes if len(matrix.axes) > 2 else ()
            return Product(source, matrices[matrix], matrix.axes[-1] == axis, axis, to, axes)
    return None


def _few(axes: Axes) -> bool:
    """Check whether kernels have loops for all axes of a parameter."""
    return len(axes) <= 2 + OTHER_AXES


def _outers(target: Target, source: Value | float) -> list[Outer]:
    """Return the outer products whose sum is added to a parameter's gradient; none for other
    terms."""
    if target.kind != "grad_param" or len(target.axes) < 2 or not isinstance(source, Value):
        return []
    source = _in_memory(source)
    factors, to = operands(source, MULTIPLY), target.axes[-1]
    for lhs, rhs in zip(factors, reversed(factors), strict=True):
        is_whole = {*lhs.axes, *rhs.axes} == {*target.axes} and _few(target.axes)
        if is_whole and lhs.axes and rhs.axes[-1:] == (to,) and to not in lhs.axes:
            if lhs.axes[-1] in rhs.axes:
                continue
            axes = target.axes if len(target.axes) > 2 else ()
            return [Outer(target.number, lhs, rhs, lhs.axes[-1], to, axes)]
    terms = [_outers(target, term) for term in operands(source, torch.ops.aten.add.Tensor)]
    return [outer for outers in terms for outer in outers] if all(terms) else []
