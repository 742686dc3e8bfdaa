"""A cell runs the step that its class has now: whatever the step reads, no other Program serves."""

import copy
import pickle

import changing_cells
import pytest
import torch
from changing_cells import (
    CHANGES,
    Global,
    X,
    agree,
    layer_of,
    restore,
    results,
    states_by_leak,
    with_structure,
)

import pararnn
from pararnn.program.program import program_by_key

PAIRS = [("newton", "torch"), ("sequential", "torch"), ("sequential", "fused")]


@pytest.mark.parametrize(
    ("what", "structure"),
    [
        *((what, None) for what in CHANGES),
        *((what, "dense") for what in ("a class attribute", "a global", "a helper")),
        *((what, "sequential") for what in CHANGES),
    ],
)
@pytest.mark.one_in(5)
def test_what_a_step_reads_is_followed(what, structure):
    cls, change = CHANGES[what]
    kind = with_structure(cls, structure)
    pair = ("sequential", "torch") if structure == "sequential" else ("newton", "torch")
    try:
        layer = layer_of(kind, pair)
        agree(results(layer), states_by_leak(0.9))
        first = pararnn.program_of(layer.cell)
        output = layer(X)[0]
        change()
        agree(results(layer), states_by_leak(0.1))
        agree(results(layer_of(kind, pair)), states_by_leak(0.1))
        assert pararnn.verify(layer, X).passed
        second = pararnn.program_of(layer.cell)
        assert second is not first
        assert pararnn.program_of(layer.cell) is second
        # A backward pass after the change is that of its forward pass.
        grads = torch.autograd.grad(output.square().sum(), list(layer.parameters()))
        agree(grads, states_by_leak(0.9)[1:-1])
    finally:
        restore(cls)
    agree(results(layer), states_by_leak(0.9))


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_engines_take_the_new_program(pair):
    try:
        layer = layer_of(Global, pair)
        results(layer)
        changing_cells.LEAK = 0.1
        agree(results(layer), states_by_leak(0.1))
        assert pararnn.verify(layer, X).passed
    finally:
        restore(Global)
    agree(results(layer), states_by_leak(0.9))


def make_class(leak, structure, name="h"):
    """Classes of one module and qualified name."""

    class Made(pararnn.Cell):
        states = (name,)
        gates = ("x",)

        def step(self, state, gate, param):
            return torch.tanh(leak * state[0] + gate.x)

    Made.structure = structure
    return Made


@pytest.mark.parametrize("structure", [None, "dense", "sequential"])
def test_classes_of_one_name_are_not_mixed_up(structure):
    pair = ("sequential", "torch") if structure == "sequential" else ("newton", "torch")
    layers = [layer_of(make_class(leak, structure), pair) for leak in (0.9, 0.1, 0.9)]
    for layer, leak in [*zip(layers, (0.9, 0.1, 0.9), strict=True)] * 2:
        agree(results(layer), states_by_leak(leak))
    keys = [pararnn.program_of(layer.cell).key for layer in layers]
    assert keys[0] == keys[2] != keys[1]
    third = pararnn.program_of(make_class(0.9, structure, "y")(3))
    assert third.states == ("y",)
    assert third.key not in keys


def test_constants_that_are_tensors_tell_dense_steps_apart():
    def kind(leak):
        def step(self, state, gate, param):
            return torch.tanh(torch.tensor(leak) * state.h + gate.x)

        body = {"states": ("h",), "gates": ("x",), "structure": "dense", "step": step}
        return type("Made", (pararnn.Cell,), body)

    for leak in (0.9, 0.1):
        agree(results(layer_of(kind(leak))), states_by_leak(leak))


def test_a_closure_that_changes():
    leak = 0.9

    class Made(pararnn.Cell):
        states = ("h",)
        gates = ("x",)

        def step(self, state, gate, param):
            return torch.tanh(leak * state.h + gate.x)

    layer = layer_of(Made)
    agree(results(layer), states_by_leak(0.9))
    leak = 0.1
    agree(results(layer), states_by_leak(0.1))


def test_a_class_defined_anew_and_one_that_gets_a_jacobian():
    source = (
        "import pararnn, torch\n"
        "class Cell(pararnn.Cell):\n"
        "    states, gates, structure = ('h',), ('x',), 'dense'\n"
        "    def step(self, state, gate, param):\n"
        "        return torch.tanh({} * state.h + gate.x)\n"
    )
    notebook = {"__name__": "notebook"}
    layers = []
    for leak in (0.9, 0.1):
        exec(source.format(leak), notebook)
        layers.append(layer_of(notebook["Cell"]))
    for layer, leak in zip(layers, (0.9, 0.1), strict=True):
        agree(results(layer), states_by_leak(leak))
    cell = layers[0].cell
    old = pararnn.program_of(cell)
    type(cell).jacobian = lambda self, state, gate, param: torch.diag_embed(
        0.9 * (1 - self.step(state, gate, param).square())
    )
    assert pararnn.program_of(cell) is not old
    assert pararnn.program_of(cell).step.has_jacobian
    agree(results(layers[0]), states_by_leak(0.9))


def test_unchanged_programs_stay():
    layer = layer_of(Global)
    program = pararnn.program_of(layer.cell)
    changing_cells.x = changing_cells.h = (
        object()
    )  # globals by the names of what `gate.x` and `state.h` read
    assert pararnn.program_of(layer.cell) is program
    assert pararnn.program_of(copy.deepcopy(layer).cell) is program
    assert pararnn.program_of(pickle.loads(pickle.dumps(layer)).cell) is program
    assert program_by_key(program.key) is program


COUNT = 0


def test_steps_that_change_what_they_read_are_warned_of(monkeypatch):
    monkeypatch.setattr("pararnn.program.program.MANY_TRACES", 2)

    def step(self, state, gate, param):
        global COUNT
        COUNT += 1
        return torch.tanh(0.9 * state.h + gate.x)

    body = {"states": ("h",), "gates": ("x",), "step": step, "structure": "sequential"}
    layer = layer_of(type("Counting", (pararnn.Cell,), body), ("sequential", "torch"))
    layer(X)
    layer(X)
    with pytest.warns(pararnn.CellCostWarning, match="last COUNT, which was"):
        layer(X)


@pytest.mark.thorough
def test_compiled_code_says_that_the_step_has_changed():
    layer = layer_of(Global)
    program = torch.compile(layer, fullgraph=True, backend="aot_eager")
    try:
        torch.testing.assert_close(program(X)[0], layer(X)[0])
        changing_cells.LEAK = 0.1
        with pytest.raises(Exception, match=r"LEAK, which was 0\.9 and is 0\.1"):
            program(X)
        pararnn.program_of(layer.cell)
        torch.testing.assert_close(program(X)[0], states_by_leak(0.1)[0])
    finally:
        restore(Global)


def test_exported_code_says_that_the_step_has_changed():
    layer = layer_of(Global)
    graph_module = torch.export.export(layer, (X,)).module()
    try:
        torch.testing.assert_close(graph_module(X)[0], layer(X)[0])
        changing_cells.LEAK = 0.1
        with pytest.raises(pararnn.CellError, match=r"LEAK, which was 0\.9 and is 0\.1.*export"):
            graph_module(X)
    finally:
        restore(Global)
    torch.testing.assert_close(graph_module(X)[0], layer(X)[0])
