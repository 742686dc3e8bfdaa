"""Tangent programs: the steps of matrix cells with independent entries, and derivatives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pararnn.base.errors import PararnnError
from pararnn.cells.base import Cell, Step
from pararnn.cells.matrix import VALUES, Axes
from pararnn.program.apart import outside_modes
from pararnn.program.derive import flat, gradients, leaves_of
from pararnn.program.matrix import (
    Run,
    axes_by_kind,
    dependences,
    examples,
    reachable,
    statements_of_head,
    trace_pairs,
    trace_step,
)
from pararnn.program.program import Program
from pararnn.program.record import BranchError
from pararnn.program.statements import RENAMED, CannotGenerate, Point, Statements

Pair = tuple[int, int]
"""(i, j): an entry of state i may depend on the entry of state j that has the same indices."""


class Entries(NamedTuple):
    """Derivatives of the state after a segment by the state before it, one for each of `pairs`.

    axes: of the states. The axes of state j are among those of state i, and a derivative has the
    axes of state i.
    """

    axes: tuple[Axes, ...]
    pairs: tuple[Pair, ...]


@lru_cache(maxsize=1024)
def why_entries_couple(program: Program) -> str | None:
    """Return the reason why entries of a matrix cell's states couple, or None."""
    if program.why_no_family is not None or program.memory:
        return program.why_no_family or program.why_one_sequence
    if any(statements.renames for statements in program.statements.values()):
        return f"{program.cell_name}'s step has {RENAMED}"
    for value, states in _advance(program).dependent("state").items():
        if not isinstance(value.definition, (Point, type(None))):
            return (
                f"{program.cell_name}'s step sums entries of its state "
                f"{program.states[min(states)]!r}; segments of time need each entry's next value "
                "to depend on that entry only"
            )
    return None


@lru_cache(maxsize=1024)
@outside_modes
def why_no_derivatives(program: Program) -> str | None:
    """Return the reason why PyTorch cannot give the derivatives of a cell with independent entries,
    or None.

    They are gradients of gradients. Autograd may take a user's function without them for a
    constant, so both are compared: the gradient for `incoming`, times a direction, is `incoming`
    times the derivative along that direction.
    """
    entries, base = entries_of(program), trace_step(program.step)
    count, run = base.num_states, advance_tangents(base, entries, with_adjoints=False)
    dtype = torch.float64
    for sign, seed in ((1, 0), (-1, 1)):
        tensors = [sign * x for x in examples(base, dtype, (), seed)]
        states, arguments = tensors[:count], tensors[count:]
        units = [torch.full_like(states[i], float(i == j)) for i, j in entries.pairs]
        try:
            derivatives = run([*states, *units], arguments)[count:]
            with torch.enable_grad():
                leaves = leaves_of(states)
                new = flat(base, base)(*leaves, *arguments)
                incoming = examples(base, dtype, (), seed + 2)[:count]
                pull = gradients(new, leaves, incoming)
        except (RuntimeError, PararnnError) as error:
            return f"PyTorch has no gradient of the gradient of {program.cell_name}'s step: {error}"
        expected = [torch.zeros_like(x) for x in states]
        for (i, j), x in zip(entries.pairs, derivatives, strict=True):
            expected[j] = expected[j] + sum_to(x * incoming[i], entries.axes[i], entries.axes[j])
        pairs = zip(pull, expected, strict=True)
        if not all(torch.allclose(a, b, 1e-6, 1e-9, equal_nan=True) for a, b in pairs):
            return (
                f"{program.cell_name}'s step calls a function with a backward of its own that "
                "autograd cannot differentiate again, by which derivatives of entries are made"
            )
    return None


@lru_cache(maxsize=1024)
def why_no_tangents(program: Program) -> str | None:
    """Return the reason why a cell has no kernels of tangent programs, or None."""
    if program.step.axes.outputs != ((VALUES,),):
        return f"{program.cell_name} has outputs of other axes than {VALUES}"
    reason = why_entries_couple(program) or why_no_derivatives(program)
    if reason is not None:
        return reason
    dtype = next(iter(program.statements))
    try:
        for derive in (with_jacobians, with_adjoints):
            derive(program, dtype)
    except (CannotGenerate, BranchError, PararnnError) as error:
        return f"derivatives of {program.cell_name}'s step have no kernels: {error}"
    return None


@lru_cache(maxsize=1024)
def entries_of(program: Program) -> Entries:
    """Return the derivatives of a cell's segments; `why_entries_couple` must have no reason."""
    reach = reachable(dependences(_advance(program)))
    pairs = [(i, j) for i, states in enumerate(reach) for j in sorted(states)]
    return Entries(tuple(axes_by_kind(program.step)["state"]), tuple(pairs))


def _advance(program: Program) -> Statements:
    return next(iter(program.statements.values())).only(["new_state"])


@lru_cache(maxsize=1024)
@outside_modes
def with_jacobians(program: Program, dtype: torch.dtype) -> Program:
    """Return the tangent program of a cell's states and their derivatives by the initial states, in
    a compute dtype. Its output is zero."""
    return _tangent(program, dtype, "Jacobians", with_adjoints=False)


@lru_cache(maxsize=1024)
@outside_modes
def with_adjoints(program: Program, dtype: torch.dtype) -> Program:
    """Return the program of `with_jacobians` with one more gate, the incoming gradient of a step's
    output, and one more state for each of the cell's, the gradient by its initial state."""
    return _tangent(program, dtype, "Adjoints", with_adjoints=True)


def _tangent(program: Program, dtype: torch.dtype, name: str, *, with_adjoints: bool) -> Program:
    base, entries = program.step, entries_of(program)
    states = dict(base.axes.states) | {f"d{i}_d{j}": entries.axes[i] for i, j in entries.pairs}
    gates = dict(base.axes.gates)
    if with_adjoints:
        states |= {f"grad_{j}": tangent for j, tangent in enumerate(entries.axes)}
        gates |= {"grad_output": (VALUES,)}
    members: dict[str, Any] = {"states": states, "gates": gates, "__module__": base.cls.__module__}
    cls: type[Cell] = type(f"{base.cls.__name__}{name}", (base.cls,), members)
    config = {key: getattr(base.view, key) for key in cls.config}
    step = Step(cls, config, base.training, base.sizes)

    def function(tangent: Step, base_step: Step) -> Run:
        run = advance_tangents(base_step, entries, with_adjoints)
        count, inputs = tangent.num_states, tangent.num_rows + len(tangent.cls.params)

        def results_and_gradients(*t: Tensor) -> tuple[Tensor, ...]:
            zeros = [torch.zeros_like(x) for x in t[:inputs]]  # nothing differentiates it
            output = t[0].new_zeros(tangent.head.output[1])
            return (*run(t[:count], t[count:inputs]), output, *zeros)

        return results_and_gradients

    pairs = [(trace_step(step), trace_step(base)), (step, base)]
    with torch.no_grad():
        graphs = trace_pairs([(s, function(s, b)) for s, b in pairs], dtype)
    return replace(
        program,
        key=f"{program.key}.{name}",
        cell_name=cls.__name__,
        states=tuple(states),
        gates=tuple(gates),
        step=step,
        statements={dtype: statements_of_head(step, graphs)},
    )


def advance_tangents(base: Step, entries: Entries, with_adjoints: bool) -> Run:
    """Return one step of a tangent program: from states, their derivatives by `entries.pairs`, what
    `with_adjoints` adds, gates and parameters to the new states, derivatives and additions."""
    count, pairs = base.num_states, entries.pairs
    step = flat(base, base)
    readout = flat(base, lambda s, x, p: base.call("readout", s, x, p))

    @torch.enable_grad()
    def run(states: Sequence[Tensor], arguments: Sequence[Tensor]) -> tuple[Tensor, ...]:
        incoming: Sequence[Tensor] = ()
        if with_adjoints:
            incoming, arguments = _pop_gate(base, arguments)
        jacobians = dict(zip(pairs, states[count : count + len(pairs)], strict=True))
        leaves = leaves_of(states[:count])
        new = step(*leaves, *arguments)
        cotangents = leaves_of([torch.zeros_like(x) for x in new])
        pull = gradients(new, leaves, cotangents, create_graph=True)
        results: dict[Pair, Tensor] = {}
        for j in range(count):
            # The gradient of `pull` by its cotangents is the derivative along a direction.
            directions = [
                jacobians.get((m, j), torch.zeros_like(x)) for m, x in enumerate(states[:count])
            ]
            columns = gradients(pull, cotangents, directions)
            results |= {(i, j): columns[i] for i in range(count) if (i, j) in jacobians}
        derivatives = [results[pair] for pair in pairs]
        out = [*(x.detach() for x in new), *derivatives]
        if with_adjoints:
            new_leaves = leaves_of(new)
            output = readout(*new_leaves, *arguments) if base.has_readout else new_leaves[0]
            by_state = gradients([output], new_leaves, incoming)
            grads = [*states[count + len(pairs) :]]
            for (i, j), derivative in results.items():
                axes = entries.axes[i], entries.axes[j]
                grads[j] = grads[j] + sum_to(derivative * by_state[i], *axes)
            out += grads
        return tuple(out)

    return run


def _pop_gate(base: Step, inputs: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Return the gate that follows those of the base, and the other inputs."""
    index = base.num_rows - base.num_states
    return inputs[index : index + 1], [*inputs[:index], *inputs[index + 1 :]]


def sum_to(x: Tensor, axes: Axes, wanted: Axes) -> Tensor:
    """Return the sum of a tensor, whose last dimensions are `axes`, over axes not in `wanted`."""
    dims = [i - len(axes) for i, axis in enumerate(axes) if axis not in wanted]
    return x.sum(dims) if dims else x
