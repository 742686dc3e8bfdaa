"""What a step's longest chain, from a state to the next, need not wait for.

A loop over time takes as long as that chain. Two rules take multiplications off it. What they
choose is chosen on the step's graph, and holds for the graphs of its derivatives, which compute the
step too: a fixed point of one must be that of the other.
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


class Joined(NamedTuple):
    """Some calls that are spelled as one: a function of the headers, and what it is given."""

    function: str
    given: Sequence[Any]


def cost(node: fx.Node) -> int:
    """How long a call takes: functions take as long as some sums."""
    return 1 if node.target in _CHEAP else 10


def shortened(
    step: Sequence[fx.Node], nodes: Sequence[fx.Node], num_states: int
) -> dict[fx.Node, Joined]:
    """By the last of the calls, what of a graph is spelled as one, as in the step's.

    The graph's first inputs are those of the step, of which the states come first.
    """
    numbers: dict[str, int] = {}
    in_step, here = _numbered(step, numbers), _numbered(nodes, numbers)
    place = {number: node for node, number in here.items()}

    def moved(given: Any) -> Any:
        return place[in_step[given]] if isinstance(given, fx.Node) else given

    return {
        place[in_step[node]]: Joined(joined.function, [moved(given) for given in joined.given])
        for node, joined in _chosen(step, num_states).items()
        if in_step[node] in place
    }


def _numbered(nodes: Iterable[fx.Node], numbers: dict[str, int]) -> dict[fx.Node, int]:
    """A number for each node, the same for what computes the same from inputs of the same place."""
    found: dict[fx.Node, int] = {}
    inputs = count()
    for node in nodes:
        if node.op == "placeholder":
            text = f"input {next(inputs)}"
        else:
            args = fx.node.map_arg((node.args, node.kwargs), lambda n: f"%{found[n]}")
            text = f"{node.target} {args}"
        found[node] = numbers.setdefault(text, len(numbers))
    return found


def _chosen(nodes: Sequence[fx.Node], num_states: int) -> dict[fx.Node, Joined]:
    """Both rules, where they concern the longest chain."""
    known = _known(nodes, num_states)
    left: dict[fx.Node, int] = {}
    for node in reversed(nodes):
        left[node] = max((left[n] + cost(n) for n in node.users if n.op != "output"), default=0)
    longest = max((known[node] + left[node] for node in known), default=0)
    found = {}
    for node in known:
        if known[node] + left[node] < longest:
            continue
        if (sum_ := _sum_in_sigmoid(node, known)) is not None:
            found[node] = Joined("sigmoid_of_sum", sum_)
        elif (factors := _three_factors(node, known)) is not None:
            found[node] = Joined("product", factors)
    return found


def _known(nodes: Sequence[fx.Node], num_states: int) -> dict[fx.Node, int]:
    """How long after the states each node is known; without those that depend on no state."""
    inputs = [node for node in nodes if node.op == "placeholder"]
    known = dict.fromkeys(inputs[:num_states], 0)
    for node in nodes:
        behind = [known[n] for n in node.all_input_nodes if n in known]
        if behind and node.op != "output":
            known[node] = max(behind) + cost(node)
    return known


def _sum_in_sigmoid(node: fx.Node, known: dict[fx.Node, int]) -> list[Any] | None:
    """a, b, c of sigmoid(a b + c) where b alone depends on a state.

    The exponential in it is a power of two, of the sum times a number. Here a and c can be
    multiplied ahead of the step. Where c depends on a state too, as an LSTM's, the multiplication
    would move from one chain to another.
    """
    if node.target is not aten.sigmoid.default:
        return None
    (total,) = node.args
    if not isinstance(total, fx.Node) or total.target is not aten.add.Tensor or total.kwargs:
        return None
    for product, other in (total.args, total.args[::-1]):
        if isinstance(product, fx.Node) and product.target in PRODUCTS and other not in known:
            a, b = sorted(product.args, key=lambda factor: factor in known)
            return None if a in known else [a, b, other]
    return None


def _three_factors(node: fx.Node, known: dict[fx.Node, int]) -> list[Any] | None:
    """a, b, c of a (b c) where c is known last: (a b) c waits for one multiplication behind it."""
    if node.target not in PRODUCTS:
        return None

    def when(factor: Any) -> int:
        return known.get(factor, -1)

    for a, inner in (node.args, node.args[::-1]):
        if isinstance(inner, fx.Node) and inner.target in PRODUCTS and len(inner.users) == 1:
            b, c = sorted(inner.args, key=when)
            if when(c) > max(when(a), when(b)):
                return [a, b, c]
    return None
