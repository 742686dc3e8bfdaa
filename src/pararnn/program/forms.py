"""Affine forms of a step's values in its states: sums of terms, each a state or its weighted sum
over one axis, times factors of gates alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import fx

from pararnn.cells.matrix import Axes
from pararnn.program.statements import Point, Product, Reduce, Statements, Value, sources_of

aten = torch.ops.aten

Factor = Value | float
"""A value of gates alone, or a number."""
_COMMUTE = {aten.add.Tensor, aten.mul.Tensor}


class NotAffine(Exception):
    """An operation by which a step leaves the class; the text names it."""


class Expressions:
    """Statements of gates alone, of which equal ones are one value."""

    def __init__(self, order: Axes) -> None:
        self.order, self.out = order, Statements()
        self._values: dict[Any, Value] = {}
        self._index: dict[Value, int] = {}
        self._by_node: dict[fx.Node, Value] = {}

    def input(self, kind: str, number: int, axes: Axes) -> Value:
        """Return the value of an input."""
        inputs = self.out.inputs
        if (kind, number) not in inputs:
            inputs[kind, number] = self.leaf(axes)
        return inputs[kind, number]

    def leaf(self, axes: Axes) -> Value:
        """Return a value that has no definition."""
        return self._note(Value(self._placeholder(), axes))

    def point(
        self,
        target: Any,
        *args: Any,
        dtype: torch.dtype = torch.float32,
        kwargs: Mapping[str, Any] | None = None,
    ) -> Value:
        """Return the value of a pointwise call of values and numbers."""
        kwargs = dict(kwargs or {})
        keys = [self._key(arg) for arg in args]
        ordered = sorted(keys) if target in _COMMUTE and not kwargs else keys
        key = (target, tuple(ordered), repr(sorted(kwargs.items())))
        if key not in self._values:
            values = tuple(arg for arg in args if isinstance(arg, Value))
            nodes = tuple(arg.node if isinstance(arg, Value) else arg for arg in args)
            node = self.out.graph.call_function(target, nodes, kwargs)
            node.meta["dtype"] = dtype
            axes = {axis for value in values for axis in value.axes}
            self._add(key, node, axes, Point(values))
        return self._values[key]

    def reduce(self, op: str, source: Value, axis: str) -> Value:
        """Return the value of a reduction over an axis of the source."""
        key = (op, source, axis)
        if key not in self._values:
            axes = {*source.axes} - {axis}
            self._add(key, self._placeholder(), axes, Reduce(op, source, axis))
        return self._values[key]

    def copy(self, value: Value, arguments: Mapping[Value, Factor], nodes: Any) -> Value:
        """Return a value of other statements, given those of its arguments. nodes: their values by
        node."""
        definition = value.definition
        if isinstance(definition, Point):
            args = [
                arguments[nodes[arg]] if isinstance(arg, fx.Node) else arg
                for arg in value.node.args
            ]
            meta, kwargs = value.node.meta, value.node.kwargs
            return self.point(value.node.target, *args, dtype=meta["dtype"], kwargs=kwargs)
        assert isinstance(definition, (Reduce, Product))  # `affine_form` refuses renames
        source = arguments[definition.source]
        assert isinstance(source, Value)
        if isinstance(definition, Reduce):
            return self.reduce(definition.op, source, definition.axis)
        key = ("product", source, definition.param, definition.transposes, definition.axis)
        if key not in self._values:
            product = Product(source, definition.param, definition.transposes, definition.axis)
            self._add(key, self._placeholder(), source.axes, product)
        return self._values[key]

    def product(self, a: Factor, b: Factor) -> Factor:
        """Return a times b."""
        if not isinstance(a, Value):
            a, b = b, a
        if not isinstance(a, Value):
            return a * float(b)  # type: ignore[arg-type]
        if b == 1.0:
            return a
        if b == -1.0:
            if a.node.target is aten.neg.default:
                return self.value_of(a.node.args[0])
            return self.point(aten.neg.default, a)
        return self.point(aten.mul.Tensor, a, b)

    def sum(self, a: Factor, b: Factor) -> Factor:
        """Return a plus b."""
        if not isinstance(a, Value) and not isinstance(b, Value):
            return a + b
        if a == 0.0 or b == 0.0:
            return b if a == 0.0 else a
        return self.point(aten.add.Tensor, a, b)

    def where(self, condition: Value, a: Factor, b: Factor) -> Factor:
        """Return a where the condition holds, and b elsewhere."""
        return a if a == b else self.point(aten.where.self, condition, a, b)

    def value_of(self, arg: Any) -> Any:
        """Return the value of an argument's node, and a number as it is."""
        return self._by_node[arg] if isinstance(arg, fx.Node) else arg

    def depends(self, value: Factor, source: Factor) -> bool:
        """Check whether a value is computed from another."""
        above = {value}
        for candidate in reversed(self.out.values):
            if candidate in above:
                above.update(sources_of(candidate))
        return source in above

    def statements(self, writes: Iterable[tuple[Any, Factor]]) -> Statements:
        """Return the statements that results need, and the inputs that they read."""
        writes = [*writes]
        out = Statements(self.out.graph, self.out.inputs, self.out.values, writes)
        out = out.only({target.kind for target, _ in writes})
        live = {value for _, value in writes if isinstance(value, Value)}
        live.update(source for value in out.values for source in sources_of(value))
        out.inputs = {key: value for key, value in out.inputs.items() if value in live}
        return out

    def _key(self, arg: Any) -> tuple[int, str, str]:
        """Return a number's or a value's key, which orders them."""
        if isinstance(arg, Value):
            return self._index[arg], "", ""
        return -1, type(arg).__name__, repr(arg)

    def _placeholder(self) -> fx.Node:
        node = self.out.graph.placeholder(f"value_{len(self._index)}")
        node.meta["dtype"] = torch.float32
        return node

    def _note(self, value: Value) -> Value:
        self._index[value] = len(self._index)
        self._by_node[value.node] = value
        return value

    def _add(self, key: Any, node: fx.Node, axes: Iterable[str], definition: Any) -> None:
        ordered = tuple(axis for axis in self.order if axis in {*axes})
        value = self._values[key] = self._note(Value(node, ordered, definition))
        self.out.values.append(value)


class Read(NamedTuple):
    """The sum over an axis of states, each times its weight, by the states' numbers in order."""

    axis: str
    weights: tuple[tuple[int, Factor], ...]


Atom = int | Read | None
"""A state by its number, a weighted sum of states, or None for 1."""


class Term(NamedTuple):
    """A product: a number of gates alone, factors by their axes, and an atom."""

    coefficient: Factor
    factors: tuple[tuple[Axes, Value], ...] = ()
    atom: Atom = None


Form = tuple[Term, ...]


@dataclass
class StepValues:
    """What forms of a step's values share.

    pure: by value of the step, that of gates alone; states that are solved before count as gates.
    nodes: all values by their nodes. axes, names: of all states. lengths: of axes.
    """

    expressions: Expressions
    pure: dict[Value, Factor]
    nodes: Mapping[fx.Node, Value]
    axes: Sequence[Axes]
    names: Sequence[str]
    lengths: Mapping[str, int]


class Forms:
    """Forms of values in some states, statement by statement. atoms: these states by value."""

    def __init__(self, step: StepValues, atoms: Mapping[Value, int]) -> None:
        self.step, self.expressions, self.pure = step, step.expressions, step.pure
        self.forms: dict[Value, Form] = {
            value: (Term(1.0, (), state),) for value, state in atoms.items()
        }
        self._outers: dict[Value, Form] = {}

    def run(self, statements: Statements) -> None:
        """Visit all statements. Raises NotAffine."""
        for value in statements.values:
            if value not in self.pure and value not in self.forms:
                self.visit(value)

    def visit(self, value: Value) -> None:
        """Find the form of a value whose sources have been visited."""
        if all(source in self.pure for source in sources_of(value)):
            self.pure[value] = self.expressions.copy(value, self.pure, self.step.nodes)
        else:
            self.forms[value] = self.collected(self._call(value))

    def form(self, x: Any) -> Form:
        """Return the form of a value or a number. One of gates alone with two axes is a sum of
        products of factors with one, where its operations allow."""
        if x in self.forms:
            return self.forms[x]
        factor = self.pure.get(x, x)
        if not isinstance(factor, Value):
            return (Term(float(factor)),)
        if len(factor.axes) < 2:
            return (self._term(factor),)
        if x not in self._outers:
            self._outers[x] = (self._term(factor),)
            if all(source in self.pure for source in sources_of(x)) and x.definition is not None:
                with suppress(NotAffine):
                    self._outers[x] = self.collected(self._call(x))
        return self._outers[x]

    def refusal(self, value: Value, reason: str = "a value that depends on {}") -> NotAffine:
        """Return the error for a statement, which names its operation and the states."""
        forms = [self.forms[s] for s in sources_of(value) if s in self.forms]
        states = sorted({i for form in forms for term in form for i in _states(term.atom)})
        names = " and ".join(self.step.names[i] for i in states)
        op = ".".join(str(value.node.meta["op"]).split(".")[:2])
        return NotAffine(f"{op} of {reason.format(names)}")

    def times(self, x: Form, y: Form) -> Form:
        """Return the product of two forms, one of them without states."""
        multiply = self.expressions.product
        out = []
        for a in x:
            for b in y:
                factors = dict(a.factors)
                for axes, value in b.factors:
                    product = multiply(factors[axes], value) if axes in factors else value
                    factors[axes] = product  # type: ignore[assignment]
                atom = b.atom if a.atom is None else a.atom
                coefficient = multiply(a.coefficient, b.coefficient)
                out.append(Term(coefficient, tuple(sorted(factors.items(), key=_axes_of)), atom))
        return tuple(out)

    def collected(self, form: Form) -> Form:
        """Return a form with terms that differ in their coefficients alone added up."""
        sums: dict[Any, Factor] = {}
        for coefficient, *key in form:
            old = sums.get(tuple(key), 0.0)
            sums[tuple(key)] = self.expressions.sum(old, coefficient)
        return tuple(Term(coefficient, *key) for key, coefficient in sums.items())

    def selected(self, condition: Value, x: Form, y: Form) -> Form:
        """Return the form that is x where a condition of gates alone holds, and y elsewhere. What
        is not selected may be NaN: its factors are selected too, against 0."""
        where = self.expressions.where
        out: list[Term] = []
        sides = [self._coefficients(form) for form in (x, y)]
        for key in {**sides[0], **sides[1]}:
            (factors, atom), (a, b) = key, (side.get(key) for side in sides)
            if isinstance(atom, int) or (a is not None and b is not None):
                factor = where(condition, 0.0 if a is None else a, 0.0 if b is None else b)
                out += self.times((self._term(factor),), (Term(1.0, factors, atom),))
            elif a is not None:
                pick = partial(where, condition, b=0.0)
                out += self._guarded(Term(a, factors, atom), condition.axes, pick)
            elif b is not None:
                pick = partial(where, condition, 0.0)
                out += self._guarded(Term(b, factors, atom), condition.axes, pick)
        return tuple(out)

    def _coefficients(self, form: Form) -> dict[Any, Factor]:
        """Return coefficients by factors and atom; those of a state include its factors."""
        terms = [
            Term(whole(self.expressions, term), (), term.atom)
            if isinstance(term.atom, int)
            else term
            for term in form
        ]
        return {(factors, atom): a for a, factors, atom in self.collected(tuple(terms))}

    def _guarded(self, term: Term, axes: Axes, pick: Callable[[Factor], Factor]) -> Form:
        """Return a term times 0 where a condition does not select it, whatever its factors are.
        axes: of the condition."""
        coefficient, factors, atom = term
        if not axes:
            if isinstance(atom, Read):
                atom = Read(atom.axis, tuple((i, pick(weight)) for i, weight in atom.weights))
            if isinstance(coefficient, Value) or not (factors or atom):
                coefficient = pick(coefficient)
        selects = {of for of, _ in factors if {*axes} <= {*of}}
        guarded: Any = tuple((of, pick(x) if of in selects else x) for of, x in factors)
        form = (Term(coefficient, guarded, atom),)
        return form if selects or not axes else self.times((self._term(pick(1.0)),), form)

    def summed(self, form: Form, axis: str) -> Form:
        """Return the sum of a form over an axis."""
        out: list[Term] = []
        reads: dict[Any, list[tuple[Factor, Factor, int]]] = {}
        for coefficient, factors, atom in self.collected(form):
            rest = tuple((axes, value) for axes, value in factors if axis not in axes)
            along = [(axes, value) for axes, value in factors if axis in axes]
            weight = whole(self.expressions, Term(1.0, tuple(along)))
            if axis in self._atom_axes(atom):
                assert atom is not None
                if isinstance(weight, Value) and len(weight.axes) > 1:
                    raise NotAffine(
                        f"a sum over {axis} of {self._names(atom)} with weights along both axes"
                    )
                if isinstance(atom, Read):
                    total = self.summed_twice(atom, axis, weight)
                    out += self.times((total,), (Term(coefficient, rest),))
                else:
                    key = rest, self.step.axes[atom]
                    reads.setdefault(key, []).append((coefficient, weight, atom))
            elif isinstance(weight, Value):
                total = self._term(self.expressions.reduce("sum", weight, axis))
                out += self.times((total,), (Term(coefficient, rest, atom),))
            else:
                length = weight * self.step.lengths[axis]
                out.append(Term(self.expressions.product(coefficient, length), rest, atom))
        for (rest, _), terms in reads.items():
            out.append(self._read(axis, rest, terms))
        return tuple(out)

    def _read(self, axis: str, rest: Any, terms: list[tuple[Factor, Factor, int]]) -> Term:
        if len(terms) == 1:
            ((coefficient, weight, state),) = terms
            return Term(coefficient, rest, Read(axis, ((state, weight),)))
        weights: dict[int, Factor] = {}
        for coefficient, weight, state in terms:
            product = self.expressions.product(coefficient, weight)
            weights[state] = self.expressions.sum(weights.get(state, 0.0), product)
        return Term(1.0, rest, Read(axis, tuple(sorted(weights.items()))))

    def summed_twice(self, read: Read, axis: str, weight: Factor) -> Term:
        """Return the sum over the other axis of a weighted sum of states."""
        raise NotAffine(f"a read of {self._names(read)} that is weighted along both axes")

    def _term(self, factor: Factor) -> Term:
        if isinstance(factor, Value) and factor.node.meta["dtype"] == torch.bool:
            factor = self.expressions.where(factor, 1.0, 0.0)
        if not isinstance(factor, Value) or not factor.axes:
            return Term(factor)
        return Term(1.0, ((factor.axes, factor),))

    def _atom_axes(self, atom: Atom) -> Axes:
        if atom is None:
            return ()
        if isinstance(atom, int):
            return self.step.axes[atom]
        return tuple(axis for axis in self.step.axes[atom.weights[0][0]] if axis != atom.axis)

    def _names(self, atom: Atom) -> str:
        return " and ".join(self.step.names[i] for i in _states(atom))

    def _call(self, value: Value) -> Form:
        """Return the form of a statement. Raises NotAffine."""
        definition = value.definition
        if isinstance(definition, Reduce) and definition.op == "sum":
            return self.summed(self.form(definition.source), definition.axis)
        if isinstance(definition, Product):
            raise self.refusal(value, "{} and a square parameter")
        target: Any = value.node.target
        rule = RULES.get(target) if isinstance(definition, Point) else None
        args = [self.step.nodes[a] if isinstance(a, fx.Node) else a for a in value.node.args]
        form = None if rule is None else rule(self, args, value.node.kwargs)
        if form is None:
            raise self.refusal(value)
        return form


class ReadoutForms(Forms):
    """Forms of a readout's values in the new states of components. Where it does more with them, it
    reads answers: weighted sums over one axis.

    components: their states and sides. queries: answers over the side by component and weights of
    all its states; looks: over the other axis, by component and (index of the state, weight).
    """

    def __init__(
        self,
        step: StepValues,
        atoms: Mapping[Value, int],
        components: Sequence[tuple[tuple[int, ...], str]],
    ) -> None:
        super().__init__(step, atoms)
        self.components = components
        self.queries: dict[tuple[int, tuple[Factor, ...]], Value] = {}
        self.looks: dict[tuple[int, tuple[int, Factor]], Value] = {}

    def visit(self, value: Value) -> None:
        """Find the form of a value, or compute it from answers."""
        try:
            super().visit(value)
        except NotAffine:
            sources = [source for source in sources_of(value) if source in self.forms]
            if any(self._is_matrix(term) for source in sources for term in self.forms[source]):
                raise
            for source in sources:
                self.open(source)
            super().visit(value)
        if value in self.forms and not any(map(self._is_open, self.forms[value])):
            self.open(value)

    def open(self, value: Value) -> Factor:
        """Return a value of the readout, computed from answers."""
        if value in self.pure:
            return self.pure[value]
        form = self.forms.pop(value)
        for term in filter(self._is_matrix, form):
            raise NotAffine(f"every entry of {self._names(term.atom)} in the readout")
        total: Factor = 0.0
        for term in form:
            product = whole(self.expressions, term)
            if term.atom is not None:
                product = self.expressions.product(product, self.answer(term.atom))
            total = self.expressions.sum(total, product)
        self.pure[value] = total
        return total

    def answer(self, atom: int | Read) -> Factor:
        """Return a vector state, or a weighted sum of states."""
        read = atom if isinstance(atom, Read) else Read("", ((atom, 1.0),))
        total: Factor = 0.0
        for number, (states, side) in enumerate(self.components):
            weights = {state: weight for state, weight in read.weights if state in states}
            axes = self.step.axes[states[0]]
            if weights and read.axis == side:
                query = number, tuple(weights.get(state, 0.0) for state in states)
                if query not in self.queries:
                    rest = tuple(axis for axis in axes if axis != side)
                    self.queries[query] = self.expressions.leaf(rest)
                total = self.expressions.sum(total, self.queries[query])
                continue
            for state, weight in weights.items():
                look = number, (states.index(state), weight)
                if look not in self.looks:
                    self.looks[look] = self.expressions.leaf((side,))
                total = self.expressions.sum(total, self.looks[look])
        return total

    def summed_twice(self, read: Read, axis: str, weight: Factor) -> Term:
        """Return the sum over both axes: over the components' sides first."""
        total: Factor = 0.0
        for state, first in read.weights:
            side = next(side for states, side in self.components if state in states)
            inner, outer = (first, weight) if read.axis == side else (weight, first)
            answer = self.answer(Read(side, ((state, inner),)))
            product = self.expressions.product(outer, answer)
            assert isinstance(product, Value)
            left = axis if read.axis == side else read.axis
            total = self.expressions.sum(total, self.expressions.reduce("sum", product, left))
        return Term(total)

    def _is_matrix(self, term: Term) -> bool:
        """Check whether a term is a state with two axes."""
        return isinstance(term.atom, int) and len(self.step.axes[term.atom]) == 2

    def _is_open(self, term: Term) -> bool:
        """Check whether a sum over an axis may still make a query of a term's states."""
        if isinstance(term.atom, Read):
            sides = {side for states, side in self.components if {*states} & {*_states(term.atom)}}
            return bool(self._atom_axes(term.atom)) and sides != {term.atom.axis}
        return term.atom is not None


def whole(expressions: Expressions, term: Term) -> Factor:
    """Return the product of a term's coefficient and factors."""
    product = term.coefficient
    for _, factor in term.factors:
        product = expressions.product(product, factor)
    return product


def _states(atom: Atom) -> tuple[int, ...]:
    if isinstance(atom, Read):
        return tuple(i for i, _ in atom.weights)
    return () if atom is None else (atom,)


def _axes_of(factor: tuple[Axes, Value]) -> Axes:
    return factor[0]


Rule = Callable[[Forms, Sequence[Any], Mapping[str, Any]], Form | None]
"""The form of a call, given its arguments; None where it is not affine in them."""


def _sum(forms: Forms, args: Sequence[Any], kwargs: Mapping[str, Any], sign: float = 1.0) -> Form:
    x, y = map(forms.form, args)
    return (*x, *forms.times(y, (Term(sign * float(kwargs.get("alpha", 1.0))),)))


_difference = partial(_sum, sign=-1.0)


def _reversed_difference(forms: Forms, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Form:
    return _difference(forms, args[1::-1], kwargs)


def _neg(forms: Forms, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Form:
    return forms.times(forms.form(args[0]), (Term(-1.0),))


def _mul(forms: Forms, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Form | None:
    if all(arg in forms.forms for arg in args):
        return None
    return forms.times(*map(forms.form, args))


def _div(forms: Forms, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Form | None:
    x, y = args
    if y in forms.forms:
        return None
    factor = forms.pure.get(y, y)
    if not isinstance(factor, Value):
        return forms.times(forms.form(x), (Term(1.0 / factor),)) if factor else None
    reciprocal = forms.expressions.point(aten.reciprocal.default, factor)
    return forms.times(forms.form(x), (forms._term(reciprocal),))


def _lerp(forms: Forms, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Form | None:
    x, y, weight = args
    if weight in forms.forms:
        return None
    to_y = forms.form(weight)
    to_x = (Term(1.0), *forms.times(to_y, (Term(-1.0),)))
    return (*forms.times(forms.form(x), to_x), *forms.times(forms.form(y), to_y))


def _where(forms: Forms, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Form | None:
    condition, x, y = args
    factor = forms.pure.get(condition)
    if not isinstance(factor, Value):
        return None
    return forms.selected(factor, forms.form(x), forms.form(y))


def _convert(forms: Forms, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Form:
    return forms.form(args[0])


RULES: dict[Any, Rule] = {
    aten.add.Tensor: _sum,
    aten.add.Scalar: _sum,
    aten.sub.Tensor: _difference,
    aten.sub.Scalar: _difference,
    aten.rsub.Scalar: _reversed_difference,
    aten.neg.default: _neg,
    aten.mul.Tensor: _mul,
    aten.mul.Scalar: _mul,
    aten.div.Tensor: _div,
    aten.div.Scalar: _div,
    aten.lerp.Tensor: _lerp,
    aten.lerp.Scalar: _lerp,
    aten.where.self: _where,
    aten._to_copy.default: _convert,
}
"""Forms by operation: those that are affine in states."""
