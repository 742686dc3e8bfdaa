"""The emitter takes multiplications off a step's longest chain, in all of its graphs alike."""

import re

import pytest
import torch
from table import needs_compiler

import pararnn
from pararnn import Param
from pararnn.codegen import emit

ELEMENTWISE = [name for name in pararnn.CELLS if name != "dense-gru"]

# What a result waits for behind each argument, in sums of a GPU, of which a special function takes
# four: a sigmoid is a multiplication, a power of two, a sum and a reciprocal.
WAITS = {
    "sigmoid": [10],
    "sigmoid_of_sum": [11, 10, 10],
    "tanh": [4],
    "product": [2, 2, 1],
    "multiply_add": [1, 1, 1],
}
LINE = re.compile(r"  const real (\w+) = (?:(\w+)\((.*)\)|(.*));")

CHAINS = {
    "gru": (18, 16),
    "lstm": (26, 26),
    "elman": (5, 5),
    "lem": (18, 17),
    "slstm": (19, 19),
    "lrc": (25, 23),
}
"""By cell, without the rules and with them. What an LSTM's sigmoids add up depends on the state."""


def functions_of(cell):
    """The emitted functions by name, each a list of lines."""
    parts = pararnn.emitted(cell).split("PARARNN_FUNCTION void ")[1:]
    return {part.partition("(")[0]: part.splitlines() for part in parts}


def chain(cell):
    """How many sums' time lies between a state and the next, at most, within a step.

    A product and the sum behind it are one.
    """
    products = set()
    known = {f"state_{name}": 0 for name in cell.states}
    for line in functions_of(cell)["step"]:
        if not (match := LINE.match(line)) or match[1] in known:
            continue
        name, function, given, plain = match.groups()
        parts = given.split(", ") if function else re.findall(r"\w+", plain)
        waits = WAITS.get(function, [int(" + " not in line or p not in products) for p in parts])
        if function == "product" or re.fullmatch(r"\w+ \* \w+", plain or ""):
            products.add(name)
        behind = [known[p] + w for p, w in zip(parts, waits, strict=True) if p in known]
        if behind:
            known[name] = max(behind)
    return max(known.values())


FORM = re.compile(r"sigmoid_of_sum|product")


def forms(cell, name="step"):
    return [line.split(" = ")[1] for line in functions_of(cell)[name] if FORM.search(line)]


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_chains_get_shorter_or_stay_as_they_are(name, monkeypatch):
    cell = pararnn.CELLS[name](4)
    now, chosen = chain(cell), forms(cell)
    monkeypatch.setattr(emit, "calls_to_fuse", lambda *graphs: {})
    before = chain(cell)
    assert (now < before) == bool(chosen)
    assert CHAINS[name] == (before, now)


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_all_graphs_of_a_step_make_the_same_choice(name):
    cell = pararnn.CELLS[name](4)
    count = len(forms(cell))
    assert count == {"gru": 2, "lem": 1, "lrc": 2}.get(name, 0)
    for other in ("jacobian", "vjp"):
        assert len(forms(cell, other)) == count


def made(step, **attributes):
    body = {"states": ("h",), "gates": ("x", "y"), "params": {"a": Param()}, "step": step}
    return type("Made", (pararnn.Cell,), {**body, **attributes})(4)


def commuted(self, state, gate, param):
    return torch.sigmoid(state.h * param.a + gate.x)


def by_a_number(self, state, gate, param):
    return torch.sigmoid(gate.x + 0.5 * state.h)


def of_a_product(self, state, gate, param):
    return torch.sigmoid(gate.x * gate.y + param.a * state.h)


def both_move(self, state, gate, param):
    return torch.sigmoid(gate.x + param.a * state.h + gate.y * state.h)


def squared(self, state, gate, param):
    return torch.sigmoid(gate.x + state.h * state.h)


def beside_the_chain(self, state, gate, param):
    late = torch.tanh(torch.tanh(torch.tanh(state.h)))
    return late * torch.sigmoid(gate.x + param.a * state.h)


def known_last(self, state, gate, param):
    return gate.x * (torch.tanh(state.h) * param.a)


def needed_twice(self, state, gate, param):
    inner = torch.tanh(state.h) * param.a
    return gate.x * inner + torch.tanh(inner)


def known_at_once(self, state, gate, param):
    return torch.tanh(gate.x * (state.h * param.a))


RULES = {
    commuted: ["sigmoid_of_sum(param_a, state_h, gate_x);"],
    by_a_number: ["sigmoid_of_sum(constant(0.5), state_h, gate_x);"],
    of_a_product: ["sigmoid_of_sum(param_a, state_h, t4);"],
    both_move: [],  # what else is summed depends on the state: it would be scaled within the step
    squared: [],
    beside_the_chain: [],
    known_last: ["product(gate_x, param_a, t3);"],
    needed_twice: [],
    known_at_once: ["product(gate_x, param_a, state_h);"],
}


@pytest.mark.parametrize("step", RULES, ids=lambda step: step.__name__)
def test_what_the_rules_take(step):
    assert forms(made(step)) == RULES[step]


@needs_compiler
@pytest.mark.parametrize("step", [by_a_number, of_a_product, known_last])
def test_what_they_take_is_right(step):
    layer = pararnn.ParaRNN(type(made(step)), 3, 8, backend="fused")
    with torch.no_grad():
        layer.cell.a.fill_(0.5)
    assert pararnn.verify(layer, torch.randn(2, 50, 3))
