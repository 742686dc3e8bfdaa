"""Sums over an axis rewritten so that they wait for less and are fewer.

A factor that does not change along the axis, such as what another sum gives, multiplies the sum
rather than its terms where the sum then needs not wait for it. Sums with the same factors are added
up first, and multiplied once: a norm of several vectors has one sum for its mean.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial, reduce
from typing import Any, NamedTuple

import torch
from torch import fx

from pararnn.program.statements import (
    Point,
    Product,
    Reduce,
    Statements,
    Value,
    operands,
    sources_of,
    with_sources,
)

aten = torch.ops.aten
ADD, SUBTRACT, NEGATE = aten.add.Tensor, aten.sub.Tensor, aten.neg.default
MULTIPLY, DIVIDE, POWER = aten.mul.Tensor, aten.div.Tensor, aten.pow.Tensor_Scalar


class _Term(NamedTuple):
    """A number times factors without the axis of a sum, times a value."""

    number: float
    factors: tuple[Value, ...]
    value: Value

    def scaled(self, number: float, *factors: Value) -> _Term:
        """Return the term times more."""
        # In an order that every process has: kernels are cached by their text, and round by it.
        ordered = sorted((*self.factors, *factors), key=lambda factor: factor.node.name)
        return _Term(self.number * number, tuple(ordered), self.value)


def with_early_sums(statements: Statements) -> Statements:
    """Return statements with the same results, whose sums have few and early terms."""
    return _Rewriting(statements).run()


class _Rewriting:
    """The values so far: copies of the original ones, and how many sums and products follow each
    other up to each of them."""

    def __init__(self, statements: Statements) -> None:
        self.statements = statements
        self.values: list[Value] = []
        self.copies: dict[Value, Value] = {}
        self.nodes: dict[fx.Node, fx.Node] = {}
        self.depths: dict[Value, int] = {}
        self.forms: dict[Value, list[_Term]] = {}

    def run(self) -> Statements:
        """Return the statements of copies."""
        for value in self.statements.values:
            copy = self._copy(value)
            self.copies[value], self.nodes[value.node] = copy, copy.node
        writes = [(target, self._copy_of(value)) for target, value in self.statements.writes]
        outers = [outer.of(self._copy_of) for outer in self.statements.outers]
        whole = replace(self.statements, values=self.values, writes=writes, outers=outers)
        return whole.only({target.kind for target, _ in writes} | {"grad_param"})

    def _copy_of(self, value: Any) -> Any:
        return self.copies.get(value, value) if isinstance(value, Value) else value

    def _copy(self, value: Value) -> Value:
        definition = with_sources(value.definition, self._copy_of)
        if isinstance(definition, Point):
            return self._collected(self._add(self._call(value.node), value.axes, definition))
        if isinstance(definition, Reduce) and definition.op == "sum":
            return self._sum(definition.source, definition.axis, value)
        return self._add(value.node, value.axes, definition)

    def _call(self, node: fx.Node) -> fx.Node:
        """Return a call of copies in place of one of originals."""
        args = fx.node.map_arg(node.args, lambda n: self.nodes.get(n, n))
        if args == node.args:
            return node
        return self._node(node.target, args, node.kwargs, node)

    def _node(self, target: Any, args: Any, kwargs: Any, like: fx.Node) -> fx.Node:
        call = self.statements.graph.call_function(target, args, kwargs)
        call.meta |= like.meta
        return call

    def _add(self, node: fx.Node, axes: tuple[str, ...], definition: Any) -> Value:
        value = Value(node, axes, definition)
        self.values.append(value)
        waits = isinstance(definition, (Reduce, Product))
        self.depths[value] = max(map(self._depth, sources_of(value)), default=0) + waits
        return value

    def _depth(self, value: Value) -> int:
        return self.depths.get(value, 0)

    def _point(self, like: Value, target: Any, *args: Value | float) -> Value:
        """Add a pointwise call with a result like another value."""
        values = tuple(arg for arg in args if isinstance(arg, Value))
        names = {axis for value in values for axis in value.axes}
        axes = tuple(axis for axis in like.axes if axis in names)
        numbers = tuple(arg.node if isinstance(arg, Value) else arg for arg in args)
        return self._add(self._node(target, numbers, {}, like.node), axes, Point(values))

    def _total(self, like: Value, terms: Sequence[_Term]) -> Value:
        scaled = []
        for number, factors, value in terms:
            value = reduce(partial(self._point, like, MULTIPLY), factors, value)
            scaled.append(value if number == 1 else self._point(like, MULTIPLY, value, number))
        return reduce(partial(self._point, like, ADD), scaled)

    def _sum(self, source: Value, axis: str, original: Value) -> Value:
        """Add the sum over an axis; factors come after it where it is earlier without them."""
        terms = _terms(source, axis)
        first = max(self._depth(term.value) for term in terms)
        if first == self._depth(source):
            definition = Reduce("sum", source, axis)
            return self._add(original.node, original.axes, definition)
        sums = []
        for group in _groups(terms):
            inner = self._total(source, [_Term(1.0, (), term.value) for term in group])
            axes = tuple(a for a in inner.axes if a != axis)
            node = self.statements.graph.placeholder(f"sum_{len(self.values)}")
            node.meta |= original.node.meta
            whole = self._add(node, axes, Reduce("sum", inner, axis))
            sums.append(group[0]._replace(value=whole))
        total = self._total(original, sums)
        self.forms[total] = sums
        return total

    def _collected(self, value: Value) -> Value:
        """Return a sum of sums with factors so that these come once, after it; or another value as
        it is."""
        terms = self._sums(value) if value.node.target in (ADD, SUBTRACT) else None
        groups = _groups(terms or ())
        if terms is None or len(groups) == len(terms):
            return value
        if all(term.number == 1 and not term.factors for term in terms):
            return value
        totals = []
        for group in groups:
            inner = self._total(value, [_Term(1.0, (), term.value) for term in group])
            totals.append(group[0]._replace(value=inner))
        return self._total(value, totals)

    def _sums(self, value: Value) -> list[_Term] | None:
        """Return the sums over axes, with factors, of which a value is the sum; None for another
        value."""
        if value in self.forms:
            return self.forms[value]
        if isinstance(value.definition, Reduce) and value.definition.op == "sum":
            return [_Term(1.0, (), value)]
        parts = _parts(value)
        if parts is None:
            forms = [self._sums(source) for source in _factors(value)]
            found = [form for form in forms if form is not None]
            if len(found) != 1:
                return None
            (factor,) = (x for x, form in zip(_factors(value), forms, strict=True) if form is None)
            return [term.scaled(1.0, factor) for term in found[0]]
        terms = []
        for number, source in parts:
            form = self._sums(source)
            if form is None:
                return None
            terms += [term.scaled(number) for term in form]
        return terms


def _groups(terms: Iterable[_Term]) -> list[list[_Term]]:
    """Return terms in groups with the same numbers and factors."""
    groups: dict[tuple[object, ...], list[_Term]] = {}
    for term in terms:
        groups.setdefault((term.number, term.factors), []).append(term)
    return [*groups.values()]


def _terms(value: Value, axis: str) -> list[_Term]:
    """Return the terms with an axis that a value is the sum of."""
    parts, factors = _parts(value), _factors(value)
    if parts is not None and all(axis in source.axes for _, source in parts):
        return [term.scaled(n) for n, source in parts for term in _terms(source, axis)]
    constant = [x for x in factors if axis not in x.axes]
    if len(constant) == 1:
        (varying,) = (x for x in factors if axis in x.axes)
        return [term.scaled(1.0, *constant) for term in _terms(varying, axis)]
    return [_Term(1.0, (), value)]


def _parts(value: Value) -> list[tuple[float, Value]] | None:
    """Return the values, with numbers, that a pointwise value is the sum of; None for another."""
    if not isinstance(value.definition, Point) or value.node.kwargs:
        return None
    target, sources, args = value.node.target, value.definition.values, value.node.args
    if target is NEGATE or (target is POWER and args[1] == 1):
        return [(-1.0 if target is NEGATE else 1.0, sources[0])]
    if target in (ADD, SUBTRACT) and len(sources) == 2:
        return [(1.0, sources[0]), (1.0 if target is ADD else -1.0, sources[1])]
    number = args[1] if target in (MULTIPLY, DIVIDE) and len(sources) == 1 else None
    if isinstance(number, (int, float)) and number != 0:
        return [(float(number) if target is MULTIPLY else 1 / number, sources[0])]
    return None


def _factors(value: Value) -> tuple[Value, ...]:
    """Return the two values that a value is the product of; none for another."""
    factors = operands(value, MULTIPLY)
    return factors if len({*factors}) == 2 else ()


def distances_from_mean(
    squares: Sequence[Value], sums: Sequence[Value], whole: Value, count: int
) -> bool:
    """Check whether values are the squares of the distances of other ones, with `count` numbers
    each, from the mean of all, whose sum is a value."""
    if len(squares) != len(sums):
        return False
    found = []
    for square in squares:
        factors = _square_root(square)
        parts = None if factors is None else _parts(factors)
        if parts is None or len(parts) != 2 or [number for number, _ in parts] != [1.0, -1.0]:
            return False
        (_, value), (_, mean) = parts
        number = 1.0
        while (steps := _parts(mean)) is not None and len(steps) == 1:
            ((scale, mean),) = steps
            number *= scale
        if mean is not whole or abs(number * count * len(sums) - 1) > 1e-6:
            return False
        found.append(value)
    return {*found} == {*sums} and len({*found}) == len(found)


def _square_root(value: Value) -> Value | None:
    """Return the value of which one is the square, None for another."""
    sources = sources_of(value) if isinstance(value.definition, Point) else ()
    is_power = value.node.target is POWER and value.node.args[1] == 2
    is_product = value.node.target is MULTIPLY and len(sources) == 2 and sources[0] is sources[1]
    return sources[0] if is_power or is_product else None
