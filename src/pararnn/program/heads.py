"""Steps of vector states as steps of matrix cells: a head's channels are one axis of its tensors.

Kernels of matrix cells then run norms, sums and softmaxes over the channels of a head, which those
of products with matrices cannot.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pararnn.base.errors import CellError
from pararnn.cells.base import Cell, Param, Step
from pararnn.cells.matrix import VALUES, HeadAxes
from pararnn.cells.shapes import ParamShape
from pararnn.program.derive import TOLERANCES, example, flat, why_odd_params
from pararnn.program.guard import DerivativeError
from pararnn.program.matrix import trace_of_heads
from pararnn.program.record import BranchError
from pararnn.program.statements import Traces

_VECTOR = ParamShape(f"H,{VALUES}", lambda d, h: (h, d // h), axes=(VALUES,))
_MATRIX = ParamShape(f"H,{VALUES},{VALUES}", lambda d, h: (h, d // h, d // h), by_heads=True,
                     axes=(VALUES, VALUES))  # fmt: skip
CHECK_POINTS = ((0, 0.0), (1, -0.75))
"""Seeds and offsets of the points at which a head's step is compared with that of all channels."""


def trace_as_heads(
    step: Step, sizes: tuple[int, int], dtypes: Sequence[torch.dtype]
) -> tuple[Step, Traces] | str:
    """Trace a step of vector states for channels and heads on the tensors of a head. Return the
    step and its traces, or the reason why there are none.

    The head has all channels where no parameter is a matrix of each head.
    """
    if step.has_jacobian:
        return "it has a Jacobian by hand"
    if (reason := why_odd_params(step)) is not None:
        return reason
    heads = sizes[1] if True in step.by_heads else 1
    try:
        head_step = _step_of_head(step, (sizes[0], heads))
        if not _agrees(step, head_step):
            return (
                "it couples heads: its step computes a head's states from channels of others. "
                "Use one head, or write it as a matrix cell, whose step sees one head"
            )
        traces = trace_of_heads(head_step, dtypes)
    except DerivativeError:
        raise
    except (CellError, BranchError, RuntimeError, IndexError, ValueError) as error:
        return f"it cannot be traced on the channels of a head: {error}"
    return (head_step, traces) if traces.reason is None else traces.reason


def _step_of_head(step: Step, sizes: tuple[int, int]) -> Step:
    """Return the same step in a class whose states and gates are vectors of a head. Its outputs are
    all states. Fields become gates."""
    cls = step.cls
    shapes = [_MATRIX if is_matrix else _VECTOR for is_matrix in step.matrices]
    params = {name: Param(shape) for name, shape in zip(cls.params, shapes, strict=True)}
    names = {
        "states": dict.fromkeys(cls.states, VALUES),
        "gates": dict.fromkeys([*cls.gates, *cls.fields], VALUES),
        "fields": (),
        "params": params,
        "structure": None,
        "readout": None,
        "__module__": cls.__module__,
    }
    head_cls: type[Cell] = type(cls.__name__, (cls,), names)
    config = {name: getattr(step.view, name) for name in cls.config}
    axes = Step(head_cls, config).axes
    head_cls.head_axes = HeadAxes(axes.states, axes.gates, ((VALUES,),) * len(cls.states))
    return Step(head_cls, config, step.training, sizes)


def _agrees(step: Step, head_step: Step) -> bool:
    """Check that the step of all channels equals the head's step on the channels of each head."""
    sizes, tolerance = head_step.head, TOLERANCES[torch.float64]
    heads, channels = sizes.heads, sizes.heads * sizes.lengths[VALUES]
    for seed, offset in CHECK_POINTS:
        tensors = example(step, (), channels, torch.float64, seed, heads)
        tensors = [x + offset for x in tensors]
        whole = flat(step, step)(*tensors)
        for head in range(heads):
            states = flat(head_step, head_step)(*(_select(x, heads, head) for x in tensors))
            for whole_state, state in zip(whole, states, strict=True):
                expected = _select(whole_state, heads, head)
                if expected.shape != state.shape or not torch.allclose(
                    expected, state, tolerance, tolerance, equal_nan=True
                ):
                    return False
    return True


def _select(x: Tensor, heads: int, head: int) -> Tensor:
    """Return a head's channels of a vector, or its matrix."""
    if x.ndim == 1:
        return x.unflatten(0, (heads, -1))[head]
    return x[head] if x.ndim > 2 else x
