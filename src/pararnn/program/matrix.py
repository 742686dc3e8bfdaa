"""Steps of matrix cells: the check of one, and its trace on the tensors of a single head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pararnn.cells.base import Step
from pararnn.cells.matrix import VALUES, HeadSizes
from pararnn.errors import CellError
from pararnn.program.derive import flat
from pararnn.program.guard import SizeError, from_the_users_line, line_of
from pararnn.program.trace import Graph, trace_pointwise

LENGTHS = (5, 3, 7, 11, 13, 17, 19, 23)
"""Lengths of axes in a trace, V first. They differ, so that a size names its axis."""
LEAD = (2, 3)
"""Batch and heads on which a step must do what it does on one head of one row."""


@dataclass(frozen=True)
class MatrixTrace:
    """The step and the readout of a matrix cell as graphs of one head's tensors, in one dtype.

    Both take states, gates and parameters; the readout takes the step's new states. readout: None
    where the output is the first state.
    """

    step: Graph
    readout: Graph | None


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
    heads = LEAD[1]
    return Step(step.cls, config, step.training, (heads * LENGTHS[0], heads))


def examples(
    sizes: HeadSizes, step: Step, dtype: torch.dtype, lead: tuple[int, ...], seed: int = 0
) -> list[Tensor]:
    """Return random states, gates and parameters with leading sizes: of `lead` = (B, H), or of one
    head for ()."""
    generator = torch.Generator().manual_seed(seed)

    def draw(size: Sequence[int]) -> Tensor:
        return torch.rand(tuple(size), generator=generator, dtype=torch.float64).add(0.25).to(dtype)

    kinds = [param.kind for param in step.cls.params.values()]
    params = [sizes.param(kind) for kind in kinds]
    if not lead:
        params = [size[1:] for size in params]
    return [*(draw((*lead, *size)) for size in (*sizes.states, *sizes.gates)), *map(draw, params)]


def trace_matrix(step: Step, dtypes: Sequence[torch.dtype]) -> dict[torch.dtype, MatrixTrace]:
    """Trace a step and its readout once they are checked, in each dtype.

    Raises BranchError where they read a tensor's value, CellError where they break the contract.
    """
    small = trace_step(step)
    sizes = small.head_sizes
    assert sizes is not None
    traces = {}
    for dtype in dtypes:
        own = _trace(small, "step", dtype)
        _check_method(small, "step", sizes.states, dtype)
        readout = None
        if small.has_readout:
            readout = _trace(small, "readout", dtype)
            _check_method(small, "readout", ((sizes.lengths[VALUES],),), dtype)
        traces[dtype] = MatrixTrace(own, readout)
    return traces


def _method(step: Step, name: str) -> Callable[..., Any]:
    return flat(step, step if name == "step" else partial(step.call, name))


def _trace(step: Step, method: str, dtype: torch.dtype) -> Graph:
    assert step.head_sizes is not None
    tensors = examples(step.head_sizes, step, dtype, ())
    try:
        return trace_pointwise(_method(step, method), tensors, f"{step.cls.__name__}.{method}")
    except SizeError as error:
        raise CellError(f"{error.failure}. {_lengths(step)}") from error.__cause__


def _lengths(step: Step) -> str:
    assert step.head_sizes is not None
    lengths = ", ".join(f"{axis} = {size}" for axis, size in step.head_sizes.lengths.items())
    return (
        f"It was called on the tensors of one head, with axes of the lengths {lengths}: read "
        "lengths off a tensor, or as self.K, and give products the axes that they sum over"
    )


def _check_method(
    step: Step, method: str, wanted: Sequence[tuple[int, ...]], dtype: torch.dtype
) -> None:
    """Check what a method returns, and that rows and heads do not meet in it."""
    assert step.head_sizes is not None
    what, tensors = f"{step.cls.__name__}.{method}", examples(step.head_sizes, step, dtype, LEAD)
    rows = step.num_rows
    row, head = 1, 2
    one = [
        *(tensor[row, head] for tensor in tensors[:rows]),
        *(tensor[head] if tensor.ndim else tensor for tensor in tensors[rows:]),
    ]
    try:
        whole, single = (_method(step, method)(*some) for some in (tensors, one))
    except (RuntimeError, IndexError, ValueError) as error:
        raise CellError(
            f"{what} fails on tensors with leading dimensions (B, H), or without them: "
            f"{error}{line_of(error)}. Count axes from the end: a vector of keys is "
            "gate.k[..., :, None] next to a matrix, and a number gate.f[..., None, None]"
        ) from from_the_users_line(error)
    pairs = zip(_tensors(what, whole), _tensors(what, single), wanted, strict=True)
    for many, alone, size in pairs:
        got = (tuple(many.shape), tuple(alone.shape), many.dtype)
        if got != ((*LEAD, *size), size, dtype):
            raise CellError(
                f"{what} must return {', '.join(str(('...', *own)) for own in wanted)} in {dtype}, "
                f"got {got[0]} {many.dtype} for B, H = {LEAD}, and {got[1]} for one head. "
                f"{_lengths(step)}"
            )
        if not torch.allclose(many[row, head], alone, 1e-4, 1e-4, equal_nan=True):
            raise CellError(
                f"{what} must treat leading dimensions (B, H) as independent: on {LEAD} it mixes "
                "rows or heads, or differs from that of one head"
            )


def _tensors(what: str, result: object) -> tuple[Tensor, ...]:
    if isinstance(result, Tensor):
        return (result,)
    if isinstance(result, tuple):
        return result
    raise CellError(f"{what} must return one tensor, got {type(result).__name__}")


def why_a_loop(step: Step) -> str:
    """Return why solvers do not cut a matrix cell's time, for their messages."""
    axes = step.cls.head_axes
    assert axes is not None
    shapes = ", ".join(f"{name} ({', '.join(own)})" for name, own in axes.states.items())
    return f"Jacobians of a head's tensors, {shapes}, are too large for Newton's method"
