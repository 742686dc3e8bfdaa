"""A pass over a step in parts: of gates alone, what the next step waits for, and the rest."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from pararnn.program.statements import (
    Product,
    Reduce,
    Statements,
    Target,
    Value,
    sources_of,
)

LINK, READY = "link", "ready"
"""Kinds of the targets and inputs by which a part hands numbers and vectors to a later one: the
middle one, and the first one."""


class Parts(NamedTuple):
    """Both parts of a pass. links: values that `later` reads, of `now`.

    Those that are reductions may be left to `later` in pieces. The others are written by `now` to
    targets ("link", number). `later` reads gates and ("link", number).
    """

    now: Statements
    later: Statements
    links: list[Value]

    def pieces(self) -> set[Value]:
        """Return the links that `now` leaves in pieces."""
        whole = {value for target, value in self.now.writes if target.kind == LINK}
        return {value for value in self.links if value not in whole}


def split(own: Statements, kinds: Collection[str]) -> Parts:
    """Split a pass. Targets of `kinds` that are numbers or vectors come later, with all that only
    they depend on and that has at most one axis."""
    late = [write for write in own.writes if write[0].kind in kinds and len(write[0].axes) <= 1]
    early = [write for write in own.writes if write not in late]
    factors = [factor for outer in own.outers for factor in (outer.lhs, outer.rhs)]
    early_results = {value for _, value in early if isinstance(value, Value)} | {*factors}
    live = _ancestors(own, early_results | {v for _, v in late if isinstance(v, Value)})
    wide = {v for v in live if len(v.axes) > 1 or isinstance(v.definition, Product)}
    early_values = _ancestors(own, early_results | wide)
    gates = {value for (kind, _), value in own.inputs.items() if kind == "gate"}
    of_gates = {value for value in gates if len(value.axes) <= 1}
    for value in own.values:
        sources = sources_of(value)
        is_early = len(value.axes) > 1 or isinstance(value.definition, Product)
        if not is_early and sources and {*sources} <= of_gates:
            of_gates.add(value)
    partial = partial_reductions(own)
    links: dict[Value, None] = {}
    cuts: set[Value] = set()  # reductions, and those that are pieces of them
    late_values = [v for v in own.values if v in live and v not in early_values | of_gates]
    for value in late_values:
        outside = [v for v in sources_of(value) if v not in of_gates and v not in late_values]
        if isinstance(value.definition, Reduce) and (outside or value.definition.source in cuts):
            source = value.definition.source
            if outside or (source in partial and source not in links):
                cuts.add(value)
                if value not in partial:
                    links[value] = None
                continue
        links |= dict.fromkeys(outside)
    inputs = {*own.inputs.values()}
    results = [result for _, result in late if isinstance(result, Value)]
    links |= dict.fromkeys(v for v in results if v not in of_gates and v not in late_values)
    links_in_order = [*links]
    writes: list[tuple[Target, Value | float]] = [
        (Target(LINK, number, value.axes), value)
        for number, value in enumerate(links_in_order)
        if value not in cuts
    ]
    values = [value for value in own.values if value in early_values or value in cuts]
    now = Statements(own.graph, own.inputs, values, [*early, *writes], own.outers)
    places = {place: value for place, value in own.inputs.items() if value in of_gates}
    places |= {(LINK, number): value for number, value in enumerate(links_in_order)}
    leaves = {*links_in_order} | inputs
    others = [v for v in own.values if v not in leaves and (v in of_gates or v in late_values)]
    later = Statements(own.graph, places, others, late).only(kinds)
    return Parts(now, later, links_in_order)


def prepare(parts: Sequence[Statements]) -> tuple[Statements, list[Statements]]:
    """Take out of parts of a pass what depends on gates alone, and has at most one axis.

    Return the statements of it, which write targets ("ready", number), and the parts, which read
    these instead of gates.
    """
    inputs = {place: value for own in parts for place, value in own.inputs.items()}
    gates = {place: v for place, v in inputs.items() if place[0] == "gate" and len(v.axes) <= 1}
    other_inputs = {value for place, value in inputs.items() if place not in gates}
    values = [*dict.fromkeys(value for own in parts for value in own.values)]
    of_gates = {*gates.values()}
    for value in values:
        is_late = len(value.axes) > 1 or isinstance(value.definition, Product)
        if not is_late and value not in other_inputs and {*sources_of(value)} <= of_gates:
            of_gates.add(value)
    ready: dict[Value, None] = {}
    for own in parts:
        sources = [v for value in own.values if value not in of_gates for v in sources_of(value)]
        sources += [value for _, value in own.writes if isinstance(value, Value)]
        ready |= dict.fromkeys(value for value in sources if value in of_gates)
    places = {(READY, number): value for number, value in enumerate(ready)}
    writes: list[tuple[Target, Value | float]] = [
        (Target(*place, value.axes), value) for place, value in places.items()
    ]
    others = [
        Statements(
            own.graph,
            {place: value for place, value in own.inputs.items() if place not in gates} | places,
            [value for value in own.values if value not in of_gates],
            own.writes,
            own.outers,
        )
        for own in parts
    ]
    first = Statements(parts[0].graph, gates, [v for v in values if v in of_gates], writes)
    return first, others


def _ancestors(own: Statements, results: set[Value]) -> set[Value]:
    """Return values with all that they are computed of, from inputs on."""
    values, inputs = {*results}, {*own.inputs.values()}
    for value in reversed(own.values):
        if value in values and value not in inputs:
            values.update(sources_of(value))
    return values


def partial_reductions(own: Statements) -> set[Value]:
    """Return the reductions that only another one of the same kind reads: their threads' parts need
    not be combined before it."""
    readers: dict[Value, list[Value | None]] = {}
    for value in own.values:
        for source in sources_of(value):
            readers.setdefault(source, []).append(value)
    others = [source for _, source in own.writes if isinstance(source, Value)]
    others += [factor for outer in own.outers for factor in (outer.lhs, outer.rhs)]
    for value in others:
        readers.setdefault(value, []).append(None)

    def kind(value: Value | None) -> str | None:
        is_reduction = value is not None and isinstance(value.definition, Reduce)
        return value.definition.kind if is_reduction else None  # type: ignore[union-attr]

    return {
        value
        for value, by in readers.items()
        if kind(value) is not None and [kind(reader) for reader in by] == [kind(value)]
    }
