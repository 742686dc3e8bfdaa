"""Forms of stacked states, merged into few columns, reads and values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from pararnn.cells.matrix import Axes
from pararnn.program.forms import Expressions, Factor, Form, NotAffine, Read, Term, whole
from pararnn.program.statements import Point, Value

aten = torch.ops.aten

Stack = tuple[Factor, ...]
"""An entry for each of the stacked states, or for each column."""


class Normal(NamedTuple):
    """States that are solved together; fields as those of `affine.Component`."""

    states: tuple[int, ...]
    axes: Axes
    side: str
    other: str | None
    decay: tuple[Stack, ...]
    column: tuple[Stack, ...]
    gain: tuple[Stack, ...]
    read: tuple[Stack, ...]
    value: tuple[Factor, ...]


def normal_form(
    expressions: Expressions,
    states: tuple[int, ...],
    axes: Axes,
    forms: Sequence[Form],
    preferred: str,
) -> Normal:
    """Merge the forms of new states, along the preferred axis where they leave the choice. Raises
    NotAffine where their terms are of another class."""
    side = _side(axes, forms, preferred)
    other = next((axis for axis in axes if axis != side), None)
    count = len(states)
    decay: list[list[Factor]] = [[0.0] * count for _ in states]
    rows: dict[Any, list[Factor]] = {}  # stacks of columns by what they multiply
    for i, term in ((i, term) for i, form in enumerate(forms) for term in form):
        if term == Term(0.0):
            continue
        if isinstance(term.atom, int):
            j = states.index(term.atom)
            decay[i][j] = expressions.sum(decay[i][j], whole(expressions, term))
            continue
        factors: dict[Any, Factor] = dict(term.factors)
        column, value = factors.pop((side,), 1.0), factors.pop((other,), 1.0)
        if factors:
            raise NotAffine(f"a write with axes {' and '.join(axes)} that is no product of vectors")
        if term.atom is not None and value != 1.0:
            raise NotAffine(f"a read along {side} that is weighted along {other}")
        stack = rows.setdefault((term.atom, term.coefficient, value), [0.0] * count)
        stack[i] = expressions.sum(stack[i], column)
    columns, scales = _merged(expressions, [tuple(stack) for stack in rows.values()])
    reads = [*dict.fromkeys(atom for atom, _, _ in rows if atom is not None)]
    weights, read_scales = _merged(expressions, [_stack(read, states) for read in reads])
    gain: list[list[Factor]] = [[0.0] * len(weights) for _ in columns]
    values: list[Factor] = [0.0] * len(columns)
    for (atom, coefficient, value), (c, scale) in zip(rows, scales, strict=True):
        number = expressions.product(coefficient, scale)
        if atom is None:
            values[c] = expressions.sum(values[c], expressions.product(number, value))
        else:
            r, read_scale = read_scales[reads.index(atom)]
            gain[c][r] = expressions.sum(gain[c][r], expressions.product(number, read_scale))
    by_gain: dict[Stack, Stack] = {}  # reads that always come together are one
    for numbers, weight in zip(zip(*gain, strict=True), weights, strict=True):
        old = by_gain.get(numbers, (0.0,) * count)
        by_gain[numbers] = tuple(map(expressions.sum, old, weight))
    return Normal(
        states,
        axes,
        side,
        other,
        decay=tuple(map(tuple, decay)),
        column=tuple(columns),
        gain=tuple(zip(*by_gain, strict=True)) if by_gain else ((),) * len(columns),
        read=tuple(by_gain.values()),
        value=tuple(values),
    )


def _side(axes: Axes, forms: Sequence[Form], preferred: str) -> str:
    """Return the axis that reads sum over, else that of vector decays, else the preferred one."""
    terms = [term for form in forms for term in form]
    reads = {term.atom.axis for term in terms if isinstance(term.atom, Read)}
    along = [of for term in terms if isinstance(term.atom, int) for of, _ in term.factors]
    decays = {axis for of in along for axis in of}
    if len(reads) > 1:
        raise NotAffine(f"reads along {' and along '.join(sorted(reads))} in one step")
    if len(decays) > 1:
        raise NotAffine(f"a decay along both axes, {' and '.join(axes)}")
    if len(reads | decays) > 1:
        raise NotAffine(f"a decay along {min(decays)} and reads along {min(reads)} in one step")
    return min(reads | decays, default=preferred)


def _stack(read: Read, states: tuple[int, ...]) -> Stack:
    weights = dict(read.weights)
    return tuple(weights.get(state, 0.0) for state in states)


def _merged(
    expressions: Expressions, stacks: Iterable[Stack]
) -> tuple[list[Stack], list[tuple[int, Factor]]]:
    """Return stacks of which others are multiples by numbers, and for each stack the index of its
    base and the number."""
    groups: list[tuple[list[Stack], list[int]]] = []
    chains = [_multiples(expressions, stack) for stack in stacks]
    for number, chain in enumerate(chains):
        for common, members in groups:
            shared = [stack for stack in common if stack in chain]
            if shared:
                common[:] = shared
                members.append(number)
                break
        else:
            groups.append(([*chain], [number]))
    index = {number: i for i, (_, members) in enumerate(groups) for number in members}
    bases = [common[0] for common, _ in groups]
    return bases, [(index[k], chain[bases[index[k]]]) for k, chain in enumerate(chains)]


def _multiples(expressions: Expressions, stack: Stack) -> dict[Stack, Factor]:
    """Return the stacks of which a stack is a multiple, itself first, and the numbers.

    A vector that is divided by its own norm is no multiple: without it, it may be of any size.
    """
    number: Factor = 1.0
    out = {stack: number}
    while True:
        splits = [_split(expressions, x) for x in stack if isinstance(x, Value)]
        scales = {scale for scale, _ in splits}
        if len(scales) != 1 or None in scales:
            return out
        (scale,) = scales
        assert scale is not None
        vectors = iter(vector for _, vector in splits)
        if any(x != 0.0 for x in stack if not isinstance(x, Value)):
            return out
        stack = tuple(next(vectors) if isinstance(x, Value) else x for x in stack)
        number = expressions.product(number, scale)
        out[stack] = number


def _split(expressions: Expressions, value: Value) -> tuple[Factor | None, Factor]:
    """Return a number and the vector that a value is the product of; None for no number."""
    if isinstance(value.definition, Point) and value.axes:
        args = [expressions.value_of(arg) for arg in value.node.args]
        if value.node.target is aten.neg.default:
            return -1.0, args[0]
        if value.node.target is aten.mul.Tensor:
            for scale, vector in (args, args[::-1]):
                is_vector = isinstance(vector, Value) and vector.axes == value.axes
                is_number = not isinstance(scale, Value) or not scale.axes
                if is_vector and is_number and not expressions.depends(scale, vector):
                    return scale, vector
    return None, value
