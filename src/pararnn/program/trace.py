"""From a Python function on tensors to a checked, simplified ATen graph."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from inspect import unwrap
from typing import Any

import torch
from torch import Tensor, fx, nn

from pararnn.base.errors import CellError
from pararnn.base.private import OpOverload, core_aten_decompositions, is_composite
from pararnn.program.guard import guard
from pararnn.program.record import record, replay, without_writes

aten = torch.ops.aten

# Ops that hand their input on: they leave no trace in a graph of scalars.
IDENTITIES = {
    aten.alias.default,
    aten.clone.default,
    aten.detach.default,
    aten.lift_fresh.default,
    aten.lift_fresh_copy.default,
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
# Ops that wrap a Python number given for a tensor themselves.
TAKES_NUMBERS = {aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor}
# Pointwise, though PyTorch, or a version of it, does not say so.
UNTAGGED = {
    aten._to_copy.default,
    aten.leaky_relu.default,
    aten.softshrink_backward.default,
    aten.hardshrink_backward.default,
}
# Not decomposed: what leaves no trace, and what its parts would make longer and round otherwise.
WHOLE = {aten.detach.default, aten.empty_like.default, aten.lerp.Tensor, aten.lerp.Scalar}


def ancestors(
    nodes: Sequence[fx.Node],
    of: Iterable[fx.Node],
    reads: Callable[[fx.Node], Iterable[fx.Node]] = lambda node: node.all_input_nodes,
) -> set[fx.Node]:
    """Return the nodes that nodes `of` a graph depend on, themselves included, by `reads`."""
    nodes_above = set(of)
    for node in reversed(nodes):
        if node in nodes_above:
            nodes_above.update(reads(node))
    return nodes_above


@dataclass(frozen=True)
class Graph:
    """A traced function of flat tensors: `graph(*inputs)` returns a tuple of tensors and numbers.

    `mixing_op` names the first op that is not pointwise (None: the graph is elementwise) and `text`
    is the canonical form, equal for equal graphs. `defaults`: whether it holds numbers that were
    rounded to PyTorch's default dtype.
    """

    module: fx.GraphModule
    mixing_op: str | None
    text: str
    defaults: bool = False

    def __call__(self, *inputs: Tensor) -> tuple[Any, ...]:
        if self.mixing_op is None:
            return self.module(*inputs)
        # It holds reshapes as the views that they were of the trace's own inputs.
        return self.module(*(x.contiguous() for x in inputs))


def trace_pointwise(function: Callable[..., Any], inputs: Sequence[Tensor], what: str) -> Graph:
    """Trace at these inputs' sizes into functional core ATen, constants folded, repeats shared.

    `function` returns a tensor or a tuple of them. Raises BranchError for data-dependent Python,
    CellError for randomness, complex numbers, captured tensors, lost precision and hooks.
    """
    # Autograd runs while the user's code is recorded, and not once its ops are decomposed.
    raw = guard(what, lambda: record(_as_tuple(function), inputs), inputs)
    _check_ops(raw, inputs[0].dtype, what)
    whole = raw
    if not without_writes(raw) or any(is_composite(node.target) for node in raw.nodes):
        whole = record(torch.func.functionalize(functools.partial(replay, raw)), inputs)
    graph = record(functools.partial(replay, whole), inputs, _rule_of)
    _check_ops(graph, inputs[0].dtype, what)
    _fold(graph)
    _share(graph)
    graph.eliminate_dead_code()
    _box_numbers(graph, inputs[0].dtype)
    mixing = mixing_ops(graph)
    # The op that the user wrote is the better name; a view of a parameter alone mixes nothing.
    named_ops = [op for op in mixing_ops(raw) if not getattr(op, "is_view", True)]
    name = str([*named_ops, *mixing][0]) if mixing else None
    text, defaults = canonical_text(graph), _defaults(raw)
    shapes = {node: getattr(node.meta.get("val"), "shape", None) for node in graph.nodes}
    _keep_dtypes(graph)
    for node, shape in shapes.items():
        if shape is not None:
            node.meta["shape"] = tuple(shape)
    return Graph(fx.GraphModule(nn.Module(), graph), name, text, defaults)


def trace_rows(function: Callable[..., Any], inputs: Sequence[Tensor], what: str) -> Graph:
    """Trace with symbolic sizes: the graph then takes any number of rows and channels."""
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
    module.graph.eliminate_dead_code()
    module.recompile()
    for node in module.graph.nodes:
        number = node.target is aten.scalar_tensor.default  # goes with tensors of any device
        if not number and node.kwargs.get("device") is not None:
            raise CellError(
                f"{what} creates a tensor on a fixed device ({node.target}); "
                "use new_zeros, zeros_like or the like on a state"
            )
    text, defaults = canonical_text(module.graph), _defaults(module.graph)
    _keep_dtypes(module.graph)
    return Graph(module, "not elementwise", text, defaults)


def canonical_text(graph: fx.Graph) -> str:
    """One line a node, with names by position."""
    names: dict[fx.Node, str] = {}
    lines = []
    for node in graph.nodes:
        names[node] = f"%{len(names)}"
        args: Any = fx.node.map_arg((node.args, node.kwargs), lambda n: names[n])
        if node.op == "get_attr":
            args = repr(node.meta["val"].item())
        lines.append(
            f"{names[node]} = {node.op} {node.target if node.op != 'placeholder' else ''}{args}"
        )
    return "\n".join(lines)


def _defaults(graph: fx.Graph) -> bool:
    """Check whether a graph makes a number of the default dtype, which another would round."""
    nodes = [n for n in graph.nodes if n.op in ("get_attr", "call_function")]
    values = [node.meta.get("val") for node in nodes if not node.all_input_nodes]
    numbers = [v for v in values if isinstance(v, Tensor) and v.ndim == 0]
    return any(v.dtype == torch.get_default_dtype() for v in numbers)


def _keep_dtypes(graph: fx.Graph) -> None:
    """Of what the trace noted at each node, keep a tensor's dtype: graphs on disk hold no more."""
    for node in graph.nodes:
        value = node.meta.get("val")
        node.meta = {"dtype": value.dtype} if isinstance(value, Tensor) else {}


@functools.cache
def _rule_of(op: Any) -> Callable[..., Any] | None:
    """Return how PyTorch decomposes an op into core ATen, None for one that it leaves.

    Without wrappers that promote dtypes, which ops in a graph have done: they import SymPy and
    torch._dynamo, which takes a second.
    """
    if op in WHOLE:
        return None
    rule = _rules().get(op)
    if rule is None:
        return op.decompose if is_composite(op) else None
    return unwrap(rule)


@functools.cache
def _rules() -> dict[Any, Callable[..., Any]]:
    return core_aten_decompositions()


def _as_tuple(function: Callable[..., Any]) -> Callable[..., tuple[Any, ...]]:
    def call(*inputs: Tensor) -> tuple[Any, ...]:
        out = function(*inputs)
        return (out,) if isinstance(out, Tensor) else tuple(out)

    return call


def _check_ops(graph: fx.Graph, dtype: torch.dtype, what: str) -> None:
    for node in graph.nodes:
        if node.op == "get_attr" and node.meta["val"].ndim:
            raise CellError(
                f"{what} captures a tensor of shape {tuple(node.meta['val'].shape)} from outside; "
                "make it a Param (trainable=False for a constant) or a field"
            )
        if node.op != "call_function":
            continue
        tags = getattr(node.target, "tags", ())
        if torch.Tag.nondeterministic_seeded in tags:
            raise CellError(
                f"{what} draws random numbers ({node.target}): a solver evaluates a step more than "
                "once; draw them outside and pass them as a field"
            )
        value = node.meta.get("val")
        if not isinstance(value, Tensor):
            continue
        if value.is_complex():
            raise CellError(
                f"{what} computes complex numbers ({node.target}); "
                "hold the real and imaginary parts as two states"
            )
        if value.is_floating_point() and value.ndim and value.dtype != dtype:
            raise CellError(
                f"{what} turns {dtype} into {value.dtype} ({node.target}); "
                "keep the dtype of the states throughout"
            )


def _fold(graph: fx.Graph) -> None:
    """Replace constants by numbers and drop identities, so that only arithmetic is left."""
    for node in list(graph.nodes):
        replacement = _replacement(node)
        if replacement is None:
            continue
        if isinstance(replacement, fx.Node):
            node.replace_all_uses_with(replacement)
        else:
            _replace_by_number(node, replacement)
        graph.erase_node(node)


UNIFORM = "uniform"
"""Key of the shape of a constant in the notes of a call that has its number instead."""


def _replace_by_number(node: fx.Node, number: Any) -> None:
    def number_or_node(argument: fx.Node) -> Any:
        return number if argument is node else argument

    for user in list(node.users):
        user.meta[UNIFORM] = node.meta["val"].shape
        user.args = fx.node.map_arg(user.args, number_or_node)
        user.kwargs = fx.node.map_arg(user.kwargs, number_or_node)


def _replacement(node: fx.Node) -> Any:
    if node.op == "get_attr":
        return node.meta["val"].item()
    if node.op != "call_function":
        return None
    target: Any = node.target
    args = node.args
    if target in CONSTANTS:
        return args[CONSTANTS[target]]
    if target in ZERO_ONE:
        return ZERO_ONE[target]
    if target in IDENTITIES:
        return args[0]
    if target is aten._to_copy.default and isinstance(args[0], fx.Node):
        old, new = args[0].meta.get("val"), node.meta["val"]
        return args[0] if old is not None and old.dtype == new.dtype else None
    if target is aten.expand.default and isinstance(args[0], fx.Node):
        old, new = args[0].meta["val"], node.meta["val"]
        return args[0] if old.shape == new.shape else None
    if target is aten.where.self and isinstance(args[0], bool):
        choice = args[1] if args[0] else args[2]
        if not isinstance(choice, fx.Node) or _same_kind(choice, node):
            return choice
        node.target, node.args = aten.mul.Tensor, (choice, 1)  # it broadcasts
        return None
    if args and not any(isinstance(a, fx.Node) for a in args) and is_pointwise(target):
        return target(*_with_numbers(target, args, _exact), **node.kwargs).item()
    if target is aten.mul.Tensor:
        for one, other in (args, args[::-1]):
            if _is_number(one) and one == 1 and _same_kind(other, node):
                return other
    return _of_uniform(node) if UNIFORM in node.meta else None


def _same_kind(argument: Any, node: fx.Node) -> bool:
    """Return True if an argument has the shape and the dtype of a node, which it may replace."""
    if not isinstance(argument, fx.Node):
        return False
    own, value = argument.meta["val"], node.meta["val"]
    return bool(own.shape == value.shape and own.dtype == value.dtype)


def _of_uniform(node: fx.Node) -> Any:
    """Return the number that all entries of a call's result are, given that its only tensor had
    the same number everywhere. None for other calls."""
    target, args = node.target, node.args
    kinds = [str(argument.type) for argument in target._schema.arguments]  # type: ignore[union-attr]
    if kinds.count("Tensor") != 1 or node.all_input_nodes or not _is_number(args[0]):
        return None
    result = target(torch.full(node.meta[UNIFORM], args[0]), *args[1:], **node.kwargs)  # type: ignore[operator, arg-type]
    if not isinstance(result, Tensor) or not result.numel():
        return None
    first = result.flatten()[0]
    return first.item() if bool((result == first).all()) else None


def _box_numbers(graph: fx.Graph, dtype: torch.dtype) -> None:
    """Give a 0-d tensor to ops that take no number there; it works on any device."""

    def box(number: int | float) -> fx.Node:
        # In the graph's own dtype: where() over two 0-d tensors would promote to a wider one.
        own = torch.int64 if isinstance(number, int) else dtype
        return graph.call_function(aten.scalar_tensor.default, (number,), {"dtype": own})

    for node in list(graph.nodes):
        # No OpOverload: operator.getitem.
        if node.target in TAKES_NUMBERS or not isinstance(node.target, OpOverload):
            continue
        with graph.inserting_before(node):
            node.args = _with_numbers(node.target, node.args, box)


def _with_numbers(
    target: Any, args: Sequence[Any], tensor: Callable[[int | float], Any]
) -> tuple[Any, ...]:
    """Return an op's arguments, with `tensor` of each number that stands where a tensor should."""
    kinds = [str(argument.type) for argument in target._schema.arguments]
    return tuple(
        tensor(value) if kind == "Tensor" and _is_number(value) else value
        for value, kind in zip(args, kinds, strict=False)
    )


def _exact(number: int | float) -> Tensor:
    return torch.tensor(number, dtype=torch.float64)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_pointwise(target: Any) -> bool:
    """Return True for an op that computes each entry of its result from those of its arguments."""
    return torch.Tag.pointwise in getattr(target, "tags", ()) or target in UNTAGGED


def _share(graph: fx.Graph) -> None:
    """Compute equal subexpressions once."""
    nodes: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        # Of a number and a vector, the same call may be made for a matrix and for a vector.
        shape = getattr(node.meta.get("val"), "shape", None)
        key = (node.target, _hashable(node.args), _hashable(node.kwargs), shape)
        if key in nodes:
            node.replace_all_uses_with(nodes[key])
            graph.erase_node(node)
        else:
            nodes[key] = node


def _hashable(value: Any) -> Any:
    if isinstance(value, dict):
        return tuple((k, _hashable(v)) for k, v in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(_hashable(v) for v in value)
    # 1, 1.0 and True are equal but do not promote alike; -0.0 equals 0.0.
    return value if isinstance(value, fx.Node) else (type(value).__name__, repr(value))


def mixing_ops(graph: fx.Graph) -> list[Any]:
    """Return the ops that are neither pointwise nor constants nor identities, in order."""
    harmless = {*IDENTITIES, *CONSTANTS, *ZERO_ONE}
    return [
        node.target
        for node in graph.nodes
        if node.op == "call_function"
        and not is_pointwise(node.target)
        and node.target not in harmless
    ]
