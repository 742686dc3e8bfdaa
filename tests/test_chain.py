"""The emitter shortens a step's critical path, in all of its graphs alike."""

import re

import pytest
import torch
from table import ELEMENTWISE, needs_compiler

import pararnn
from pararnn import Param
from pararnn.codegen import emit

# Latency of a call after each argument, in a GPU's sums. A special function takes four; a sigmoid
# is a multiplication, a power of two, a sum and a reciprocal.
LATENCIES = {
    "sigmoid": [10],
    "sigmoid_of_sum": [11, 10, 10],
    "tanh": [4],
    "product": [2, 2, 1],
    "multiply_add": [1, 1, 1],
}
LINE = re.compile(r"  const real (\w+) = (?:(\w+)\((.*)\)|(.*));")

PATHS = {
    "gru": (18, 16),
    "lstm": (26, 26),
    "elman": (5, 5),
    "lem": (18, 17),
    "slstm": (19, 19),
    "lrc": (25, 23),
}
"""Critical path without the rules and with them. An LSTM's sums all depend on the state."""


def functions_of(cell):
    """Return the lines of the emitted functions, by name."""
    functions = pararnn.emitted(cell).split("PARARNN_FUNCTION void ")[1:]
    return {text.partition("(")[0]: text.splitlines() for text in functions}


def critical_path(cell):
    """Return the longest time from a state to the next within a step, in sums.

    A product and the sum after it count as one.
    """
    products = set()
    times = {f"state_{name}": 0 for name in cell.states}
    for line in functions_of(cell)["step"]:
        if not (match := LINE.match(line)) or match[1] in times:
            continue
        name, function, arguments, plain = match.groups()
        terms = arguments.split(", ") if function else re.findall(r"\w+", plain)
        latencies = LATENCIES.get(
            function, [int(" + " not in line or t not in products) for t in terms]
        )
        if function == "product" or re.fullmatch(r"\w+ \* \w+", plain or ""):
            products.add(name)
        ready = [times[t] + n for t, n in zip(terms, latencies, strict=True) if t in times]
        if ready:
            times[name] = max(ready)
    return max(times.values())


FUSED = re.compile(r"sigmoid_of_sum|product")


def fused_calls(cell, name="step"):
    return [line.split(" = ")[1] for line in functions_of(cell)[name] if FUSED.search(line)]


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_fused_calls_shorten_the_critical_path(name, monkeypatch):
    cell = pararnn.CELLS[name](4)
    now, calls = critical_path(cell), fused_calls(cell)
    monkeypatch.setattr(emit, "calls_to_fuse", lambda *graphs: {})
    plain = critical_path(cell)
    assert (now < plain) == bool(calls)
    assert PATHS[name] == (plain, now)


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_all_graphs_of_a_step_make_the_same_choice(name):
    cell = pararnn.CELLS[name](4)
    count = len(fused_calls(cell))
    assert count == {"gru": 2, "lem": 1, "lrc": 2}.get(name, 0)
    for other in ("jacobian", "vjp"):
        assert len(fused_calls(cell, other)) == count


def cell_with(step):
    body = {"states": ("h",), "gates": ("x", "y"), "params": {"a": Param()}, "step": step}
    return type("Cell", (pararnn.Cell,), body)(4)


def needed_twice(self, state, gate, param):
    inner = torch.tanh(state.h) * param.a
    return gate.x * inner + torch.tanh(inner)


def off_the_path(self, state, gate, param):
    late = torch.tanh(torch.tanh(torch.tanh(state.h)))
    return late * torch.sigmoid(gate.x + param.a * state.h)


RULES = {
    "commuted": (
        lambda self, s, g, p: torch.sigmoid(s.h * p.a + g.x),
        ["sigmoid_of_sum(param_a, state_h, gate_x);"],
    ),
    "times a number": (
        lambda self, s, g, p: torch.sigmoid(g.x + 0.5 * s.h),
        ["sigmoid_of_sum(constant(0.5), state_h, gate_x);"],
    ),
    "plus a product": (
        lambda self, s, g, p: torch.sigmoid(g.x * g.y + p.a * s.h),
        ["sigmoid_of_sum(param_a, state_h, t4);"],
    ),
    # the other term depends on the state: its scaling would stay within the step
    "two terms of the state": (
        lambda self, s, g, p: torch.sigmoid(g.x + p.a * s.h + g.y * s.h),
        [],
    ),
    "square of the state": (lambda self, s, g, p: torch.sigmoid(g.x + s.h * s.h), []),
    "off the critical path": (off_the_path, []),
    "three factors": (
        lambda self, s, g, p: g.x * (torch.tanh(s.h) * p.a),
        ["product(gate_x, param_a, t3);"],
    ),
    "product needed twice": (needed_twice, []),
    "three factors in a function": (
        lambda self, s, g, p: torch.tanh(g.x * (s.h * p.a)),
        ["product(gate_x, param_a, state_h);"],
    ),
}


@pytest.mark.parametrize("name", RULES)
def test_rules_fuse_calls_on_the_critical_path(name):
    step, calls = RULES[name]
    assert fused_calls(cell_with(step)) == calls


@needs_compiler
@pytest.mark.parametrize("name", ["times a number", "plus a product", "three factors"])
def test_fused_calls_are_right(name):
    layer = pararnn.ParaRNN(type(cell_with(RULES[name][0])), 3, 8, backend="fused")
    with torch.no_grad():
        layer.cell.a.fill_(0.5)
    assert pararnn.verify(layer, torch.randn(2, 50, 3))
