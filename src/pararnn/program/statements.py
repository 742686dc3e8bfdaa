"""A step and its gradients as statements over named axes: pointwise, reductions and products.

Kernels of every target are emitted from them. A value is a function of the indices of its axes, so
views that only reorder or broadcast axes make no statement. Gates and states are of one head. Where
a tensor has an axis twice, as X X^T has, the second goes by an alias, and values that are read by
other names than theirs are renamed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from typing import Any, NamedTuple, cast

import torch
from torch import fx

from pararnn.cells.matrix import VALUES, Axes
from pararnn.cells.products import MIX, OUTER
from pararnn.cells.windows import OVERLAP, WINDOWS
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


RENAMED = "a tensor with one axis twice or axes in both orders, windows, or one entry of an axis"
"""What neither chunks nor segments of time have, see `Statements.renames`."""


class CannotGenerate(Exception):
    """A step that kernels cannot be generated for; the text is the reason."""


class NoStatement(CannotGenerate):
    """An operation that has no statement, by its name."""

    def __str__(self) -> str:
        return f"it has no statement for {self.args[0]}"


@dataclass(eq=False)
class Value:
    """A tensor of one head, by its axes in the order of memory. node: in `Statements.graph`, where
    arguments of pointwise calls are nodes of values. definition: None for an input; `repr` leaves
    it out, as it would say all that a value is computed from, once for each way there."""

    node: fx.Node
    axes: Axes
    definition: Definition | None = field(default=None, repr=False)


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
    to: the axis of l; "" for that of j, as all have but those of `program/rectangles.py`. kind:
    "memory" if M is one, whose number is `param`.

    axes: those of a parameter with more than these two, a matrix for each index of the others. Such
    a product sums over all of them that the value has not.
    """

    source: Value
    param: int
    transposes: bool
    axis: str
    to: str = ""
    axes: Axes = ()
    kind: str = "param"


@dataclass(eq=False)
class Rename:
    """A value by other names of its axes. names: those of the result, in the order of the source's
    axes; each is the axis or an alias of it."""

    source: Value
    names: Axes


@dataclass(eq=False)
class Slide:
    """A value whose index along an axis is moved by a number, or by that along another, `taps`, of
    length J: entry [s, j] is the source's at s + by + sign (j - (J - 1) // 2) along the axis, and
    at j if it has `taps`. Outside it is 0."""

    source: Value
    axis: str
    by: int = 0
    taps: str = ""
    sign: int = 1


@dataclass(eq=False)
class Select:
    """The entries of a value at an index along an axis, from the end if it is negative."""

    source: Value
    axis: str
    index: int


@dataclass(eq=False)
class Index:
    """The index along an axis, as a number."""

    axis: str


Definition = Point | Reduce | Product | Rename | Slide | Select | Index
"""What a value is computed by."""


class Outer(NamedTuple):
    """A term of the gradient of a square matrix: [j, l] = sum over all other axes of
    lhs[..., j] rhs[..., l], both along `axis`. to, axes, kind: as in `Product`; each of the other
    axes is that of lhs, of rhs or of both."""

    param: int
    lhs: Value
    rhs: Value
    axis: str
    to: str = ""
    axes: Axes = ()
    kind: str = "param"

    def of(self, function: Callable[[Value], Value]) -> Outer:
        """Return the outer product of a function of both vectors."""
        return self._replace(lhs=function(self.lhs), rhs=function(self.rhs))


class Target(NamedTuple):
    """An array that a result is written to, such as ("new_state", 0), and its axes.

    adds: whether the result is added to the array.
    """

    kind: str
    number: int
    axes: Axes
    adds: bool = False


OF_VECTORS = ("state", "gate", "field", "param")
"""Kinds of the arguments of a step on vectors of channels, in order."""
INPUTS = (*OF_VECTORS, "memory")
"""Kinds of a step's arguments, in order."""
RESULTS = ("new_state", "output")
"""Kinds of a step's results, in order."""
GRADIENTS = tuple(f"grad_{kind}" for kind in INPUTS)
"""Kinds of a step's gradients, in order. The inputs of `grad_new_state` and `grad_output` are the
gradients by its results."""


@dataclass
class Statements:
    """Values in order of computation, and the results: of a step and its gradients, or of a pass.

    inputs: by kind and number. writes: values, or numbers, by target. order: all axes.
    """

    graph: fx.Graph = field(default_factory=fx.Graph)
    inputs: dict[tuple[str, int], Value] = field(default_factory=dict)
    values: list[Value] = field(default_factory=list)
    writes: list[tuple[Target, Value | float]] = field(default_factory=list)
    outers: list[Outer] = field(default_factory=list)
    order: Axes = ()

    @property
    def renames(self) -> bool:
        """Whether there is `RENAMED`."""
        kinds = Rename, Slide, Select, Index
        renamed = any(isinstance(value.definition, kinds) for value in self.values)
        return renamed or any(axis_of_alias(axis) != axis for axis in self.order)

    def only(
        self, kinds: Collection[str], given: Mapping[tuple[str, int], Value] | None = None
    ) -> Statements:
        """Return the statements that targets of these kinds need, where values in `given` are
        inputs."""
        inputs = self.inputs | dict(given or {})
        writes = [(target, value) for target, value in self.writes if target.kind in kinds]
        outers = self.outers if "grad_param" in kinds else []
        pass_ = replace(self, inputs=inputs, writes=writes, outers=outers)
        live, leaves = pass_.ancestors(pass_.results()), {*inputs.values()}
        pass_.values = [value for value in self.values if value in live and value not in leaves]
        return pass_

    def ancestors(self, results: Iterable[Value]) -> set[Value]:
        """Return results, and all values and inputs that they are computed from."""
        values, inputs = {*results}, {*self.inputs.values()}
        for value in reversed(self.values):
            if value in values and value not in inputs:
                values.update(sources_of(value))
        return values

    def inputs_of(self, kind: str) -> dict[int, Value]:
        """Return the inputs of a kind by number."""
        return {number: value for (name, number), value in self.inputs.items() if name == kind}

    def results(self) -> list[Value]:
        """Return the values that are written, and the vectors of outer products."""
        written = [value for _, value in self.writes if isinstance(value, Value)]
        return [*written, *(vector for outer in self.outers for vector in (outer.lhs, outer.rhs))]

    def written(self, kind: str) -> dict[tuple[str, int], Value]:
        """Return the values that are written to targets of a kind, by these."""
        pairs = [(t, v) for t, v in self.writes if t.kind == kind and isinstance(v, Value)]
        return {(kind, target.number): value for target, value in pairs}

    def readers(self) -> dict[Value, list[Value | None]]:
        """Return the values that read each value, and None for each result that is that value."""
        readers: dict[Value, list[Value | None]] = {}
        for value in self.values:
            for source in sources_of(value):
                readers.setdefault(source, []).append(value)
        for value in self.results():
            readers.setdefault(value, []).append(None)
        return readers

    def dependent(self, kind: str) -> dict[Value, frozenset[int]]:
        """Return the inputs of a kind, and the values that depend on one, with the numbers of those
        that each depends on."""
        dependent = {value: frozenset({i}) for i, value in self.inputs_of(kind).items()}
        for value in self.values:
            origins = [dependent[source] for source in sources_of(value) if source in dependent]
            if origins:
                dependent[value] = frozenset().union(*origins)
        return dependent


class Traces(NamedTuple):
    """A traced step: its statements by compute dtype, empty for a `reason`, and the graphs."""

    statements: dict[torch.dtype, Statements]
    graphs: list[Graph]
    reason: str | None = None


def sources_of(value: Value) -> tuple[Value, ...]:
    """Return the values that a value is computed from."""
    definition = value.definition
    if definition is None or isinstance(definition, Index):
        return ()
    return definition.values if isinstance(definition, Point) else (definition.source,)


def with_sources(
    definition: Definition | None, function: Callable[[Value], Value]
) -> Definition | None:
    """Return a definition by a function of the values that it reads."""
    if definition is None or isinstance(definition, Index):
        return definition
    if isinstance(definition, Point):
        return Point(tuple(map(function, definition.values)))
    return replace(definition, source=function(definition.source))


def operands(value: Value, op: Any) -> tuple[Value, ...]:
    """Return the two values of which one is the pointwise `op`; none for another value."""
    sources = sources_of(value)
    is_op = isinstance(value.definition, Point) and value.node.target is op
    return sources if is_op and len(sources) == 2 and not value.node.kwargs else ()


def alias_of(axis: str, number: int) -> str:
    """Return the name of the number-th axis of a tensor with this one several times: K, 2K, 3K. No
    axis of a cell can have it, as theirs are identifiers."""
    return axis if number == 1 else f"{number}{axis}"


def axis_of_alias(name: str) -> str:
    """Return the axis that an alias stands for, and an axis itself."""
    return name.lstrip("0123456789")


def distinct(axes: Iterable[str]) -> Axes:
    """Return axes, or aliases of them, with aliases for all but the first of equal ones."""
    counts: Counter[str] = Counter()
    names: list[str] = []
    for axis in map(axis_of_alias, axes):
        counts[axis] += 1
        names.append(alias_of(axis, counts[axis]))
    return tuple(names)


def sorted_axes(axes: Iterable[str], order: Axes) -> Axes:
    """Return axes, each once, in an order; aliases of an axis come behind it."""
    return tuple(sorted({*axes}, key=lambda a: (order.index(axis_of_alias(a)), len(a), a)))


def is_copy(value: Value) -> bool:
    """Check whether a value has its source's entries in another order, or some of them, or is an
    index: what loops of its own write."""
    definition = value.definition
    moves = isinstance(definition, Rename) and definition.names != value.axes
    return moves or isinstance(definition, (Slide, Select, Index))


def order_of_axes(tensors: Iterable[Axes], may_differ: bool, first: Collection[str]) -> Axes:
    """Return all axes in an order that every tensor has, `VALUES` as late as possible.

    may_differ: whether tensors may have others than those before them. first: axes that are as
    early as possible. Raises NoStatement where tensors may not differ and do.
    """
    tensors = [axes for axes in tensors if len({*axes}) == len(axes)]
    every = {axis for axes in tensors for axis in axes}
    names = sorted(every, key=lambda a: (a == VALUES, a not in first, a))
    agreeing: list[Axes] = []
    order = tuple(names)
    for axes in tensors:
        found = _common_order(names, [*agreeing, axes])
        if found is not None:
            agreeing, order = [*agreeing, axes], found
        elif not may_differ:
            raise NoStatement(
                "tensors that have two axes in both orders (give them one order, and transpose in "
                "the step: param.W.mT)"
            )
    return order


def _common_order(names: Sequence[str], tensors: Sequence[Axes]) -> Axes | None:
    """Return names in an order that every tensor has, early ones first, or None."""
    order: list[str] = []
    while len(order) < len(names):
        later = {axis for axes in tensors for axis in [a for a in axes if a not in order][1:]}
        first = next((a for a in names if a not in order and a not in later), None)
        if first is None:
            return None
        order.append(first)
    return tuple(order)


@dataclass(frozen=True)
class _Matrix:
    """A parameter with one axis twice, or its transpose; kind: as in `Product`."""

    param: int
    transposes: bool
    kind: str


@dataclass(frozen=True)
class _Outers:
    """The gradient of a matrix, a sum of outer products (lhs, rhs)."""

    terms: tuple[tuple[Value, Value], ...]


_CURES = {
    aten.max.dim: " (write amax, whose gradient equal entries share)",
    aten.min.dim: " (write amin, whose gradient equal entries share)",
}
"""What to write for some ops without statements."""


def size_dependence(small: Graph, sized: Graph, numbers_may_differ: bool = False) -> str | None:
    """Return the first op in which traces on other sizes differ, or None. Numbers that choose axes
    may not differ."""
    partner: dict[fx.Node, fx.Node] = {}
    nodes, sized_nodes = small.ops.nodes, sized.ops.nodes

    def agree(a: Any, b: Any, exact: bool) -> bool:
        if isinstance(a, fx.Node) or isinstance(b, fx.Node):
            return isinstance(a, fx.Node) and partner.get(a) is b
        if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
            return len(a) == len(b) and all(agree(x, y, exact) for x, y in zip(a, b, strict=True))
        return not exact or repr(a) == repr(b)

    for a, b in zip(nodes, sized_nodes, strict=False):
        same = a.op == b.op and (a.op == "placeholder" or a.target == b.target)
        exact = not numbers_may_differ or a.target in CHOOSE_AXES
        if not same or not agree((a.args, *a.kwargs.values()), (b.args, *b.kwargs.values()), exact):
            return op_of(a)
        partner[a] = b
    return None if len(nodes) == len(sized_nodes) else "more operations"


def check_numbers_of_length(graph: Graph, longer: Graph, of_calls: Axes) -> None:
    """Check that a graph computes with no number that another length of memories changes. Raises
    NoStatement."""
    change = size_dependence(graph, longer, numbers_may_differ=True)
    if change is not None:
        raise NoStatement(_of_length(change, of_calls))
    for a, b in zip(graph.ops.nodes, longer.ops.nodes, strict=True):
        numbers: Any = a.args, b.args
        if a.target in CONSTANTS:
            numbers = [args[CONSTANTS[a.target]] for args in numbers]
        elif not is_pointwise(a.target):
            continue
        first, second = (fx.node.map_arg(args, lambda node: None) for args in numbers)
        if repr(first) != repr(second):
            raise NoStatement(_of_length(op_of(a), of_calls))


def _of_length(op: str, of_calls: Axes) -> str:
    axes = " or ".join(of_calls)
    return (
        f"{op} by the length of {axes}, which differs between calls: pass numbers that depend on "
        "it as a memory"
    )


class _Lowering:
    """Statements of a graph on small, distinct lengths; constants from one on the cell's.

    of_calls: axes whose lengths are a call's, of which no number may depend. renames: whether
    tensors may have an axis twice.
    """

    def __init__(
        self,
        order: Axes,
        small: Mapping[str, int],
        lengths: Mapping[str, int],
        of_calls: Axes = (),
        renames: bool = False,
    ) -> None:
        self.order, self.lengths, self.of_calls = order, lengths, of_calls
        self.renames, self.renamed_values = renames, dict[tuple[Value, Axes], Value]()
        self.axis_of = {length: axis for axis, length in small.items()}
        self.out = Statements(order=order)
        self.entries: dict[fx.Node, Any] = {}
        self.matrices: dict[fx.Node, Value] = {}  # sums of outer products, as values
        self.axes_of: dict[fx.Node, tuple[Axes, ...]] = {}
        self.joined: dict[int, set[Axes]] = {}  # by the length of axes that a reshape has joined
        self.op = ""  # the op of the step that is lowered, which may take several statements

    def run(
        self, small: Graph, sized: Graph, inputs: Sequence[Target], targets: Sequence[Target]
    ) -> Statements:
        """Return the statements of a graph, given its inputs' axes and its results' targets."""
        change = size_dependence(small, sized, numbers_may_differ=True)
        if change is not None:
            ones = [axis for axis, length in self.lengths.items() if length == 1]
            cure = f"; axis {ones[0]} has length 1: leave it out" if ones else ""
            raise NoStatement(f"operations that depend on the lengths of axes ({change}){cure}")
        arguments, nodes = iter(inputs), small.ops.nodes
        for node, sized_node in zip(nodes, sized.ops.nodes, strict=True):
            if node.op == "placeholder":
                self.entries[node] = self._input(next(arguments))
            elif node.op == "output":
                self._write(node.args[0], sized_node.args[0], targets)
            else:
                self.op = op_of(node)
                entry = self.entries[node] = self._call(node, sized_node)
                if not isinstance(entry, Value):
                    continue
                self._check_twice(self.axes(node))
                size = [math.prod(map(self.length, joined)) for joined in self.dims(node)]
                if [*sized_node.meta["shape"]] != size:
                    raise NoStatement(f"{op_of(node)}, whose axes depend on their lengths")
        values = (*self.out.inputs.values(), *self.out.values)
        used = {axis for value in values for axis in value.axes}
        aliases = {axis for axis in used if axis_of_alias(axis) != axis}
        self.out.order = self._sorted({*self.order, *aliases})
        return self.out

    def _check_twice(self, axes: Sequence[str]) -> None:
        """Check that only axes of fixed length are there twice. Raises NoStatement."""
        for axis in axes:
            base = axis_of_alias(axis)
            if base != axis and (not self.renames or base in self.of_calls):
                why = ", whose length calls decide" if base in self.of_calls else ""
                op = self.op or "an input"
                raise NoStatement(f"{op}, which makes one axis twice, {base}{why}")

    def _sorted(self, axes: Iterable[str]) -> Axes:
        """Return axes and aliases in the order of memory."""
        return sorted_axes(axes, self.order)

    def length(self, axis: str) -> int:
        """Return the cell's length of an axis or an alias."""
        return self.lengths[axis_of_alias(axis)]

    def _input(self, target: Target) -> Any:
        axes = distinct(target.axes)
        if axes != target.axes and target.kind in ("param", "memory"):
            if len(axes) != 2:
                raise NoStatement(f"a {target.kind} that has one axis twice")
            return _Matrix(target.number, False, target.kind)
        self._check_twice(axes)
        node = self.out.graph.placeholder(f"{target.kind}_{target.number}")
        node.meta["dtype"] = torch.float32
        value = self.out.inputs[target.kind, target.number] = Value(node, axes)
        return self._moved(value, self._sorted(axes))

    def _write(self, results: Any, numbers: Any, targets: Sequence[Target]) -> None:
        for result, number, target in zip(results, numbers, targets, strict=True):
            value = self.entries[result] if isinstance(result, fx.Node) else float(number)
            axes, kind = distinct(target.axes), target.kind.removeprefix("grad_")
            is_matrix = axes != target.axes and kind in ("param", "memory")
            if isinstance(value, _Outers) and is_matrix:
                (axis, _) = target.axes
                outers = [Outer(target.number, *term, axis, kind=kind) for term in value.terms]
                self.out.outers += outers
            elif isinstance(value, _Matrix):
                raise NoStatement("a matrix that is a result")
            elif is_matrix and value == 0:
                pass
            elif is_matrix and not self.renames:
                raise NoStatement("a gradient of a matrix that is no outer product")
            else:
                if isinstance(value, _Outers):
                    value = self._plain(result, result)
                if isinstance(value, Value):
                    value = self._moved(value, tuple(a for a in axes if a in value.axes))
                self.out.writes.append((target._replace(axes=axes), value))

    def _call(self, node: fx.Node, sized_node: fx.Node) -> Any:
        target: Any = node.target
        if target in (aten.scalar_tensor.default, aten.full.default):
            return float(sized_node.args[CONSTANTS[target]])  # type: ignore[arg-type]
        if target is aten.select.int and any(self.dims(node.args[0])[node.args[1]]):  # type: ignore[index]
            return self._select(node)
        if target in VIEWS:
            return self._view(node)
        if target is aten.arange.start_step:
            return self._index(node)
        if target is aten.constant_pad_nd.default:
            return self._shift(node, sized_node)
        if target is aten.permute.default:
            return self._permute(node)
        if target in REDUCTIONS:
            return self._reduction(node)
        if target in PRODUCTS:
            return self._product(node)
        if target is WINDOWS:
            return self._slide(node, 1)
        if target is OVERLAP:
            return self._slide(node, -1)
        if target in (aten._softmax.default, aten._log_softmax.default):
            return self._softmax(node, target is aten._log_softmax.default)
        if is_pointwise(target):
            return self._point_of(node, sized_node)
        raise NoStatement(op_of(node) + _CURES.get(target, ""))

    def dims(self, node: Any) -> tuple[Axes, ...]:
        """Return the axes of each dimension of a node: none for one of length 1, one, or several
        that a reshape has joined, in order."""
        if node not in self.axes_of:
            joined = [self._axes_of_size(node, n) for n in node.meta["shape"]]
            self.axes_of[node] = _distinct_dims(joined)
        return self.axes_of[node]

    def axes(self, node: Any) -> list[str]:
        """Return the axes of all dimensions of a node."""
        return [axis for joined in self.dims(node) for axis in joined]

    def _axes_of_size(self, node: fx.Node, size: int) -> Axes:
        """Return the axes of a dimension of a node: joined ones in the order of its arguments, and
        where these are constant along them in that of all nodes before it."""
        if size in (1, *self.axis_of):
            return (self.axis_of[size],) if size > 1 else ()
        joined = set[Axes]()
        for source in node.all_input_nodes:
            of_source = [tuple(map(axis_of_alias, axes)) for axes in self.dims(source)]
            joined.update(axes for axes in of_source if self._length(axes) == size)
            if node.target in VIEWS:
                axes = tuple(axis for axes in of_source for axis in axes)
                runs = [axes[i:j] for j in range(len(axes) + 1) for i in range(j)]
                joined.update(run for run in runs if self._length(run) == size)
        orders = joined or self.joined.get(size, set())
        if len(orders) != 1:
            raise NoStatement(f"{op_of(node)}, which joins or splits axes")
        self.joined.setdefault(size, set()).update(orders)
        return next(iter(orders))

    def _length(self, axes: Axes) -> int:
        """Return the length of joined axes in the trace on small lengths."""
        lengths = {axis: length for length, axis in self.axis_of.items()}
        return math.prod(lengths[axis] for axis in axes)

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

    def reduce(self, op: str, value: Any, axes: Axes) -> Any:
        """Add reductions over axes, which the value may not have."""
        for axis in axes:
            value = self._reduce_axis(op, value, axis)
        return value

    def _reduce_axis(self, op: str, value: Any, axis: str) -> Any:
        if op == "sum" and axis not in getattr(value, "axes", ()):
            self._check_length(axis)
        if not isinstance(value, Value):
            return value * self.length(axis) if op == "sum" else value
        if axis not in value.axes:
            if op != "sum":
                return value
            return self.point(aten.mul.Tensor, value, float(self.length(axis)))
        axes = {a for a in value.axes if a != axis}
        return self._add(self._node(), axes, Reduce(op, value, axis))

    def _check_length(self, *axes: str) -> None:
        """Raise NoStatement where a number is the length of an axis that calls decide."""
        if not {*axes}.isdisjoint(self.of_calls):
            raise NoStatement(_of_length(self.op, self.of_calls))

    def entry(self, argument: Any) -> Any:
        """Return what an argument stands for: a value, a matrix, outer products or a number."""
        return self.entries[argument] if isinstance(argument, fx.Node) else argument

    def _node(self) -> fx.Node:
        call = self.out.graph.placeholder(f"result_{len(self.out.values)}")
        call.meta["dtype"] = torch.float32
        return call

    def renamed(self, value: Any, names: Mapping[str, str]) -> Any:
        """Return a value by other names of its axes, or a number as it is."""
        if not isinstance(value, Value):
            return value
        before = value
        axes = tuple(names.get(axis, axis) for axis in value.axes)
        if axes == value.axes:
            return value
        if isinstance(value.definition, Rename):
            axes = tuple(names.get(axis, axis) for axis in value.definition.names)
            value = value.definition.source
        if axes == value.axes == self._sorted(axes):
            return value
        key = value, axes
        if key not in self.renamed_values:
            node = self._node()
            node.meta["dtype"] = before.node.meta["dtype"]
            self.renamed_values[key] = self._add(node, axes, Rename(value, axes))
        return self.renamed_values[key]

    def _moved(self, value: Value, axes: Axes) -> Value:
        """Return a value with its axes in another order."""
        if axes == value.axes:
            return value
        moved = Value(self._node(), axes, Rename(value, value.axes))
        moved.node.meta["dtype"] = value.node.meta["dtype"]
        self.out.values.append(moved)
        return moved

    def _aligned(self, source: fx.Node, node: fx.Node) -> dict[str, str]:
        """Return a node's names of a source's axes, where dimensions correspond from the last."""
        pairs = zip(reversed(self.dims(source)), reversed(self.dims(node)), strict=False)
        return {a: b for old, new in pairs if old for a, b in zip(old, new, strict=True)}

    def _add(self, node: fx.Node, axes: Iterable[str], definition: Definition) -> Value:
        node.meta["op"] = self.op
        value = Value(node, self._sorted(axes), definition)
        self.out.values.append(value)
        return value

    def _view(self, node: fx.Node) -> Any:
        source: Any = node.args[0]
        names = self._aligned(source, node) if node.target is aten.expand.default else {}
        old, new = [names.get(axis, axis) for axis in self.axes(source)], self.axes(node)
        if not {*old} <= {*new}:
            raise NoStatement(f"{op_of(node)}, which takes one entry of an axis")
        if [axis for axis in new if axis in old] != old:
            raise NoStatement(f"{op_of(node)}, which reorders axes")
        if names == {axis: axis for axis in names}:
            return self.entries[source]
        return self.renamed(self._plain(node, source), names)

    def _permute(self, node: fx.Node) -> Any:
        source, order = cast("tuple[fx.Node, list[int]]", node.args)
        entry = self.entries[source]
        if isinstance(entry, float):
            return entry
        if isinstance(entry, Value):
            before, after = self.dims(source), self.dims(node)
            pairs = [(before[i], axes) for i, axes in zip(order, after, strict=True)]
            return self.renamed(
                entry, {a: b for old, new in pairs for a, b in zip(old, new, strict=True)}
            )
        first, second = (i for i, axis in enumerate(self.dims(source)) if axis)
        if order.index(first) < order.index(second):
            return entry
        if isinstance(entry, _Matrix):
            return replace(entry, transposes=not entry.transposes)
        return _Outers(tuple((rhs, lhs) for lhs, rhs in entry.terms))

    def _reduction(self, node: fx.Node) -> Any:
        value, dims = self._plain(node, node.args[0]), self.dims(node.args[0])
        listed_dims: Any = node.args[1] if len(node.args) > 1 else None
        op = REDUCTIONS[node.target]  # type: ignore[index]
        axes = tuple(axis for i in listed_dims or range(len(dims)) for axis in dims[i])
        value = self.reduce("sum" if op == "mean" else op, value, axes)
        kept = [axis for joined in dims for axis in joined if axis not in axes]
        value = self.renamed(value, dict(zip(kept, self.axes(node), strict=True)))
        if op != "mean":
            return value
        self._check_length(*axes)
        count = float(math.prod(map(self.length, axes)))
        return self.point(aten.div.Tensor, value, count)

    def _product(self, node: fx.Node) -> Any:
        a, b = node.args[:2]
        lhs, rhs = self.entry(a), self.entry(b)
        if node.target is MIX:
            return self._recorded_product(node, lhs, rhs)
        if node.target is OUTER:
            return self._outer(node, lhs, rhs, (), self.order[-1:])
        lhs_dims, rhs_dims = self.dims(a), self.dims(b)
        axis, inner = lhs_dims[-1], rhs_dims[-2 if len(rhs_dims) > 1 else -1]
        rows = lhs_dims[-2] if len(lhs_dims) > 1 else ()
        columns = rhs_dims[-1] if len(rhs_dims) > 1 else ()
        if [*map(axis_of_alias, axis)] != [*map(axis_of_alias, inner)]:
            raise NoStatement(f"{op_of(node)} along axes that are joined in two orders")
        if isinstance(rhs, _Matrix) and isinstance(lhs, Value):
            return self._matrix_product(node, lhs, rhs, axis, rows)
        if isinstance(lhs, _Matrix) and isinstance(rhs, Value):
            matrix = replace(lhs, transposes=not lhs.transposes)
            return self._matrix_product(node, rhs, matrix, inner, columns)
        lhs, rhs = self._plain(node, a), self._plain(node, b)
        if not (isinstance(lhs, Value) or isinstance(rhs, Value)):
            return self.reduce("sum", lhs * rhs, axis)
        if rows and rows == columns and self._is_outer(lhs, rhs, axis, rows):
            return _Outers(((lhs, rhs),))
        # Names of all axes at once, in the order of the sum's loops: rows, inner ones and columns.
        of_rows, of_sum, of_columns = _distinct_dims([*lhs_dims[:-2], rows, axis, columns])[-3:]
        lhs = self.renamed(lhs, dict(zip((*rows, *axis), (*of_rows, *of_sum), strict=True)))
        rhs = self.renamed(rhs, dict(zip((*inner, *columns), (*of_sum, *of_columns), strict=True)))
        total = self.reduce("sum", self.point(aten.mul.Tensor, lhs, rhs), of_sum)
        result = self.dims(node)[-len([d for d in (lhs_dims[:-1], rhs_dims[1:]) if d]) :]
        names = zip((*of_rows, *of_columns), [a for dim in result for a in dim], strict=True)
        return self.renamed(total, dict(names))

    def _recorded_product(self, node: fx.Node, value: Any, matrix: Any) -> Value:
        if not (isinstance(value, Value) and isinstance(matrix, _Matrix)):
            raise NoStatement(f"{op_of(node)} by a matrix that is not a Param")
        return self._matrix_product(
            node, value, replace(matrix, transposes=bool(node.args[2])), value.axes[-1:], ()
        )

    def _matrix_product(
        self, node: fx.Node, value: Value, matrix: _Matrix, axes: Axes, free_axes: Axes
    ) -> Value:
        if not axes or axes[0] not in value.axes or axes == free_axes:
            raise NoStatement(f"{op_of(node)}, which sums a parameter's entries")
        if matrix.kind == "memory" and value.axes[-1] != axes[0]:
            raise NoStatement(f"{op_of(node)} by a memory along another axis than the last")
        definition = Product(value, matrix.param, matrix.transposes, axes[0], kind=matrix.kind)
        return self._add(self._node(), value.axes, definition)

    def _is_outer(self, lhs: Any, rhs: Any, inner: Axes, axes: Axes) -> bool:
        """Check whether a product of two values is the gradient of a matrix along one axis, or
        another matrix with it twice: rows and columns along `axes`, a sum over `inner`."""
        wanted = {*axes, *inner}
        of_factors = [{*v.axes} if isinstance(v, Value) else None for v in (lhs, rhs)]
        return len(axes) == 1 and of_factors == [wanted, wanted]

    def _outer(self, node: fx.Node, lhs: Value, rhs: Value, inner: Axes, axes: Axes) -> _Outers:
        if not self._is_outer(lhs, rhs, inner, axes):
            raise NoStatement(f"{op_of(node)}, which makes a matrix with one axis twice")
        return _Outers(((lhs, rhs),))

    def _matrix_of(self, outers: _Outers, axes: Axes) -> Value:
        """Return a sum of outer products as a value of an axis and its alias."""
        axis, alias = axes
        terms = []
        for lhs, rhs in outers.terms:
            product = self.point(aten.mul.Tensor, lhs, self.renamed(rhs, {axis: alias}))
            summed = tuple(a for a in product.axes if a not in axes)
            terms.append(self.reduce("sum", product, summed))
        return reduce(partial(self.point, aten.add.Tensor), terms)

    def _slide(self, node: fx.Node, sign: int) -> Any:
        """Return windows (..., S, J) of a value (..., S), or for the sign -1 their transpose."""
        source: Any = node.args[0]
        value = self._plain(node, source)
        dims = self.dims(node if sign > 0 else source)
        (axis, taps) = (axes[0] if len(axes) == 1 else "" for axes in dims[-2:])
        if not axis or not taps or not self.renames:
            raise NoStatement(f"{op_of(node)} along an axis of length 1, or several joined ones")
        if not isinstance(value, Value) or axis not in value.axes:
            raise NoStatement(f"{op_of(node)} of a constant along an axis")
        slide = Slide(value, axis, taps=taps, sign=sign)
        slid = self._add(self._node(), {*value.axes, taps}, slide)
        return slid if sign > 0 else self.reduce("sum", slid, (taps,))

    def _select(self, node: fx.Node) -> Any:
        """Return the entry of an axis at an index."""
        source, dim, index = cast("tuple[fx.Node, int, int]", node.args)
        value, dims = self._plain(node, source), [*self.dims(source)]
        axis, *joined = dims.pop(dim)
        if joined or not self.renames:
            raise NoStatement(f"{op_of(node)}, which takes one entry of an axis")
        self._check_length(axis)
        if isinstance(value, Value) and axis in value.axes:
            axes = {*value.axes} - {axis}
            value = self._add(self._node(), axes, Select(value, axis, index))
        kept = [name for axes in dims for name in axes]
        return self.renamed(value, dict(zip(kept, self.axes(node), strict=True)))

    def _index(self, node: fx.Node) -> Value:
        """Return the numbers of an axis, from 0 on."""
        axes = self.axes(node)
        if len(axes) != 1 or not self.renames or node.args[0] != 0 or len(node.args) != 2:
            raise NoStatement(f"{op_of(node)} other than all indices of an axis")
        return self._add(self._node(), axes, Index(axes[0]))

    def _shift(self, node: fx.Node, sized: fx.Node) -> Any:
        """Return a value moved along an axis, zeros after it."""
        pads = cast("list[int]", sized.args[1])
        value, dims = self._plain(node, node.args[0]), self.dims(node)
        pairs = list(zip(pads[::2], pads[1::2], strict=True))
        moved = [i for i, pair in enumerate(pairs) if any(pair)]
        fills = float(sized.args[2] if len(sized.args) > 2 else 0)  # type: ignore[arg-type]
        whole = len(moved) == 1 and sum(pairs[moved[0]]) == 0 and len(dims[-1 - moved[0]]) == 1
        if not whole or fills != 0 or not self.renames:
            raise NoStatement(
                f"{op_of(node)} (move an axis by k: F.pad(x, (-k, k)), which keeps its length)"
            )
        (axis,) = dims[-1 - moved[0]]
        if not isinstance(value, Value) or axis not in value.axes:
            raise NoStatement(f"{op_of(node)} of a constant along an axis")
        return self._add(self._node(), value.axes, Slide(value, axis, -pairs[moved[0]][0]))

    def _softmax(self, node: fx.Node, logarithm: bool) -> Value:
        value, (_, dim, _) = self._plain(node, node.args[0]), node.args
        axes = self.dims(node.args[0])[dim]  # type: ignore[index]
        difference = self.point(aten.sub.Tensor, value, self.reduce("max", value, axes))
        powers = self.point(aten.exp.default, difference)
        total = self.reduce("sum", powers, axes)
        if logarithm:
            return self.point(aten.sub.Tensor, difference, self.point(aten.log.default, total))
        return self.point(aten.div.Tensor, powers, total)

    def _point_of(self, node: fx.Node, sized: fx.Node) -> Any:
        entries = [self.entries[n] for n in node.all_input_nodes]
        if any(isinstance(entry, _Outers) for entry in entries):
            adds = node.target is aten.add.Tensor and not node.kwargs
            if adds and all(isinstance(entry, _Outers) for entry in entries):
                return _Outers(tuple(term for n in node.args for term in self.entry(n).terms))
        args = [
            self._operand(node, arg) if isinstance(arg, fx.Node) else number
            for arg, number in zip(node.args, sized.args, strict=True)
        ]
        return self.point(node.target, *args, dtype=sized.meta["dtype"], kwargs=sized.kwargs)

    def _operand(self, node: fx.Node, argument: fx.Node) -> Any:
        """Return a value of a pointwise call by the names of the call's axes, or a number."""
        entry = self._plain(node, argument)
        if not isinstance(entry, Value):
            return entry
        return self.renamed(entry, self._aligned(argument, node))

    def _plain(self, node: fx.Node, argument: Any) -> Any:
        entry = self.entry(argument)
        if not isinstance(entry, (_Matrix, _Outers)):
            return entry
        if isinstance(entry, _Matrix):
            raise NoStatement(f"{op_of(node)} of a matrix that multiplies")
        axes = tuple(self.axes(argument))
        self._check_twice(axes)
        if argument not in self.matrices:
            self.matrices[argument] = self._matrix_of(entry, axes)
        return self.matrices[argument]


def _distinct_dims(dims: Sequence[Axes]) -> tuple[Axes, ...]:
    """Return the axes of each dimension, with aliases for all but the first of equal ones."""
    names = iter(distinct(axis for axes in dims for axis in axes))
    return tuple(tuple(next(names) for _ in axes) for axes in dims)


def lower(
    graphs: tuple[Graph, Graph],
    order: Axes,
    lengths: tuple[Mapping[str, int], Mapping[str, int]],
    inputs: Sequence[Target],
    results: Sequence[Target],
    of_calls: Axes = (),
    renames: bool = False,
) -> Statements:
    """Return the statements of graphs of two traces, as in `statements_of`, of inputs and results.
    Raises NoStatement."""
    return _Lowering(order, *lengths, of_calls, renames).run(*graphs, inputs, results)


def statements_of(
    graphs: tuple[Graph, Graph],
    axes: Mapping[str, Sequence[Axes]],
    lengths: tuple[Mapping[str, int], Mapping[str, int]],
    of_calls: Axes = (),
    renames: bool = False,
) -> Statements:
    """Return the statements of a function of a step's arguments and of the gradients by its
    results, which returns results and gradients.

    axes: of all tensors by kind. graphs: of two traces, on lengths of axes that differ from each
    other, so that a size names its axis, and on the cell's; both `lengths`. of_calls: axes whose
    lengths differ between calls. renames: whether tensors may have an axis twice, by an alias.
    Raises NoStatement.
    """
    tensors = [(VALUES,), *(names for tensors in axes.values() for names in tensors)]
    order = order_of_axes(tensors, may_differ=renames, first=of_calls)

    def targets(kinds: Iterable[str], prefix: str = "") -> list[Target]:
        return [
            Target(prefix + kind, i, names, adds=bool(prefix) and kind in ("param", "memory"))
            for kind in kinds
            for i, names in enumerate(axes.get(kind.removeprefix("new_"), ()))
        ]

    arguments = [*targets(INPUTS), *targets(RESULTS, "grad_")]
    results = [*targets(RESULTS), *targets(INPUTS, "grad_")]
    return lower(graphs, order, lengths, arguments, results, of_calls, renames)
