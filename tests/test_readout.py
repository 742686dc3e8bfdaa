"""A cell's readout: a layer's output made of states, in every kind of layer and call."""

from functools import cache

import pytest
import torch
from call_results import as_tuple
from table import PAIRS
from torch import nn
from torch.func import functional_call, stack_module_state, vmap
from torch.nn.utils.rnn import PackedSequence, pack_sequence

import pararnn
from pararnn import Param
from pararnn.check import readout as readout_check

D, T = 4, 9


class Gated(pararnn.Cell):
    """o c / n: reads two states, a gate, a field and a parameter."""

    states = ("c", "n")
    gates = ("f", "i", "z", "o")
    fields = ("dt",)
    params = {"w": Param(mean=1.0), "unread": Param("H")}

    def step(self, state, gate, param):
        f, i = torch.sigmoid(gate.f), torch.exp(gate.i)
        return f * state.c + i * torch.tanh(gate.z), f * state.n + i

    def readout(self, state, gate, param):
        return torch.sigmoid(gate.o + gate.dt) * param.w * state.c / state.n


class ByHead(pararnn.Cell):
    """A norm over the channels of each head: it mixes channels, which its step does not."""

    states = ("h",)
    gates = ("x",)
    params = {"a": Param(), "s": Param("", mean=1.0)}
    config = {"heads": 2}

    def step(self, state, gate, param):
        return torch.tanh(gate.x + param.a * state.h)

    def readout(self, state, gate, param):
        heads = state.h.unflatten(-1, (self.heads, -1))
        return param.s * (heads / heads.norm(dim=-1, keepdim=True)).flatten(-2)


class Dense(pararnn.Cell):
    states = ("h",)
    gates = ("x", "o")
    params = {"A": Param("D,D"), "C": Param("D,D")}
    structure = "dense"

    def step(self, state, gate, param):
        return torch.tanh(gate.x + state.h @ param.A.mT)

    def readout(self, state, gate, param):
        return torch.sigmoid(gate.o) * (state.h @ param.C.mT)


class Branching(Gated):
    structure = "sequential"

    def step(self, state, gate, param):
        c, n = Gated.step(self, state, gate, param)
        return (c, n) if n.max() < 20 else (c / 2, n / 2)


CELLS = [Gated, ByHead, Dense, Branching]
SEQUENTIAL = {"solver": "sequential", "backend": "torch", "dtype": torch.float64}


@cache
def inside(cell):
    """The cell with its output as a first state, which no step reads."""

    class Inside(cell):
        states = ("y", *cell.states)
        structure = "sequential"
        readout = None

        def step(self, state, gate, param):
            new = cell.step(self, state, gate, param)
            new = (new,) if torch.is_tensor(new) else new
            state = state._replace(**dict(zip(cell.states, new, strict=True)))
            return cell.readout(self, state, gate, param), *new

    return Inside


def both(cell, *args, **options):
    """Layers of a cell, and of its like with the output as a state: the same weights."""
    layers = []
    for kind in (cell, inside(cell)):
        torch.manual_seed(0)
        layers.append(pararnn.ParaRNN(kind, D, D, *args, **{**SEQUENTIAL, **options}))
    return layers


def fields_of(cell, size=(2, T)):
    torch.manual_seed(2)
    return {name: torch.rand(size, dtype=torch.float64) for name in cell.fields}


def inputs():
    torch.manual_seed(1)
    return torch.randn(2, T, D, dtype=torch.float64, requires_grad=True)


def starts(cell, layers, count):
    """States of a number of layers."""
    torch.manual_seed(3)
    return tuple(torch.rand(layers, count, D, dtype=torch.float64) + 1 for _ in cell.states)


def with_output(states):
    """The states of `inside`, whose first is not read."""
    return (torch.zeros_like(states[0]), *states)


LENGTHS, RESET = [T, 4], torch.arange(2 * T).view(2, T) % 5 == 3
KINDS = {
    "plain": ({}, {}),
    "heads": ({"num_heads": 2}, {}),
    "no bias": ({"bias": False}, {}),
    "stack": ({"num_layers": 3}, {}),
    "both directions": ({"num_layers": 2, "bidirectional": True, "num_heads": 2}, {}),
    "right padding": ({"bidirectional": True}, {"lengths": LENGTHS}),
    "left padding": ({}, {"lengths": LENGTHS, "padding": "left"}),
    "no steps": ({}, {"lengths": [0, 0]}),
    "resets": ({}, {"reset": RESET}),
    "recomputed": ({"num_layers": 2, "recompute_gates": True}, {}),
}


def compare(cell, one, other, x, **options):
    """Outputs, final states and gradients of two layers that are alike, side by side."""
    results = []
    for layer in (one, other):
        output, h_n = layer(x, fields=fields_of(cell), **options)[:2]
        h_n = as_tuple(h_n)
        h_n = h_n[-len(cell.states) :]
        loss = output.sin().sum() + sum(h.square().sum() for h in h_n)
        leaves = [x, *layer.parameters()]
        grads = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
        results.append((output, *h_n, *grads))
    for got, reference in zip(*results, strict=True):
        assert reference.isfinite().all()
        torch.testing.assert_close(got, reference, rtol=1e-11, atol=1e-12)
    return results[0][0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cell", CELLS)
def test_a_layer_puts_out_what_the_loop_does(cell, kind):
    options, call = KINDS[kind]
    layers = both(cell, **options)
    output = compare(cell, *layers, inputs(), **call)
    assert output.shape == (2, T, D * (1 + layers[0].bidirectional))
    if "lengths" in call:
        full_rows = output[1, 4:] if call.get("padding") != "left" else output[1, :-4]
        assert not full_rows.any()


@pytest.mark.parametrize("cell", CELLS)
def test_from_given_states_and_at_every_layout(cell):
    one, other = both(cell, num_layers=2)
    states, x = starts(cell, 2, 2), inputs()
    of_two = [h if len(h) > 1 else h[0] for h in (states, with_output(states))]
    fields = fields_of(cell)
    output, _ = one(x, of_two[0], fields=fields)
    torch.testing.assert_close(output, other(x, of_two[1], fields=fields)[0])

    again = [starts(cell, 2, int(RESET.sum()))]
    again = [h if len(h) > 1 else h[0] for h in (again[0], with_output(again[0]))]
    results = [
        layer(x, fields=fields, reset=RESET, reset_states=h)[0]
        for layer, h in zip((one, other), again, strict=True)
    ]
    torch.testing.assert_close(*results)

    row = {name: field[:1] for name, field in fields.items()}
    cut = {"cu_seqlens": torch.tensor([0, 3, 7])}
    results = [layer(x[:1], fields=row, **cut)[0] for layer in (one, other)]
    torch.testing.assert_close(*results)
    assert not results[0][0, 7:].any()

    sequence = pack_sequence([x[0], x[1, :4]])
    along = {
        name: PackedSequence(pack_sequence([f[0], f[1, :4]]).data, sequence.batch_sizes)
        for name, f in fields.items()
    }
    results = [layer(sequence, fields=along)[0].data for layer in (one, other)]
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("cell", CELLS)
def test_step_by_step_as_at_once(cell):
    layer, _ = both(cell, num_layers=2)
    x, fields, state = inputs(), fields_of(cell), None
    output, h_n = layer(x, fields=fields)
    for t in range(T):
        here = {name: field[:, t] for name, field in fields.items()}
        y, state = layer.step(x[:, t], state, fields=here)
        torch.testing.assert_close(y, output[:, t])
    torch.testing.assert_close(state, h_n)


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.one_in(7)
def test_gradients_reach_all_states_by_every_engine(pair, recompute):
    one, other = both(Gated, recompute_gates=recompute)
    one.layers[0].solver, one.layers[0].backend = pair
    compare(Gated, one, other, inputs(), lengths=LENGTHS)


def by_hand(layer, states, gates, dtype):
    """The readout of states in a dtype, with the gates as the projection leaves them."""
    cell, part = layer.cell, layer.layers[0]
    wide = gates.to(dtype) + part.bias.to(dtype)
    state = pararnn.program_of(cell).step
    params = [p.to(dtype) for p in cell.lifted_params()]
    dt = torch.full_like(wide[:, :, 0], 0.5)
    return state.call("readout", [s.to(dtype) for s in states], [*wide.unbind(2), dt], params)


@pytest.mark.parametrize("source", ["bfloat16", "autocast"])
def test_16_bits_are_rounded_once(source):
    torch.manual_seed(0)
    dtype = torch.bfloat16 if source == "bfloat16" else torch.float32
    layer = pararnn.ParaRNN(Gated, 3, D, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=source == "autocast"):
        x = torch.randn(2, T, 3, dtype=dtype)
        output, _, [states] = layer(x, fields={"dt": 0.5}, all_states=True)
        gates = layer.layers[0].proj(x)
    assert gates.dtype == output.dtype == torch.bfloat16
    reference = by_hand(layer, states, gates, torch.float32).bfloat16()
    assert torch.equal(output, reference)


def test_final_states_keep_their_own_dtype():
    layer = pararnn.ParaRNN(Gated, 3, D, dtype=torch.bfloat16, keep_dtype=True)
    output, h_n = layer(torch.randn(2, T, 3).bfloat16(), fields={"dt": 0.5})
    assert {output.dtype, *(h.dtype for h in h_n)} == {torch.bfloat16}


@pytest.mark.parametrize("cell", [ByHead, Dense])
@pytest.mark.thorough
def test_compiled_and_exported(cell):
    layer, _ = both(cell, num_layers=2)
    x, fields = inputs(), fields_of(cell)
    reference, _ = layer(x, fields=fields)
    program = torch.compile(layer, backend="aot_eager", fullgraph=True)
    output, _ = program(x, fields=fields)
    torch.testing.assert_close(output, reference)
    for one, other in zip(
        *(torch.autograd.grad(y.sin().sum(), x) for y in (output, reference)), strict=True
    ):
        torch.testing.assert_close(one, other)
    with torch.no_grad():
        graph_module = torch.export.export(layer, (x.detach(),), {"fields": fields})
        torch.testing.assert_close(graph_module.module()(x, fields=fields)[0], reference)


def test_seeds_folded_into_one():
    layers = [both(Gated)[0] for _ in range(2)]
    layers[1].reset_parameters()
    weights, buffers = stack_module_state(layers)
    x, fields = inputs(), fields_of(Gated)

    def one(state):
        return functional_call(layers[0], state, (x,), {"fields": fields})[0]

    output = vmap(one)({**weights, **buffers})
    torch.testing.assert_close(output, torch.stack([y(x, fields=fields)[0] for y in layers]))


def test_solve_leaves_the_readout_to_layers():
    torch.manual_seed(0)
    layer = pararnn.ParaRNN(ByHead, 3, D)
    x = torch.randn(2, T, 3)
    gates = layer.layers[0].proj(x) + layer.layers[0].bias
    states, _ = pararnn.solve(layer.cell, gates)
    output, h_n, [(h,)] = layer(x, all_states=True)
    assert torch.equal(states, h)
    assert torch.equal(h[:, -1], h_n[0])
    norms = output.unflatten(-1, (2, -1)).norm(dim=-1)
    torch.testing.assert_close(norms, layer.cell.s.abs().expand_as(norms))


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.one_in(7)
def test_verify_holds_values_and_gradients(cell, dtype, monkeypatch):
    torch.manual_seed(0)
    layer = pararnn.ParaRNN(cell, 3, D, bidirectional=True, dtype=dtype, solver="sequential")
    x, fields = torch.randn(2, T, 3).to(dtype), dict.fromkeys(cell.fields, 0.5)
    report = pararnn.verify(layer, x, fields=fields, lengths=LENGTHS)
    assert report.passed, str(report)
    names = [check.name for check in report.layers[0][2].checks]
    assert "readout" in names
    assert f"readout grad {cell.states[-1]}" in names
    assert "readout grad unread" not in names

    right = readout_check.read_out
    for wrong, first in (
        (lambda y: y * 1.1, "readout"),
        (lambda y: y.roll(1, 1), "readout"),
        (lambda y: y.detach() * 1.1 - (y.detach() - y) - 0.1 * y.detach(), None),
        (lambda y: 1.1 * y - 0.1 * y.detach(), "readout grad"),
    ):
        monkeypatch.setattr(readout_check, "read_out", lambda *a, w=wrong: w(right(*a)))
        report = pararnn.verify(layer, x, fields=fields, lengths=LENGTHS)
        failures = [c.name for _, _, checks in report.layers for c in checks.checks if not c.passed]
        assert [name.startswith(first) for name in failures[:1]] == ([True] if first else [])


def misses_an_argument(self, state, gate):
    return state.h


def misspells(self, state, gate, param):
    return state.hidden


def reads_itself(self, state, gate, param):
    return self.a * state.h


def is_a_tuple(self, state, gate, param):
    return state.h, state.h


def is_narrow(self, state, gate, param):
    return state.h[..., :2]


def is_rounded(self, state, gate, param):
    return state.h.bfloat16()


def sets_a_state(self, state, gate, param):
    state.h *= 2
    return state.h


def writes_into_a_gate(self, state, gate, param):
    gate.x.clamp_(0)
    return gate.x * state.h


def writes_by_mask(self, state, gate, param):
    h = torch.tanh(state.h)
    h[h > 0.5] = 0.5
    return h


def draws(self, state, gate, param):
    return nn.functional.dropout(state.h, 0.5)


def branches(self, state, gate, param):
    return state.h if state.h.max() > 0 else -state.h


def mixes_rows(self, state, gate, param):
    return state.h - state.h.mean(0)


def looks_back(self, state, gate, param):
    return state.h.roll(1, 0)


def divides_down(self, state, gate, param):
    return state.h // 2


LINE = r" \(.*test_readout.py, line \d+\)"
SLIPS = {
    misses_an_argument: r"must take \(self, state, gate, param\), as the step does: too many",
    misspells: f"fails: state.hidden is not there: it has h{LINE}",
    reads_itself: r"step \(or readout\) reads self.a, which it may not: read it as param.a",
    is_a_tuple: r"must return one tensor of a state's shape and dtype, \(2, 3, 6\) .* got tuple",
    is_narrow: r"\(2, 3, 6\) torch.float32, got \(2, 3, 2\) torch.float32",
    is_rounded: r"\(2, 3, 6\) torch.float32, got \(2, 3, 6\) torch.bfloat16",
    sets_a_state: f"fails: state.h cannot be set: .*and return it{LINE}",
    writes_into_a_gate: "writes in place, into an argument",
    writes_by_mask: "writes in place, into an argument or what its gradient needs",
    draws: "draws random numbers .*pass them as a field",
    branches: "reads a tensor's value in Python .*use torch.where",
    mixes_rows: r"must treat leading dimensions as independent rows: for \(2, 3, 6\)",
    looks_back: "as independent rows",
    divides_down: r"uses floor_divide, .*rounding_mode='floor'",
}


@pytest.mark.parametrize("readout", SLIPS, ids=lambda readout: readout.__name__)
def test_what_a_readout_may_not_do_is_said_of_it(readout):
    body = {"readout": readout, "gates": ("x",), "config": {}}
    cell_class = type("Made", (ByHead,), body)
    with pytest.raises(pararnn.CellError, match=f"Made.*{SLIPS[readout]}"):
        pararnn.ParaRNN(cell_class, 3, 6)


def test_it_may_be_no_number_at_some_states():
    body = {"readout": lambda self, state, gate, param: torch.log(state.h - 9), "config": {}}
    pararnn.ParaRNN(type("Made", (ByHead,), {**body, "gates": ("x",)}), 3, 6)


def test_it_is_checked_on_as_many_channels_as_there_are():
    assert pararnn.ParaRNN(ByHead, 3, 9, heads=3)
    with pytest.raises(
        pararnn.CellError, match=f"Made.readout fails: .*{LINE}".replace("Made", "ByHead")
    ):
        pararnn.ParaRNN(ByHead, 3, 9, heads=2)


def test_it_is_the_classs_and_none_hides_it():
    layer = pararnn.ParaRNN(ByHead, 3, D)
    with pytest.raises(AttributeError, match="the readout of a cell is its class's"):
        layer.cell.readout = lambda *a: a
    with pytest.raises(pararnn.CellError, match="'readout' is a name of"):
        type("Taken", (ByHead,), {"config": {"readout": 1}})
    plain = pararnn.ParaRNN(type("Plain", (ByHead,), {"readout": None}), 3, D)
    output, _, [(h,)] = plain(torch.randn(2, T, 3), all_states=True)
    assert torch.equal(output, h)


class Loud(pararnn.Cell):
    """A readout of any size."""

    states, gates, config = ("h",), ("x",), {"factor": 1.0}

    def step(self, state, gate, param):
        return 0.5 * state.h + gate.x

    def readout(self, state, gate, param):
        return self.factor * state.h


@pytest.mark.parametrize("factor", [1e5, 1e2])
def test_a_readout_that_overflows_in_16_bits_is_no_error(factor):
    torch.manual_seed(0)
    layer = pararnn.RecurrentLayer(Loud, 4, 6, dtype=torch.float16, factor=factor)
    x = torch.randn(2, 30, 4, dtype=torch.float16)
    assert layer(x)[0].isinf().any() == (factor == 1e5)
    report = pararnn.verify(layer, x)
    assert report.passed, report
