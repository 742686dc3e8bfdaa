"""From a cell's step to its graphs: new states, Jacobian and VJP, for one compute dtype."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from pararnn.base.errors import CellError, StructureError
from pararnn.cells.base import Cell, Step
from pararnn.program.coupling import expand_entry
from pararnn.program.guard import guard
from pararnn.program.record import BranchError
from pararnn.program.statements import size_dependence
from pararnn.program.structure import Structure
from pararnn.program.trace import (
    Graph,
    ancestors,
    canonical_text,
    erase_dead,
    trace_pointwise,
    trace_rows_alike,
)

TRACE_CHANNELS = (8, 24)  # two sizes with many divisors: graphs must not depend on the size
TRACE_ROWS = 6
LEADING, ROW = (2, 3), (1, 2)
"""Leading sizes, and a row of them, for which a step must return what it returns for it alone."""
TOLERANCES = {torch.float32: 1e-4, torch.float64: 1e-10}
"""Tolerance, by dtype, between a row or a head computed by itself and with others."""
TRACE_HEADS = 2
OTHER_ROWS = 5
"""Rows of channels, another number than a trace has, on which its graphs must hold too."""
LARGE = 1 << 20
"""Numbers of a parameter above which one point is compared, without gradients, to save seconds."""
POINTS = ((0, 0.0), (1, -0.75))
"""Seeds and offsets of the points at which graphs are compared with the step: positive ones, for
roots and logarithms, and of both signs."""
PROBES = 3
JACOBIAN_TOLERANCE = 1e-9
SCALES = (-(2.0**30), 2.0**-30)
"""Scales of incoming gradients, at which a backward that bounds or normalises them shows."""
DENSE_NUMBERS = 1 << 24
"""Largest number of entries of pulled-back rows in memory at once."""


@dataclass(frozen=True)
class Graphs:
    """The graphs of one compute dtype, functions of flat tensors (states, inputs, params).

    step: -> new states. vjp: with a cotangent for each state -> gradients of all arguments.
    jacobian: -> new states and the structure's entries, derived from the step. Where channels
    couple: with cotangents -> gradients of the states, by which the Jacobian's rows are pulled
    back. by_hand: -> new states and the entries of the class's own Jacobian.
    """

    step: Graph
    jacobian: Graph
    vjp: Graph
    by_hand: Graph | None = None


def flat(step: Step, call: Callable[..., Any]) -> Callable[..., Any]:
    """Return `call(states, inputs, params)` as a function of one flat list of tensors."""
    states, rows, params = step.num_states, step.num_rows, step.num_params
    return lambda *t: call(t[:states], t[states:rows], t[rows : rows + params])


def example(
    step: Step,
    leading: tuple[int, ...],
    channels: int,
    dtype: torch.dtype,
    seed: int = 0,
    heads: int | None = None,
) -> list[Tensor]:
    """Return random states, inputs and params as flat tensors with `leading` sizes."""
    generator = torch.Generator().manual_seed(seed)
    if heads is None:
        heads = TRACE_HEADS if step.sizes is None else step.sizes[1]

    def draw(*size: int) -> Tensor:
        return torch.rand(size, generator=generator, dtype=torch.float64).add(0.25).to(dtype)

    kinds = [param.kind for param in step.cls.params.values()]
    params = [k.lifted(draw(*k.size(channels, heads)), channels, heads) for k in kinds]
    return [*(draw(*leading, channels) for _ in range(step.num_rows)), *params]


def why_odd_params(step: Step) -> str | None:
    """Return which parameter is neither a matrix of channels nor one value a channel, or None."""
    channels, heads = 8, 2
    for (name, param), is_matrix in zip(step.cls.params.items(), step.matrices, strict=True):
        value = torch.empty(param.size(channels, heads))
        if not is_matrix and param.kind.lifted(value, channels, heads).shape != (channels,):
            return (
                f"its Param {name!r} is neither a matrix 'H,K,K' or 'D,D' nor one value a channel"
            )
    return None


def channels_of(step: Step) -> tuple[int, ...]:
    """Return the numbers of channels that a step is traced on."""
    return TRACE_CHANNELS if step.sizes is None else step.sizes[:1]


def mixing_op(step: Step) -> str | None:
    """Return the op that mixes channels, or None, and check the results of an elementwise step.

    Raises BranchError where the step reads a tensor's value, CellError where it breaks the
    contract.
    """
    what = f"{step.cls.__name__}.step"
    graphs = []
    for channels in channels_of(step):
        tensors = example(step, (), channels, torch.float32)
        graph = trace_pointwise(flat(step, step), tensors, what)
        if graph.mixing_op is not None:
            _check_rows(step)
            return graph.mixing_op
        for new in flat(step, step)(*tensors):
            if new.shape != (channels,) or new.dtype != torch.float32:
                raise CellError(
                    f"{what} must return states of the shape and dtype of its input states, got "
                    f"{tuple(new.shape)} {new.dtype} for {(channels,)} torch.float32"
                )
        graphs.append(graph)
    _check_rows(step)
    change = size_dependence(graphs[0], graphs[-1])
    if change is not None:
        raise CellError(
            f"{what} depends on the number of channels (it reads a shape, by which {change} "
            "differs); make that number a config value or a scalar Param"
        )
    return None


def derive(
    step: Step, structure: Structure, dtypes: Sequence[torch.dtype]
) -> dict[torch.dtype, Graphs]:
    """Trace all graphs of a step in each dtype; StructureError where the structure does not
    hold."""
    couples = structure.couples_channels
    leading = (TRACE_ROWS,) if couples else ()
    states = step.num_states
    call = flat(step, step.by_ops if couples else step)
    channels = channels_of(step)[0]
    inputs = [example(step, leading, channels, dtype) for dtype in dtypes]
    cotangents = [example(step, leading, channels, dtype, seed=1)[:states] for dtype in dtypes]
    both = [[*pair[0], *pair[1]] for pair in zip(inputs, cotangents, strict=True)]

    @torch.enable_grad()
    def rows(*t: Tensor) -> list[Tensor]:
        """Return new states, then the Jacobian row by row, each the pull-back of one state."""
        leaves = leaves_of(t[:states])
        new = call(*leaves, *t[states:])
        out = list(new)
        for state in new:
            out += gradients([state], leaves, [torch.ones_like(state)])
        return out

    def by_hand(*t: Tensor) -> list[Tensor]:
        entries = flat(step, lambda s, x, p: step.call("jacobian", s, x, p))(*t)
        if isinstance(entries, Tensor):
            entries = ((entries,),)
        return [*call(*t), *(entry for row in entries for entry in row)]

    def trace(
        function: Callable[..., Any],
        arguments: Sequence[Sequence[Tensor]],
        what: str,
        results: int | None = None,
    ) -> list[Graph]:
        if couples:
            return trace_rows_alike(function, arguments, f"{name}{what}", results)
        return [trace_pointwise(function, tensors, f"{name}{what}") for tensors in arguments]

    name = step.cls.__name__
    vjp = with_gradients(call, len(inputs[0]), states)
    if couples:
        results = 0 if step.cls.is_derivative else states
        try:
            whole = trace(vjp, both, "'s gradient", results)
        except (BranchError, CellError):
            trace(call, inputs, ".step", results)  # raises for what the step does itself
            raise
        steps = [_with_text(_new_states(g, states, len(inputs[0]))) for g in whole]
        of_all = [_with_text(_with_outputs(g, lambda graph, out: out[states:])) for g in whole]
        jacobians = [_with_outputs(g, lambda graph, grads: grads[:states]) for g in of_all]
    else:
        jacobians = trace(rows, inputs, "'s Jacobian")
        steps = [_new_states(g, states) for g in jacobians]
        of_all = trace(lambda *t: vjp(*t)[states:], both, "'s gradient")
    by_hands: Sequence[Graph | None] = [None] * len(dtypes)
    if step.has_jacobian:
        by_hands = trace(by_hand, inputs, ".jacobian")
    tables = [Graphs(*graphs) for graphs in zip(steps, jacobians, of_all, by_hands, strict=True)]
    if not couples:
        for graphs in tables:
            _check_elementwise(name, graphs)
    return dict(zip(dtypes, tables, strict=True))


def _check_elementwise(name: str, graphs: Graphs) -> None:
    """Raise StructureError where a derivative of an elementwise step mixes channels."""
    labels = ((graphs.jacobian, "Jacobian"), (graphs.vjp, "gradient"), (graphs.by_hand, "jacobian"))
    for graph, what in labels:
        if graph is not None and graph.mixing_op is not None:
            raise StructureError(
                f"{name}'s {what} is not elementwise ({graph.mixing_op}) although its step is; "
                "declare structure = 'dense'"
            )


def graphs_of_rows(step: Step, traced: Graph) -> Graphs:
    """Return the graphs over rows (R, D) of a step traced on single ones (D,).

    traced: with cotangents, new states and the gradients of all arguments, by elementwise ops and
    products inside heads, which take leading dimensions. Gradients of parameters with one value a
    channel are summed over rows, as the ops sum those of matrices.
    """
    states, rows = step.num_states, step.num_rows

    def sums(graph: fx.Graph, results: Sequence[Any]) -> list[Any]:
        grads = results[states:]
        pairs = zip(grads[rows:], step.matrices, strict=True)
        return [*grads[:rows], *(g if matrix else _sum(graph, g) for g, matrix in pairs)]

    inputs = rows + len(step.matrices)
    new = _new_states(traced, states, inputs)
    jacobian = _with_outputs(traced, lambda graph, results: results[states : 2 * states])
    return Graphs(new, jacobian, _with_outputs(traced, sums))


def _new_states(graph: Graph, states: int, num_inputs: int | None = None) -> Graph:
    """Return a graph of new states alone, the first ones of its results."""
    return _with_outputs(graph, lambda _, results: results[:states], num_inputs)


def _with_text(graph: Graph) -> Graph:
    """Return a graph with the text of its ops."""
    return replace(graph, text=canonical_text(graph.ops, graph.constants))


def _sum(graph: fx.Graph, gradient: Any) -> Any:
    """Return the sum over rows of a gradient; numbers are zeros."""
    if not isinstance(gradient, fx.Node):
        return gradient
    return graph.call_function(torch.ops.aten.sum.dim_IntList, (gradient, [0]))


def _with_outputs(
    graph: Graph,
    outputs_of: Callable[[fx.Graph, Any], Sequence[Any]],
    num_inputs: int | None = None,
) -> Graph:
    """Return a copy of a graph with other outputs, computed from its own, of its first inputs."""
    copy = fx.Graph()
    outputs = copy.graph_copy(graph.ops, {})
    copy.output(tuple(outputs_of(copy, outputs)))
    erase_dead(copy)
    if num_inputs is not None:
        for unused in [n for n in copy.nodes if n.op == "placeholder"][num_inputs:]:
            copy.erase_node(unused)
    return replace(graph, ops=copy)


def linearise(
    step: Step,
    structure: Structure,
    graphs: Graphs,
    tensors: Sequence[Tensor],
    by_hand: bool = False,
) -> tuple[list[Tensor], Tensor]:
    """Return new states and the Jacobian's representation at flat tensors (states, inputs, params).

    Elementwise: tensors (..., D). Coupled channels: rows (R, D). `by_hand`: by the class's own
    Jacobian, where it writes one.
    """
    states, like = step.num_states, tensors[0]
    graph = graphs.by_hand if by_hand and graphs.by_hand is not None else graphs.jacobian
    if structure.couples_channels and graph is graphs.jacobian:
        new = [expand_entry(s, like, like.shape) for s in graphs.step(*tensors)]
        return new, _pulled_back(step, structure, graph, tensors)
    out = graph(*tensors)
    new = [expand_entry(s, like, like.shape) for s in out[:states]]
    return new, structure.coupling.representation(out[states:], like, states)


@torch.no_grad()
def holds_for(
    step: Step, graphs: Graphs, channels: int, heads: int | None = None, gradients: bool = True
) -> bool:
    """Check that graphs compute, for numbers of rows and channels that they were not traced on,
    what the step and its gradient do.

    A step may branch on its number of channels, and PyTorch gives some derivatives, such as that of
    `sgn`, the very sizes of a trace. True where the step itself fails on these channels.
    """
    call, states = flat(step, step.by_ops), step.num_states
    kinds = [param.kind for param in step.cls.params.values()]
    count_heads = TRACE_HEADS if heads is None else heads
    is_large = any(math.prod(kind.size(channels, count_heads)) > LARGE for kind in kinds)
    gradients = gradients and not is_large
    for seed, offset in POINTS[:1] if is_large else POINTS:
        size = (OTHER_ROWS,), channels, torch.float64
        tensors = [x + offset for x in example(step, *size, seed, heads)]
        cotangents = example(step, *size, seed + len(POINTS), heads)[:states]
        count, both = len(tensors), [*tensors, *cotangents]
        try:
            expected = with_gradients(call, count, states)(*both) if gradients else call(*tensors)
        except (RuntimeError, IndexError):
            return True
        try:
            results = [*graphs.step(*tensors), *(graphs.vjp(*both) if gradients else ())]
        except (RuntimeError, IndexError):
            return False
        pairs = zip(results, expected, strict=True)
        if not all(_equal(result, exact) for result, exact in pairs):
            return False
    return True


def _equal(result: Any, expected: Tensor) -> bool:
    """Check that what a graph returns, a tensor or a number, is the expected tensor."""
    result, tolerance = torch.as_tensor(result, dtype=expected.dtype), TOLERANCES[torch.float64]
    fits = result.ndim <= expected.ndim and result.expand_as(expected).shape == expected.shape
    return fits and torch.allclose(result, expected, tolerance, tolerance, equal_nan=True)


def is_affine(graphs: Graphs, states: int) -> bool:
    """Check that no entry of an elementwise step's Jacobian depends on a state."""
    *nodes, output = graphs.jacobian.ops.nodes
    inputs = [node for node in nodes if node.op == "placeholder"]
    return ancestors(nodes, output.args[0][states:]).isdisjoint(inputs[:states])


def check_structure(step: Step, structure: Structure, graphs: Graphs) -> None:
    """Compare the Jacobians that solvers will use with autograd's at random points, in float64.

    Catches a hand-written Jacobian that is wrong and a registered structure that the step does not
    have. Raises StructureError naming the entry.
    """
    channels, states, rows = channels_of(step)[0], step.num_states, step.num_rows
    for seed in range(PROBES):
        t = example(step, (1,), channels, torch.float64, seed)
        if seed:  # else positive numbers, for roots and logarithms
            t = [x * 3 - 2 for x in t]

        def new_states(whole: Tensor, t: list[Tensor] = t) -> Tensor:
            arguments = (*(x[0] for x in t[states:rows]), *t[rows:])
            return torch.cat(flat(step, step)(*whole.reshape(states, -1).unbind(), *arguments))

        with torch.enable_grad():
            whole = torch.cat([x[0] for x in t[:states]])
            jacobian = torch.autograd.functional.jacobian(new_states, whole)
        for by_hand in (True, False) if step.has_jacobian else (False,):
            representation = linearise(step, structure, graphs, t, by_hand)[1]
            _compare(step.cls, structure, structure.to_dense(representation)[0], jacobian, by_hand)


def check_linear(step: Step, graphs: Graphs) -> None:
    """Raise CellError where a step's gradient is not linear in the incoming gradient, in float64.

    PyTorch's functions are linear. The backward of a user's torch.autograd.Function need not be.
    """
    tensors, cotangents = (
        [x * 3 - 2 for x in example(step, (1,), channels_of(step)[0], torch.float64, seed)]
        for seed in (0, 1)
    )
    incoming = cotangents[: step.num_states]
    what = f"{step.cls.__name__}'s gradient"
    grads = guard(what, lambda: graphs.vjp(*tensors, *incoming), tensors)
    for scale in SCALES:
        multiples = graphs.vjp(*tensors, *(scale * c for c in incoming))
        for grad, multiple in zip(grads, multiples, strict=True):
            gap = torch.as_tensor(multiple) / scale - torch.as_tensor(grad)
            if float(gap.abs().max()) > JACOBIAN_TOLERANCE:
                raise CellError(
                    f"{step.cls.__name__}.step calls a torch.autograd.Function whose backward is "
                    "not linear in the incoming gradient (it bounds or normalises it, say), "
                    "which parallel solvers add up and compose. Bound gradients outside of the "
                    "step (torch.nn.utils.clip_grad_norm_), or declare structure = 'sequential'"
                )


def _compare(
    cls: type[Cell], structure: Structure, jacobian: Tensor, expected: Tensor, by_hand: bool
) -> None:
    same = (jacobian == expected) | (jacobian.isnan() & expected.isnan())
    error = torch.where(same, 0.0, (jacobian - expected).abs() / expected.abs().clamp(min=1))
    if jacobian.shape == expected.shape and float(error.max()) <= JACOBIAN_TOLERANCE:
        return
    i, j = divmod(int(error.argmax()), expected.shape[1])
    channels, names = len(expected) // len(cls.states), tuple(cls.states)
    entry = f"d {names[i // channels]}[{i % channels}] / d "
    entry += f"{names[j // channels]}[{j % channels}]"
    if not by_hand:
        values = f"{entry} is {expected[i, j]:.9g}, the {{}} holds {jacobian[i, j]:.9g}; "
        if cls.structure is None:
            raise StructureError(
                f"{cls.__name__}.step's gradient by PyTorch is not that of its traced operations: "
                + values.format("trace")
                + "declare structure = 'sequential' to run it by PyTorch alone"
            )
        raise StructureError(
            f"{cls.__name__} declares structure = {structure.name!r}, but the traced step's "
            f"Jacobian does not have it: {values.format('structure')}declare 'dense' or mend the "
            "step"
        )
    raise StructureError(
        f"{cls.__name__}.jacobian is wrong: {entry} is {jacobian[i, j]:.9g} by hand and "
        f"{expected[i, j]:.9g} by autograd at a random point"
    )


def _pulled_back(
    step: Step, structure: Structure, graph: Graph, tensors: Sequence[Tensor]
) -> Tensor:
    """Return Jacobians at rows (R, D): all cotangents in one batch, some rows at a time."""
    cotangents, num_rows = structure.cotangents(tensors[0]), step.num_rows
    count = len(cotangents)
    block_rows = max(1, DENSE_NUMBERS // (count * step.num_states * tensors[0].shape[1]))

    def vjp_rows(rows: Sequence[Tensor]) -> Tensor:
        """Return the VJPs of some rows, (R, K, N*D)."""
        size = (count, *rows[0].shape)
        states_and_inputs = [x.expand(size).flatten(0, 1) for x in rows]
        expanded = [c.unsqueeze(1).expand(size).flatten(0, 1) for c in cotangents.unbind(1)]
        grads = graph(*states_and_inputs, *tensors[num_rows:], *expanded)
        full = [expand_entry(g, expanded[0], expanded[0].shape).reshape(size) for g in grads]
        return torch.cat(full, -1).transpose(0, 1)

    blocks = zip(*(x.split(block_rows) for x in tensors[:num_rows]), strict=True)
    return torch.cat([structure.from_pulled(vjp_rows(rows)) for rows in blocks])


def with_gradients(
    function: Callable[..., Sequence[Tensor]], count: int, results: int
) -> Callable[..., tuple[Tensor, ...]]:
    """Return a function of the arguments of `function` and the gradients by its results, which
    returns the results and the gradients by the first `count` arguments."""

    @torch.enable_grad()
    def run(*t: Tensor) -> tuple[Tensor, ...]:
        leaves = leaves_of(t[:count])
        new = function(*leaves, *t[count:-results])
        return (*new, *gradients(new, leaves, t[-results:]))

    return run


def leaves_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors as leaves that require gradients."""
    return [t.detach().requires_grad_() for t in tensors]


def gradients(
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    cotangents: Sequence[Tensor],
    create_graph: bool = False,
) -> tuple[Tensor, ...]:
    """Return the gradients of all inputs, zero where nothing depends on one; with `create_graph`
    differentiable by the cotangents too.

    By plain autograd, which runs users' autograd functions. torch.func refuses some of them.
    """
    pairs = [(o, c) for o, c in zip(outputs, cotangents, strict=True) if o.requires_grad]
    if not pairs:
        return tuple(torch.zeros_like(t) for t in inputs)
    outs, incoming = zip(*pairs, strict=True)
    root = _Root.apply(incoming, *outs)
    grads = torch.autograd.grad(
        root, inputs, retain_graph=True, create_graph=create_graph, allow_unused=True
    )
    return with_zeros(grads, inputs, create_graph)


def with_zeros(
    grads: Sequence[Tensor | None], inputs: Sequence[Tensor], create_graph: bool
) -> tuple[Tensor, ...]:
    """Return the gradients of inputs, zero where there is none.

    `materialize_grads` of PyTorch 2.9 gives zeros that require gradients without `create_graph`
    too.
    """
    return tuple(
        torch.zeros_like(x, requires_grad=create_graph) if grad is None else grad
        for grad, x in zip(grads, inputs, strict=True)
    )


class _Root(torch.autograd.Function):
    """A number with given gradients. `autograd.grad` imports SymPy for gradients it is given."""

    @staticmethod
    def forward(ctx: Any, cotangents: tuple[Tensor, ...], *outputs: Tensor) -> Tensor:
        ctx.cotangents = cotangents
        return outputs[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.cotangents


def _check_rows(step: Step) -> None:
    """Raise CellError where a step that mixes channels mixes leading dimensions too."""
    what, channels, rows = f"{step.cls.__name__}.step", channels_of(step)[0], step.num_rows
    call, points = flat(step, step), example(step, LEADING, channels, torch.float64)
    for tensors in (points, [t - 0.75 for t in points]):
        try:
            whole = call(*tensors)
            alone = call(*(t[ROW] for t in tensors[:rows]), *tensors[rows:])
        except (RuntimeError, IndexError) as error:
            raise CellError(
                f"{what} must broadcast over leading dimensions (..., D); "
                f"with shape {(*LEADING, channels)} it fails: {error}"
            ) from error
        for batch, row in zip(whole, alone, strict=True):
            check_independent(what, batch, row, (channels,))


def check_independent(what: str, batch: Tensor, alone: Tensor, size: tuple[int, ...]) -> None:
    """Check that a result on `LEADING` sizes is, at `ROW`, that of the row alone, of this size."""
    whole, tolerance = (*LEADING, *size), TOLERANCES.get(batch.dtype, 1e-4)
    fits = (batch.shape, alone.shape) == (whole, size)
    if not fits or not batch[ROW].allclose(alone, tolerance, tolerance, equal_nan=True):
        raise CellError(
            f"{what} must treat leading dimensions as independent rows: for {whole} it returns "
            f"{tuple(batch.shape)}, mixes rows, or differs from that of a single one"
        )
