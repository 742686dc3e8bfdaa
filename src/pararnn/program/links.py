"""Stages of steps that a cluster of blocks runs for some rows: what is computed when, and where.

The entries of a value are divided among the blocks by tiles of its last axis. A block computes its
entries of a value from its entries of others. What needs those of other blocks comes a stage later:
sums over axes, products with parameters, and values that are read along other axes than their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from typing import NamedTuple

import torch

from pararnn.cells.matrix import Axes
from pararnn.program.matrix import axes_by_kind
from pararnn.program.program import MATRIX, Program
from pararnn.program.rectangles import with_rectangles
from pararnn.program.statements import (
    GRADIENTS,
    RESULTS,
    Index,
    Outer,
    Point,
    Product,
    Reduce,
    Rename,
    Select,
    Slide,
    Statements,
    Target,
    Value,
    axis_of_alias,
    sources_of,
)

KEPT = "kept"
"""Kind of the values that a forward pass keeps for the backward pass."""
ADD, MULTIPLY = torch.ops.aten.add.Tensor, torch.ops.aten.mul.Tensor
IN_ARRAYS = ("array", "rows", "slide")
"""Kinds of links to values with lines that are in memory meanwhile, where all blocks read them."""
TYPICAL = 128
"""Length by which ways are compared for an axis that only memories have."""


@dataclass(frozen=True, eq=False)
class Link:
    """What a block learns from others: a value of a later stage than its sources.

    kind: "gather" for a sum of products of which a block computes its entries from all of the
    sources; "scatter" for one of which it computes terms of all entries from its entries of the
    sources; "reduce" for a reduction, or a sum of some; "lines" for one inside lines that a block
    has; "spread" for a value of which a block gets all entries; "array" for a value with lines that
    others read elsewhere than at their own entries, and "rows" for a sum of products of lines: both
    are in memory, where a "slide" reads a value at moved indices. products: those of a sum.
    stage: in which the result is there. whole: True if a block has all entries of the result, False
    for its entries. op: of a reduction.
    """

    kind: str
    value: Value
    sources: tuple[Value, ...]
    stage: int
    whole: bool
    products: tuple[Product, ...] = ()
    op: str = ""

    @property
    def multiplies(self) -> bool:
        """True for products by matrices that blocks divide."""
        return self.kind in ("gather", "scatter")


class Sink(NamedTuple):
    """A result of a loop over the entries that a block has: the value, or number, and where it
    goes. link: the link that sends it, as its source `term`, or None; axes: of the loop."""

    source: Value | float
    axes: Axes
    stage: int
    target: Target | None = None
    link: Link | None = None
    term: int = 0
    stream: int | None = None


@dataclass(frozen=True, eq=False)
class Steps:
    """A pass in stages.

    inputs: by kind and number. sinks: in order of stages. links: in order of stages. streams:
    vectors of outer products, which the pass writes for all steps. outers: terms of gradients of
    matrices, with the numbers of their vectors among the streams. line_outers: those that sum over
    lines: a parameter, and the values (line, row) and (line, column).
    """

    statements: Statements
    links: list[Link]
    sinks: list[Sink]
    streams: list[Value]
    outers: list[tuple[Outer, int, int]]
    spreads: Mapping[Value, Link]
    line_outers: list[tuple[int, Value, Value]]

    def in_one_block(self) -> Steps:
        """Return the pass of a block that has all entries: it gathers what blocks would scatter."""
        links = {
            link: replace(link, kind="gather") if link.kind == "scatter" else link
            for link in self.links
        }
        sinks = [s if s.link is None else s._replace(link=links[s.link]) for s in self.sinks]
        return replace(self, links=[*links.values()], sinks=sinks)

    @property
    def stages(self) -> int:
        """Stages after the first one."""
        return max((link.stage for link in self.links), default=0)

    def is_leaf(self, value: Value) -> bool:
        """Check whether a loop reads a value rather than computes it: an input, or a link's."""
        return value in self.leaves or not is_point(value)

    @cached_property
    def leaves(self) -> set[Value]:
        """Inputs, and the results of links."""
        of_links = (link.value for link in self.links if link.kind != "array")
        return {*self.statements.inputs.values(), *of_links}

    @cached_property
    def readers(self) -> dict[Value, set[Axes]]:
        """The axes of the loops that read each leaf."""
        readers: dict[Value, set[Axes]] = {}
        for sink in self.sinks:
            for leaf in leaves_of(sink.source, self.is_leaf):
                readers.setdefault(leaf, set()).add(sink.axes)
        return readers

    @cached_property
    def axes(self) -> list[Axes]:
        """Axes of all loops and links, each once."""
        of_links = [value.axes for link in self.links for value in (link.value, *link.sources)]
        states = [
            value.axes
            for kind in ("state", "grad_new_state")
            for value in self.statements.inputs_of(kind).values()
        ]
        return [*dict.fromkeys([*(sink.axes for sink in self.sinks), *of_links, *states])]


class Passes(NamedTuple):
    """The passes of a step: forward, forward for gradients (which keeps values), and backward."""

    forward: Steps
    saving: Steps
    backward: Steps
    kept: list[Value]


class Unfit(Exception):
    """A step that clusters do not run; the text is the reason."""


@lru_cache(maxsize=1024)
def passes_of(program: Program, dtype: torch.dtype) -> Passes:
    """Return the passes of a step in stages, in a compute dtype. Raises Unfit."""
    whole = with_rectangles(program.statements[dtype])
    readers = whole.readers()
    sole = {value for value, of_value in readers.items() if len(of_value) == 1}
    lengths = {**program.step.head.lengths, **dict.fromkeys(program.step.axes.of_calls, TYPICAL)}
    make = partial(_Pass, lengths, axes_by_kind(program.step)["param"], sole, line_axis(program))
    given_to_forward = ("gate", "param", "memory")
    forward = make(whole.only(RESULTS), given_to_forward).steps([])
    values = [x.value for x in forward.links if x.kind not in ("spread", *IN_ARRAYS)]
    given = {(KEPT, i): value for i, value in enumerate(values)}
    backward = whole.only(GRADIENTS, given=given)
    live = backward.ancestors(backward.results())
    kept = [value for value in values if value in live]
    backward = whole.only(GRADIENTS, given={(KEPT, i): value for i, value in enumerate(kept)})
    backward.inputs = {key: value for key, value in backward.inputs.items() if value in live}
    from_memory = (*given_to_forward, "state", KEPT, "grad_output")
    return Passes(
        forward,
        make(whole.only(RESULTS), given_to_forward).steps(kept),
        make(backward, from_memory).steps([]),
        kept,
    )


def line_axis(program: Program) -> str:
    """Return the axis that only memories have, "" for none."""
    return "".join(program.step.axes.of_calls)


def why_not(program: Program) -> str | None:
    """Return why clusters do not run a matrix cell's step, or None."""
    if program.family != MATRIX or not program.statements:
        return "it is no step of heads"
    if len(program.step.axes.of_calls) > 1:
        return f"its memories have two axes of their own, {program.step.axes.of_calls}"
    if any(_renames(statements) for statements in program.statements.values()):
        return "it renames axes, or takes entries of them"
    try:
        passes_of(program, next(iter(program.statements)))
    except Unfit as error:
        return str(error)
    return None


def _renames(statements: Statements) -> bool:
    """Check whether there is an alias of an axis, or a copy that does not move along one."""
    copies = any(isinstance(x.definition, (Rename, Select, Index)) for x in statements.values)
    return copies or any(axis_of_alias(axis) != axis for axis in statements.order)


def multiplied_numbers(program: Program) -> int:
    """Return how many numbers of a head's parameters a step multiplies vectors by."""
    links = passes_of(program, next(iter(program.statements))).forward.links
    links = [link for link in links if link.multiplies]
    lengths = program.step.head.lengths
    params = axes_by_kind(program.step)["param"]
    numbers = {product.param for link in links for product in link.products}
    return sum(math.prod(lengths[axis] for axis in params[n]) for n in numbers)


@dataclass
class _Pass:
    """Assigns stages to what a pass computes.

    params: axes of the parameters. sole: values of the step and its gradients that one other reads.
    line_axis: that only memories have, "" for none: blocks divide it, and have whole lines of the
    other axes. from_memory: kinds of inputs of which every block can read all entries.
    """

    lengths: Mapping[str, int]
    params: Sequence[Axes]
    sole: set[Value]
    line_axis: str
    statements: Statements
    from_memory: Collection[str]
    links: list[Link] = field(default_factory=list)
    by_value: dict[Value, Link] = field(default_factory=dict)
    spreads: dict[Value, Link] = field(default_factory=dict)
    arrays: dict[Value, Link] = field(default_factory=dict)
    line_outers: list[tuple[int, Value, Value]] = field(default_factory=list)
    cones: dict[Value, frozenset[Value]] = field(default_factory=dict)
    elsewhere: set[Value] = field(default_factory=set)

    @cached_property
    def inputs(self) -> dict[Value, str]:
        """The kinds of inputs."""
        return {value: kind for (kind, _), value in self.statements.inputs.items()}

    def steps(self, kept: Sequence[Value]) -> Steps:
        """Return the pass in stages; kept: values that it writes besides its results. Raises
        Unfit."""
        streams: list[Value] = []

        def number(value: Value) -> int:
            if value not in streams:
                streams.append(value)
            return streams.index(value)

        outers = []
        for outer in self.statements.outers:
            if self._sums_lines(outer.lhs, outer.rhs):
                self.line_outers.append((outer.param, outer.lhs, outer.rhs))
                continue
            self._check_outer(outer)
            outers.append((outer, number(outer.lhs), number(outer.rhs)))
        writes = []
        for target, value in self.statements.writes:
            factors = self._line_factors(target, value)
            if factors is None:
                writes.append((target, value))
            else:
                self.line_outers.append((target.number, *factors))
        vectors = [vector for _, *pair in self.line_outers for vector in pair]
        loops = [(value, target.axes) for target, value in writes]
        loops += [(value, value.axes) for value in (*streams, *kept, *vectors)]
        self._note_readers(loops)
        for vector in vectors:
            self._array(vector)
        sinks = [
            Sink(value, target.axes, self.stage(value, target.axes), target)
            for target, value in writes
        ]
        sinks += [Sink(v, v.axes, self.stage(v, v.axes), stream=i) for i, v in enumerate(streams)]
        for i, value in enumerate(kept):
            stage = self.stage(value, value.axes)
            sinks.append(Sink(value, value.axes, stage, Target(KEPT, i, value.axes)))
        for link in self.links:
            for i, source in enumerate(link.sources):
                stage = self.stage(source, source.axes)
                sinks.append(Sink(source, source.axes, stage, link=link, term=i))
        sinks.sort(key=lambda sink: sink.stage)
        links = sorted(self.links, key=lambda link: link.stage)
        return Steps(self.statements, links, sinks, streams, outers, self.spreads, self.line_outers)

    def _sums_lines(self, lhs: Value, rhs: Value) -> bool:
        """Check whether an outer product of vectors is a sum over lines."""
        both = lhs.axes, rhs.axes
        return all(len(axes) == 2 and self.has_lines(axes) for axes in both)

    def _line_factors(self, target: Target, value: Value | float) -> tuple[Value, Value] | None:
        """Return the two values (line, row) and (line, column) whose outer products, summed over
        lines, are added to a matrix's gradient; None for another result."""
        reduction = value.definition if isinstance(value, Value) else None
        if target.kind != "grad_param" or not isinstance(reduction, Reduce):
            return None
        terms, factors = reduction.source, sources_of(reduction.source)
        is_product = is_point(terms) and terms.node.target is MULTIPLY and len(factors) == 2
        if (reduction.op, reduction.axis) != ("sum", self.line_axis) or not is_product:
            return None
        for lhs, rhs in (factors, reversed(factors)):
            if self._sums_lines(lhs, rhs) and (lhs.axes[1], rhs.axes[1]) == target.axes:
                return lhs, rhs
        return None

    def _check_outer(self, outer: Outer) -> None:
        shape, axes = self.params[outer.param], {*outer.lhs.axes, *outer.rhs.axes}
        square = len({*shape}) < len(shape)
        if outer.kind != "param" or axes != {*shape} or (square and len(axes) > 1):
            raise Unfit("the gradient of a parameter sums over axes of a state")
        if self.has_lines(outer.lhs.axes) or self.has_lines(outer.rhs.axes):
            raise Unfit("a parameter has the axis of a memory")

    def cone(self, value: Value) -> frozenset[Value]:
        """Return the inputs, reductions and products that a value is computed from pointwise."""
        if value in self.inputs or not is_point(value):
            return frozenset([value])
        if value not in self.cones:
            cones = [self.cone(source) for source in sources_of(value)]
            whole = frozenset([value]) if self.terms(value) else frozenset[Value]().union(*cones)
            self.cones[value] = whole
        return self.cones[value]

    def terms(self, value: Value) -> tuple[Value, ...]:
        """Return the products, or sums over axes, of one stage and kind that a value is the sum of;
        none for another value."""
        definition = value.definition
        if value in self.inputs:
            return ()
        if isinstance(definition, (Product, Reduce)):
            return (value,)
        is_sum = value.node.target is ADD and not value.node.kwargs
        sources = sources_of(value)
        if not (is_sum and len({*sources}) == 2):
            return ()
        if any(source not in self.sole or source.axes != value.axes for source in sources):
            return ()
        terms = [self.terms(source) for source in sources]
        found = [term for of_source in terms for term in of_source]
        kinds = {self._kind_of_term(term) for term in found}
        return tuple(found) if all(terms) and len(kinds) == 1 and None not in kinds else ()

    def _kind_of_term(self, value: Value) -> tuple[object, ...] | None:
        """Return what terms of a sum have in common; None for a largest or least number."""
        definition = value.definition
        if isinstance(definition, Product):
            source = definition.source
            return self.stage(source, source.axes), self._kind(value, definition)
        assert isinstance(definition, Reduce)
        source = self.reduced(value)
        return (self.stage(source, source.axes), source.axes) if definition.op == "sum" else None

    def stage(self, value: Value | float, axes: Axes) -> int:
        """Return the stage in which a loop over axes can compute a value, and add the links that it
        needs."""
        if not isinstance(value, Value):
            return 0
        return max((self._leaf(leaf, axes) for leaf in self.cone(value)), default=0)

    def _leaf(self, leaf: Value, axes: Axes) -> int:
        kind = self.inputs.get(leaf)
        if kind in self.from_memory or (kind is not None and leaf.axes == axes):
            return 0
        is_inside = self.has_lines(leaf.axes) and {*leaf.axes} <= {*axes}
        if kind is not None:
            return 0 if is_inside else self._spread(leaf, 0).stage
        link = self.link(leaf)
        if link.kind in IN_ARRAYS and is_inside:
            return link.stage
        if link.kind == "lines" and axes[:1] == leaf.axes[:1]:
            return link.stage
        if link.whole or (leaf.axes == axes and link.kind != "lines"):
            return link.stage
        return self._spread(leaf, link.stage).stage

    def has_lines(self, axes: Axes) -> bool:
        """Check whether a value has the axis that blocks divide by whole lines."""
        if self.line_axis in axes[1:]:
            raise Unfit(f"{self.line_axis} is not the first axis of a value")
        return self.line_axis in axes

    def _spread(self, leaf: Value, stage: int) -> Link:
        if self.has_lines(leaf.axes):
            raise Unfit(f"a loop reads all of what the axis {self.line_axis} has")
        if leaf not in self.spreads:
            self.spreads[leaf] = Link("spread", leaf, (leaf,), stage + 1, True)
            self.links.append(self.spreads[leaf])
        return self.spreads[leaf]

    def _array(self, value: Value) -> int:
        """Return the stage in which a value with lines is in memory."""
        kind = self.inputs.get(value)
        if kind is not None and kind not in self.from_memory:
            return 0
        if kind is None and isinstance(value.definition, Product):
            return self.link(value).stage
        if value not in self.arrays:
            stage = self.stage(value, value.axes)
            self.arrays[value] = Link("array", value, (value,), stage + 1, False)
            self.links.append(self.arrays[value])
        return self.arrays[value].stage

    def _slide(self, value: Value, slide: Slide) -> Link:
        source = slide.source
        if not self.has_lines(source.axes) or slide.axis != self.line_axis:
            raise Unfit("it moves along an axis that is no call's")
        if self.inputs.get(source) in self.from_memory:
            return Link("slide", value, (), 0, False)
        stage = self._array(source)
        later = isinstance(source.definition, Product)  # other blocks' results
        return Link("slide", value, (), stage + later, False)

    def link(self, value: Value) -> Link:
        """Return the link of a reduction or a sum of products, which is added if it is new."""
        if value not in self.by_value:
            self.by_value[value] = self._new_link(value)
            self.links.append(self.by_value[value])
        return self.by_value[value]

    def _new_link(self, value: Value) -> Link:
        if isinstance(value.definition, Slide):
            return self._slide(value, value.definition)
        terms = self.terms(value)
        definitions = [term.definition for term in terms]
        products = tuple(d for d in definitions if isinstance(d, Product))
        if products:
            sources = tuple(product.source for product in products)
            stage, kind = self.stage(sources[0], sources[0].axes), self._kind(terms[0], products[0])
            if kind == "rows":
                stage = max(map(self._array, sources))
                return Link("rows", value, (), stage + 1, False, products)
            if kind == "gather" and self._adds_up(sources, value):
                kind = "scatter"
            return Link(kind, value, sources, stage + 1, False, products)
        (op, *_) = (d.op for d in definitions if isinstance(d, Reduce))
        sources = tuple(self.reduced(term) for term in terms)
        stage = self.stage(sources[0], sources[0].axes)
        if self.has_lines(sources[0].axes) and self.has_lines(value.axes):
            return Link("lines", value, sources, stage + 1, False, op=op)
        whole = not self.elsewhere.isdisjoint(terms)
        return Link("reduce", value, sources, stage + 1, whole, op=op)

    def _adds_up(self, sources: Sequence[Value], result: Value) -> bool:
        """Check whether a sum of products of several values has fewer results than terms."""
        if any(shared_axes(source.axes, result.axes) for source in sources) and any(
            source.axes != result.axes for source in sources
        ):
            return False
        numbers = [math.prod(self.lengths[a] for a in value.axes) for value in {*sources}]
        return sum(numbers) > math.prod(self.lengths[a] for a in result.axes)

    def reduced(self, value: Value) -> Value:
        """Return what a reduction, and those that only it reads, reduce."""
        reduction = value.definition
        assert isinstance(reduction, Reduce)
        source = reduction.source
        inner = source.definition
        chained = isinstance(inner, Reduce) and inner.op == reduction.op and source in self.sole
        return self.reduced(source) if chained and source not in self.inputs else source

    def _kind(self, value: Value, product: Product) -> str:
        source, shape = product.source.axes, self.params[product.param]
        if product.kind != "param":
            raise Unfit("it multiplies by a square memory")
        if self.has_lines(source) or self.has_lines(value.axes):
            are_lines = self._sums_lines(product.source, value) and len(shape) == 2
            if not are_lines:
                raise Unfit("it multiplies what has a memory's axis by more than vectors of lines")
            return "rows"
        if not product.to:
            if source != (product.axis,):
                raise Unfit("it multiplies a matrix by a matrix")
            return "gather"
        shared = shared_axes(source, value.axes)
        leading = tuple(a for a in source if a in value.axes) == shared
        if not leading or {*source, *value.axes} != {*shape}:
            raise Unfit("it multiplies by matrices along axes between others")
        counts = [math.prod(self.lengths[a] for a in axes) for axes in (source, value.axes)]
        return "scatter" if not shared and counts[0] > counts[1] else "gather"

    def _note_readers(self, loops: Iterable[tuple[Value | float, Axes]]) -> None:
        """Note the reductions that a loop over other axes reads."""
        sources = [sources_of(v)[0] for v in self.statements.values if not is_point(v)]
        for value, axes in [*loops, *((source, source.axes) for source in sources)]:
            leaves = leaves_of(value, lambda v: v in self.inputs or not is_point(v))
            self.elsewhere |= {leaf for leaf in leaves if leaf.axes != axes}


def leaves_of(value: Value | float, is_leaf: Callable[[Value], bool]) -> set[Value]:
    """Return the leaves that a value is computed from; none for a number."""
    left = [value] if isinstance(value, Value) else []
    seen = {*left}
    while left:
        current = left.pop()
        if not is_leaf(current):
            left += {*sources_of(current)} - seen
            seen.update(sources_of(current))
    return {value for value in seen if is_leaf(value)}


def is_point(value: Value) -> bool:
    """Check whether a value is a pointwise call."""
    return isinstance(value.definition, Point)


def shared_axes(source: Axes, result: Axes) -> Axes:
    """Return the leading axes that the source and the result of a product share."""
    count = next((i for i, (a, b) in enumerate(zip(source, result, strict=False)) if a != b), None)
    return source[:count] if count is not None else source[: min(len(source), len(result))]
