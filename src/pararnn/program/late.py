"""A pass in three phases: values of gates only, values that the next step needs, and the rest."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from pararnn.program.statements import Product, Reduce, Statements, Target, Value, sources_of

LINK, READY = "link", "ready"
"""Kinds of targets and inputs by which the second phase, and the first, pass values on."""


class SplitPass(NamedTuple):
    """A pass in two phases, of which `later` may wait. links: values of `now` that `later` reads.

    A link that is a reduction may stay in partial results, which `later` combines. The others are
    written by `now` to targets ("link", number). `later` reads gates and ("link", number).
    """

    now: Statements
    later: Statements
    links: list[Value]

    def partial_links(self) -> set[Value]:
        """Return the links that `now` leaves in partial results."""
        whole = {value for target, value in self.now.writes if target.kind == LINK}
        return {value for value in self.links if value not in whole}


def split(whole: Statements, kinds: Collection[str]) -> SplitPass:
    """Split a pass. Targets of `kinds` that are numbers or vectors come later, and so do values of
    at most one axis that only they need."""
    late = [write for write in whole.writes if write[0].kind in kinds and len(write[0].axes) <= 1]
    early = [write for write in whole.writes if write not in late]
    factors = [factor for outer in whole.outers for factor in (outer.lhs, outer.rhs)]
    early_results = {value for _, value in early if isinstance(value, Value)} | {*factors}
    live = whole.ancestors(early_results | {v for _, v in late if isinstance(v, Value)})
    early_values = whole.ancestors(early_results | {*filter(_is_wide, live)})
    gates = [value for value in whole.inputs_of("gate").values() if not _is_wide(value)]
    of_gates = _of_gates(whole.values, gates)
    partial = partial_reductions(whole)
    links: dict[Value, None] = {}
    linked: set[Value] = set()  # reductions that `later` combines, inner ones included
    late_values = [v for v in whole.values if v in live and v not in early_values | of_gates]
    for value in late_values:
        needs = [v for v in sources_of(value) if v not in of_gates and v not in late_values]
        if isinstance(value.definition, Reduce) and (needs or value.definition.source in linked):
            source = value.definition.source
            if needs or (source in partial and source not in links):
                linked.add(value)
                if value not in partial:
                    links[value] = None
                continue
        links |= dict.fromkeys(needs)
    inputs = {*whole.inputs.values()}
    results = [result for _, result in late if isinstance(result, Value)]
    links |= dict.fromkeys(v for v in results if v not in of_gates and v not in late_values)
    links_in_order = [*links]
    writes: list[tuple[Target, Value | float]] = [
        (Target(LINK, number, value.axes), value)
        for number, value in enumerate(links_in_order)
        if value not in linked
    ]
    values = [value for value in whole.values if value in early_values or value in linked]
    now = replace(whole, values=values, writes=[*early, *writes])
    later_inputs = {key: value for key, value in whole.inputs.items() if value in of_gates}
    later_inputs |= {(LINK, number): value for number, value in enumerate(links_in_order)}
    leaves = {*links_in_order} | inputs
    rest = [v for v in whole.values if v not in leaves and (v in of_gates or v in late_values)]
    later = replace(whole, inputs=later_inputs, values=rest, writes=late, outers=[]).only(kinds)
    return SplitPass(now, later, links_in_order)


def prepare(passes: Sequence[Statements]) -> tuple[Statements, list[Statements]]:
    """Move values of at most one axis that depend only on gates to statements of their own.

    Return these statements, which write targets ("ready", number), and the passes, which read the
    targets instead of gates.
    """
    inputs = {key: value for pass_ in passes for key, value in pass_.inputs.items()}
    gates = {key: v for key, v in inputs.items() if key[0] == "gate" and not _is_wide(v)}
    other_inputs = {value for key, value in inputs.items() if key not in gates}
    values = [*dict.fromkeys(value for pass_ in passes for value in pass_.values)]
    of_gates = _of_gates([v for v in values if v not in other_inputs], gates.values())
    ready: dict[Value, None] = {}
    for pass_ in passes:
        sources = [v for value in pass_.values if value not in of_gates for v in sources_of(value)]
        sources += [value for _, value in pass_.writes if isinstance(value, Value)]
        ready |= dict.fromkeys(value for value in sources if value in of_gates)
    ready_inputs = {(READY, number): value for number, value in enumerate(ready)}
    writes: list[tuple[Target, Value | float]] = [
        (Target(*key, value.axes), value) for key, value in ready_inputs.items()
    ]
    remaining = [
        replace(
            pass_,
            inputs={k: value for k, value in pass_.inputs.items() if k not in gates} | ready_inputs,
            values=[value for value in pass_.values if value not in of_gates],
        )
        for pass_ in passes
    ]
    prelude = Statements(passes[0].graph, gates, [v for v in values if v in of_gates], writes)
    return prelude, remaining


def _is_wide(value: Value) -> bool:
    """Check whether a value has more than one axis, or is a product."""
    return len(value.axes) > 1 or isinstance(value.definition, Product)


def _of_gates(values: Iterable[Value], gates: Iterable[Value]) -> set[Value]:
    """Return gates, and those of the values of at most one axis that are computed of them alone."""
    of_gates = {*gates}
    for value in values:
        sources = sources_of(value)
        if sources and not _is_wide(value) and {*sources} <= of_gates:
            of_gates.add(value)
    return of_gates


def partial_reductions(statements: Statements) -> set[Value]:
    """Return the reductions that only another one of the same kind reads: threads need not combine
    their partial results before it."""

    def op_of(value: Value | None) -> str | None:
        is_reduction = value is not None and isinstance(value.definition, Reduce)
        return value.definition.op if is_reduction else None  # type: ignore[union-attr]

    return {
        value
        for value, users in statements.readers().items()
        if op_of(value) is not None and [op_of(user) for user in users] == [op_of(value)]
    }
