"""From a Python function on tensors to a checked, simplified ATen graph."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from pararnn.base.errors import CellError
from pararnn.base.private import OpOverload, is_composite, is_zerotensor
from pararnn.cells.products import MIX, OUTER
from pararnn.program.guard import guard
from pararnn.program.record import (
    BranchError,
    WriteError,
    decompose,
    is_mutable,
    record,
    replay,
    without_writes,
)
from pararnn.program.rules import rule_of

aten = torch.ops.aten

# Ops that return their input: they leave no trace in a graph of scalars.
IDENTITIES = {
    aten.alias.default,
    aten.clone.default,
    aten.detach.default,
    aten.lift_fresh.default,
    aten.lift_fresh_copy.default,
}
# Ops that return their input where its size and dtype stay.
CONVERSIONS = {
    aten._to_copy.default,
    aten.expand.default,
    aten.slice.Tensor,
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
}
# Ops that make a constant: the position of the value among the arguments.
CONSTANTS = {
    aten.full.default: 1,
    aten.full_like.default: 1,
    aten.new_full.default: 2,
    aten.scalar_tensor.default: 0,
}
ZERO_ONE = {
    aten.zeros.default: 0.0,
    aten.zeros_like.default: 0.0,
    aten.new_zeros.default: 0.0,
    aten._efficientzerotensor.default: 0.0,
    aten.ones.default: 1.0,
    aten.ones_like.default: 1.0,
    aten.new_ones.default: 1.0,
}
# Ops that sum products of their first two arguments.
PRODUCTS = {aten.mm.default, aten.bmm.default, aten.mv.default, aten.dot.default, MIX, OUTER}
# Ops that wrap a Python number given for a tensor themselves.
TAKES_NUMBERS = {aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor}
# Pointwise, though PyTorch, or a version of it, does not say so.
UNTAGGED = {aten._to_copy.default, aten.leaky_relu.default}


def ancestors(
    nodes: Sequence[fx.Node],
    results: Iterable[fx.Node],
    reads: Callable[[fx.Node], Iterable[fx.Node]] = lambda node: node.all_input_nodes,
) -> set[fx.Node]:
    """Return the nodes that `results` depend on by `reads`, themselves included."""
    nodes_above = set(results)
    for node in reversed(nodes):
        if node in nodes_above:
            nodes_above.update(reads(node))
    return nodes_above


def erase_dead(graph: fx.Graph) -> None:
    """Erase ops on which no result depends, also those that write into such tensors."""
    *nodes, output = graph.nodes
    live = {None, *ancestors(nodes, output.all_input_nodes)}
    for node in reversed(nodes):
        is_dead = node.op != "placeholder" and not node.users
        if is_dead and not (is_mutable(node.target) and _memory(node) in live):
            graph.erase_node(node)


def _memory(node: Any) -> fx.Node | None:
    """Return the node that made the memory that one writes or views; None for that of several."""
    while isinstance(node, fx.Node):
        target: Any = node.target
        if is_mutable(target):
            values = {
                **dict(zip(_tensor_arguments(target), node.args, strict=False)),
                **node.kwargs,
            }
            node = next(values[a.name] for a in target._schema.arguments if a.is_write)
        elif getattr(target, "is_view", False):
            node = node.args[0]
        else:
            return node
    return None


@dataclass(frozen=True)
class Graph:
    """A traced function of flat tensors: `graph(*inputs)` returns a tuple of tensors and numbers.

    `mixing_op` names the first op that is not pointwise (None: the graph is elementwise) and `text`
    is the canonical form, equal for equal graphs. `defaults`: whether constants in it were rounded
    to PyTorch's default dtype. `constants`: a module that holds the tensors that `ops` reads.
    """

    ops: fx.Graph
    mixing_op: str | None
    text: str
    defaults: bool = False
    constants: nn.Module = field(default_factory=nn.Module)

    @functools.cached_property
    def module(self) -> fx.GraphModule:
        """The ops as Python code, made at the first call: most graphs only become statements."""
        return fx.GraphModule(self.constants, self.ops)

    def __call__(self, *inputs: Tensor) -> tuple[Any, ...]:
        if self.mixing_op is None:
            return self.module(*inputs)
        # The graph has views in place of reshapes, as the contiguous inputs of the trace allowed.
        return self.module(*(x.contiguous() for x in inputs))


def trace_pointwise(function: Callable[..., Any], inputs: Sequence[Tensor], what: str) -> Graph:
    """Trace at these inputs' sizes into functional core ATen, constants folded, repeats shared.

    `function` returns a tensor or a tuple of them. Raises BranchError for data-dependent Python,
    CellError for randomness, complex numbers, captured tensors, lost precision and hooks.
    """
    (graph,) = trace_alike([(function, inputs)], what)
    return graph


def trace_alike(
    calls: Sequence[tuple[Callable[..., Any], Sequence[Tensor]]], what: str
) -> list[Graph]:
    """Trace calls as `trace_pointwise` does. Where all call the same ops, their graphs stay alike:
    a simplification that only one allows, as by two equal lengths, is not made."""
    records = [_record(*call, what) for call in calls]
    graphs = [graph for _, graph in records]
    alike = len({_outline(graph) for graph in graphs}) == 1
    for group in [graphs] if alike else [[graph] for graph in graphs]:
        _fold(group)
        _share(group)
    return [
        _finished(raw, graph, inputs[0].dtype, what)
        for (raw, graph), (_, inputs) in zip(records, calls, strict=True)
    ]


def _record(
    function: Callable[..., Any], inputs: Sequence[Tensor], what: str
) -> tuple[fx.Graph, fx.Graph]:
    """Return the ops that a function calls, and those into which they decompose."""
    # Autograd runs while the user's code is recorded, not while its ops are decomposed.
    raw = guard(what, lambda: record(_as_tuple(function), inputs), inputs)
    _check_ops(raw, inputs[0].dtype, what)
    whole = raw
    if not without_writes(raw) or any(is_composite(node.target) for node in raw.nodes):
        whole = record(torch.func.functionalize(functools.partial(replay, raw)), inputs)
    graph = decompose(whole, inputs, rule_of)
    _check_ops(graph, inputs[0].dtype, what)
    return raw, graph


def _finished(raw: fx.Graph, graph: fx.Graph, dtype: torch.dtype, what: str) -> Graph:
    erase_dead(graph)
    _check_constants(graph, what)
    _box_numbers(graph, dtype)
    mixing = mixing_nodes(graph)
    # The op that the user wrote is the better name; a mere view of a parameter mixes nothing.
    named = [node for node in mixing_nodes(raw) if not getattr(node.target, "is_view", True)]
    name = op_of([*named, *mixing][0]) if mixing else None
    text, defaults = canonical_text(graph), _defaults(raw)
    _drop_values(graph)
    return Graph(graph, name, text, defaults)


def trace_rows(
    function: Callable[..., Any],
    inputs: Sequence[Tensor],
    what: str,
    results: int | None = None,
) -> Graph:
    """Trace with symbolic sizes: the graph then takes any number of rows and channels.

    results: how many of the first results are a step's, None for all. The others are derivatives:
    autograd's zeros are made on the device of the inputs; a step's are refused.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    trace = make_fx(_as_tuple(function), tracing_mode="symbolic")
    module = guard(what, lambda: trace(*inputs), inputs)
    for node in module.graph.nodes:
        if node.op == "get_attr":  # a clone: the user may write into it
            node.meta["val"] = getattr(module, node.target).clone()
            setattr(module, node.target, node.meta["val"])
    _check_ops(module.graph, inputs[0].dtype, what)
    for node in list(module.graph.nodes):
        if node.target is aten.detach.default:
            node.replace_all_uses_with(node.args[0])
            module.graph.erase_node(node)
    _follow_device(module.graph, results)
    erase_dead(module.graph)
    _check_constants(module.graph, what)
    for node in module.graph.nodes:
        number = node.target is aten.scalar_tensor.default  # works with tensors of any device
        if not number and node.kwargs.get("device") is not None:
            raise CellError(
                f"{what} creates a tensor on a fixed device ({node.target}); "
                "use new_zeros, zeros_like or the like on a state"
            )
    text, defaults = canonical_text(module.graph), _defaults(module.graph)
    _drop_values(module.graph)
    return Graph(module.graph, "not elementwise", text, defaults, module)


def trace_rows_alike(
    function: Callable[..., Any],
    inputs: Sequence[Sequence[Tensor]],
    what: str,
    results: int | None = None,
) -> list[Graph]:
    """Trace at several inputs, which differ by their dtype, as `trace_rows` does: symbolically, in
    a second or more, only where the ops differ by more than the dtype."""
    graphs: list[Graph] = []
    for others in inputs:
        graph = _in_dtype(graphs[0], function, inputs[0], others) if graphs else None
        graphs.append(graph or trace_rows(function, others, what, results))
    return graphs


def _in_dtype(
    graph: Graph, function: Callable[..., Any], inputs: Sequence[Tensor], others: Sequence[Tensor]
) -> Graph | None:
    """Return what `trace_rows` gives at other inputs, converted from its graph at these; None where
    records of the ops at both differ by more than dtypes and rounded numbers."""
    dtypes = inputs[0].dtype, others[0].dtype
    try:
        records = [record(_as_tuple(function), tensors) for tensors in (inputs, others)]
    except (BranchError, WriteError, RuntimeError):
        return None  # a trace with symbolic sizes may allow it, or says why not
    numbers = _numbers(records, dtypes)
    ops = fx.Graph()
    ops.output(ops.graph_copy(graph.ops, {}))
    used = {repr(x) for node in ops.nodes for x in _leaves(node) if type(x) is float}
    constants = any(node.op == "get_attr" for node in ops.nodes)
    if numbers is None or constants or not used <= numbers.keys():
        return None

    def converted(value: Any) -> Any:
        if type(value) is float:
            return numbers[repr(value)]
        return dtypes[1] if value is dtypes[0] else value

    for node in ops.nodes:
        node.args = fx.node.map_aggregate(node.args, converted)
        node.kwargs = fx.node.map_aggregate(node.kwargs, converted)
        node.meta.update({name: converted(value) for name, value in node.meta.items()})
    text, defaults = canonical_text(ops), _defaults(records[1])
    return replace(graph, ops=ops, text=text, defaults=defaults)


def _numbers(
    records: Sequence[fx.Graph], dtypes: tuple[torch.dtype, torch.dtype]
) -> dict[str, float] | None:
    """Return the numbers in the second of two records by those in the first, which PyTorch may have
    rounded; None where the records differ by more than these and their dtypes."""
    numbers: dict[str, float] = {}
    nodes = [[*graph.nodes] for graph in records]
    places = {node: place for column in nodes for place, node in enumerate(column)}
    calls = [[(node.op, node.target, [*node.kwargs]) for node in column] for column in nodes]
    if calls[0] != calls[1] or any(op == "get_attr" for op, *_ in calls[0]):
        return None
    for first, second in zip(*nodes, strict=True):
        pairs = [_leaves(first), _leaves(second)]
        if len(pairs[0]) != len(pairs[1]):
            return None
        for a, b in zip(*pairs, strict=True):
            if type(a) is not type(b):
                return None
            if type(a) is float:
                if repr(numbers.setdefault(repr(a), b)) != repr(b):
                    return None
            elif (dtypes[1] if a is dtypes[0] else places.get(a, a)) != places.get(b, b):
                return None
    return numbers


def _leaves(node: fx.Node) -> list[Any]:
    """Return the arguments of a node, those inside of lists one by one."""
    leaves: list[Any] = []
    fx.node.map_aggregate((node.args, node.kwargs), leaves.append)
    return leaves


def _follow_device(graph: fx.Graph, results: int | None) -> None:
    """Make zeros, ones and copies of autograd's, of which the first `results` do not depend, on the
    device of their inputs."""
    *nodes, output = graph.nodes
    of_step = ancestors(nodes, [x for x in output.args[0][:results] if isinstance(x, fx.Node)])
    new = {aten.zeros.default: aten.new_zeros.default, aten.ones.default: aten.new_ones.default}
    first = nodes[0]
    for node in nodes:
        if node in of_step:
            continue
        if node.target in new:
            node.target, node.args = new[node.target], (first, *node.args)
        if node.args and isinstance(node.args[0], fx.Node):
            node.kwargs = {name: v for name, v in node.kwargs.items() if name != "device"}


def canonical_text(graph: fx.Graph, constants: nn.Module | None = None) -> str:
    """Return one line a node, with names by position. constants: the module with the graph's, where
    its nodes do not have them."""
    names: dict[fx.Node, str] = {}
    lines = []
    for node in graph.nodes:
        names[node] = f"%{len(names)}"
        args: Any = fx.node.map_arg((node.args, node.kwargs), lambda n: names[n])
        if node.op == "get_attr":
            value = getattr(constants, str(node.target), None)
            args = repr((node.meta["val"] if value is None else value).item())
        lines.append(
            f"{names[node]} = {node.op} {node.target if node.op != 'placeholder' else ''}{args}"
        )
    return "\n".join(lines)


def _defaults(graph: fx.Graph) -> bool:
    """Check whether a graph makes a number of the default dtype, which another would round."""
    nodes = [n for n in graph.nodes if n.op in ("get_attr", "call_function")]
    values = [node.meta.get("val") for node in nodes if not node.all_input_nodes]
    numbers = [v for v in values if isinstance(v, Tensor) and v.numel() == 1]
    return any(v.dtype == torch.get_default_dtype() for v in numbers)


def _drop_values(graph: fx.Graph) -> None:
    """Keep only the op, and a tensor's dtype and size, of what the trace noted at each node: graphs
    on disk hold no more."""
    for node in graph.nodes:
        value = node.meta.get("val")
        kept: dict[str, Any] = {"op": op_of(node)}
        if isinstance(value, Tensor):
            kept["dtype"] = value.dtype
            if all(type(size) is int for size in value.shape):
                kept["shape"] = tuple(value.shape)
        node.meta.clear()
        node.meta.update(kept)


def _as_tuple(function: Callable[..., Any]) -> Callable[..., tuple[Any, ...]]:
    def call(*inputs: Tensor) -> tuple[Any, ...]:
        out = function(*inputs)
        return (out,) if isinstance(out, Tensor) else tuple(out)

    return call


def _check_ops(graph: fx.Graph, dtype: torch.dtype, what: str) -> None:
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if _draws(node.target):
            raise CellError(
                f"{what} draws random numbers ({node.target}): a solver evaluates a step more than "
                "once; draw them outside and pass them as a field"
            )
        value = node.meta.get("val")
        if not isinstance(value, Tensor) or value.dtype == dtype:
            continue
        if all(map(_is_constant, [node, *node.users])):
            continue
        if value.is_complex():
            raise CellError(
                f"{what} computes complex numbers ({op_of(node)}); "
                "hold the real and imaginary parts as two states"
            )
        if value.is_floating_point() and value.ndim:
            raise CellError(
                f"{what} turns {dtype} into {value.dtype} ({op_of(node)}); keep the dtype of the "
                "states throughout: a step is traced in float32 and float64, and torch.zeros(...), "
                "torch.tensor([...]), torch.where(mask, 1.0, 0.0) or mask.float() have another. "
                "Write x.new_zeros(...), x.new_tensor(...), torch.where(mask, 1.0, 0 * x) or "
                "mask.to(x.dtype)"
            )


@functools.cache
def _draws(target: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())


def _check_constants(graph: fx.Graph, what: str) -> None:
    """Raise CellError for a tensor of several numbers that is no argument of the step."""
    for node in graph.nodes:
        if node.op == "get_attr" and node.meta["val"].numel() != 1:
            raise CellError(
                f"{what} reads a tensor of shape {tuple(node.meta['val'].shape)} that is no state, "
                "gate, field or parameter; make it a Param (trainable=False for a constant) or a "
                "field"
            )


def _is_constant(node: fx.Node) -> bool:
    return bool(node.meta.get("is_constant"))


def _outline(graph: fx.Graph) -> str:
    """Return a graph's ops and their operands, without numbers; note the position of each node."""
    lines = []
    for position, node in enumerate(graph.nodes):
        node.meta["position"] = position
        reads = [read.meta["position"] for read in node.all_input_nodes]
        lines.append(f"{node.op} {node.target if node.op == 'call_function' else ''} {reads}")
    return "\n".join(lines)


def _fold(graphs: Sequence[fx.Graph]) -> None:
    """Replace constants by numbers and drop identities, so that only arithmetic is left.
    Graphs that are alike stay alike."""
    for nodes in zip(*(list(graph.nodes) for graph in graphs), strict=True):
        replacements = [_replacement(node) for node in nodes]
        meanings = {
            r.meta["position"] if isinstance(r, fx.Node) else None if r is None else "a number"
            for r in replacements
        }
        if len(meanings) > 1 or None in meanings:
            continue
        for graph, node, replacement in zip(graphs, nodes, replacements, strict=True):
            if isinstance(replacement, fx.Node):
                node.replace_all_uses_with(replacement)
            else:
                _replace_by_number(graph, node, replacement)
            graph.erase_node(node)


def _replace_by_number(graph: fx.Graph, node: fx.Node, number: Any) -> None:
    """Give a constant's users its number, and its tensor to ops that need its size."""

    def number_or_node(argument: fx.Node) -> Any:
        return number if argument is node else argument

    for user in list(node.users):
        if user.op == "output" or is_pointwise(user.target) or len(user.all_input_nodes) == 1:
            user.args = fx.node.map_arg(user.args, number_or_node)
            user.kwargs = fx.node.map_arg(user.kwargs, number_or_node)
    if node.users:
        value = node.meta["val"]
        with graph.inserting_before(node):
            size = (list(value.shape), number)
            full = graph.call_function(aten.full.default, size, {"dtype": value.dtype})
        full.meta |= {"val": value, "position": node.meta["position"]}
        node.replace_all_uses_with(full)


def _replacement(node: fx.Node) -> Any:
    """Return what a node's users may read instead: a number, or another node; None for neither."""
    target: Any = node.target
    args, value = node.args, node.meta.get("val")
    if node.op == "get_attr":
        return _number_of(value)
    if node.op != "call_function":
        return None
    if target in CONSTANTS:
        return args[CONSTANTS[target]]
    if target in ZERO_ONE:
        return ZERO_ONE[target]
    if target in IDENTITIES:
        return args[0]
    if _is_constant(node) or not node.all_input_nodes:
        return _number_of(value)
    if target in PRODUCTS and any(map(_is_zero, args[:2])):
        return 0.0
    if target in CONVERSIONS:
        return args[0] if _is_like(args[0], value) else None
    if target is aten.where.self and isinstance(args[0], bool):
        chosen = args[1] if args[0] else args[2]
        return chosen if _is_number(chosen) or _is_like(chosen, value) else None
    if target is aten.mul.Tensor:
        for factor, tensor in (args, args[::-1]):
            if _is_number(factor) and factor == 1 and _is_like(tensor, value):
                return tensor
    return None


def _number_of(value: Any) -> Any:
    """Return the number that all entries of a tensor equal, or None."""
    if not isinstance(value, Tensor) or value.is_meta:  # autograd finds sizes by meta tensors
        return None
    if is_zerotensor(value):
        return 0.0
    numbers = value.flatten()
    first = numbers[:1]
    same = (numbers == first) | (numbers.isnan() & first.isnan())
    return first.item() if len(first) and same.all() else None


def _is_like(argument: Any, value: Any) -> bool:
    """Check whether an argument is a node with the size and dtype of a tensor."""
    old = argument.meta.get("val") if isinstance(argument, fx.Node) else None
    return old is not None and (old.shape, old.dtype) == (value.shape, value.dtype)


def _is_zero(argument: Any) -> bool:
    if isinstance(argument, fx.Node) and argument.target is aten.full.default:
        argument = argument.args[1]
    return _is_number(argument) and argument == 0


def _box_numbers(graph: fx.Graph, dtype: torch.dtype) -> None:
    """Give a 0-d tensor to ops that take no number there; it works on any device."""

    def box(number: float | bool) -> fx.Node:
        # In the graph's dtype: where() over two 0-d tensors would promote to a wider one.
        dtypes = {bool: torch.bool, int: torch.int64}
        options: dict[str, Any] = {"dtype": dtypes.get(type(number), dtype)}
        return graph.call_function(aten.scalar_tensor.default, (number,), options)

    for node in list(graph.nodes):
        # No OpOverload: operator.getitem.
        if node.target in TAKES_NUMBERS or not isinstance(node.target, OpOverload):
            continue
        takes_tensor = _tensor_arguments(node.target)
        pairs = [*zip(takes_tensor, node.args, strict=False), *node.kwargs.items()]
        if not any(takes_tensor[name] and isinstance(v, (int, float)) for name, v in pairs):
            continue

        def tensor_or_value(name: str, value: Any, wanted: dict[str, bool] = takes_tensor) -> Any:
            return box(value) if wanted[name] and isinstance(value, (int, float)) else value

        with graph.inserting_before(node):
            node.args = tuple(map(tensor_or_value, takes_tensor, node.args))
            node.kwargs = {name: tensor_or_value(name, v) for name, v in node.kwargs.items()}


@functools.cache
def _tensor_arguments(op: OpOverload) -> dict[str, bool]:
    """Return the names of an op's arguments, in order, and whether they are tensors."""
    tensors = ("Tensor", "Optional[Tensor]")
    return {argument.name: str(argument.type) in tensors for argument in op._schema.arguments}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


@functools.cache
def is_pointwise(target: Any) -> bool:
    """Return True for an op that computes each entry of its result from those of its arguments."""
    return torch.Tag.pointwise in getattr(target, "tags", ()) or target in UNTAGGED


def _share(graphs: Sequence[fx.Graph]) -> None:
    """Compute equal subexpressions once, where all of the graphs, which are alike, have them."""
    first: dict[Any, tuple[fx.Node, ...]] = {}
    for nodes in zip(*(list(graph.nodes) for graph in graphs), strict=True):
        if nodes[0].op != "call_function":
            continue
        equal = first.setdefault(tuple(map(_call_key, nodes)), nodes)
        if equal is nodes:
            continue
        for graph, node, original in zip(graphs, nodes, equal, strict=True):
            node.replace_all_uses_with(original)
            graph.erase_node(node)


def _call_key(node: fx.Node) -> Any:
    # The same call on a number and a vector may be meant for a matrix or for a vector.
    shape = getattr(node.meta.get("val"), "shape", None)
    return node.target, _hashable(node.args), _hashable(node.kwargs), shape


def _hashable(value: Any) -> Any:
    if isinstance(value, dict):
        return tuple((k, _hashable(v)) for k, v in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(_hashable(v) for v in value)
    # 1, 1.0 and True are equal but do not promote alike; -0.0 equals 0.0.
    return value if isinstance(value, fx.Node) else (type(value).__name__, repr(value))


def op_of(node: fx.Node) -> str:
    """Return the name of the op that a step called, which may have decomposed into this node."""
    name = str(node.meta.get("op", node.target))
    return "torch.tensor" if name.startswith("aten.lift_fresh") else name


def mixing_nodes(graph: fx.Graph) -> list[fx.Node]:
    """Return the ops that are neither pointwise nor constants nor identities, in order."""
    harmless = {*IDENTITIES, *CONSTANTS, *ZERO_ONE}
    return [
        node
        for node in graph.nodes
        if node.op == "call_function"
        and not is_pointwise(node.target)
        and node.target not in harmless
    ]
