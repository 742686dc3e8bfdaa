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
from pararnn.program.indexed import Order, indexed
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
    distinct,
    operands,
    sources_of,
)
from pararnn.program.sums import with_early_sums

KEPT = "kept"
"""Kind of the values that a forward pass keeps for the backward pass."""
ADD, MULTIPLY = torch.ops.aten.add.Tensor, torch.ops.aten.mul.Tensor
EQUAL = torch.ops.aten.eq.Tensor
IN_ARRAYS = ("array", "rows", "view")
"""Kinds of links to values that are in memory meanwhile, where all blocks read them."""
VIEWS = (Rename, Slide, Select, Index)
"""Definitions of values that are others at other indices, or an index."""
ELSEWHERE = ("*",)
"""Stands for the axes of loops that read a value at any index."""
TYPICAL = 128
"""Length by which ways are compared for an axis that only memories have."""


class Lengths(dict[str, int]):
    """Lengths of axes, and of their aliases."""

    def __missing__(self, axis: str) -> int:
        base = axis_of_alias(axis)
        if base == axis:
            raise KeyError(axis)
        return self[base]

    def numbers(self, axes: Iterable[str]) -> int:
        """Return how many entries a value with some axes has."""
        return math.prod(self[axis] for axis in axes)


@dataclass(frozen=True, eq=False)
class Link:
    """What a block learns from others: a value of a later stage than its sources.

    kind: "gather" for a sum of products of which a block computes its entries from all of the
    sources; "scatter" for one of which it computes terms of all entries from its entries of the
    sources; "reduce" for a reduction, or a sum of some; "lines" for one inside lines that a block
    has; "fold" for one of which a block computes its entries, each from all of what it is computed
    from; "spread" for a value of which a block gets all entries; "array" for a value that others
    read elsewhere than at their own entries, and "rows" for a sum of products of lines: both are in
    memory, where a "view" reads a value at other indices. products: those of a sum. stage: in which
    the result is there. whole: True if a block has all entries of the result, False for its
    entries. op: of a reduction.
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
    lines: a parameter, and the values (line, row) and (line, column). meets: stages that begin when
    all blocks have written what the stage before has put into memory.
    """

    statements: Statements
    links: list[Link]
    sinks: list[Sink]
    streams: list[Value]
    outers: list[tuple[Outer, int, int]]
    spreads: Mapping[Value, Link]
    line_outers: list[tuple[int, Value, Value]]
    meets: frozenset[int]

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

    def ends_of(self, fold: Value) -> list[Value]:
        """Return what a fold's expression is made of, see `ends_of`."""
        return ends_of(fold, self.is_leaf)

    @cached_property
    def leaves(self) -> set[Value]:
        """Inputs, and the results of links."""
        of_links = (link.value for link in self.links if link.kind not in ("array", "spread"))
        return {*self.statements.inputs.values(), *of_links}

    def of_lines(self, axes: Axes, sources: Iterable[Value | float]) -> list[Value]:
        """Return what a loop over lines and entries in them computes alike for all entries of a
        line: the largest such numbers that the sources are made of."""
        left, found = [source for source in sources if isinstance(source, Value)], list[Value]()
        seen = dict.fromkeys(left)
        for value in left:  # which grows meanwhile
            if self.is_leaf(value):
                continue
            if value.axes == axes[:1] != axes and value.node.meta["dtype"] != torch.bool:
                found.append(value)
                continue
            new = [source for source in sources_of(value) if source not in seen]
            seen |= dict.fromkeys(new)
            left += new
        return found

    @cached_property
    def readers(self) -> dict[Value, set[Axes]]:
        """The axes of the loops that read each leaf."""
        readers: dict[Value, set[Axes]] = {}
        for sink in self.sinks:
            for leaf in leaves_of(sink.source, self.is_leaf):
                readers.setdefault(leaf, set()).add(sink.axes)
        for link in self.links:
            ends = self.ends_of(link.value) if link.kind == "fold" else []
            if link.kind == "view":
                ends = [*sources_of(link.value)]
            for value in ends:
                readers.setdefault(value, set()).add(ELSEWHERE)
        return readers

    @cached_property
    def axes(self) -> list[Axes]:
        """Axes of all loops and links, each once."""
        links = [link for link in self.links if link.kind != "view"]
        of_links = [value.axes for link in links for value in (link.value, *link.sources)]
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
    whole = _statements_of(program, dtype)
    if not whole.renames:
        whole = with_early_sums(whole)
    extremes = _hold_compared_values(whole)
    readers = whole.readers()
    sole = {value for value, of_value in readers.items() if len(of_value) == 1}
    of_calls, params = program.step.axes.of_calls, axes_by_kind(program.step)["param"]
    lengths = Lengths({**program.step.head.lengths, **dict.fromkeys(of_calls, TYPICAL)})
    make = partial(_Pass, lengths, params, sole, of_calls)
    given_to_forward = ("gate", "param", "memory")
    forward = make(whole.only(RESULTS), given_to_forward).steps([])
    values = [x.value for x in forward.links if x.kind not in ("spread", *IN_ARRAYS)]
    values = [v for v in values if not _is_large(v, forward.links) and v not in extremes]
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


def _hold_compared_values(statements: Statements) -> set[Value]:
    """Let loops read, from memory, what is compared with its own largest or least number, and
    return these numbers: the gradient of amax goes to the entries that equal it.

    A compiler may round the same expression differently in two loops, or two kernels, and then no
    entry is equal. So it is computed once in a pass, and passes keep no extremes for each other.
    """
    extremes = set[Value]()
    for value in [*statements.values]:
        pair = operands(value, EQUAL)
        for whole, extreme in zip(pair, reversed(pair), strict=True):
            reductions = _reductions_to(extreme)
            sources = [source for reduction in reductions for source in sources_of(reduction)]
            if whole not in sources:
                continue
            extremes.update(reductions[: sources.index(whole) + 1])
            if is_point(whole):
                inner = Value(whole.node, whole.axes, whole.definition)
                node = statements.graph.placeholder(f"held_{len(statements.graph.nodes)}")
                node.meta |= whole.node.meta
                whole.node.replace_all_uses_with(node)
                whole.node, whole.definition = node, Rename(inner, whole.axes)
                statements.values.insert(statements.values.index(whole), inner)
    return extremes


def _reductions_to(value: Value) -> list[Value]:
    """Return the reductions of which a value is the largest or least number, from the last one to
    the first."""
    found = []
    while isinstance(value.definition, Reduce) and value.definition.op != "sum":
        found.append(value)
        value = value.definition.source
    return found


def _is_large(value: Value, links: Sequence[Link]) -> bool:
    """Check whether a value is a fold's matrix: backward passes compute these again."""
    return len(value.axes) > 1 and any(x.kind == "fold" and x.value is value for x in links)


def _statements_of(program: Program, dtype: torch.dtype) -> Statements:
    """Return the statements of a step and its gradients by axes in one order. Raises Unfit."""
    step, whole = program.step, with_rectangles(program.statements[dtype])
    kinds, of_calls = axes_by_kind(step), step.axes.of_calls
    sums_others = bool(program.memory) or any(s.renames for s in program.statements.values())
    squares = {
        (kind, number): axes
        for kind in ("param", "memory")
        for number, axes in enumerate(kinds[kind])
        if distinct(axes) != axes
    }

    def sums(reason: str | None) -> bool:
        if reason is not None and not sums_others:
            raise Unfit(reason)
        return reason is not None

    return indexed(
        whole,
        Order(whole.order, of_calls),
        squares,
        lambda value: sums(_why_no_product(value, kinds["param"], of_calls)),
        lambda outer: sums(_why_no_outer(outer, kinds["param"], of_calls)),
    )


def axes_in_order(program: Program, axes: Axes) -> Axes:
    """Return the axes of a tensor in the order of values."""
    statements = next(iter(program.statements.values()))
    return Order(statements.order, program.step.axes.of_calls)(distinct(axes))


def are_divided(axes: Axes, of_calls: Axes) -> bool:
    """Check whether blocks divide values with these axes by the first one, an axis of calls."""
    return axes[:1] != () and axes[0] in of_calls


def _are_lines(of_calls: Axes, *tensors: Axes) -> bool:
    """Check whether values are vectors of numbers for each index of the same axis of calls."""
    first = tensors[0][:1]
    are_alike = all(len(axes) == 2 and axes[:1] == first for axes in tensors)
    return are_alike and are_divided(first, of_calls)


def _why_no_product(value: Value, params: Sequence[Axes], of_calls: Axes) -> str | None:
    """Return why neither matrix units nor lines multiply so, or None."""
    product = value.definition
    assert isinstance(product, Product)
    source = product.source.axes
    if product.kind != "param":
        return "it multiplies by a square memory"
    shape = params[product.param]
    if not {*source, *value.axes}.isdisjoint(of_calls):
        if not _are_lines(of_calls, source, value.axes) or len(shape) > 2:
            return "it multiplies what has a memory's axis by more than vectors of lines"
        return None
    if not product.to:
        return None if source == (product.axis,) else "it multiplies a matrix by a matrix"
    shared = shared_axes(source, value.axes)
    leading = tuple(a for a in source if a in value.axes) == shared
    if not leading or {*source, *value.axes} != {*shape}:
        return "it multiplies by matrices along axes between others"
    return None


def _why_no_outer(outer: Outer, params: Sequence[Axes], of_calls: Axes) -> str | None:
    """Return why an outer product is none of vectors of a step, or of lines, or None."""
    reason = "the gradient of a parameter sums over axes of a state"
    if outer.kind != "param":
        return reason
    shape, axes = params[outer.param], {*outer.lhs.axes, *outer.rhs.axes}
    if _are_lines(of_calls, outer.lhs.axes, outer.rhs.axes):
        return None
    is_square = len({*shape}) < len(shape)
    return reason if axes != {*shape} or (is_square and len(axes) > 1) else None


def why_not(program: Program) -> str | None:
    """Return why clusters do not run a matrix cell's step, or None."""
    if program.family != MATRIX or not program.statements:
        return "it is no step of heads"
    try:
        passes_of(program, next(iter(program.statements)))
    except Unfit as error:
        return str(error)
    return None


def multiplied_numbers(program: Program) -> int:
    """Return how many numbers of a head's parameters a step multiplies vectors by."""
    all_links = passes_of(program, next(iter(program.statements))).forward.links
    links = [link for link in all_links if link.multiplies]
    params = axes_by_kind(program.step)["param"]
    numbers = {product.param for link in links for product in link.products}
    lengths = Lengths(program.step.head.lengths)
    return sum(lengths.numbers(params[n]) for n in numbers)


def folded_numbers(program: Program) -> int:
    """Return how many numbers of a head the largest fold of a step has, without axes of calls."""
    links = passes_of(program, next(iter(program.statements))).forward.links
    of_calls = dict.fromkeys(program.step.axes.of_calls, 1)
    lengths = Lengths({**program.step.head.lengths, **of_calls})
    terms = [link.value.definition for link in links if link.kind == "fold"]
    sizes = (lengths.numbers(x.source.axes) for x in terms if isinstance(x, Reduce))
    return max(sizes, default=0)


@dataclass
class _Pass:
    """Assigns stages to what a pass computes.

    params: axes of the parameters. sole: values of the step and its gradients that one other reads.
    of_calls: axes that only memories have: blocks divide the first axis of a value that is one, and
    have whole lines of its others. from_memory: kinds of inputs of which every block can read all
    entries.
    """

    lengths: Lengths
    params: Sequence[Axes]
    sole: set[Value]
    of_calls: Axes
    statements: Statements
    from_memory: Collection[str]
    links: list[Link] = field(default_factory=list)
    by_value: dict[Value, Link] = field(default_factory=dict)
    spreads: dict[Value, Link] = field(default_factory=dict)
    arrays: dict[Value, Link] = field(default_factory=dict)
    line_outers: list[tuple[int, Value, Value]] = field(default_factory=list)
    cones: dict[Value, tuple[Value, ...]] = field(default_factory=dict)
    sources_of_reductions: dict[Value, Value | None] = field(default_factory=dict)
    elsewhere: set[Value] = field(default_factory=set)
    meets: set[int] = field(default_factory=set)

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
            if _are_lines(self.of_calls, outer.lhs.axes, outer.rhs.axes):
                self.line_outers.append((outer.param, outer.lhs, outer.rhs))
                continue
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
                stage = link.stage - 1 if link.op else self.stage(source, source.axes)
                sinks.append(Sink(source, source.axes, stage, link=link, term=i))
        sinks.sort(key=lambda sink: sink.stage)
        links = sorted(self.links, key=lambda link: link.stage)
        return Steps(
            self.statements, links, sinks, streams, outers, self.spreads, self.line_outers,
            frozenset(self.meets),
        )  # fmt: skip

    def _line_factors(self, target: Target, value: Value | float) -> tuple[Value, Value] | None:
        """Return the two values (line, row) and (line, column) whose outer products, summed over
        lines, are added to a matrix's gradient; None for another result."""
        reduction = value.definition if isinstance(value, Value) else None
        if target.kind != "grad_param" or not isinstance(reduction, Reduce):
            return None
        factors = operands(reduction.source, MULTIPLY) if reduction.op == "sum" else ()
        for lhs, rhs in zip(factors, reversed(factors), strict=True):
            if (
                _are_lines(self.of_calls, lhs.axes, rhs.axes)
                and reduction.axis == lhs.axes[0]
                and (lhs.axes[1], rhs.axes[1]) == target.axes
            ):
                return lhs, rhs
        return None

    def cone(self, value: Value) -> tuple[Value, ...]:
        """Return the inputs, reductions and products that a value is computed from pointwise."""
        if value in self.inputs or not is_point(value):
            return (value,)
        if value not in self.cones:
            found = [leaf for source in sources_of(value) for leaf in self.cone(source)]
            self.cones[value] = (value,) if self.terms(value) else tuple(dict.fromkeys(found))
        return self.cones[value]

    def terms(self, value: Value) -> tuple[Value, ...]:
        """Return the products, or sums over axes, of one stage and kind that a value is the sum of;
        none for another value."""
        definition = value.definition
        if value in self.inputs:
            return ()
        if isinstance(definition, (Product, Reduce)):
            return (value,)
        sources = operands(value, ADD)
        if len({*sources}) != 2:
            return ()
        if any(source not in self.sole or source.axes != value.axes for source in sources):
            return ()
        terms = [self.terms(source) for source in sources]
        found = [term for of_source in terms for term in of_source]
        kinds = {self._kind_of_term(term) for term in found}
        return tuple(found) if all(terms) and len(kinds) == 1 and None not in kinds else ()

    def _kind_of_term(self, value: Value) -> tuple[object, ...] | None:
        """Return what terms of a sum have in common; None for a largest or least number, and a
        fold."""
        definition = value.definition
        if isinstance(definition, Product):
            source = definition.source
            return self.stage(source, source.axes), self._kind(value, definition)
        assert isinstance(definition, Reduce)
        reduced = self.reduced(value)
        return (reduced.axes,) if definition.op == "sum" and reduced is not None else None

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
        is_inside = self.has_lines(leaf.axes) and leaf.axes[0] == axes[0]
        if kind is not None:
            return 0 if is_inside else self._anywhere(leaf)
        link = self.link(leaf)
        is_there = is_inside or link.kind == "view" or link.whole or leaf.axes == axes
        return link.stage if is_there else self._anywhere(leaf)

    def has_lines(self, axes: Axes) -> bool:
        """Check whether a value has an axis that blocks divide by whole lines."""
        return are_divided(axes, self.of_calls)

    @cached_property
    def has_views(self) -> bool:
        """True for steps that read values at other indices: matrices are then in memory."""
        return any(isinstance(value.definition, VIEWS) for value in self.statements.values)

    def _anywhere(self, value: Value) -> int:
        """Return the stage in which loops can read a value at any index."""
        kind = self.inputs.get(value)
        if kind in self.from_memory:
            return 0
        if not self.has_lines(value.axes) and (len(value.axes) < 2 or not self.has_views):
            return self._spread(value)
        if kind is not None and self.has_lines(value.axes):
            return 0
        is_leaf = kind is None and not is_point(value)
        link = self.link(value) if is_leaf else None
        if link is not None and self._is_in_array(link):
            stage = link.stage + 1
        else:
            stage = self._array(value)
        self.meets.add(stage)
        return stage

    def _is_in_array(self, link: Link) -> bool:
        return link.kind == "rows" or (link.kind == "fold" and self.has_lines(link.value.axes))

    def _spread(self, value: Value) -> int:
        if value in self.spreads:
            return self.spreads[value].stage
        is_leaf = value not in self.inputs and not is_point(value)
        if is_leaf and (link := self.link(value)).whole:
            return link.stage
        stage = self.stage(value, value.axes)
        self.spreads[value] = Link("spread", value, (value,), stage + 1, True)
        self.links.append(self.spreads[value])
        return stage + 1

    def _array(self, value: Value) -> int:
        """Return the stage in which a value is in memory, where its block reads it."""
        kind = self.inputs.get(value)
        if kind is not None and kind not in self.from_memory and self.has_lines(value.axes):
            return 0
        is_link = kind is None and isinstance(value.definition, (Product, Reduce))
        if is_link and self._is_in_array(link := self.link(value)):
            return link.stage
        if value not in self.arrays:
            stage = self.stage(value, value.axes)
            self.arrays[value] = Link("array", value, (value,), stage + 1, False)
            self.links.append(self.arrays[value])
        return self.arrays[value].stage

    def link(self, value: Value) -> Link:
        """Return the link of a reduction or a sum of products, which is added if it is new."""
        if value not in self.by_value:
            self.by_value[value] = self._new_link(value)
            self.links.append(self.by_value[value])
        return self.by_value[value]

    def _new_link(self, value: Value) -> Link:
        if isinstance(value.definition, VIEWS):
            stage = max(map(self._anywhere, sources_of(value)), default=0)
            return Link("view", value, (), stage, False)
        if isinstance(value.definition, Reduce) and self.reduced(value) is None:
            ends = ends_of(value, lambda v: v in self.inputs or not is_point(v))
            stage = max(1, *map(self._anywhere_in_fold, ends))
            return Link("fold", value, (), stage, False, op=value.definition.op)
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
        reduced = [self.reduced(term) for term in terms]
        sources = tuple(source for source in reduced if source is not None)
        stage = max(self.stage(source, source.axes) for source in sources)
        if self.has_lines(sources[0].axes) and self.has_lines(value.axes):
            return Link("lines", value, sources, stage + 1, False, op=op)
        is_small = len(value.axes) < 2 or not self.has_views
        whole = is_small and not self.elsewhere.isdisjoint(terms)
        return Link("reduce", value, sources, stage + 1, whole, op=op)

    def _adds_up(self, sources: Sequence[Value], result: Value) -> bool:
        """Check whether a sum of products of several values has fewer results than terms."""
        if any(shared_axes(source.axes, result.axes) for source in sources) and any(
            source.axes != result.axes for source in sources
        ):
            return False
        numbers = self.lengths.numbers
        return sum(numbers(value.axes) for value in {*sources}) > numbers(result.axes)

    def _anywhere_in_fold(self, value: Value) -> int:
        """Return the stage in which a fold can read a value that its expression ends with."""
        if value not in self.inputs and isinstance(value.definition, VIEWS):
            return self.link(value).stage
        return self._anywhere(value)

    def reduced(self, value: Value) -> Value | None:
        """Return what a reduction, and those that only it reads, reduce; None for a fold."""
        if value not in self.sources_of_reductions:
            self.sources_of_reductions[value] = self._reduced(value)
        return self.sources_of_reductions[value]

    def _reduced(self, value: Value) -> Value | None:
        reduction = value.definition
        assert isinstance(reduction, Reduce)
        source = reduction.source
        inner = source.definition
        chained = isinstance(inner, Reduce) and inner.op == reduction.op and source in self.sole
        if chained and source not in self.inputs:
            first = self.reduced(source)
            if first is not None and self._reduces(first.axes, value.axes):
                return first
        if not self._reduces(source.axes, value.axes) or self._folds(value, reduction):
            return None
        return source

    def _reduces(self, axes: Axes, left: Axes) -> bool:
        """Check whether blocks combine what they have of a value, where some axes are left."""
        if self.has_lines(axes):
            return left in ((), axes[:1]) or (left == axes[1:] and not self.has_lines(left))
        reduced = [axis for axis in axes if axis not in left]
        first = axes.index(reduced[0])
        return list(axes[first : first + len(reduced)]) == reduced

    def _folds(self, value: Value, reduction: Reduce) -> bool:
        """Check whether a reduction is of products of less than it sums, or of what is elsewhere:
        its source then is in no memory."""
        axes = reduction.source.axes
        if not value.axes or (self.has_lines(axes) and value.axes == axes[:1]):
            return False
        ends = ends_of(value, lambda v: v in self.inputs or not is_point(v))
        return all(end.axes != axes for end in ends) or any(
            end not in self.inputs and isinstance(end.definition, VIEWS) for end in ends
        )

    def _kind(self, value: Value, product: Product) -> str:
        source = product.source.axes
        if self.has_lines(source):
            return "rows"
        if not product.to:
            return "gather"
        is_new, numbers = not shared_axes(source, value.axes), self.lengths.numbers
        return "scatter" if is_new and numbers(source) > numbers(value.axes) else "gather"

    def _note_readers(self, loops: Iterable[tuple[Value | float, Axes]]) -> None:
        """Note the reductions that a loop over other axes reads."""
        others = [sources_of(v) for v in self.statements.values if not is_point(v)]
        sources = [source for of_value in others for source in of_value]
        for value, axes in [*loops, *((source, source.axes) for source in sources)]:
            leaves = leaves_of(value, lambda v: v in self.inputs or not is_point(v))
            self.elsewhere |= {leaf for leaf in leaves if leaf.axes != axes}


def leaves_of(value: Value | float, is_leaf: Callable[[Value], bool]) -> list[Value]:
    """Return the leaves that a value is computed from, each once; none for a number."""
    # In an order that every process has: kernels are cached by their text.
    left = [value] if isinstance(value, Value) else []
    seen = dict.fromkeys(left)
    while left:
        current = left.pop()
        if not is_leaf(current):
            new = [source for source in dict.fromkeys(sources_of(current)) if source not in seen]
            left += new
            seen |= dict.fromkeys(new)
    return [value for value in seen if is_leaf(value)]


def ends_of(fold: Value, is_leaf: Callable[[Value], bool]) -> list[Value]:
    """Return the values that the expression of a fold's terms ends with: leaves, and what has other
    axes than the terms, which is computed once and not for each of them."""
    reduction = fold.definition
    assert isinstance(reduction, Reduce)
    axes = reduction.source.axes
    return leaves_of(reduction.source, lambda v: v.axes != axes or is_leaf(v))


def is_point(value: Value) -> bool:
    """Check whether a value is a pointwise call."""
    return isinstance(value.definition, Point)


def shared_axes(source: Axes, result: Axes) -> Axes:
    """Return the leading axes that the source and the result of a product share."""
    count = next((i for i, (a, b) in enumerate(zip(source, result, strict=False)) if a != b), None)
    return source[:count] if count is not None else source[: min(len(source), len(result))]
