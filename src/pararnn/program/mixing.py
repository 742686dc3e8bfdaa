"""Steps that mix channels by products with matrices: their statements, in stages between products.

Kernels run a step, and its gradient, stage by stage. A stage computes operands of products from the
step's inputs and the products of earlier stages. No products follow the last stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch

from pararnn.base.errors import CellError
from pararnn.cells.base import Step
from pararnn.cells.matrix import VALUES, Axes
from pararnn.cells.products import MIX, OUTER
from pararnn.program.derive import channels_of, example, flat, why_odd_params, with_gradients
from pararnn.program.record import BranchError
from pararnn.program.schedule import Nest, Stage, schedule
from pararnn.program.statements import (
    GRADIENTS,
    CannotGenerate,
    Product,
    Statements,
    Target,
    Traces,
    Value,
    size_dependence,
    sources_of,
    statements_of,
)
from pararnn.program.trace import Graph, aten, erase_dead, mixing_nodes, op_of, trace_alike

MAX_ROUNDS = 3
"""Longest chain of products of a step in which each one reads the result of the one before."""


class OuterIndices(NamedTuple):
    """Outer product that a matrix's gradient sums over steps: indices of its matrix among the
    params and of its vectors among the pass's left and right ones."""

    matrix: int
    left_vector: int
    right_vector: int


@dataclass(frozen=True)
class StagedPass:
    """Statements in stages, which also write operands of products and values carried to later ones.

    operands, carried: the numbers of these. In the gradient the first stage needs no gradient by a
    state, and has no products after it. Its other stages read only such gradients, parameters and
    what the first one gives.
    """

    statements: Statements
    stages: list[Stage]
    operands: Mapping[Value, int]
    carried: Mapping[Value, int]

    @cached_property
    def products(self) -> list[Value]:
        """All products, in order."""
        return [product for stage in self.stages for product in stage.products]

    @cached_property
    def multiplies_states(self) -> bool:
        """True if all operands are states, unchanged."""
        return {*self.operands} <= {*self.statements.inputs_of("state").values()}

    def count(self, kind: str) -> int:
        """Return the number of results of a kind."""
        return sum(stage.count(kind) for stage in self.stages)

    def reads(self, kind: str) -> list[int]:
        """Return the numbers of the inputs of a kind that it reads."""
        readers = self.statements.readers()
        return [i for i, value in self.statements.inputs_of(kind).items() if value in readers]


@dataclass(frozen=True)
class Mixing:
    """A step's products and stages in one compute dtype.

    The backward pass does not repeat the step's products, but reads pre-activations: sums of
    products and other terms. outers: terms of the gradients of matrices. matrices: indices of these
    among the params. channel_params: indices of the other params, which have one value a channel.
    gate_of_right: by right vector of outer products, the gate whose gradient it is, -1 for none.
    preactivation_of: by product of the step, the index of the pre-activation that it is a term of,
    -1 for none. accumulators: by product of the gradient, the index of the product that it adds to,
    itself for the first one of a sum.
    """

    forward: StagedPass
    backward: StagedPass
    outers: tuple[OuterIndices, ...]
    matrices: tuple[int, ...]
    channel_params: tuple[int, ...]
    gate_of_right: tuple[int, ...]
    preactivation_of: tuple[int, ...]
    accumulators: tuple[int, ...]

    @cached_property
    def num_preactivations(self) -> int:
        """Number of the step's pre-activations that the gradient reads."""
        return self.forward.count("sum")

    @cached_property
    def lefts(self) -> int:
        """Number of left vectors of outer products."""
        return self.backward.count("left")

    @cached_property
    def rights(self) -> int:
        """Number of right vectors of outer products."""
        return self.backward.count("right")


def trace_mixing(step: Step, dtypes: Sequence[torch.dtype]) -> Traces:
    """Trace a step that mixes channels, and its gradients, on single rows (D,) in each dtype."""
    traces = Traces({}, [])
    try:
        _check_params(step)
        for dtype in dtypes:
            channels = channels_of(step) if dtype is dtypes[0] else channels_of(step)[:1]
            graph = _trace(step, dtype, channels)
            lengths = {VALUES: channels[0]}
            statements = statements_of((graph, graph), _axes(step), (lengths, lengths))
            mixing_of(step, statements)
            traces.graphs.append(graph)
            traces.statements[dtype] = statements
    except CannotGenerate as error:
        return Traces({}, [], f"{step.cls.__name__} mixes channels, and {error}")
    return traces


def _check_params(step: Step) -> None:
    pairs = zip(step.cls.params.values(), step.matrices, strict=True)
    if len({param.kind.name for param, is_matrix in pairs if is_matrix}) > 1:
        raise CannotGenerate("it has matrices 'D,D' and 'H,K,K': kernels take one kind")
    reason = why_odd_params(step)
    if reason is not None:
        raise CannotGenerate(reason)


def _axes(step: Step) -> dict[str, list[Axes]]:
    """Return the axes of a step's states, gates, fields and parameters."""
    counts = {"state": step.num_states, "gate": len(step.cls.gates), "field": len(step.cls.fields)}
    axes: dict[str, list[Axes]] = {kind: [(VALUES,)] * n for kind, n in counts.items()}
    return axes | {"param": [(VALUES,) * (1 + is_matrix) for is_matrix in step.matrices]}


def _trace(step: Step, dtype: torch.dtype, channel_counts: Sequence[int]) -> Graph:
    """Return the graph of new states and gradients, of elementwise ops and products."""
    states, name = step.num_states, step.cls.__name__
    arguments = step.num_rows + len(step.matrices)
    function = with_gradients(flat(step, step.by_ops), arguments, states)
    calls = []
    for channels in channel_counts:
        tensors = example(step, (), channels, dtype)
        calls.append((function, [*tensors, *example(step, (), channels, dtype, seed=1)[:states]]))
    try:
        graphs = trace_alike(calls, f"{name}'s gradient")
    except (BranchError, CellError) as error:
        raise CannotGenerate(f"it cannot be traced by single rows: {error}") from error
    graph, change = graphs[0], size_dependence(graphs[0], graphs[-1])
    for node in mixing_nodes(graph.ops):
        if node.target not in (MIX, OUTER):
            raise CannotGenerate(
                f"it uses {op_of(node)}: kernels take elementwise ops, and products `x @ param.R` "
                "with a Param 'H,K,K' or 'D,D'"
            )
    if change is not None:
        raise CannotGenerate(
            f"its step depends on the number of channels, by which {change} differs"
        )
    _associate(graph, arguments)
    return graph


def _associate(graph: Graph, arguments: int) -> None:
    """Multiply factors that depend on no cotangent by each other first, then by the cotangent.

    Their product is known before the step's cotangent is. Where it overflows, a cotangent of 0
    gives NaN. The cotangents are the inputs after the `arguments`.
    """
    nodes, multiply = graph.ops, aten.mul.Tensor
    dependent = {*[node for node in nodes.nodes if node.op == "placeholder"][arguments:]}
    for node in list(nodes.nodes):
        if dependent.isdisjoint(node.all_input_nodes):
            continue
        dependent.add(node)
        if node.target is not multiply:
            continue
        x, factor = node.args if node.args[0] in dependent else reversed(node.args)
        if factor in dependent or x.target is not multiply or len(x.users) > 1:
            continue
        y, first = x.args if x.args[0] in dependent else reversed(x.args)
        if first in dependent:
            continue
        with nodes.inserting_before(node):
            product = nodes.call_function(multiply, (first, factor))
        product.meta = dict(node.meta)
        node.args = (y, product)
    erase_dead(nodes)


def mixing_of(step: Step, whole: Statements) -> Mixing:
    """Return a step's products and stages, given the statements of the step and its gradients."""
    forward, backward = whole.only(["new_state"]), whole.only(GRADIENTS)
    preactivations = _preactivations(backward)
    if not {*preactivations} <= {*forward.values}:
        raise CannotGenerate("its gradient needs a product that its step does not have")
    given = {("sum", i): value for i, value in enumerate(preactivations)}
    backward = whole.only(GRADIENTS, given)
    lefts = _numbered(outer.lhs for outer in backward.outers)
    rights = _numbered(outer.rhs for outer in backward.outers)
    of_gates = {value: target.number for target, value in backward.writes
                if target.kind == "grad_gate"}  # fmt: skip
    vectors = [
        (Target(kind, i, value.axes), value)
        for kind, numbers in (("left", lefts), ("right", rights))
        for value, i in numbers.items()
    ]
    sums = [(Target(*key, value.axes), value) for key, value in given.items()]
    forward_pass = _pass(replace(forward, writes=[*forward.writes, *sums]))
    backward_pass = _pass(
        replace(backward, writes=[*backward.writes, *vectors], outers=[]),
        first_stage=("state", "gate", "field", "sum"),
    )
    _check_products(forward, forward_pass)
    numbers, readers = _numbered(preactivations), forward.readers()
    terms = [_enclosing_sums(product, readers) for product in forward_pass.products]
    preactivation_of = tuple(next((numbers[v] for v in t if v in numbers), -1) for t in terms)
    readers, accumulators = backward.readers(), list[int]()
    first: dict[tuple[int, Value], int] = {}
    for number, stage in enumerate(backward_pass.stages):
        for product in stage.products:
            total = _enclosing_sums(product, readers)[-1]
            accumulators.append(first.setdefault((number, total), len(accumulators)))
    return Mixing(
        forward_pass,
        backward_pass,
        tuple(OuterIndices(o.param, lefts[o.lhs], rights[o.rhs]) for o in backward.outers),
        tuple(i for i, is_matrix in enumerate(step.matrices) if is_matrix),
        tuple(i for i, is_matrix in enumerate(step.matrices) if not is_matrix),
        tuple(of_gates.get(value, -1) for value in rights),
        preactivation_of,
        tuple(accumulators),
    )


def _preactivations(backward: Statements) -> list[Value]:
    """Return the sums that a gradient's products of the step are terms of."""
    dependent, readers = backward.dependent("grad_new_state"), backward.readers()
    products = [v for v in backward.values
                if isinstance(v.definition, Product) and v not in dependent]  # fmt: skip
    sums = [[v for v in _enclosing_sums(p, readers) if v not in dependent] for p in products]
    return [*dict.fromkeys(terms[-1] for terms in sums)]


def _enclosing_sums(value: Value, readers: Mapping[Value, list[Value | None]]) -> list[Value]:
    """Return a value and the chain of sums above it, each the only reader of the one before."""
    sums = [value]
    while len(users := readers.get(sums[-1], [])) == 1:
        (user,) = users
        if user is None or user.node.target is not aten.add.Tensor or user.node.kwargs:
            break
        sums.append(user)
    return sums


def _check_products(step: Statements, pass_: StagedPass) -> None:
    """Check that products are of values that depend on states, and that their rounds are few."""
    if not pass_.operands.keys() <= step.dependent("state").keys():
        raise CannotGenerate(
            "it multiplies a gate or a constant by a matrix, which no state decides: give the "
            "layer's projection that product, for all steps at once"
        )
    rounds = sum(bool(stage.products) for stage in pass_.stages)
    if rounds > MAX_ROUNDS:
        raise CannotGenerate(
            f"its step has {rounds} products of which each reads the one before: kernels take "
            f"{MAX_ROUNDS}"
        )


def _pass(statements: Statements, first_stage: Sequence[str] = ()) -> StagedPass:
    """Return the stages of a pass. first_stage: kinds of inputs that only the first stage reads,
    and carries to others; it does not wait for gradients by new states."""
    late = [*statements.inputs_of("grad_new_state").values()] if first_stage else []
    stages = schedule(statements, late).stages
    stage_of = {value: 0 for kind in first_stage for value in statements.inputs_of(kind).values()}
    operands: dict[Value, int] = {}

    def write(stage: Stage, kind: str, numbers: Mapping[Value, int]) -> None:
        stage.nests = stage.nests or [Nest((VALUES,))]
        stage.nests[0].writes += [(Target(kind, i, v.axes), v) for v, i in numbers.items()]

    for number, stage in enumerate(stages):
        stage_of |= dict.fromkeys(stage.points, number)
        sources = dict.fromkeys(_operand(product) for product in stage.products)
        in_stage = {source: len(operands) + i for i, source in enumerate(sources)}
        operands |= in_stage
        stage.products.sort(key=lambda product: operands[_operand(product)])
        write(stage, "operand", in_stage)
    reads = [(source, stage_of[value]) for value in reversed(statements.values)
             if value in stage_of for source in sources_of(value)]  # fmt: skip
    reads += [(value, number) for number, stage in enumerate(stages)
              for _, value in stage.writes if isinstance(value, Value)]  # fmt: skip
    carried = _numbered(v for v, stage in reads if stage_of.get(v, stage) < stage)
    for number, stage in enumerate(stages):
        write(stage, "carried", {v: i for v, i in carried.items() if stage_of[v] == number})
    return StagedPass(statements, stages, operands, carried)


def _numbered(values: Iterable[Value]) -> dict[Value, int]:
    """Return the index of each value among those that differ."""
    return {value: i for i, value in enumerate(dict.fromkeys(values))}


def _operand(product: Value) -> Value:
    (operand,) = sources_of(product)
    return operand
