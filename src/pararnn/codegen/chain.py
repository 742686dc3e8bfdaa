"""Shorten the critical path from one state to the next.

A loop over time takes as long as that path. Two rules remove multiplications from it. They choose
on the step's graph. The graphs of its derivatives, which compute the step too, use the same choice:
a fixed point of one must be that of the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import fx

aten = torch.ops.aten

PRODUCTS = {aten.mul.Tensor}
_CHEAP = {aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.neg.default}


class FusedCall(NamedTuple):
    """Several calls spelled as one: a function of the headers, and its arguments."""

    function: str
    args: Sequence[Any]


def cost(node: fx.Node) -> int:
    """Return the latency of a call in additions; a function counts as ten."""
    return 1 if node.target in _CHEAP else 10


def calls_to_fuse(
    step: Sequence[fx.Node], nodes: Sequence[fx.Node], num_states: int
) -> dict[fx.Node, FusedCall]:
    """Return the calls of a graph to fuse, by the last of them, as chosen on the step's graph.

    The graph's first inputs are those of the step, whose first inputs are the states.
    """
    numbers: dict[str, int] = {}
    in_step, in_graph = _number(step, numbers), _number(nodes, numbers)
    by_number = {number: node for node, number in in_graph.items()}

    def counterpart(arg: Any) -> Any:
        return by_number[in_step[arg]] if isinstance(arg, fx.Node) else arg

    return {
        counterpart(node): FusedCall(call.function, [counterpart(arg) for arg in call.args])
        for node, call in _choices(step, num_states).items()
        if in_step[node] in by_number
    }


def _number(nodes: Iterable[fx.Node], numbers: dict[str, int]) -> dict[fx.Node, int]:
    """Return a number for each node, equal for nodes that compute the same from the same inputs.

    Inputs are the same if they have the same index.
    """
    result: dict[fx.Node, int] = {}
    inputs = count()
    for node in nodes:
        if node.op == "placeholder":
            text = f"input {next(inputs)}"
        else:
            args = fx.node.map_arg((node.args, node.kwargs), lambda n: f"%{result[n]}")
            text = f"{node.target} {args}"
        result[node] = numbers.setdefault(text, len(numbers))
    return result


def _choices(nodes: Sequence[fx.Node], num_states: int) -> dict[fx.Node, FusedCall]:
    """Apply both rules to the calls on the critical path."""
    ready = _ready_times(nodes, num_states)
    remaining: dict[fx.Node, int] = {}
    for node in reversed(nodes):
        remaining[node] = max(
            (remaining[n] + cost(n) for n in node.users if n.op != "output"), default=0
        )
    critical = max((ready[node] + remaining[node] for node in ready), default=0)
    choices = {}
    for node in ready:
        if ready[node] + remaining[node] < critical:
            continue
        call = _sum_in_sigmoid(node, ready) or _three_factors(node, ready)
        if call is not None:
            choices[node] = call
    return choices


def _ready_times(nodes: Sequence[fx.Node], num_states: int) -> dict[fx.Node, int]:
    """Return the time from the states to each node's value, for nodes that depend on a state."""
    inputs = [node for node in nodes if node.op == "placeholder"]
    ready = dict.fromkeys(inputs[:num_states], 0)
    for node in nodes:
        times = [ready[n] for n in node.all_input_nodes if n in ready]
        if times and node.op != "output":
            ready[node] = max(times) + cost(node)
    return ready


def _sum_in_sigmoid(node: fx.Node, ready: dict[fx.Node, int]) -> FusedCall | None:
    """Fuse sigmoid(a b + c) if only b depends on a state.

    The exponential inside is a power of two, of the sum times a constant. The fused function
    multiplies a and c by it ahead of the step. If c depends on a state too, as an LSTM's does, that
    would move the multiplication from one path to another.
    """
    if node.target is not aten.sigmoid.default:
        return None
    (total,) = node.args
    if not isinstance(total, fx.Node) or total.target is not aten.add.Tensor or total.kwargs:
        return None
    for product, other in (total.args, total.args[::-1]):
        if isinstance(product, fx.Node) and product.target in PRODUCTS and other not in ready:
            a, b = sorted(product.args, key=lambda factor: factor in ready)
            return None if a in ready else FusedCall("sigmoid_of_sum", [a, b, other])
    return None


def _three_factors(node: fx.Node, ready: dict[fx.Node, int]) -> FusedCall | None:
    """Fuse a (b c) if c is ready last: (a b) c has one multiplication after c instead of two."""
    if node.target not in PRODUCTS:
        return None

    def time(factor: Any) -> int:
        return ready.get(factor, -1)

    for a, inner in (node.args, node.args[::-1]):
        if isinstance(inner, fx.Node) and inner.target in PRODUCTS and len(inner.users) == 1:
            b, c = sorted(inner.args, key=time)
            if time(c) > max(time(a), time(b)):
                return FusedCall("product", [a, b, c])
    return None
