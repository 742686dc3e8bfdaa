"""The step of a matrix cell as statements over named axes: pointwise, reductions and products.

Kernels of every target are emitted from them. A value is a function of the indices of its axes, so
views that only reorder or broadcast axes make no statement. Gates and states are of one head.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import fx

from pararnn.cells.matrix import VALUES, Axes
from pararnn.program.trace import CONSTANTS, IDENTITIES, PRODUCTS, Graph, is_pointwise, op_of

aten = torch.ops.aten

VIEWS = {
    *IDENTITIES,
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.squeeze.default,
    aten.expand.default,
    aten.select.int,
    aten.slice.Tensor,
}
"""Ops that keep the order of axes longer than 1, and may broadcast others."""
REDUCTIONS = {
    aten.sum.default: "sum",
    aten.sum.dim_IntList: "sum",
    aten.mean.default: "mean",
    aten.mean.dim: "mean",
    aten.amax.default: "max",
    aten.amin.default: "min",
}
CHOOSE_AXES = {
    *REDUCTIONS,
    aten.permute.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.select.int,
    aten._softmax.default,
    aten._log_softmax.default,
}
"""Ops whose numeric arguments choose axes."""


class CannotGenerate(Exception):
    """An operation that has no statement; the text names it, for a message."""


@dataclass(eq=False)
class Value:
    """A tensor of one head, by its axes in the order of memory. node: in `Statements.graph`, where
    arguments of pointwise calls are nodes of values. definition: None for an input."""

    node: fx.Node
    axes: Axes
    definition: Point | Reduce | Product | None = None


@dataclass(eq=False)
class Point:
    """A pointwise call: node.target of node.args, which include the nodes of `values`."""

    values: tuple[Value, ...]


@dataclass(eq=False)
class Reduce:
    """A sum, max or min over one axis."""

    op: str
    source: Value
    axis: str


@dataclass(eq=False)
class Product:
    """The product of a value with a parameter that is a square matrix, along one axis of it:
    y[..., l] = sum over j of x[..., j] M[j, l], M the parameter or, if `transposes`, its transpose.
    """

    source: Value
    param: int
    transposes: bool
    axis: str


class Outer(NamedTuple):
    """A term of the gradient of a square matrix: [j, l] = sum over all other axes of
    lhs[..., j] rhs[..., l], both along `axis`."""

    param: int
    lhs: Value
    rhs: Value
    axis: str


class Target(NamedTuple):
    """An array that a result is written to, such as ("new_state", 0), and its axes.

    adds: whether the result is added to the array.
    """

    kind: str
    number: int
    axes: Axes
    adds: bool = False


@dataclass
class Statements:
    """A pass over one step: values in order of computation, and the results.

    inputs: by kind and number. writes: values, or numbers, by target.
    """

    graph: fx.Graph = field(default_factory=fx.Graph)
    inputs: dict[tuple[str, int], Value] = field(default_factory=dict)
    values: list[Value] = field(default_factory=list)
    writes: list[tuple[Target, Value | float]] = field(default_factory=list)
    outers: list[Outer] = field(default_factory=list)

    def only(self, kinds: Iterable[str]) -> Statements:
        """Return the statements that targets of these kinds need."""
        writes = [(target, value) for target, value in self.writes if target.kind in kinds]
        live = {value for _, value in writes if isinstance(value, Value)}
        leaves = {*self.inputs.values()}
        for value in reversed(self.values):
            if value in live and value not in leaves:
                live.update(sources_of(value))
        values = [value for value in self.values if value in live and value not in leaves]
        return Statements(self.graph, self.inputs, values, writes)

    def remainder(self, kind: str, source_kind: str) -> Statements:
        """Return the statements that targets of a kind need; values that are written to targets of
        `source_kind` are inputs of it."""
        inputs = dict(self.inputs)
        for target, value in self.writes:
            if target.kind == source_kind and isinstance(value, Value):
                inputs[source_kind, target.number] = value
        return Statements(self.graph, inputs, self.values, self.writes).only([kind])


def sources_of(value: Value) -> tuple[Value, ...]:
    """Return the values that a value is computed from."""
    definition = value.definition
    if definition is None:
        return ()
    return definition.values if isinstance(definition, Point) else (definition.source,)


def order_of_axes(tensors: Iterable[Axes]) -> Axes:
    """Return all axes in an order that every tensor has, `VALUES` as late as possible.

    Raises CannotGenerate where there is none.
    """
    tensors = [axes for axes in tensors if len({*axes}) == len(axes)]
    names = sorted({axis for axes in tensors for axis in axes}, key=lambda a: (a == VALUES, a))
    order: list[str] = []
    while len(order) < len(names):
        later = {axis for axes in tensors for axis in [a for a in axes if a not in order][1:]}
        first = next((a for a in names if a not in order and a not in later), None)
        if first is None:
            raise CannotGenerate("tensors that have two axes in both orders")
        order.append(first)
    return tuple(order)


@dataclass(frozen=True)
class _Matrix:
    """A parameter with one axis twice, or its transpose."""

    param: int
    transposes: bool


@dataclass(frozen=True)
class _Outers:
    """The gradient of a matrix, a sum of outer products (lhs, rhs)."""

    terms: tuple[tuple[Value, Value], ...]


_CURES = {
    aten.max.dim: " (write amax, whose gradient equal entries share)",
    aten.min.dim: " (write amin, whose gradient equal entries share)",
}
"""What to write for some ops without statements."""


def _first_change(pairs: Iterable[tuple[fx.Node, fx.Node]]) -> Any:
    """Return the op of the first node that differs from its partner by more than constants, or
    None. A dimension is no constant where it chooses an axis."""
    partner: dict[fx.Node, fx.Node] = {}

    def agree(a: Any, b: Any, exact: bool) -> bool:
        if isinstance(a, fx.Node) or isinstance(b, fx.Node):
            return isinstance(a, fx.Node) and partner.get(a) is b
        if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
            return len(a) == len(b) and all(agree(x, y, exact) for x, y in zip(a, b, strict=True))
        return not exact or a == b

    for a, b in pairs:
        same = a.op == b.op and (a.op == "placeholder" or a.target == b.target)
        if not same or not agree(a.args, b.args, a.target in CHOOSE_AXES):
            return op_of(a)
        partner[a] = b
    return None


class _Lowering:
    """Statements of a graph on small, distinct lengths; constants from one on the cell's."""

    def __init__(self, order: Axes, small: Mapping[str, int], lengths: Mapping[str, int]) -> None:
        self.order, self.lengths = order, lengths
        self.axis_of = {length: axis for axis, length in small.items()}
        self.out = Statements()
        self.entries: dict[fx.Node, Any] = {}
        self.op = ""  # the op of the step that is lowered, which may take several statements

    def run(
        self, small: Graph, sized: Graph, inputs: Sequence[Target], targets: Sequence[Target]
    ) -> Statements:
        """Return the statements of a graph, given its inputs' axes and its results' targets."""
        pairs = [*zip(small.module.graph.nodes, sized.module.graph.nodes, strict=False)]
        change = _first_change(pairs)
        if change is not None or len(small.module.graph.nodes) != len(sized.module.graph.nodes):
            name = f" ({change})" if change is not None else ""
            ones = [axis for axis, length in self.lengths.items() if length == 1]
            cure = f"; axis {ones[0]} has length 1: leave it out" if ones else ""
            raise CannotGenerate(f"operations that depend on the lengths of axes{name}{cure}")
        arguments = iter(inputs)
        for node, sized_node in pairs:
            if node.op == "placeholder":
                self.entries[node] = self._input(next(arguments))
            elif node.op == "output":
                self._write(node.args[0], sized_node.args[0], targets)
            else:
                self.op = op_of(node)
                entry = self.entries[node] = self._call(node, sized_node)
                axes = [*filter(None, self.dims(node))] if isinstance(entry, Value) else []
                if len({*axes}) < len(axes):
                    raise CannotGenerate(f"{op_of(node)}, which makes one axis twice")
                if isinstance(entry, Value):
                    size = tuple(self.lengths[axis] if axis else 1 for axis in self.dims(node))
                    if tuple(sized_node.meta["shape"]) != size:
                        raise CannotGenerate(f"{op_of(node)}, whose axes depend on their lengths")
        return self.out

    def _input(self, target: Target) -> Any:
        if len({*target.axes}) < len(target.axes):
            if target.kind != "param" or len(target.axes) != 2:
                raise CannotGenerate(f"a {target.kind} that has one axis twice")
            return _Matrix(target.number, False)
        node = self.out.graph.placeholder(f"{target.kind}_{target.number}")
        node.meta["dtype"] = torch.float32
        value = self.out.inputs[target.kind, target.number] = Value(node, target.axes)
        return value

    def _write(self, results: Any, numbers: Any, targets: Sequence[Target]) -> None:
        for result, number, target in zip(results, numbers, targets, strict=True):
            value = self.entries[result] if isinstance(result, fx.Node) else float(number)
            if isinstance(value, _Outers):
                (axis, _) = target.axes
                self.out.outers += [Outer(target.number, *term, axis) for term in value.terms]
            elif isinstance(value, _Matrix):
                raise CannotGenerate("a matrix that is a result")
            elif len({*target.axes}) < len(target.axes):
                if value != 0:
                    raise CannotGenerate("a gradient of a matrix that is no outer product")
            else:
                self.out.writes.append((target, value))

    def _call(self, node: fx.Node, sized_node: fx.Node) -> Any:
        target: Any = node.target
        if target in (aten.scalar_tensor.default, aten.full.default):
            return float(sized_node.args[CONSTANTS[target]])  # type: ignore[arg-type]
        if target in VIEWS:
            return self._view(node)
        if target is aten.permute.default:
            return self._permute(node)
        if target in REDUCTIONS:
            return self._reduction(node)
        if target in PRODUCTS:
            return self._product(node)
        if target in (aten._softmax.default, aten._log_softmax.default):
            return self._softmax(node, target is aten._log_softmax.default)
        if is_pointwise(target):
            return self._point_of(node, sized_node)
        raise CannotGenerate(op_of(node) + _CURES.get(target, ""))

    def dims(self, node: Any) -> tuple[str | None, ...]:
        """Return the axis of each dimension of a node, None for one of length 1."""
        try:
            return tuple(None if size == 1 else self.axis_of[size] for size in node.meta["shape"])
        except KeyError:
            raise CannotGenerate(f"{op_of(node)}, which joins or splits axes") from None

    def point(
        self,
        target: Any,
        *args: Any,
        dtype: torch.dtype = torch.float32,
        kwargs: dict[str, Any] | None = None,
    ) -> Value:
        """Add a pointwise call of values and numbers, with a result of `dtype`."""
        values = tuple(arg for arg in args if isinstance(arg, Value))
        axes = {axis for value in values for axis in value.axes}
        nodes = tuple(arg.node if isinstance(arg, Value) else arg for arg in args)
        call = self.out.graph.call_function(target, nodes, kwargs or {})
        call.meta["dtype"] = dtype
        return self._add(call, axes, Point(values))

    def reduce(self, op: str, value: Any, axis: str | None) -> Any:
        """Add a reduction over an axis, which the value may not have."""
        if axis is None:
            return value
        if not isinstance(value, Value):
            return value * self.lengths[axis] if op == "sum" else value
        if axis not in value.axes:
            if op != "sum":
                return value
            return self.point(aten.mul.Tensor, value, float(self.lengths[axis]))
        axes = {a for a in value.axes if a != axis}
        return self._add(self._node(), axes, Reduce(op, value, axis))

    def _node(self) -> fx.Node:
        call = self.out.graph.placeholder(f"result_{len(self.out.values)}")
        call.meta["dtype"] = torch.float32
        return call

    def _add(
        self, node: fx.Node, axes: Iterable[str], definition: Point | Reduce | Product
    ) -> Value:
        node.meta["op"] = self.op
        value = Value(node, tuple(axis for axis in self.order if axis in {*axes}), definition)
        self.out.values.append(value)
        return value

    def _view(self, node: fx.Node) -> Any:
        source: Any = node.args[0]
        old, new = ([axis for axis in self.dims(n) if axis] for n in (source, node))
        if not {*old} <= {*new}:
            raise CannotGenerate(f"{op_of(node)}, which takes one entry of an axis")
        if [axis for axis in new if axis in old] != old:
            raise CannotGenerate(f"{op_of(node)}, which reorders axes")
        return self.entries[source]

    def _permute(self, node: fx.Node) -> Any:
        source, order = cast("tuple[fx.Node, list[int]]", node.args)
        entry = self.entries[source]
        if not isinstance(entry, (_Matrix, _Outers)):
            return entry
        first, second = (i for i, axis in enumerate(self.dims(source)) if axis)
        if order.index(first) < order.index(second):
            return entry
        if isinstance(entry, _Matrix):
            return _Matrix(entry.param, not entry.transposes)
        return _Outers(tuple((rhs, lhs) for lhs, rhs in entry.terms))

    def _reduction(self, node: fx.Node) -> Any:
        value, dims = self._plain(node, node.args[0]), self.dims(node.args[0])
        listed_dims: Any = node.args[1] if len(node.args) > 1 else None
        op = REDUCTIONS[node.target]  # type: ignore[index]
        axes = [axis for i in listed_dims or range(len(dims)) if (axis := dims[i])]
        for axis in axes:
            value = self.reduce("sum" if op == "mean" else op, value, axis)
        if op != "mean":
            return value
        count = float(math.prod(self.lengths[axis] for axis in axes))
        return self.point(aten.div.Tensor, value, count)

    def _product(self, node: fx.Node) -> Any:
        a, b = node.args
        lhs, rhs = self.entries[a], self.entries[b]  # type: ignore[index]
        lhs_axes, rhs_axes = self.dims(a), self.dims(b)
        axis = lhs_axes[-1]
        rows = lhs_axes[-2] if len(lhs_axes) > 1 else None
        columns = rhs_axes[-1] if len(rhs_axes) > 1 else None
        if isinstance(rhs, _Matrix) and isinstance(lhs, Value):
            return self._matrix_product(node, lhs, rhs, axis, rows)
        if isinstance(lhs, _Matrix) and isinstance(rhs, Value):
            matrix = _Matrix(lhs.param, not lhs.transposes)
            return self._matrix_product(node, rhs, matrix, axis, columns)
        if any(isinstance(entry, (_Matrix, _Outers)) for entry in (lhs, rhs)):
            raise CannotGenerate(f"{op_of(node)} of two matrices with one axis twice")
        if not (isinstance(lhs, Value) or isinstance(rhs, Value)):
            return self.reduce("sum", lhs * rhs, axis)
        if rows is not None and rows == columns:
            return self._outer(node, lhs, rhs, axis, rows)
        return self.reduce("sum", self.point(aten.mul.Tensor, lhs, rhs), axis)

    def _matrix_product(
        self, node: fx.Node, value: Value, matrix: _Matrix, axis: str | None, free_axis: str | None
    ) -> Value:
        if axis is None or axis not in value.axes or axis == free_axis:
            raise CannotGenerate(f"{op_of(node)}, which sums a parameter's entries")
        definition = Product(value, matrix.param, matrix.transposes, axis)
        return self._add(self._node(), value.axes, definition)

    def _outer(
        self, node: fx.Node, lhs: Value, rhs: Value, inner: str | None, axis: str
    ) -> _Outers:
        inner_axes = {inner} - {None}
        wanted = {axis, *inner_axes}
        axes = [{*v.axes} if isinstance(v, Value) else None for v in (lhs, rhs)]
        if axes != [wanted, wanted]:
            raise CannotGenerate(f"{op_of(node)}, which makes a matrix with one axis twice")
        return _Outers(((lhs, rhs),))

    def _softmax(self, node: fx.Node, logarithm: bool) -> Value:
        value, (_, dim, _) = self._plain(node, node.args[0]), node.args
        axis = self.dims(node.args[0])[dim]  # type: ignore[index]
        difference = self.point(aten.sub.Tensor, value, self.reduce("max", value, axis))
        powers = self.point(aten.exp.default, difference)
        total = self.reduce("sum", powers, axis)
        if logarithm:
            return self.point(aten.sub.Tensor, difference, self.point(aten.log.default, total))
        return self.point(aten.div.Tensor, powers, total)

    def _point_of(self, node: fx.Node, sized: fx.Node) -> Any:
        entries = [self.entries[n] for n in node.all_input_nodes]
        if any(isinstance(entry, _Outers) for entry in entries):
            if node.target is aten.add.Tensor and all(isinstance(e, _Outers) for e in entries):
                return _Outers(tuple(term for entry in entries for term in entry.terms))
            raise CannotGenerate(f"{op_of(node)} of a matrix's gradient")
        args = [
            self._plain(node, arg) if isinstance(arg, fx.Node) else number
            for arg, number in zip(node.args, sized.args, strict=True)
        ]
        return self.point(node.target, *args, dtype=sized.meta["dtype"], kwargs=sized.kwargs)

    def _plain(self, node: fx.Node, argument: Any) -> Any:
        entry = self.entries[argument]
        if isinstance(entry, (_Matrix, _Outers)):
            raise CannotGenerate(f"{op_of(node)} of a matrix that multiplies")
        return entry


def statements_of(
    small: Graph,
    sized: Graph,
    axes: tuple[Axes, Mapping[str, int], Mapping[str, int]],
    inputs: Sequence[Target],
    targets: Sequence[Target],
) -> Statements:
    """Return the statements of a function that was traced twice: on small and distinct lengths of
    axes, and on the cell's.

    axes: their order, and both lengths. inputs, targets: those of arguments and results. Raises
    CannotGenerate, which names an operation.
    """
    return _Lowering(*axes).run(small, sized, inputs, targets)


@dataclass(eq=False)
class Nest:
    """Nested loops over axes, the last one by vectors, and the contents of their body, in order."""

    axes: Axes
    points: list[Value] = field(default_factory=list)
    reductions: list[Value] = field(default_factory=list)
    writes: list[tuple[Target, Value | float]] = field(default_factory=list)


Operation = Nest | Value | Outer
"""A nest of loops, a product (the value that it computes) or an outer product."""


@dataclass(eq=False)
class Schedule:
    """Operations in order. arrays: values that other loops read than those that compute them."""

    operations: list[Operation]
    arrays: list[Value]


def schedule(statements: Statements) -> Schedule:
    """Order statements into loops, as few as their dependencies allow.

    A reduction or a product begins a stage: what reads it comes in a later one. Pointwise values
    are computed in the stage that first reads them, in registers if no other loop reads them.
    """
    ready: dict[Value, int] = dict.fromkeys(statements.inputs.values(), 0)
    stage_of: dict[Value, int] = {}
    for value in statements.values:
        stage_of[value] = max((ready[source] for source in sources_of(value)), default=0)
        ready[value] = stage_of[value] + (not isinstance(value.definition, Point))
    readers: dict[Value, list[tuple[int, Any]]] = {}

    def note(source: Value | float, stage: int, reader: Any) -> None:
        if isinstance(source, Value):
            readers.setdefault(source, []).append((stage, reader))

    for target, source in statements.writes:
        note(source, ready[source] if isinstance(source, Value) else 0, target.axes)
    outer_stages = [max(ready[outer.lhs], ready[outer.rhs]) for outer in statements.outers]
    for stage, outer in zip(outer_stages, statements.outers, strict=True):
        note(outer.lhs, stage, outer)
        note(outer.rhs, stage, outer)
    for value in reversed(statements.values):
        is_point = isinstance(value.definition, Point)
        if is_point and value in readers:
            stage_of[value] = min(stage for stage, _ in readers[value])
        nest: Any = value.axes
        if isinstance(value.definition, Reduce):
            nest = value.definition.source.axes
        elif isinstance(value.definition, Product):
            nest = value
        for source in sources_of(value):
            note(source, stage_of[value], nest)
    nests: dict[tuple[int, int, Axes], Nest] = {}
    calls: dict[int, list[Value | Outer]] = {}

    def nest_of(stage: int, axes: Axes) -> Nest:
        return nests.setdefault((stage, len(axes), axes), Nest(axes))

    for value in statements.values:
        if isinstance(value.definition, Point):
            nest_of(stage_of[value], value.axes).points.append(value)
        elif isinstance(value.definition, Reduce):
            nest_of(stage_of[value], value.definition.source.axes).reductions.append(value)
        else:
            calls.setdefault(stage_of[value], []).append(value)
    for target, source in statements.writes:
        stage = max(ready[source], stage_of.get(source, 0)) if isinstance(source, Value) else 0
        nest_of(stage, target.axes).writes.append((target, source))
    for stage, outer in zip(outer_stages, statements.outers, strict=True):
        calls.setdefault(stage, []).append(outer)
    last = max([*calls, *(key[0] for key in nests), 0])
    operations: list[Operation] = []
    for stage in range(last + 1):
        operations += [nests[key] for key in sorted(nests) if key[0] == stage]
        operations += calls.get(stage, [])

    def escapes(value: Value) -> bool:
        home = (stage_of[value], value.axes)
        return any((stage, reader) != home for stage, reader in readers.get(value, []))

    arrays = [v for v in statements.values if not isinstance(v.definition, Point) or escapes(v)]
    return Schedule(operations, arrays)
