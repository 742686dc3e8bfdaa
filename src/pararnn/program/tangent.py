"""Tangents of a cell: its step next to the step's derivative along a direction, as one cell.

A tangent is a linear recurrence beside the states. Both together are a cell like any other, so that
every engine, resets, sequences and gradients hold for them; gradients of tangents are second
derivatives.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import compress, count
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from pararnn.cells.base import Cell, Param, Step
from pararnn.cells.matrix import VALUES, Axes
from pararnn.cells.products import Matrix
from pararnn.cells.shapes import ParamShape
from pararnn.program.derive import gradients
from pararnn.program.program import DERIVED, Program, derived_program
from pararnn.program.rules import layer_norm

BIAS = "+bias"
"""Stands for the biases of gates among the names of what moves."""


def tangent_of(program: Program, moving: Collection[str]) -> Program:
    """Return the program of states, and behind them their tangents; cached.

    Its fields, params and memories are each the cell's and then the tangents of those named in
    `moving`. Its gates are the cell's; their tangents are the last fields, and those of biases, for
    BIAS in `moving`, the last params. A matrix cell, which has no fields, has the tangents of gates
    behind its gates, and outputs and their tangents next to each other. Raises CellError where what
    the step reads has changed since the program was traced.
    """
    return derived_program(program, "tangent", moving, _tangent_step)


DERIVED["tangent"] = tangent_of


def mark_of(program: Program, firsts: Sequence[str]) -> str:
    """Return a mark for names of tangents: no name of the program begins with one of `firsts` and
    the mark."""
    names = (*program.states, *program.gates, *program.fields, *program.params, *program.memory)
    marks = ("d" * times + "_" for times in count(1))
    return next(m for m in marks if not any(n.startswith(f + m) for n in names for f in firsts))


def differentiate(
    function: Callable[[Sequence[Any]], Sequence[Tensor]],
    values: Sequence[Any],
    tangents: Sequence[Tensor | None],
) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Return the results of a function of tensors, and their derivatives along a direction.

    values: tensors, or matrices by which a step multiplies. tangents: the direction, None where it
    is zero. By plain autograd: the derivative is the gradient, by its cotangents, of the gradient.
    """
    moves = [tangent is not None for tangent in tangents]
    with torch.enable_grad(), _Elementary():
        leaves = [leaf(value) if move else value for value, move in zip(values, moves, strict=True)]
        inputs = [x._tensor if isinstance(x, Matrix) else x for x in compress(leaves, moves)]
        results = function(leaves)
        cotangents = [torch.zeros_like(x).requires_grad_() for x in results]
        pulled = gradients(results, inputs, cotangents, create_graph=True)
        pairs = zip(tangents, values, strict=True)
        # Gates of which only the bias moves have one tangent for all rows.
        directions = [t if t.ndim == x.ndim else t.expand_as(x) for t, x in pairs if t is not None]
        return results, gradients(pulled, cotangents, directions, create_graph=True)


def _layer_norm(
    x: Tensor,
    shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *_: Any,
) -> Tensor:
    return layer_norm(x, shape, weight, bias, eps)[0]


def _rms_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    axes = [*range(-len(shape), 0)]
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    y = x * ((x * x).mean(axes, True) + eps).rsqrt()
    return y if weight is None else y * weight


def _hardsigmoid(x: Tensor, inplace: bool = False) -> Tensor:
    return F.relu6(x + 3) / 6


_ELEMENTARY: dict[Any, Callable[..., Any]] = {
    F.hardsigmoid: _hardsigmoid,
    F.layer_norm: _layer_norm,
    torch.layer_norm: _layer_norm,
    F.rms_norm: _rms_norm,
    torch.rms_norm: _rms_norm,
}
"""Functions by ops that have all derivatives: PyTorch has no second one of `hardsigmoid`, and gets
third ones of norms wrong, as it takes saved means and deviations for constants."""


class _Elementary(TorchFunctionMode):
    """Mode in which functions of `_ELEMENTARY` are composed of other ops."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function of PyTorch's, or its composition."""
        return _ELEMENTARY.get(func, func)(*args, **(kwargs or {}))


def leaf(value: Any) -> Any:
    """Return an alias that requires a gradient, and has one of its own: values may depend on each
    other, and autograd still follows the alias to its value."""
    if isinstance(value, Matrix):
        return value.of(leaf(value._tensor))
    if not value.requires_grad:
        return value.detach().requires_grad_()
    return torch.ops.aten.alias.default(value)


def _tangent_step(program: Program, moving: frozenset[str]) -> tuple[Step, tuple[int, int] | None]:
    """Return the step, and the channels and heads that it is traced for."""
    base = program.step
    mark = mark_of(program, ("", "b"))
    members: dict[str, Any] = {"__module__": base.cls.__module__, "is_derivative": True}
    config: dict[str, Any] = {}
    sizes = program.sizes
    rename: dict[str, str] = {}
    if base.head_sizes is not None:  # V is as long as all outputs: another axis has its place
        names = (*program.states, *program.gates, *program.params, *program.memory)
        used = {*base.head.lengths, *base.axes.of_calls, *names}
        axis = next(a for a in ("U" * times for times in count(1)) if a not in used)
        rename = {VALUES: axis}
        config = {axis: getattr(base.view, axis) for axis in base.axes.arguments}
        config[rename[VALUES]] = base.head.lengths[VALUES]
        heads, numbers = base.head.output
        sizes = (2 * numbers * heads, heads)
        members |= {"config": config, "outputs": _outputs(base, mark, rename)}

    def with_tangents(entries: Mapping[str, Any], among: Collection[str]) -> dict[str, Any]:
        return {**entries, **{f"{mark}{n}": entry for n, entry in entries.items() if n in among}}

    def axes_of(tensors: Mapping[str, Axes]) -> dict[str, Axes]:
        return {name: _renamed(axes, rename) for name, axes in tensors.items()}

    params = {name: _param(param, rename) for name, param in base.cls.params.items()}
    rows: dict[str, Any] = {
        "states": axes_of(base.axes.states) if config else dict.fromkeys(program.states),
        "gates": axes_of(base.axes.gates) if config else dict.fromkeys(program.gates),
    }
    fields = with_tangents(dict.fromkeys(program.fields), moving)
    params = with_tangents(params, moving)
    rows["states"] = with_tangents(rows["states"], program.states)
    if config:
        rows["gates"] = with_tangents(rows["gates"], program.gates)
        members |= rows
    else:
        members |= {kind: tuple(tensors) for kind, tensors in rows.items()}
        fields |= dict.fromkeys(f"{mark}{gate}" for gate in program.gates if gate in moving)
        biases = program.gates if BIAS in moving else ()
        params |= {f"b{mark}{gate}": Param("D") for gate in biases}
    members |= {"params": params, "fields": tuple(fields)}
    if program.memory:
        members["memory"] = with_tangents(axes_of(base.axes.memory), moving)
    members["step"] = _method(program, "step", moving, rename)
    if config:
        members["readout"] = _method(program, "readout", moving, rename)
    cls: type[Cell] = type(f"{program.cell_name}Tangent", (Cell,), members)
    step = Step(cls, config, base.training, sizes if config else base.sizes)
    return step, sizes


def _renamed(axes: Axes, rename: Mapping[str, str]) -> Axes:
    return tuple(rename.get(axis, axis) for axis in axes)


def _outputs(base: Step, mark: str, rename: Mapping[str, str]) -> dict[str, Axes]:
    """Return the axes of outputs and their tangents, by name."""
    outputs = [_renamed(axes, rename) for axes in base.axes.outputs]
    names = [f"{before}output{i}" for before in ("", mark) for i in range(len(outputs))]
    return dict(zip(names, 2 * outputs, strict=True))


def _param(param: Param, rename: Mapping[str, str]) -> Param:
    """Return a parameter with other names of axes."""
    kind = param.kind
    if not rename or not kind.axes:
        return Param(kind)
    axes = _renamed(kind.axes, rename)
    return Param(ParamShape(",".join(("H", *axes)), kind.size, kind.lift, axes=axes))


def _method(
    program: Program, name: str, moving: frozenset[str], rename: Mapping[str, str]
) -> Callable[..., tuple[Tensor, ...]]:
    """Return the method of the tangents' class that differentiates a method of the cell's."""
    base, of_matrix = program.step, program.head_sizes is not None
    rows = program.states, program.gates, program.fields
    counts = [*map(len, rows)]

    def method(self: Any, state: Any, gate: Any, param: Any, *memory: Any) -> tuple[Tensor, ...]:
        # Lengths differ in a trace, and the step may read them.
        of_class = _base_step(base, self, rename) if rename else base
        given, num_gates = memory[0] if memory else (), counts[1] * (1 + of_matrix)
        gates = gate[:num_gates]
        fields, of_gates = _apart(
            gate[num_gates:], counts[1] * (not of_matrix and {*program.gates} <= moving)
        )
        params, of_biases = _apart(param, counts[1] * (not of_matrix and BIAS in moving))
        pairs = [
            _apart(state, counts[0]),
            (gates[: counts[1]], _sums(counts[1], gates[counts[1] :], of_gates, of_biases)),
            _split(program.fields, fields, moving),
            _split(program.params, params, moving),
            _split(program.memory, given, moving),
        ]
        values = [value for values, _ in pairs for value in values]
        tangents = [tangent for _, tangents in pairs for tangent in tangents]

        def function(values: Sequence[Any]) -> Sequence[Tensor]:
            states = values[: counts[0]]
            inputs = values[counts[0] : sum(counts[:3])]
            params = values[sum(counts[:3]) :]
            if name == "readout":
                return of_class.outputs_of(states, inputs, params)
            return of_class.of_matrices(states, inputs, params)

        results, derivatives = differentiate(function, values, tangents)
        return (*results, *derivatives)

    return method


def _apart(group: Sequence[Any], count: int) -> tuple[Sequence[Any], Sequence[Any]]:
    """Return a record without its last tensors, and these."""
    return group[: len(group) - count], group[len(group) - count :]


def _sums(count: int, *many: Sequence[Any]) -> list[Any]:
    """Return the sums, entry by entry, of those that are there; None where there are none."""
    rows = [row for row in many if row]
    return [total(entries) for entries in zip(*rows, strict=True)] or [None] * count


def total(terms: Sequence[Any]) -> Any:
    """Return the sum of terms, None without one."""
    return sum(terms[1:], terms[0]) if terms else None


def _split(
    names: Sequence[str], group: Sequence[Any], moving: Collection[str]
) -> tuple[Iterable[Any], Iterable[Any]]:
    """Return a record's values and their tangents, None for those that do not move."""
    tangents = iter(group[len(names) :])
    return group[: len(names)], [_tensor(next(tangents)) if n in moving else None for n in names]


def _tensor(value: Any) -> Tensor:
    return value._tensor if isinstance(value, Matrix) else value


def _base_step(base: Step, view: Any, rename: Mapping[str, str]) -> Step:
    """Return a matrix cell's step for the lengths of axes that a tangent's step runs on."""
    config = {name: getattr(base.view, name) for name in base.cls.config}
    config |= {axis: getattr(view, axis) for axis in base.axes.arguments}
    heads = base.head.heads
    return Step(base.cls, config, base.training, (getattr(view, rename[VALUES]) * heads, heads))
