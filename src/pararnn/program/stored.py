"""Traced graphs on disk, beside compiled kernels: what tracing gave, for the next process.

An entry is JSON: no code comes back from it but calls of ATen's functions and of a few on sizes.
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from pararnn import cache
from pararnn.errors import CellError
from pararnn.program.content import UnknownContent
from pararnn.program.derive import Graphs
from pararnn.program.trace import Graph, canonical_text


class Traced(NamedTuple):
    """What tracing gives: the structure's name, or why there is none, a warning, and the graphs."""

    structure: str | None
    why_sequential: str | None
    warning: str | None
    graphs: dict[torch.dtype, Graphs]


_SIZES = ("getitem", "add", "sub", "mul", "floordiv", "mod", "neg", "eq", "ne", "lt", "le", "gt")
_OPERATORS = {name: getattr(operator, name) for name in _SIZES}
"""What graphs with symbolic sizes call beside ATen."""
_CONSTANT = re.compile(r"_\w*constant\d+")
_KINDS = {
    "dtype": torch.dtype,
    "layout": torch.layout,
    "memory_format": torch.memory_format,
    "device": torch.device,
}


def kept(name: str, content: Callable[[], str], make: Callable[[], Traced]) -> Traced:
    """What `make` returns, out of the cache that kernels are in, or put there.

    `content` says all that it depends on, and must say the same when `make` is done. What has no
    content to go by, or no form on disk, is made in every process.
    """
    try:
        key = content()
    except (CellError, UnknownContent):
        return make()
    made: list[Traced] = []

    def build(_: Path, out: Path) -> None:
        made.append(make())
        if content() != key:
            raise UnknownContent("tracing the step changes what it reads")
        out.write_text(to_text(made[0]), encoding="utf-8")

    try:
        return cache.load(KIND, f"{name}-step", key, key, build)
    except (CellError, UnknownContent):
        if not made:
            raise
        return made[0]


def to_text(traced: Traced) -> str:
    """The JSON of what was traced; UnknownContent where it holds what has no form there."""
    graphs = {
        str(dtype).removeprefix("torch."): {
            name: None if graph is None else _graph(graph) for name, graph in vars(some).items()
        }
        for dtype, some in traced.graphs.items()
    }
    text = json.dumps([*traced[:3], graphs])
    try:
        from_text(text)
    except ValueError as error:
        raise UnknownContent(str(error)) from error
    return text


def from_text(text: str) -> Traced:
    """What `to_text` wrote; ValueError for what it cannot have written."""
    structure, why, warning, graphs = json.loads(text)
    try:
        restored = {_named("dtype", name): _graphs(some) for name, some in graphs.items()}
    except (AttributeError, KeyError, IndexError, TypeError) as error:
        raise ValueError(f"not a traced step: {error!r}") from error
    return Traced(structure, why, warning, restored)


def _graphs(stored: dict[str, Any]) -> Graphs:
    by_hand = stored.pop("by_hand")
    needed = {name: _restored(graph) for name, graph in stored.items()}
    return Graphs(**needed, by_hand=None if by_hand is None else _restored(by_hand))


def _read(path: Path) -> Traced:
    return from_text(path.read_text(encoding="utf-8"))


KIND = cache.Kind("step.json", "reads.txt", _read)


def _graph(graph: Graph) -> dict[str, Any]:
    numbers: dict[fx.Node, int] = {}
    nodes = []
    for node in graph.module.graph.nodes:
        numbers[node] = len(numbers)
        target = _target(node)
        dtype = node.meta.get("dtype")
        constant = None
        if node.op == "get_attr":
            value = getattr(graph.module, target)
            if not isinstance(value, Tensor) or value.ndim or value.device != torch.device("cpu"):
                raise UnknownContent(f"a graph with {target}")
            constant = [str(value.dtype).removeprefix("torch."), value.item()]
        arguments = _encoded([node.args, node.kwargs], numbers)
        dtype = None if dtype is None else str(dtype).removeprefix("torch.")
        nodes.append([node.op, target, arguments, dtype, constant])
    said = {"mixing_op": graph.mixing_op, "text": graph.text, "defaults": graph.defaults}
    return {**said, "nodes": nodes}


def _target(node: fx.Node) -> str:
    if isinstance(node.target, torch._ops.OpOverload):
        return str(node.target)
    if node.op == "call_function":
        return f"operator.{getattr(node.target, '__name__', '')}"
    return str(node.target)


def _encoded(value: Any, numbers: dict[fx.Node, int]) -> Any:
    """Arguments as JSON: everything but plain values with its kind before it."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, fx.Node):
        return ["node", numbers[value]]
    if isinstance(value, (list, tuple)):
        kind = "list" if isinstance(value, list) else "tuple"
        return [kind, *(_encoded(entry, numbers) for entry in value)]
    if isinstance(value, dict):
        return ["dict", *([name, _encoded(entry, numbers)] for name, entry in value.items())]
    if isinstance(value, slice):
        return ["slice", *(_encoded(v, numbers) for v in (value.start, value.stop, value.step))]
    for kind, cls in _KINDS.items():
        if isinstance(value, cls):
            return [kind, str(value).removeprefix("torch.")]
    raise UnknownContent(f"a graph with a {type(value).__name__}")


def _decoded(value: Any, nodes: list[fx.Node]) -> Any:
    if not isinstance(value, list):
        return value
    kind, *parts = value
    if kind == "node":
        return nodes[parts[0]]
    if kind in _KINDS:
        return _named(kind, parts[0])
    if kind == "dict":
        if not all(name.isidentifier() for name, _ in parts):
            raise ValueError("arguments whose names are none")
        return {name: _decoded(entry, nodes) for name, entry in parts}
    entries = [_decoded(part, nodes) for part in parts]
    return slice(*entries) if kind == "slice" else {"list": list, "tuple": tuple}[kind](entries)


def _named(kind: str, name: str) -> Any:
    value = torch.device(name) if kind == "device" else getattr(torch, name)
    if not isinstance(value, _KINDS[kind]):
        raise ValueError(f"{name} is no {kind}")
    return value


def _restored(stored: dict[str, Any]) -> Graph:
    graph, root = fx.Graph(), nn.Module()
    nodes: list[fx.Node] = []
    for op, target, arguments, dtype, constant in stored["nodes"]:
        args, kwargs = _decoded(arguments, nodes)
        if op == "placeholder":
            node = graph.placeholder(f"arg{len(nodes)}")
        elif op == "get_attr" and _CONSTANT.fullmatch(target):
            where = {"dtype": _named("dtype", constant[0]), "device": "cpu"}
            setattr(root, target, torch.tensor(constant[1], **where))
            node = graph.get_attr(target)
        elif op == "call_function":
            node = graph.call_function(_function(target), args, kwargs)
        elif op == "output":
            node = graph.output(args[0])
        else:
            raise ValueError(f"a graph of traced steps holds no {op} of {target}")
        if dtype is not None:
            node.meta["dtype"] = _named("dtype", dtype)
        nodes.append(node)
    module = fx.GraphModule(root, graph)
    if canonical_text(module.graph) != stored["text"]:
        raise ValueError("a graph that reads otherwise than it was written")
    return Graph(module, stored["mixing_op"], stored["text"], stored["defaults"])


def _function(target: str) -> Any:
    namespace, *path = target.split(".")
    if namespace == "operator":
        return _OPERATORS[path[0]]
    if namespace != "aten":
        raise ValueError(f"{target} is no function of ATen's")
    found: Any = torch.ops.aten
    for part in path:
        found = getattr(found, part)
    if not isinstance(found, torch._ops.OpOverload):
        raise ValueError(f"{target} is no function of ATen's")
    return found
