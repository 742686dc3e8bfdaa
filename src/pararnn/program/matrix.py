"""Steps of matrix cells: the check of one, and its trace on the tensors of a single head."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pararnn.base.errors import CellError
from pararnn.cells.base import Step
from pararnn.cells.matrix import VALUES, Axes, HeadSizes
from pararnn.program.derive import LEADING, ROW, check_independent, flat, with_gradients
from pararnn.program.guard import DerivativeError, SizeError, from_the_users_line, line_of
from pararnn.program.record import BranchError
from pararnn.program.statements import (
    GRADIENTS,
    RESULTS,
    CannotGenerate,
    Statements,
    Traces,
    check_numbers_of_length,
    statements_of,
)
from pararnn.program.trace import Graph, trace_alike

CHECKPOINT = 16
"""Steps between the states that a forward pass saves for the backward pass."""
LENGTHS = (5, 3, 7, 11, 13, 17, 19, 23)
"""Lengths of axes in a trace, V first. They differ, so that a size identifies its axis."""
LENGTHS_OF_CALLS = (29, 31, 37), (41, 43, 47), (2, 3, 4), (1000, 1001, 1002)
"""Lengths of axes that calls decide, in a trace and in others, which must be the same: also short
and long ones, on which a step that reads a length may branch."""
Run = Callable[..., tuple[Tensor, ...]]


class Passes(NamedTuple):
    """Statements of a step for kernels: forward gives all results, advance the new states, readout
    the output of these, and backward the gradients."""

    forward: Statements
    advance: Statements
    readout: Statements
    backward: Statements


def passes_of(step: Statements) -> Passes:
    """Return the passes of a step and its gradients."""
    return Passes(
        step.only(RESULTS),
        step.only(["new_state"]),
        step.only(["output"], given=step.written("new_state")),
        step.only(GRADIENTS),
    )


def dependences(advance: Statements) -> list[frozenset[int]]:
    """Return the states on which each new state depends, which an advance pass computes."""
    dependent: Mapping[Any, frozenset[int]] = advance.dependent("state")
    return [dependent.get(value, frozenset()) for _, value in advance.writes]


def reachable(depends: Sequence[frozenset[int]]) -> list[frozenset[int]]:
    """Return the states on which each state depends by any path, itself included."""
    reach = [states | {i} for i, states in enumerate(depends)]
    for _ in reach:
        reach = [states.union(*(reach[j] for j in states)) for states in reach]
    return reach


def trace_step(step: Step) -> Step:
    """Return a matrix cell's step with the lengths of `LENGTHS`. Raises CellError for more axes."""
    arguments = step.axes.arguments
    if len(arguments) >= len(LENGTHS):
        raise CellError(
            f"{step.cls.__name__} has {len(arguments) + 1} axes, {len(LENGTHS)} are allowed"
        )
    of_calls, most = step.axes.of_calls, len(LENGTHS_OF_CALLS[0])
    if len(of_calls) > most:
        raise CellError(
            f"{step.cls.__name__} has {len(of_calls)} axes that only memories have, {of_calls}: "
            f"{most} are allowed"
        )
    config = {name: getattr(step.view, name) for name in step.cls.config}
    config |= dict(zip(arguments, LENGTHS[1:], strict=False))
    heads = LEADING[1]
    return Step(step.cls, config, step.training, (heads * LENGTHS[0], heads))


def examples(
    step: Step, dtype: torch.dtype, batch: tuple[int, ...], seed: int = 0, of_calls: int = 0
) -> list[Tensor]:
    """Return random states, gates, parameters and memories with leading sizes `batch` = (B, H), or
    of one head for (). of_calls: which lengths of `LENGTHS_OF_CALLS` they have."""
    generator = torch.Generator().manual_seed(seed)

    def draw(size: Sequence[int]) -> Tensor:
        return torch.rand(tuple(size), generator=generator, dtype=torch.float64).add(0.25).to(dtype)

    sizes = sizes_in_trace(step, of_calls)
    kinds = [param.kind for param in step.cls.params.values()]
    params = [sizes.param(kind) for kind in kinds]
    if not batch:
        params = [size[1:] for size in params]
    rows = [(*batch, *size) for size in (*sizes.states, *sizes.gates)]
    memories = [(*batch, *size) for size in sizes.memory_sizes]
    return [draw(size) for size in (*rows, *params, *memories)]


def sizes_in_trace(step: Step, of_calls: int = 0) -> HeadSizes:
    """Return the sizes in a trace with those of `LENGTHS_OF_CALLS` that calls decide."""
    lengths = LENGTHS_OF_CALLS[of_calls]
    return step.head.of_call(dict(zip(step.axes.of_calls, lengths, strict=False)))


def trace_matrix(step: Step, dtypes: Sequence[torch.dtype]) -> Traces:
    """Trace a step and its readout once they are checked, in each dtype.

    Raises BranchError where they read a tensor's value, CellError where they break the contract.
    """
    small = trace_step(step)
    sizes = sizes_in_trace(small)
    wanted = {"step": sizes.states} | ({"readout": sizes.outputs} if small.has_readout else {})
    calls = [(dtype, method) for dtype in dtypes for method in wanted]

    def explain() -> None:
        """Raise the reason why a method alone cannot be traced, if there is one."""
        for dtype, method in calls:
            _trace_heads([(small, _method(small, method))], dtype, method)

    try:
        for dtype, method in calls:
            _check_method(small, method, wanted[method], dtype)
        traces = trace_of_heads(step, dtypes)
    except Exception:
        explain()
        raise
    if traces.reason is not None:
        explain()
    return traces


def trace_of_heads(step: Step, dtypes: Sequence[torch.dtype]) -> Traces:
    """Trace a step as `trace_matrix` does, without its checks."""
    traces = Traces({}, [])
    try:
        for dtype in dtypes:
            steps = trace_step(step), step
            graphs = trace_pairs([(s, with_gradients(*_results(s))) for s in steps], dtype)
            traces.graphs.extend(graphs[:2])
            for other in graphs[2:]:
                check_numbers_of_length(graphs[1], other, step.axes.of_calls)
            traces.statements[dtype] = statements_of_head(step, graphs[:2])
    except DerivativeError:
        raise
    except (CannotGenerate, CellError, BranchError) as error:
        return Traces({}, traces.graphs, str(error))
    return traces


def axes_by_kind(step: Step) -> dict[str, list[Axes]]:
    """Return the axes of a head's states, gates, parameters, memories and outputs, in order."""
    return {
        "state": [*step.axes.states.values()],
        "gate": [*step.axes.gates.values()],
        "param": [param.kind.axes or () for param in step.cls.params.values()],
        "memory": [*step.axes.memory.values()],
        "output": [*step.axes.outputs],
    }


def statements_of_head(step: Step, graphs: Sequence[Graph]) -> Statements:
    """Return the statements of the two graphs by `trace_pairs`. Raises NoStatement."""
    lengths = [sizes_in_trace(s).lengths for s in (trace_step(step), step)]
    both, pair = (graphs[0], graphs[1]), (lengths[0], lengths[1])
    return statements_of(both, axes_by_kind(step), pair, step.axes.of_calls, renames=True)


def _method(step: Step, name: str) -> Callable[..., Any]:
    return flat(step, step if name == "step" else partial(step.call, name))


def _results(step: Step) -> tuple[Run, int, int]:
    """Return the function of flat tensors to new states and the outputs, and how many it takes and
    returns."""
    run, read = _method(step, "step"), flat(step, step.outputs_of)

    def forward(*tensors: Tensor) -> tuple[Tensor, ...]:
        new = run(*tensors)
        return (*new, *read(*new, *tensors[step.num_states :]))

    count = step.num_rows + step.num_params
    return forward, count, step.num_states + len(step.head.outputs)


def forward_of(step: Step) -> Run:
    """Return the function of flat tensors to new states and the outputs."""
    return _results(step)[0]


def trace_pairs(pairs: Sequence[tuple[Step, Run]], dtype: torch.dtype) -> list[Graph]:
    """Trace a step's results and gradients, with lengths of `LENGTHS` and with the cell's; and the
    latter again if it has axes that calls decide, with the other lengths of these."""
    others = [pairs[-1]] * len(LENGTHS_OF_CALLS[1:]) if pairs[-1][0].axes.of_calls else []
    return _trace_heads([*pairs, *others], dtype, "step", with_cotangents=True)


def _trace_heads(
    calls: Sequence[tuple[Step, Run]],
    dtype: torch.dtype,
    method: str,
    *,
    with_cotangents: bool = False,
) -> list[Graph]:
    """Trace functions of a head's states, gates and parameters, and cotangents of its results."""
    inputs = []
    for i, (step, _) in enumerate(calls):
        of_calls = max(i - 1, 0)  # a cell's lengths come with those of the first trace, then others
        sizes, tensors = (
            sizes_in_trace(step, of_calls),
            examples(step, dtype, (), of_calls=of_calls),
        )
        if with_cotangents:
            results = (*sizes.states, *sizes.outputs)
            tensors += [torch.rand(size, dtype=dtype) for size in results]
        inputs.append(tensors)
    functions = [function for _, function in calls]
    first = calls[0][0]
    try:
        what = f"{first.cls.__name__}.{method}"
        return trace_alike([*zip(functions, inputs, strict=True)], what)
    except SizeError as error:
        raise CellError(f"{error.failure}. {_lengths(first)}") from error.__cause__


def _lengths(step: Step) -> str:
    lengths = ", ".join(f"{axis} = {size}" for axis, size in step.head.lengths.items())
    return (
        f"It was called on the tensors of one head, with axes of the lengths {lengths}: read "
        f"lengths off a tensor, or as self.{VALUES}, and give products the axes that they sum over"
    )


def _check_method(
    step: Step, method: str, wanted: Sequence[tuple[int, ...]], dtype: torch.dtype
) -> None:
    """Check what a method returns, and that it couples neither rows nor heads."""
    points = examples(step, dtype, LEADING)
    for tensors in (points, [point - 0.75 for point in points]):
        _check_values(step, method, wanted, tensors)


def _check_values(
    step: Step, method: str, wanted: Sequence[tuple[int, ...]], tensors: Sequence[Tensor]
) -> None:
    what, dtype, rows = f"{step.cls.__name__}.{method}", tensors[0].dtype, step.num_rows
    memories = rows + len(step.cls.params)
    single_head = [
        *(tensor[ROW] for tensor in tensors[:rows]),
        *(tensor[ROW[1]] if tensor.ndim else tensor for tensor in tensors[rows:memories]),
        *(tensor[ROW] for tensor in tensors[memories:]),
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
        if got != ((*LEADING, *size), size, dtype):
            raise CellError(
                f"{what} must return {', '.join(str(('...', *s)) for s in wanted)} in {dtype}, "
                f"got {got[0]} {batch_value.dtype} for B, H = {LEADING}, and {got[1]} for "
                f"one head. {_lengths(step)}"
            )
        check_independent(what, batch_value, head_value, size)


def _tensors(what: str, result: object, count: int) -> tuple[Tensor, ...]:
    values = result if isinstance(result, tuple) else (result,)
    if len(values) == count and all(isinstance(value, Tensor) for value in values):
        return values
    kinds = ", ".join(type(value).__name__ for value in values)
    number = "one tensor" if count == 1 else f"a tuple of {count} tensors"
    raise CellError(f"{what} must return {number}, got {kinds}")


def why_a_loop(step: Step) -> str:
    """Return why solvers do not split a matrix cell's time into segments, for messages."""
    states = step.axes.states.items()
    shapes = ", ".join(f"{name} ({', '.join(names)})" for name, names in states)
    return f"Jacobians of a head's tensors, {shapes}, are too large for Newton's method"
