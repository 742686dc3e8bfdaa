"""A function of tensors, recorded as a graph of the ATen ops that it calls.

`make_fx` does so too, but imports torch._dynamo and SymPy, and handles much that a step may not do.
Its traces take ten times as long, and the first one more than a second.
"""

from __future__ import annotations

import functools
import itertools
import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor, fx

from pararnn.base.private import OpOverload, TorchDispatchMode

aten = torch.ops.aten

RuleOf = Callable[[Any], Callable[..., Any] | None]


class BranchError(Exception):
    """The step reads a tensor's value in Python (a branch, .item()): it cannot be traced."""


class WriteError(Exception):
    """The step writes into memory of its arguments; `stack`: of the first such op, innermost first.

    Each entry is a file and a line.
    """

    def __init__(self, stack: list[tuple[str, int]]) -> None:
        super().__init__("an op writes into an input")
        self.stack = stack


def record(function: Callable[..., Iterable[Any]], inputs: Sequence[Tensor]) -> fx.Graph:
    """Return the graph of the ops that `function` calls on `inputs`; it returns tensors.

    A node's `meta["val"]` is its tensor, `meta["op"]` its op, and `meta["is_constant"]` whether it
    depends on no input. A tensor that is neither input nor result is a node of op "get_attr".
    Raises BranchError for an op that reads a tensor's value, WriteError for one that writes into
    an input.
    """
    recorder = _Recorder(inputs, lambda op: None)
    with recorder:
        outputs = list(function(*inputs))
    if recorder.stack:
        raise WriteError(recorder.stack)
    recorder.graph.output(tuple(map(recorder.node_of, outputs)))
    return recorder.graph


def decompose(graph: fx.Graph, inputs: Sequence[Tensor], rule_of: RuleOf) -> fx.Graph:
    """Return the graph of the ops into which those of a recorded graph, which writes nowhere,
    decompose. `meta["op"]` is the op that does.

    `rule_of` gives the function that decomposes an op, None for one that stays. Only ops with a
    rule, and constants, run again.
    """
    recorder = _Recorder(inputs, rule_of)
    values: dict[fx.Node, Any] = dict(zip(graph.nodes, inputs, strict=False))
    for node in graph.nodes:
        value = node.meta.get("val")
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
        if node.op == "output":
            recorder.graph.output(tuple(map(recorder.node_of, args[0])))
        elif node.target is operator.getitem:
            value = operator.getitem(*args)
        elif node.op == "call_function":
            stays = isinstance(value, Tensor) and not node.meta["is_constant"]
            if stays and rule_of(node.target) is None:
                recorder.note(value, recorder.add(node.target, args, kwargs))
            else:
                with recorder:
                    value = node.target(*args, **kwargs)
        values.setdefault(node, value)
    return recorder.graph


def replay(graph: fx.Graph, *inputs: Tensor) -> tuple[Any, ...]:
    """Call a recorded graph's ops on `inputs`."""
    values: dict[fx.Node, Any] = {}
    arguments = iter(inputs)
    for node in graph.nodes:
        if node.op == "placeholder":
            values[node] = next(arguments)
        elif node.op == "get_attr":
            values[node] = node.meta["val"]
        else:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
            if node.op == "output":
                return tuple(args[0])
            values[node] = node.target(*args, **kwargs)
    raise ValueError("a graph without output")


class _Recorder(TorchDispatchMode):
    """Adds a node for each op that is called."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # which would import torch._dynamo: no compiled code runs in this mode

    def __init__(self, inputs: Sequence[Tensor], rule_of: RuleOf) -> None:
        super().__init__()
        self.graph = fx.Graph()
        self.numbers = itertools.count()  # in the nodes' names
        self.rule_of = rule_of
        self.nodes: dict[int, fx.Node] = {}  # by id, which stays: the nodes hold the tensors
        self.op: Any = None  # the op that rules decompose
        self.stack: list[tuple[str, int]] = []  # of the first op that writes into an input
        self.memory = {tensor.untyped_storage().data_ptr() for tensor in inputs}
        for index, tensor in enumerate(inputs):
            self.note(tensor, self.graph.placeholder(f"arg{index}"))

    def note(self, tensor: Any, node: fx.Node) -> None:
        """Note which node gave a tensor."""
        node.meta["val"] = tensor
        self.nodes[id(tensor)] = node

    def node_of(self, value: Any) -> Any:
        """Return a tensor's node, and any other value as it is."""
        if not isinstance(value, Tensor):
            return value
        if id(value) not in self.nodes:
            constants = sum(node.op == "get_attr" for node in self.graph.nodes)
            node = self.graph.create_node("get_attr", f"_tensor_constant{constants}")
            node.meta.update(val=value, is_constant=True)
            return node
        return self.nodes[id(value)]

    def _read(self, reads: list[fx.Node], value: Any) -> Any:
        """Return what `node_of` does, and note a node in `reads`."""
        node = self.node_of(value)
        if node is not value:
            reads.append(node)
        return node

    def add(self, func: Any, args: Any, kwargs: Any) -> fx.Node:
        """Add the node of an op."""
        # `call_function` makes a name of the op's, and looks for SymInts in the arguments first:
        # a third of the time of a trace. Setting kwargs sets all arguments again.
        reads: list[fx.Node] = []
        arguments = fx.node.map_aggregate((args, kwargs), functools.partial(self._read, reads))
        node = self.graph.create_node("call_function", func, name=f"op{next(self.numbers)}")
        node.args = arguments[0]
        if kwargs:
            node.kwargs = arguments[1]
        is_constant = all(read.meta.get("is_constant") for read in reads)
        if not is_constant and (_reads_values(func) or _selects_by_mask(func, args)):
            raise BranchError(f"{func} of a traced tensor")
        node.meta.update(op=_name(self.op or func), is_constant=is_constant and not _makes(func))
        return node

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an op, and record it or the ops that it decomposes into."""
        kwargs = kwargs or {}
        rule = self.rule_of(func)
        if rule is not None:
            outer_op, self.op = self.op, self.op or func
            try:
                with self:
                    return rule(*_promoted(func, args), **kwargs)
            finally:
                self.op = outer_op
        if func is aten.lift_fresh.default:
            func = aten.lift_fresh_copy.default  # its input is a constant, which must not change
        if func._schema.is_mutable and not self.stack and self.writes(func, args, kwargs):
            self.stack = list(_stack(sys._getframe(1)))
        node = self.add(func, args, kwargs)
        out = func(*args, **kwargs)
        if isinstance(out, Tensor):
            self.note(out, node)
        elif isinstance(out, (tuple, list)):
            for index, element in enumerate(out):
                item = self.graph.call_function(operator.getitem, (node, index))
                item.meta.update(node.meta)
                self.note(element, item)
        return out

    def writes(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Check whether an op writes into memory of the inputs."""
        names = [argument.name for argument in func._schema.arguments]
        values = {**kwargs, **dict(zip(names, args, strict=False))}
        targets = [values.get(a.name) for a in func._schema.arguments if a.is_write]
        tensors = [value for value in targets if isinstance(value, Tensor)]
        return any(value.untyped_storage().data_ptr() in self.memory for value in tensors)


@functools.cache
def _name(func: Any) -> str:
    return str(func)


@functools.cache
def _makes(func: Any) -> bool:
    """Check whether an op makes a tensor that no trace may know."""
    return torch.Tag.nondeterministic_seeded in func.tags or "empty" in func.name()


@functools.cache
def _reads_values(func: Any) -> bool:
    """Check whether an op returns a Python value, or a size, that depends on tensors' values."""
    tags = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
    return func is not aten.index.Tensor and not tags.isdisjoint(func.tags)


def _selects_by_mask(func: Any, args: Any) -> bool:
    """Check whether an op is h[mask]."""
    return func is aten.index.Tensor and any(
        isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in args[1]
    )


def _promoted(func: Any, args: Any) -> Any:
    """Return the arguments of a pointwise op, converted to the dtype that it computes in: numbers
    of the default dtype, whole numbers and masks. Rules leave that to wrappers.
    """
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    dtypes = [x.dtype for x in tensors if x.ndim and x.is_floating_point()]
    if torch.Tag.pointwise not in func.tags or not dtypes:
        return args
    conditions = [argument.name in ("condition", "mask") for argument in func._schema.arguments]
    return tuple(
        arg.to(dtypes[0])
        if isinstance(arg, Tensor) and arg.dtype not in dtypes and not is_condition
        else arg
        for arg, is_condition in zip(args, conditions, strict=False)
    )


def _stack(frame: FrameType | None) -> Iterator[tuple[str, int]]:
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back


def _with_signature(packet: Any, op: OpOverload) -> OpOverload | None:
    """Return the overload with the arguments of another op; pow_.Scalar's has another name."""

    def signature(overload: OpOverload) -> list[tuple[str, str]]:
        return [(argument.name, str(argument.type)) for argument in overload._schema.arguments]

    overloads = [] if packet is None else [getattr(packet, name) for name in packet.overloads()]
    return next((overload for overload in overloads if signature(overload) == signature(op)), None)


def is_mutable(target: Any) -> bool:
    """Return True for an op that writes into a tensor."""
    return isinstance(target, OpOverload) and target._schema.is_mutable


def without_writes(graph: fx.Graph) -> bool:
    """Replace ops that write into a tensor by ops that return another; return whether all are.

    Replaced are those that write into a new tensor without views, as autograd's do. Others stay.
    """
    for node in graph.nodes:
        if not is_mutable(node.target):
            continue
        target, name = node.args[0], node.target._schema.name.removeprefix("aten::")
        pure = _with_signature(getattr(aten, name[:-1], None), node.target)
        views = any(getattr(user.target, "is_view", False) for user in [target, *target.users])
        dtypes = {n.meta["val"].dtype for n in node.all_input_nodes} - {torch.bool}
        is_fresh = target.op == "call_function" and not views
        if not (name.endswith("_") and pure and is_fresh and dtypes == {node.meta["val"].dtype}):
            return False
        node.target = pure
    return True
