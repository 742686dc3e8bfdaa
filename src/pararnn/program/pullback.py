"""Statements evaluated in PyTorch, and the statements of their gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx

from pararnn.cells.base import Step
from pararnn.cells.matrix import Axes
from pararnn.program.derive import gradients, leaves_of
from pararnn.program.matrix import axes_by_kind, trace_step
from pararnn.program.statements import Point, Product, Reduce, Statements, Target, Value, lower
from pararnn.program.trace import TAKES_NUMBERS, trace_alike

Inputs = Mapping[tuple[str, int], Tensor]
"""Tensors by kind and number, as `Statements.inputs`."""

_REDUCE: dict[str, Callable[..., Tensor]] = {"sum": torch.sum, "max": torch.amax, "min": torch.amin}


def evaluate(statements: Statements, inputs: Inputs) -> list[tuple[Target, Tensor | float]]:
    """Return what statements write, computed from inputs (..., axes) with leading dimensions that
    broadcast. A result has the axes of its target, 1 long where its value lacks one."""
    first = next(iter(inputs.values()))
    dtype = first.dtype
    tensors = {value: inputs[key] for key, value in statements.inputs.items()}
    values = {value.node: value for value in [*statements.inputs.values(), *statements.values]}

    def argument(target: Any, arg: Any, wants_tensor: bool, axes: Axes) -> Any:
        if isinstance(arg, fx.Node):
            value = values[arg]
            return _aligned(tensors[value], value.axes, axes)
        if wants_tensor and isinstance(arg, (int, float)):
            kinds = {bool: torch.bool, int: torch.int64}
            # A GPU's recorded graphs take no copy from a CPU: `where` makes one.
            device = first.device if target is torch.ops.aten.where.self else None
            return torch.scalar_tensor(arg, dtype=kinds.get(type(arg), dtype), device=device)
        return arg

    for value in statements.values:
        definition = value.definition
        if isinstance(definition, Point):
            target: Any = value.node.target
            args = zip(value.node.args, _takes_tensors(target), strict=False)
            kwargs = {
                name: dtype if isinstance(x, torch.dtype) and x.is_floating_point else x
                for name, x in value.node.kwargs.items()
            }
            tensors[value] = target(
                *(argument(target, *pair, value.axes) for pair in args), **kwargs
            )
        elif isinstance(definition, Reduce):
            axes = definition.source.axes
            dim = axes.index(definition.axis) - len(axes)
            tensors[value] = _REDUCE[definition.op](tensors[definition.source], dim)
        else:
            assert isinstance(definition, Product)
            matrix = inputs[definition.kind, definition.param]
            tensors[value] = _product(tensors[definition.source], definition, matrix)
    written: list[tuple[Target, Tensor | float]] = [
        (target, _aligned(tensors[value], value.axes, target.axes))
        if isinstance(value, Value)
        else (target, value)
        for target, value in statements.writes
    ]
    for number, lhs, rhs, axis, *_, kind in statements.outers:
        target = Target(f"grad_{kind}", number, (axis, axis), adds=True)
        columns, rows = (_rows(tensors[x], x.axes, axis) for x in (lhs, rhs))
        written.append((target, columns.mT @ rows))
    return written


@cache
def _takes_tensors(target: Any) -> list[bool]:
    """Return for each argument of an op whether it must be a tensor, not a number."""
    kinds = [str(argument.type) for argument in target._schema.arguments]
    return ["Tensor" in kind and target not in TAKES_NUMBERS for kind in kinds]


def _aligned(x: Tensor, axes: Axes, wanted: Axes) -> Tensor:
    """Return a tensor (..., axes) as (..., wanted), 1 long along axes that it lacks."""
    for count, axis in enumerate(reversed(wanted)):
        if axis not in axes:
            x = x.unsqueeze(-1 - count)
    return x


def _rows(x: Tensor, axes: Axes, axis: str) -> Tensor:
    """Return a tensor of one or two axes as a matrix of rows along an axis."""
    rows = x.movedim(axes.index(axis) - len(axes), -1)
    return rows.unsqueeze(-2) if len(axes) == 1 else rows


def _product(x: Tensor, product: Product, matrix: Tensor) -> Tensor:
    """Return x times a square matrix along an axis of x."""
    axes = product.source.axes
    out = _rows(x, axes, product.axis) @ (matrix.mT if product.transposes else matrix)
    out = out.squeeze(-2) if len(axes) == 1 else out
    return out.movedim(-1, axes.index(product.axis) - len(axes))


def pull_back(statements: Statements, step: Step, order: Axes, dtype: torch.dtype) -> Statements:
    """Return the statements of the gradients of all inputs: they read the inputs, and for a result
    of kind x its cotangent of kind "grad_x". Raises CannotGenerate."""
    params = axes_by_kind(step)["param"]
    products = [v.definition for v in statements.values if isinstance(v.definition, Product)]
    matrices = sorted({product.param for product in products})
    inputs = [Target(*key, value.axes) for key, value in statements.inputs.items()]
    inputs += [Target("param", number, params[number]) for number in matrices]
    results = [target for target, value in statements.writes if isinstance(value, Value)]
    cotangents = [target._replace(kind=f"grad_{target.kind}") for target in results]
    if not inputs or not results:
        return Statements()
    keys = [(target.kind, target.number) for target in inputs]
    count = len(inputs)

    @torch.enable_grad()
    def gradient(*tensors: Tensor) -> tuple[Tensor, ...]:
        leaves, incoming = leaves_of(tensors[:count]), tensors[count:]
        written = evaluate(statements, dict(zip(keys, leaves, strict=True)))
        outputs = [x for _, x in written if isinstance(x, Tensor)]
        pairs = zip(outputs, incoming, strict=True)
        return gradients([x.expand(like.shape) for x, like in pairs], leaves, incoming)

    lengths = (trace_step(step).head.lengths, step.head.lengths)
    calls = [
        (
            gradient,
            [torch.rand([of[a] for a in t.axes], dtype=dtype) for t in [*inputs, *cotangents]],
        )
        for of in lengths
    ]
    small, sized = trace_alike(calls, f"{step.cls.__name__}.step's gradient")
    targets = [t._replace(kind=f"grad_{t.kind}", adds=t.kind == "param") for t in inputs]
    return lower((small, sized), order, lengths, [*inputs, *cotangents], targets)
