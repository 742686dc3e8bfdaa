"""The normal form of a matrix cell whose step is affine in its states, for kernels over chunks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pararnn.base.errors import CellError
from pararnn.cells.base import Step
from pararnn.cells.matrix import VALUES, Axes
from pararnn.program.apart import outside_modes
from pararnn.program.derive import gradients, leaves_of
from pararnn.program.forms import Expressions, Factor, Forms, NotAffine, ReadoutForms, StepValues
from pararnn.program.matrix import (
    axes_by_kind,
    dependences,
    examples,
    forward_of,
    passes_of,
    reachable,
)
from pararnn.program.normal import Normal, normal_form
from pararnn.program.pullback import Inputs, evaluate, pull_back
from pararnn.program.statements import (
    INPUTS,
    RENAMED,
    CannotGenerate,
    Point,
    Reduce,
    Statements,
    Target,
    Value,
    sources_of,
)

CHECK_POINTS = ((0, 0.0), (1, -0.75))
"""Seeds and offsets of the points at which a form is compared with its step."""
TOLERANCE = 1e-6
"""Tolerance between a step and its form, in float64 with the constants of the compute dtype."""
_OTHER_GRADIENT = "a gradient other than that of its operations (detach, a torch.autograd.Function)"


@dataclass(frozen=True)
class Slot:
    """A tensor of gates alone: `AffineForm.gates` writes it to Target("form", number, axes)."""

    number: int
    axes: Axes


Entry = Slot | float


@dataclass(frozen=True)
class Component:
    """States that are solved together. With n states S_j (side, other), R columns and r reads:

    S_i' = sum_j decay_ij S_j + sum_c column_ci (sum_k gain_ck sum_j read_kj^T S_j + value_c)

    states: their numbers. axes: theirs, in the order of memory. side: the axis that reads sum over.
    other: the states' other axis, None for states of one. decay: n x n, axes () or (side,). column:
    R x n, (side,) or (). gain: R x r, (). read: r x n, (side,) or (). value: R, (other,) or ().

    For the readout, of the new states: query: p x n, (side,) or (), of sums over the side; look:
    for a sum over `other`, the state's index among `states`, and the weight, (other,) or ().
    """

    states: tuple[int, ...]
    axes: Axes
    side: str
    other: str | None
    decay: tuple[tuple[Entry, ...], ...]
    column: tuple[tuple[Entry, ...], ...]
    gain: tuple[tuple[Entry, ...], ...]
    read: tuple[tuple[Entry, ...], ...]
    value: tuple[Entry, ...]
    query: tuple[tuple[Entry, ...], ...] = ()
    look: tuple[tuple[int, Entry], ...] = ()


@dataclass(frozen=True)
class EntryStates:
    """States of fewer axes than others, each entry of which is computed from entries with the same
    indices, by any function. They are solved first, and are gates for the components after them.

    gates: gates and parameters -> "entry", tensors of all steps that advance reads. gates_backward:
    with "grad_entry" -> gradients of what gates read. advance: states and "entry" -> new states,
    all pointwise over `axes`.
    """

    states: tuple[int, ...]
    axes: Axes
    gates: Statements
    gates_backward: Statements
    advance: Statements


@dataclass(frozen=True)
class Answer:
    """What the readout reads of a component's new states: its index in `AffineForm.components`, and
    that among the component's queries, then looks."""

    axes: Axes
    component: int
    index: int


@dataclass(frozen=True)
class AffineForm:
    """A step that is affine in its states, in the order of solving.

    gates: gates, parameters, and of solved EntryStates "state" and "new_state" -> "form", a tensor
    for each Slot. readout: gates, parameters, "new_state" of EntryStates, and "answer" -> "output".
    The backward statements read the same inputs and cotangents ("grad_form", "grad_output"), and
    write the gradients of these inputs, "grad_gate" and so on; what they do not write is zero.
    """

    names: tuple[str, ...]
    components: tuple[Component | EntryStates, ...]
    gates: Statements
    gates_backward: Statements
    readout: Statements
    readout_backward: Statements
    answers: tuple[Answer, ...]

    @property
    def description(self) -> str:
        """The class of each component, in words."""
        lines = []
        for component in self.components:
            names = ", ".join(self.names[i] for i in component.states)
            if isinstance(component, EntryStates):
                lines.append(f"{names}: by entries")
                continue
            reads = f", reads along {component.side}" if component.read else ""
            sizes = len(component.column), len(component.read), len(component.states)
            lines.append("{}: R = {}, r = {}, n = {}{}".format(names, *sizes, reads))
        return "; ".join(lines)


@outside_modes
@torch.no_grad()
def affine_form(step: Step, statements: Statements, dtype: torch.dtype) -> AffineForm | str:
    """Return the normal form of a matrix cell's step, given the statements of the step and its
    gradients in a compute dtype, or the operation by which it leaves the class."""
    if statements.renames:
        return RENAMED
    try:
        form = _derive(step, statements, dtype)
    except (NotAffine, CannotGenerate, CellError) as error:
        return str(error)
    return form if _agrees(form, step) else _OTHER_GRADIENT


class _Derivation:
    """The normal form of a step: its components, then what its readout reads of them."""

    def __init__(self, step: Step, statements: Statements) -> None:
        self.passes = passes = passes_of(statements)
        self.axes = axes_by_kind(step)["state"]
        self.expressions = Expressions(statements.order)
        self.inputs = passes.advance.inputs
        self.new = {target.number: value for target, value in passes.advance.writes}
        everything = [*self.inputs.values(), *passes.forward.values]
        pure: dict[Value, Factor] = {
            value: self.expressions.input(*key, value.axes)
            for key, value in self.inputs.items()
            if key[0] != "state"
        }
        nodes = {value.node: value for value in everything}
        lengths = step.head.lengths
        names = tuple(step.cls.states)
        self.shared = StepValues(self.expressions, pure, nodes, self.axes, names, lengths)

    def entry_states(self, states: tuple[int, ...]) -> Statements:
        """Return the statements of states that are solved by entries; values after them read these
        states as gates."""
        pure, of = self.shared.pure, self.axes[states[0]]
        for i in states:
            pure[self.inputs["state", i]] = self.expressions.input("state", i, of)
        Forms(self.shared, {}).run(self._advance(states))
        writes = [(Target("new_state", i, of), self._pure(self.new[i])) for i in states]
        for i in states:
            value = self.new[i]
            if isinstance(value, Value) and value.definition is not None:
                pure[value] = self.expressions.input("new_state", i, of)
        return self.expressions.statements(writes)

    def component(self, states: tuple[int, ...]) -> Normal:
        """Return the normal form of states that are solved together."""
        if len({self.axes[i] for i in states}) > 1:
            names = " and ".join(self.shared.names[i] for i in states)
            raise NotAffine(f"a dependence between states of different axes, {names}")
        if not self.axes[states[0]]:
            raise NotAffine(f"states that are numbers, {self.shared.names[states[0]]}")
        forms = Forms(self.shared, {self.inputs["state", i]: i for i in states})
        forms.run(self._advance(states))
        new = [forms.form(self.new[i]) for i in states]
        axes = self.axes[states[0]]
        return normal_form(self.expressions, states, axes, new, self._summed(axes))

    def _summed(self, axes: Axes) -> str:
        """Return the axis of matrices over which the readout sums, the first if it is not one."""
        sums = {
            value.definition.axis
            for value in self.passes.readout.values
            if isinstance(value.definition, Reduce)
            and value.definition.axis in axes
            and {*axes} <= {*value.definition.source.axes}
        }
        return sums.pop() if len(sums) == 1 else axes[0]

    def readout(
        self, components: Sequence[Normal]
    ) -> tuple[ReadoutForms, list[tuple[Target, Factor]]]:
        """Return the answers that the readout reads, and its outputs."""
        atoms = {
            value: i
            for component in components
            for i in component.states
            if isinstance(value := self.new[i], Value) and value not in self.shared.pure
        }
        answers = ReadoutForms(self.shared, atoms, [(c.states, c.side) for c in components])
        answers.run(self.passes.readout)
        writes = [
            (target, answers.open(value) if isinstance(value, Value) else value)
            for target, value in self.passes.readout.writes
        ]
        return answers, writes

    def groups(self) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
        """Return the states that are solved by entries, and those that are solved in components."""
        depends = dependences(self.passes.advance)
        widest = max(map(len, self.axes))
        entries: list[set[int]] = []
        others: list[set[int]] = []
        for group in _cycles(depends):
            states, of = tuple(sorted(group)), self.axes[min(group)]
            before = [g for g in entries + others if any(depends[i] & g for i in group)]
            readers = any(depends[i] & group for i in range(len(depends)) if i not in group)
            is_narrow = len(of) < widest and all(self.axes[i] == of for i in states)
            after_entries = all(g in entries and self.axes[min(g)] == of for g in before)
            joined = group.union(*before)
            may_be = is_narrow and after_entries and self._is_pointwise(joined)
            if may_be and (not of or readers or before or not self._is_affine(states)):
                entries = [*(g for g in entries if g not in before), joined]
            else:
                before = [g for g in others if g in before]
                others = [*(g for g in others if g not in before), group.union(*before)]
        return [tuple(sorted(g)) for g in entries], sorted(tuple(sorted(g)) for g in others)

    def _is_affine(self, states: tuple[int, ...]) -> bool:
        try:
            self.component(states)
        except NotAffine:
            return False
        return True

    def _is_pointwise(self, states: set[int]) -> bool:
        """Check whether new states are computed from states entry by entry."""
        depending = {self.inputs["state", i] for i in states}
        of = self.axes[min(states)]
        for value in self._advance(sorted(states)).values:
            if not depending.isdisjoint(sources_of(value)):
                if not isinstance(value.definition, Point) or value.axes != of:
                    return False
                depending.add(value)
        return True

    def _advance(self, states: Iterable[int]) -> Statements:
        """Return the statements that new states need."""
        advance = self.passes.advance
        writes = [(target, value) for target, value in advance.writes if target.number in states]
        return replace(advance, writes=writes).only(["new_state"])

    def _pure(self, value: Value | float) -> Factor:
        return self.shared.pure[value] if isinstance(value, Value) else value


def _cycles(depends: Sequence[frozenset[int]]) -> list[set[int]]:
    """Return the strongly connected components, each after those on which it depends."""
    reach = reachable(depends)
    groups = {frozenset(j for j in states if i in reach[j]) for i, states in enumerate(reach)}
    return [set(group) for group in sorted(groups, key=lambda g: (len(reach[min(g)]), min(g)))]


def _derive(step: Step, statements: Statements, dtype: torch.dtype) -> AffineForm:
    """Return the normal form. Raises NotAffine and CannotGenerate."""
    if step.axes.outputs != ((VALUES,),):
        raise NotAffine(f"a readout of other axes than {VALUES}")
    derivation = _Derivation(step, statements)
    expressions = derivation.expressions
    entry_groups, groups = derivation.groups()
    advances = [derivation.entry_states(states) for states in entry_groups]
    normals = [derivation.component(states) for states in groups]
    answers, outputs = derivation.readout(normals)
    slots: dict[Value, Slot] = {}

    def entry(factor: Factor) -> Entry:
        if not isinstance(factor, Value):
            return factor
        return slots.setdefault(factor, Slot(len(slots), factor.axes))

    def entries(factors: Iterable[Factor]) -> tuple[Entry, ...]:
        return tuple(map(entry, factors))

    pull = partial(pull_back, step=step, order=statements.order, dtype=dtype)
    components: list[Component | EntryStates] = []
    for states, advance in zip(entry_groups, advances, strict=True):
        axes = derivation.axes[states[0]]
        of_gates, of_states = _split_entries(advance, axes)
        components.append(EntryStates(states, axes, of_gates, pull(of_gates), of_states))
    listed: list[Answer] = []
    for number, normal in enumerate(normals):
        queries = {key: v for (of, key), v in answers.queries.items() if of == number}
        looks = {key: v for (of, key), v in answers.looks.items() if of == number}
        for index, value in enumerate([*queries.values(), *looks.values()]):
            expressions.out.inputs["answer", len(listed)] = value
            listed.append(Answer(value.axes, len(components), index))
        rows = ("decay", "column", "gain", "read")
        tables = {name: tuple(map(entries, getattr(normal, name))) for name in rows}
        components.append(
            Component(
                normal.states,
                normal.axes,
                normal.side,
                normal.other,
                **tables,
                value=entries(normal.value),
                query=tuple(map(entries, queries)),
                look=tuple((i, entry(weight)) for i, weight in looks),
            )
        )
    gates = expressions.statements(
        (Target("form", slot.number, slot.axes), value) for value, slot in slots.items()
    )
    readout = expressions.statements(outputs)
    return AffineForm(
        tuple(step.cls.states),
        tuple(components),
        gates,
        pull(gates),
        readout,
        pull(readout),
        tuple(listed),
    )


def _split_entries(advance: Statements, axes: Axes) -> tuple[Statements, Statements]:
    """Split the statements of states that are solved by entries into those of gates alone, whose
    results are inputs "entry" of the others. Masks are left to these: they have no gradients."""
    readers, stepwise = advance.readers(), {*advance.dependent("state")}
    for value in reversed(advance.values):
        if value.node.meta["dtype"] == torch.bool and not stepwise.isdisjoint(readers[value]):
            stepwise.add(value)
    every = [*advance.inputs.values(), *advance.values]
    entries = [v for v in every if v not in stepwise and {None, *stepwise} & {*readers[v]}]
    writes: list[tuple[Target, Value | float]] = [
        (Target("entry", number, axes), value) for number, value in enumerate(entries)
    ]
    gates = replace(advance, writes=writes).only(["entry"])
    live = gates.ancestors(gates.results())
    gates.inputs = {key: value for key, value in gates.inputs.items() if value in live}
    numbers = {("entry", number): value for number, value in enumerate(entries)}
    states = advance.only(["new_state"], numbers)
    # An entry has all axes of the states, and so has what is computed of it.
    full: dict[Value, Value] = {}
    for value in dict.fromkeys((*states.inputs.values(), *states.values)):
        sources = tuple(full[source] for source in sources_of(value) if source in full)
        is_input = value in entries or value.definition is None
        full[value] = Value(value.node, axes, None if is_input else Point(sources))
    states.inputs = {k: full[v] for k, v in states.inputs.items() if k[0] in ("state", "entry")}
    states.values = [full[value] for value in states.values]
    states.writes = [(t, full[v] if isinstance(v, Value) else v) for t, v in states.writes]
    return gates, states


def advance(form: AffineForm, inputs: Inputs) -> tuple[list[Tensor], list[Tensor]]:
    """Return new states and outputs of a step, computed by its form in PyTorch from states, gates
    and parameters (..., axes) by kind and number."""
    tensors = dict(inputs)
    for states in form.components:
        if isinstance(states, EntryStates):
            for target, value in evaluate(states.gates, tensors):
                tensors["entry", target.number] = torch.as_tensor(value)
            for target, value in evaluate(states.advance, tensors):
                like = tensors["state", target.number]
                tensors["new_state", target.number] = torch.as_tensor(value).expand_as(like)
    slots = [value for _, value in evaluate(form.gates, tensors)]
    answers: dict[tuple[int, int], Tensor] = {}
    for number, component in enumerate(form.components):
        if isinstance(component, Component):
            new, answered = solve_step(
                component, slots, [inputs["state", i] for i in component.states]
            )
            tensors |= {("new_state", i): x for i, x in zip(component.states, new, strict=True)}
            answers |= {(number, index): x for index, x in enumerate(answered)}
    tensors |= {("answer", k): answers[a.component, a.index] for k, a in enumerate(form.answers)}
    outputs = [torch.as_tensor(value) for _, value in evaluate(form.readout, tensors)]
    return [tensors["new_state", i] for i in range(len(form.names))], outputs


def solve_step(
    component: Component, slots: Sequence[Tensor | float], states: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """Return a component's new states and answers of one step, given the tensors of all slots."""
    is_transposed = component.axes[0] != component.side
    vectors = component.other is None

    def spread(entry: Entry) -> Any:
        """Return an entry over (side, other)."""
        if not isinstance(entry, Slot):
            return entry
        value = slots[entry.number]
        assert isinstance(value, Tensor)
        if not entry.axes:
            return value[..., None, None]
        return value.unsqueeze(-1 if entry.axes == (component.side,) else -2)

    def combine(entries: Sequence[Entry], tensors: Sequence[Any]) -> Any:
        pairs = zip(entries, tensors, strict=True)
        return sum((spread(entry) * x for entry, x in pairs if entry != 0.0), start=0.0)

    def summed(entries: Sequence[Entry], tensors: Sequence[Tensor]) -> Tensor:
        products: Tensor = combine(entries, tensors)
        return products.sum(-2, keepdim=True)

    old = [x.unsqueeze(-1) if vectors else x.mT if is_transposed else x for x in states]
    reads = [summed(weights, old) for weights in component.read]
    rows = [
        combine(gains, reads) + spread(value)
        for gains, value in zip(component.gain, component.value, strict=True)
    ]
    new = []
    for i, x in enumerate(old):
        total = combine(component.decay[i], old)
        total = total + combine([stack[i] for stack in component.column], rows)
        new.append(torch.as_tensor(total, dtype=x.dtype).expand_as(x))
    answers = [summed(weights, new).squeeze(-2) for weights in component.query]
    answers = [x.squeeze(-1) for x in answers] if vectors else answers
    answers += [(new[i] * spread(weight)).sum(-1) for i, weight in component.look]
    new = [x.squeeze(-1) if vectors else x.mT if is_transposed else x for x in new]
    return new, answers


def _agrees(form: AffineForm, step: Step) -> bool:
    """Check that a form computes new states, outputs and gradients of a step at random points."""
    forward = forward_of(step)
    axes = axes_by_kind(step)
    keys = [(kind, i) for kind in INPUTS for i in range(len(axes.get(kind, ())))]
    for seed, offset in CHECK_POINTS:
        tensors = [x + offset for x in examples(step, torch.float64, (), seed)]
        with torch.enable_grad():
            leaves = leaves_of(tensors)
            expected = forward(*leaves)
            new, outputs = advance(form, dict(zip(keys, leaves, strict=True)))
            pairs = zip([*new, *outputs], expected, strict=True)
            results = [x.expand(like.shape) for x, like in pairs]
            generator = torch.Generator().manual_seed(seed)
            cotangents = [torch.randn(x.shape, generator=generator).to(x) for x in expected]
            grads = [gradients(x, leaves, cotangents) for x in (results, expected)]
        for x, y in zip([*results, *grads[0]], [*expected, *grads[1]], strict=True):
            if not torch.allclose(x, y, TOLERANCE, TOLERANCE, equal_nan=True):
                return False
    return True
