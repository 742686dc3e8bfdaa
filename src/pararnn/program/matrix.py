"""Steps of matrix cells: the check of one, and its trace on the tensors of a single head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pararnn.base.errors import CellError
from pararnn.cells.base import Step
from pararnn.cells.matrix import VALUES, Axes, HeadSizes
from pararnn.program.derive import flat, gradients, leaves_of
from pararnn.program.guard import DerivativeError, SizeError, from_the_users_line, line_of
from pararnn.program.record import BranchError
from pararnn.program.statements import (
    CannotGenerate,
    Statements,
    Target,
    order_of_axes,
    statements_of,
)
from pararnn.program.trace import Graph, trace_alike

CHECKPOINT = 16
"""Steps between the states that a forward pass saves for the backward pass."""
LENGTHS = (5, 3, 7, 11, 13, 17, 19, 23)
"""Lengths of axes in a trace, V first. They differ, so that a size identifies its axis."""
TOLERANCES = {torch.float32: 1e-4, torch.float64: 1e-10}
"""Tolerance, by dtype, between a head computed by itself and in a batch."""
INPUTS = ("state", "gate", "param")
"""Kinds of a step's arguments, in order."""
LEADING_SIZES = (2, 3)
"""Leading sizes (B, H) on which a step must return what it returns for one head of one row."""


@dataclass(frozen=True)
class MatrixTrace:
    """A matrix cell as graphs of one head's tensors, in one dtype, of the lengths of `LENGTHS`.

    forward: states, gates and parameters -> new states and the output. gradient: with a cotangent
    of each result -> gradients of all arguments; None where none can be traced. sized_forward,
    sized_gradient: the same with the cell's lengths, on which constants in them may depend.
    """

    forward: Graph
    sized_forward: Graph | None = None
    gradient: Graph | None = None
    sized_gradient: Graph | None = None


class Passes(NamedTuple):
    """Statements of a step for kernels: forward gives all results, advance the new states, readout
    the output of these, and backward the gradients."""

    forward: Statements
    advance: Statements
    readout: Statements
    backward: Statements
    order: Axes


def trace_step(step: Step) -> Step:
    """Return a matrix cell's step with the lengths of `LENGTHS`. Raises CellError for more axes."""
    axes = step.cls.head_axes
    assert axes is not None
    if len(axes.arguments) >= len(LENGTHS):
        raise CellError(
            f"{step.cls.__name__} has {len(axes.arguments) + 1} axes, {len(LENGTHS)} are allowed"
        )
    config = {name: getattr(step.view, name) for name in step.cls.config}
    config |= dict(zip(axes.arguments, LENGTHS[1:], strict=False))
    heads = LEADING_SIZES[1]
    return Step(step.cls, config, step.training, (heads * LENGTHS[0], heads))


def examples(
    sizes: HeadSizes, step: Step, dtype: torch.dtype, batch: tuple[int, ...], seed: int = 0
) -> list[Tensor]:
    """Return random states, gates and parameters with leading sizes `batch` = (B, H), or of one
    head for ()."""
    generator = torch.Generator().manual_seed(seed)

    def draw(size: Sequence[int]) -> Tensor:
        return torch.rand(tuple(size), generator=generator, dtype=torch.float64).add(0.25).to(dtype)

    kinds = [param.kind for param in step.cls.params.values()]
    params = [sizes.param(kind) for kind in kinds]
    if not batch:
        params = [size[1:] for size in params]
    rows = [(*batch, *size) for size in (*sizes.states, *sizes.gates)]
    return [draw(size) for size in (*rows, *params)]


def trace_matrix(
    step: Step, dtypes: Sequence[torch.dtype]
) -> tuple[dict[torch.dtype, MatrixTrace], str | None]:
    """Trace a step and its readout once they are checked, in each dtype. Return the traces, and why
    kernels cannot be made of them, or None.

    Raises BranchError where they read a tensor's value, CellError where they break the contract.
    """
    small = trace_step(step)
    sizes = small.head_sizes
    assert sizes is not None
    for dtype in dtypes:
        for method, results in (("step", sizes.states), ("readout", (sizes.output[1:],))):
            if method == "step" or small.has_readout:
                trace_head(small, _method(small, method), dtype, method)
                _check_method(small, method, results, dtype)
    return trace_of_heads(step, dtypes)


def trace_of_heads(
    step: Step, dtypes: Sequence[torch.dtype]
) -> tuple[dict[torch.dtype, MatrixTrace], str | None]:
    """Trace a step as `trace_matrix` does, without its checks."""
    small = trace_step(step)
    pairs = [(sized, forward_of(sized), _gradient(sized)) for sized in (small, step)]
    try:
        traces = {dtype: trace_passes(pairs, dtype) for dtype in dtypes}
        for trace in traces.values():
            passes_of(step, trace)
    except CannotGenerate as error:
        return traces, f"it has no statement for {error}"
    except DerivativeError:
        raise
    except (CellError, BranchError) as error:
        forward = forward_of(small)
        forwards = {d: MatrixTrace(trace_head(small, forward, d, "step")) for d in dtypes}
        return forwards, str(error)
    return traces, None


def axes_by_kind(step: Step) -> dict[str, list[Axes]]:
    """Return the axes of a head's states, gates, parameters and outputs, in order."""
    axes = step.cls.head_axes
    assert axes is not None
    return {
        "state": [*axes.states.values()],
        "gate": [*axes.gates.values()],
        "param": [param.kind.axes or () for param in step.cls.params.values()],
        "output": [(VALUES,)] * axes.outputs,
    }


def passes_of(step: Step, trace: MatrixTrace) -> Passes:
    """Return the statements of a trace with gradients. Raises CannotGenerate."""
    assert trace.gradient is not None
    assert trace.sized_forward is not None
    assert trace.sized_gradient is not None
    small_sizes, sizes = trace_step(step).head_sizes, step.head_sizes
    assert small_sizes is not None
    assert sizes is not None
    kinds = axes_by_kind(step)
    order = order_of_axes([(VALUES,), *(axes for tensors in kinds.values() for axes in tensors)])

    def targets(prefix: str, kind: str) -> list[Target]:
        adds = (prefix, kind) == ("grad_", "param")
        return [Target(prefix + kind, i, axes, adds) for i, axes in enumerate(kinds[kind])]

    inputs = [target for kind in INPUTS for target in targets("", kind)]
    results = [*targets("new_", "state"), *targets("", "output")]
    cotangents = [target._replace(kind=f"grad_{target.kind}") for target in results]
    gradients = [target for kind in INPUTS for target in targets("grad_", kind)]
    lengths = (order, small_sizes.lengths, sizes.lengths)
    forward = statements_of(trace.forward, trace.sized_forward, lengths, inputs, results)
    backward = statements_of(
        trace.gradient, trace.sized_gradient, lengths, [*inputs, *cotangents], gradients
    )
    advance, readout = forward.only(["new_state"]), forward.remainder("output", "new_state")
    return Passes(forward, advance, readout, backward, order)


def _method(step: Step, name: str) -> Callable[..., Any]:
    return flat(step, step if name == "step" else partial(step.call, name))


def forward_of(step: Step) -> Callable[..., Any]:
    """Return the function of flat tensors to new states and the outputs."""
    run, read = _method(step, "step"), _method(step, "readout")
    assert step.head_sizes is not None
    outputs = step.head_sizes.outputs

    def forward(*tensors: Tensor) -> tuple[Tensor, ...]:
        new = run(*tensors)
        if step.has_readout:
            return (*new, read(*new, *tensors[step.num_states :]))
        return (*new, *new[:outputs])

    return forward


def _gradient(step: Step) -> Callable[..., Any]:
    """Return the function of flat tensors and cotangents to the gradients of the tensors."""
    forward, count = forward_of(step), step.num_rows + len(step.cls.params)

    @torch.enable_grad()
    def gradient(*tensors: Tensor) -> tuple[Tensor, ...]:
        inputs = leaves_of(tensors[:count])
        return gradients(forward(*inputs), inputs, tensors[count:])

    return gradient


def trace_passes(
    pairs: Sequence[tuple[Step, Callable[..., Any], Callable[..., Any]]], dtype: torch.dtype
) -> MatrixTrace:
    """Trace the forward function and the gradient of a step, with lengths of `LENGTHS` and with the
    cell's lengths."""
    forward = [(step, run) for step, run, _ in pairs]
    gradient = [(step, pull) for step, _, pull in pairs]
    graphs = _trace_heads(forward, dtype, "step")
    graphs += _trace_heads(gradient, dtype, "step", with_cotangents=True)
    return MatrixTrace(*graphs)


def trace_head(step: Step, function: Callable[..., Any], dtype: torch.dtype, method: str) -> Graph:
    """Trace a function of a head's states, gates and parameters."""
    (graph,) = _trace_heads([(step, function)], dtype, method)
    return graph


def _trace_heads(
    calls: Sequence[tuple[Step, Callable[..., Any]]],
    dtype: torch.dtype,
    method: str,
    *,
    with_cotangents: bool = False,
) -> list[Graph]:
    """Trace functions of a head's states, gates and parameters, and cotangents of its results."""
    steps = [step for step, _ in calls]
    inputs = []
    for step in steps:
        sizes = step.head_sizes
        assert sizes is not None
        tensors = examples(sizes, step, dtype, ())
        if with_cotangents:
            outputs = [(sizes.lengths[VALUES],)] * sizes.outputs
            tensors += [torch.rand(size, dtype=dtype) for size in (*sizes.states, *outputs)]
        inputs.append(tensors)
    functions = [function for _, function in calls]
    try:
        what = f"{steps[0].cls.__name__}.{method}"
        return trace_alike([*zip(functions, inputs, strict=True)], what)
    except SizeError as error:
        raise CellError(f"{error.failure}. {_lengths(steps[0])}") from error.__cause__


def _lengths(step: Step) -> str:
    assert step.head_sizes is not None
    lengths = ", ".join(f"{axis} = {size}" for axis, size in step.head_sizes.lengths.items())
    return (
        f"It was called on the tensors of one head, with axes of the lengths {lengths}: read "
        f"lengths off a tensor, or as self.{VALUES}, and give products the axes that they sum over"
    )


def _check_method(
    step: Step, method: str, wanted: Sequence[tuple[int, ...]], dtype: torch.dtype
) -> None:
    """Check what a method returns, and that it couples neither rows nor heads."""
    assert step.head_sizes is not None
    points = examples(step.head_sizes, step, dtype, LEADING_SIZES)
    for tensors in (points, [point - 0.75 for point in points]):
        _check_values(step, method, wanted, tensors)


def _check_values(
    step: Step, method: str, wanted: Sequence[tuple[int, ...]], tensors: Sequence[Tensor]
) -> None:
    what, dtype, rows = f"{step.cls.__name__}.{method}", tensors[0].dtype, step.num_rows
    row, head = 1, 2
    single_head = [
        *(tensor[row, head] for tensor in tensors[:rows]),
        *(tensor[head] if tensor.ndim else tensor for tensor in tensors[rows:]),
    ]
    try:
        whole, single = (_method(step, method)(*arguments) for arguments in (tensors, single_head))
    except (RuntimeError, IndexError, ValueError) as error:
        cure = (
            "Count axes from the end: a vector of keys is gate.k[..., :, None] next to a matrix, "
            "and a number gate.f[..., None, None]"
        )
        if "normalized_shape" in str(error):
            cure = (
                "Heads have weights of their own, which multiply what a norm returns: "
                "F.layer_norm(x, x.shape[-1:]) * param.w + param.b"
            )
        raise CellError(
            f"{what} fails on tensors with leading dimensions (B, H), or without them: "
            f"{error}{line_of(error)}. {cure}"
        ) from from_the_users_line(error)
    results = (_tensors(what, result, len(wanted)) for result in (whole, single))
    pairs = zip(*results, wanted, strict=True)
    for batch_value, head_value, size in pairs:
        got = (tuple(batch_value.shape), tuple(head_value.shape), batch_value.dtype)
        if got != ((*LEADING_SIZES, *size), size, dtype):
            raise CellError(
                f"{what} must return {', '.join(str(('...', *s)) for s in wanted)} in {dtype}, "
                f"got {got[0]} {batch_value.dtype} for B, H = {LEADING_SIZES}, and {got[1]} for "
                f"one head. {_lengths(step)}"
            )
        tolerance = TOLERANCES[dtype]
        if not batch_value[row, head].allclose(head_value, tolerance, tolerance, equal_nan=True):
            raise CellError(
                f"{what} must treat leading dimensions (B, H) as independent: on {LEADING_SIZES} "
                "it mixes rows or heads, or differs from that of one head"
            )


def _tensors(what: str, result: object, count: int) -> tuple[Tensor, ...]:
    values = result if isinstance(result, tuple) else (result,)
    if len(values) == count and all(isinstance(value, Tensor) for value in values):
        return values
    kinds = ", ".join(type(value).__name__ for value in values)
    number = "one tensor" if count == 1 else f"a tuple of {count} tensors"
    raise CellError(f"{what} must return {number}, got {kinds}")


def why_a_loop(step: Step) -> str:
    """Return why solvers do not split a matrix cell's time into segments, for messages."""
    axes = step.cls.head_axes
    assert axes is not None
    shapes = ", ".join(f"{name} ({', '.join(names)})" for name, names in axes.states.items())
    return f"Jacobians of a head's tensors, {shapes}, are too large for Newton's method"
