"""From a step that mixes channels inside heads to its products and the elementwise stages between.

A pass (the step, or its gradient) is a list of stages. A stage computes operands of products from
the step's inputs and the products of earlier stages. No products follow the last stage.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from pararnn.base.errors import CellError
from pararnn.cells.base import Step
from pararnn.cells.products import MIX, OUTER
from pararnn.program.derive import (
    channels_of,
    example,
    flat,
    gradients,
    leaves_of,
    why_odd_params,
)
from pararnn.program.record import BranchError
from pararnn.program.trace import Graph, aten, mixing_nodes, op_of, trace_pointwise

MAX_ROUNDS = 3
"""Longest chain of products of a step in which each one reads the result of the one before."""


class ProductIndices(NamedTuple):
    """Product of a pass: indices of its operand in the pass, and of its matrix among the params."""

    operand: int
    matrix: int
    transpose: bool


class OuterIndices(NamedTuple):
    """Outer product that a matrix's gradient sums over steps: indices of its matrix among the
    params and of its vectors among the pass's left and right ones."""

    matrix: int
    left_vector: int
    right_vector: int


class Result(NamedTuple):
    """Value that a stage gives.

    kind: in both passes "operand" of a product and "carried" to a later stage. In the step also
    "new_state", and "sum", a pre-activation that the gradient reads. In the gradient also "state",
    "gate", "field" and "param", gradients of these, and "left" and "right", see OuterIndices.
    number: its index among those of its kind.
    """

    kind: str
    number: int


@dataclass(frozen=True)
class Stage:
    """Elementwise statements of a pass.

    graph: returns `results`, given the pass's inputs, all its products and all carried values, not
    all of which it reads. products: those that follow it, adjacent in the pass.
    """

    graph: Graph
    results: tuple[Result, ...]
    products: tuple[ProductIndices, ...]

    def count(self, kind: str) -> int:
        """Return the number of results of a kind."""
        return sum(result.kind == kind for result in self.results)


@dataclass(frozen=True)
class Pass:
    """Stages in order.

    inputs: counts by kind: states, gates, fields and params with one value a channel, and in the
    gradient cotangents of states and pre-activations of the step. In the gradient the first stage
    needs no cotangent and has no products after it. Its other stages read only cotangents and what
    the first one gives. num_carried: count of values that stages give to later ones. accumulators:
    index of the product that product i adds to, itself for the first one of a sum.
    preactivation_of: for each product of the step, the index of the pre-activation that it is a
    term of; -1 for none. multiplies_states: True if all operands are states, unchanged.
    """

    stages: tuple[Stage, ...]
    inputs: Mapping[str, int]
    num_carried: int
    accumulators: tuple[int, ...]
    preactivation_of: tuple[int, ...]
    multiplies_states: bool

    @property
    def products(self) -> tuple[ProductIndices, ...]:
        """All products, in order."""
        return tuple(product for stage in self.stages for product in stage.products)

    def reads(self, kind: str) -> tuple[int, ...]:
        """Return the numbers of the inputs of a kind that stages read."""
        kinds = [*self.inputs]
        begin = sum(self.inputs[before] for before in kinds[: kinds.index(kind)])
        placeholders = [_placeholders(stage.graph) for stage in self.stages]
        indices = range(self.inputs[kind])
        return tuple(i for i in indices if any(nodes[begin + i].users for nodes in placeholders))


@dataclass(frozen=True)
class Mixing:
    """A step's products and stages in one compute dtype.

    step, gradient: the whole graphs on rows (D,): new states, and with cotangents of these the
    gradients of all arguments. forward, backward: their stages. The backward pass does not repeat
    the step's products, but reads pre-activations: sums of products and other terms.
    outers: terms of the gradients of matrices. matrices: indices of these among the params.
    channel_params: indices of the other params, which have one value a channel.
    """

    step: Graph
    gradient: Graph
    forward: Pass
    backward: Pass
    outers: tuple[OuterIndices, ...]
    matrices: tuple[int, ...]
    channel_params: tuple[int, ...]

    @property
    def num_preactivations(self) -> int:
        """Number of the step's pre-activations that the gradient reads."""
        return self.backward.inputs["sum"]

    @property
    def lefts(self) -> int:
        """Number of left vectors of outer products."""
        return 1 + max((outer.left_vector for outer in self.outers), default=-1)

    @property
    def rights(self) -> int:
        """Number of right vectors of outer products."""
        return 1 + max((outer.right_vector for outer in self.outers), default=-1)


class _Unable(Exception):
    """A step without kernels of this family; the text is the reason."""


def mixing_of(
    step: Step, dtypes: Iterable[torch.dtype]
) -> tuple[dict[torch.dtype, Mixing], str | None]:
    """Return a step's products and stages by compute dtype, or the reason why there are none."""
    try:
        _check_params(step)
        first, *remaining = dtypes
        counts = channels_of(step)
        mixing = {first: _mixing(step, first, counts)}  # dtypes do not change what reads a size
        return mixing | {dtype: _mixing(step, dtype, counts[:1]) for dtype in remaining}, None
    except _Unable as error:
        return {}, f"{step.cls.__name__} mixes channels, and {error}"


def _check_params(step: Step) -> None:
    params = step.cls.params.items()
    pairs = zip(params, step.matrices, strict=True)
    if len({param.kind.name for (_, param), is_matrix in pairs if is_matrix}) > 1:
        raise _Unable("it has matrices 'D,D' and 'H,K,K': kernels take one kind")
    reason = why_odd_params(step)
    if reason is not None:
        raise _Unable(reason)


def _mixing(step: Step, dtype: torch.dtype, channel_counts: Iterable[int]) -> Mixing:
    name, states, params = step.cls.__name__, step.num_states, len(step.matrices)
    graphs = []
    for channels in channel_counts:
        tensors = example(step, (), channels, dtype)
        cotangents = example(step, (), channels, dtype, seed=1)[:states]
        graphs.append(
            (
                _trace(flat(step, step.by_ops), tensors, f"{name}.step"),
                _trace(_pull_back(step), [*tensors, *cotangents], f"{name}'s gradient"),
            )
        )
    if any(a.text != b.text for a, b in zip(graphs[0], graphs[-1], strict=True)):
        raise _Unable("its step depends on the number of channels (it reads a shape)")
    (forward, backward), rows = graphs[0], step.num_rows
    matrices = [i for i in range(params) if step.matrices[i]]
    channel_params = [i for i in range(params) if not step.matrices[i]]
    sizes = {
        "state": states,
        "gate": len(step.cls.gates),
        "field": len(step.cls.fields),
        "param": len(channel_params),
    }
    _associate(backward, _placeholders(backward)[-states:])
    pulled, preactivations = _with_preactivations(backward, states, forward)
    step_results = {Result("new_state", i): v for i, v in enumerate(_outputs(forward))}
    step_results |= {Result("sum", i): node for i, node in enumerate(preactivations)}
    traced = _TracedPass(forward, rows, matrices, params)
    _check_products(traced, traced.inputs[:states])
    forward_pass = traced.stages(step_results, sizes)

    traced = _TracedPass(pulled, rows, matrices, params, len(preactivations))
    grads = _outputs(pulled)
    results = {
        Result(kind, i): value
        for kind, values in (
            ("state", grads[:states]),
            ("gate", grads[states : states + sizes["gate"]]),
            ("field", grads[states + sizes["gate"] : rows]),
            ("param", [grads[rows + i] for i in channel_params]),
        )
        for i, value in enumerate(values)
    }
    lefts: dict[fx.Node, int] = {}
    rights: dict[fx.Node, int] = {}
    outers = []
    for matrix in matrices:
        for x, y in _outer_products(grads[rows + matrix], step, matrix):
            pair = (lefts.setdefault(x, len(lefts)), rights.setdefault(y, len(rights)))
            outers.append(OuterIndices(matrix, *pair))
    results |= {Result("left", i): node for node, i in lefts.items()}
    results |= {Result("right", i): node for node, i in rights.items()}
    backward_sizes = {**sizes, "cotangent": states, "sum": len(preactivations)}
    backward_pass = traced.stages(results, backward_sizes)
    indices = tuple(matrices), tuple(channel_params)
    return Mixing(forward, backward, forward_pass, backward_pass, tuple(outers), *indices)


def _pull_back(step: Step) -> Any:
    call, states = flat(step, step.by_ops), step.num_states

    @torch.enable_grad()
    def pulled_back(*t: Tensor) -> tuple[Tensor, ...]:
        inputs = leaves_of(t[:-states])
        return gradients(call(*inputs), inputs, t[-states:])

    return pulled_back


def _trace(function: Any, tensors: Sequence[Tensor], what: str) -> Graph:
    try:
        graph = trace_pointwise(function, tensors, what)
    except (BranchError, CellError) as error:
        raise _Unable(f"it cannot be traced by single rows: {error}") from error
    for node in mixing_nodes(graph.module.graph):
        if node.target not in (MIX, OUTER):
            raise _Unable(
                f"it uses {op_of(node)}: kernels take elementwise ops, and products `x @ param.R` "
                "with a Param 'H,K,K' or 'D,D'"
            )
    return graph


def _outputs(graph: Graph) -> Sequence[Any]:
    (values,) = (node.args[0] for node in graph.module.graph.nodes if node.op == "output")
    return values


def _check_products(traced: _TracedPass, states: Sequence[fx.Node]) -> None:
    """Raise _Unable for products of values that depend on no state, and for too many rounds."""
    dependent = set(states)
    for node in traced.nodes:
        if not dependent.isdisjoint(node.all_input_nodes):
            dependent.add(node)
        if node.target is MIX and node.args[0] not in dependent:
            raise _Unable(
                "it multiplies a gate or a constant by a matrix, which no state decides: give the "
                "layer's projection that product, for all steps at once"
            )
    rounds = max((traced.level[node] for node in traced.nodes if node.target is MIX), default=0)
    if rounds > MAX_ROUNDS:
        raise _Unable(
            f"its step has {rounds} products of which each reads the one before: kernels take "
            f"{MAX_ROUNDS}"
        )


def _outer_products(grad: Any, step: Step, matrix: int) -> list[tuple[fx.Node, fx.Node]]:
    """Return the pairs of vectors whose outer products add up to a matrix's gradient."""
    if not isinstance(grad, fx.Node):
        if grad == 0:
            return []
    elif grad.target is OUTER:
        x, y, _ = grad.args
        if isinstance(x, fx.Node) and isinstance(y, fx.Node):
            return [(x, y)]
    elif grad.target is aten.add.Tensor and not grad.kwargs:
        return [pair for term in grad.args for pair in _outer_products(term, step, matrix)]
    name = list(step.cls.params)[matrix]
    raise _Unable(f"it does more with {name!r} than multiply by it")


def _placeholders(graph: Graph) -> list[fx.Node]:
    return [node for node in graph.module.graph.nodes if node.op == "placeholder"]


def _dependent(nodes: Iterable[fx.Node], sources: Iterable[fx.Node]) -> set[fx.Node]:
    """Return the sources, and the nodes that depend on them."""
    dependent = set(sources)
    for node in nodes:
        if not dependent.isdisjoint(node.all_input_nodes):
            dependent.add(node)
    return dependent


def _associate(graph: Graph, cotangents: Sequence[fx.Node]) -> None:
    """Multiply factors that depend on no cotangent by each other first, then by the cotangent.

    Their product is known before the step's cotangent is. Where it overflows, a cotangent of 0
    gives NaN.
    """
    nodes, multiply = graph.module.graph, aten.mul.Tensor
    dependent = _dependent(nodes.nodes, cotangents)
    for node in list(nodes.nodes):
        if node.target is not multiply or node not in dependent:
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
    nodes.eliminate_dead_code()
    graph.module.recompile()


def _with_preactivations(gradient: Graph, states: int, step: Graph) -> tuple[Graph, list[fx.Node]]:
    """Return a copy of a gradient whose last inputs replace the step's products by
    their pre-activations, and these in the step."""
    copied = Graph(copy.deepcopy(gradient.module), None, "")
    nodes, inputs = copied.module.graph, _placeholders(copied)
    dependent = _dependent(nodes.nodes, inputs[-states:])
    products = [node for node in nodes.nodes if node.target is MIX and node not in dependent]
    ends = [[n for n in _enclosing_sums(node) if n not in dependent][-1] for node in products]
    preactivations = [*dict.fromkeys(ends)]
    names: dict[str, int] = {}
    numbers, in_step = _numbers(copied, names), _numbers(step, names)
    node_of = {number: node for node, number in in_step.items()}
    if any(numbers[node] not in node_of for node in preactivations):
        raise _Unable("its gradient needs a product that its step does not have")
    in_forward = [node_of[numbers[node]] for node in preactivations]
    for i, node in reversed([*enumerate(preactivations)]):
        with nodes.inserting_after(inputs[-1]):
            node.replace_all_uses_with(nodes.placeholder(f"sum_{i}"))
    nodes.eliminate_dead_code()
    copied.module.recompile()
    return copied, in_forward


def _numbers(graph: Graph, names: dict[str, int]) -> dict[fx.Node, int]:
    """Return a number for each value of a graph, the same one for values of graphs with the same
    `names` that are computed alike."""
    numbers: dict[fx.Node, int] = {}
    for position, node in enumerate(graph.module.graph.nodes):
        args = fx.node.map_arg((node.args, node.kwargs), lambda n: f"value {numbers[n]}")
        name = f"input {position}" if node.op == "placeholder" else f"{node.target} {args!r}"
        numbers[node] = names.setdefault(name, len(names))
    return numbers


class _TracedPass:
    """A traced pass, to be divided into stages at its products.

    inputs: states, gates, fields and params with one value a channel. cotangents, preactivations:
    the other placeholders. level: the first stage that can compute a node's value; in a gradient,
    nodes that depend on a cotangent come after all others.
    """

    def __init__(
        self, graph: Graph, rows: int, matrices: Sequence[int], params: int, sums: int = 0
    ) -> None:
        self.nodes = [node for node in graph.module.graph.nodes if node.op != "output"]
        placeholders = _placeholders(graph)
        self.rows = placeholders[:rows]
        self.matrices = {placeholders[rows + i]: i for i in matrices}
        self.inputs = [node for node in placeholders[: rows + params] if node not in self.matrices]
        end = len(placeholders) - sums
        self.cotangents, self.preactivations = placeholders[rows + params : end], placeholders[end:]
        for node in self.nodes:
            for operand in node.all_input_nodes:
                reads = node.target is MIX and operand is not node.args[0]
                shapes = node.target is OUTER and operand not in node.args[:2]
                if operand in self.matrices and not (reads or shapes):
                    raise _Unable(
                        f"it does more with a matrix than to multiply by it: {node.target}"
                    )
            if node.target is MIX and not (
                isinstance(node.args[0], fx.Node) and node.args[1] in self.matrices
            ):
                raise _Unable("it multiplies by a matrix that is not a Param's own")
        self.dependent = _dependent(self.nodes, self.cotangents)
        self.level: dict[fx.Node, int] = {}
        for node in self.nodes:
            levels = [self.level[operand] for operand in node.all_input_nodes]
            level = max(levels, default=0) + (node.target is MIX)
            self.level[node] = max(level, node in self.dependent)

    def stages(self, results: Mapping[Result, Any], sizes: Mapping[str, int]) -> Pass:
        """Return the pass that gives `results`."""
        live = self._live(results.values())
        mixes = [node for node in self.nodes if node in live and node.target is MIX]
        ends = {result: self._end(result, value) for result, value in results.items()}
        count = 1 + max([*ends.values(), *(self.level[node] for node in mixes)])
        stage_results: list[dict[Result, Any]] = [{} for _ in range(count)]
        for result, value in results.items():
            stage_results[ends[result]][result] = value
        products: list[list[ProductIndices]] = [[] for _ in range(count)]
        product_index: dict[fx.Node, int] = {}
        operands: dict[tuple[int, Any], int] = {}
        for stage in range(count):
            later = [node for node in mixes if self.level[node] == stage + 1]
            for node in later:  # products of one operand are adjacent
                operands.setdefault((stage, node.args[0]), len(operands))
            for node in sorted(later, key=lambda n: operands[stage, n.args[0]]):
                operand = operands[stage, node.args[0]]
                stage_results[stage][Result("operand", operand)] = node.args[0]
                matrix, transpose = self.matrices[node.args[1]], bool(node.args[2])
                product_index[node] = sum(map(len, products))
                products[stage].append(ProductIndices(operand, matrix, transpose))
        stage_of = self._stages_of(live, stage_results)
        last: dict[fx.Node, int] = {}  # stage that reads a value
        for user, stage in [
            *stage_of.items(),
            *((value, s) for s, outputs in enumerate(stage_results) for value in outputs.values()),
        ]:
            reads = user.all_input_nodes if user in stage_of and stage_of[user] == stage else []
            for node in [*reads, user]:
                if isinstance(node, fx.Node) and node in stage_of and stage_of[node] < stage:
                    last[node] = max(stage, last.get(node, 0))
        carries = {node: index for index, node in enumerate(last)}
        for node, index in carries.items():
            stage_results[stage_of[node]][Result("carried", index)] = node
        stages = [
            Stage(
                self._graph(stage, stage_of, stage_results[stage], product_index, carries),
                tuple(stage_results[stage]),
                stage_products,
            )
            for stage, stage_products in enumerate(map(tuple, products))
        ]
        first_of_sum: dict[tuple[int, fx.Node], int] = {}
        accumulators = tuple(
            first_of_sum.setdefault((self.level[node], _enclosing_sums(node)[-1]), i)
            for node, i in product_index.items()
        )
        numbers = {value: r.number for r, value in results.items() if r.kind == "sum"}
        preactivation_of = tuple(
            next((numbers[node] for node in _enclosing_sums(product) if node in numbers), -1)
            for product in product_index
        )
        states = self.rows[: sizes["state"]]
        only_states = all(operand in states for _, operand in operands)
        sums = accumulators, preactivation_of
        return Pass(tuple(stages), sizes, len(carries), *sums, only_states)

    def _end(self, result: Result, value: Any) -> int:
        """Return the stage that gives a result. Gradients of inputs, zeros included, come in stages
        with cotangents."""
        vector = result.kind in ("left", "right") and value not in self.dependent
        return max(self._level(value), bool(self.cotangents) and not vector)

    def _level(self, value: Any) -> int:
        return self.level[value] if isinstance(value, fx.Node) else 0

    def _live(self, values: Iterable[Any]) -> set[fx.Node]:
        live = {value for value in values if isinstance(value, fx.Node)}
        for node in reversed(self.nodes):
            if node in live:
                live.update(node.all_input_nodes)
        return live

    def _stages_of(
        self, live: set[fx.Node], stage_results: Sequence[Mapping[Result, Any]]
    ) -> dict[fx.Node, int]:
        """Return the stage that computes each op's value: the first one that needs it, or in a
        gradient stage 0 for values that depend on no cotangent."""
        first: dict[fx.Node, int] = {}
        for stage, results in reversed(list(enumerate(stage_results))):
            first |= {value: stage for value in results.values() if isinstance(value, fx.Node)}
        stage_of = {}
        for node in reversed(self.nodes):
            if node not in live or not _is_computed(node):
                continue
            stage_of[node] = 0 if self.cotangents and node not in self.dependent else first[node]
            for operand in node.all_input_nodes:
                first[operand] = min(first.get(operand, stage_of[node]), stage_of[node])
        # Stage 0 passes on inputs and pre-activations that stages with cotangents read.
        readable = {*self.rows, *self.preactivations}
        pulls = [node for node, stage in stage_of.items() if stage > 0]
        if self.cotangents:
            stage_of |= {operand: 0 for node in pulls for operand in node.all_input_nodes
                   if operand in readable}  # fmt: skip
        return stage_of

    def _graph(
        self,
        stage: int,
        stage_of: Mapping[fx.Node, int],
        results: Mapping[Result, Any],
        product_index: Mapping[fx.Node, int],
        carries: Mapping[fx.Node, int],
    ) -> Graph:
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        for kind, nodes in (
            ("input", [*self.inputs, *self.cotangents, *self.preactivations]),
            ("product", product_index),
            ("carried", carries),
        ):
            for i, node in enumerate(nodes):
                placeholder = graph.placeholder(f"{kind}_{i}")
                if kind != "carried" or stage_of[node] < stage:
                    copies[node] = placeholder

        def copy(node: fx.Node) -> fx.Node:
            if node not in copies:  # a constant, which every stage makes
                copies[node] = graph.node_copy(node)
            return copies[node]

        for node in self.nodes:
            if stage_of.get(node) == stage and _is_computed(node):
                copies[node] = graph.node_copy(node, copy)
        graph.output(fx.node.map_arg(tuple(results.values()), copy))
        return Graph(fx.GraphModule(nn.Module(), graph), None, "")


def _enclosing_sums(node: fx.Node) -> list[fx.Node]:
    """Return a value and the chain of sums above it, each the only reader of the one before."""
    users = [*node.users]
    if len(users) != 1:
        return [node]
    (user,) = users
    adds = user.target is aten.add.Tensor and not user.kwargs and user.args.count(node) == 1
    return [node, *(_enclosing_sums(user) if adds else ())]


def _is_computed(node: fx.Node) -> bool:
    """Check whether a node is an op of a stage: no input, product or number."""
    number = aten.scalar_tensor.default
    return node.op == "call_function" and node.target not in (MIX, OUTER, number)
