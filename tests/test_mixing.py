"""Steps cut at products: stages that make up the step and its gradient, and what is refused."""

import re

import pytest
import torch
from mixing_cells import CELLS, Dense, HeadGRU, HeadLSTM, Mixture, ResetAfter, matrices
from table import has_compiler

import pararnn
from pararnn import Cell, Param
from pararnn.cells.base import Step
from pararnn.program.derive import derive, example, flat, gradients, leaves_of
from pararnn.program.mixing import MAX_ROUNDS, trace_mixing
from pararnn.program.program import COMPUTE_DTYPES, program_of


def _mixing(cell_class, dtype=torch.float64):
    return program_of(cell_class(8, num_heads=2)).mixing[dtype]


def _call(node, values):
    """Call a statement's op by PyTorch; numbers become tensors where it takes no number."""
    types = [str(argument.type) for argument in node.target._schema.arguments]
    args = [
        values[x] if isinstance(x, torch.fx.Node)
        else torch.tensor(x, dtype=torch.float64) if kind == "Tensor" else x
        for x, kind in zip(node.args, types, strict=False)
    ]  # fmt: skip
    return node.target(*args, **node.kwargs)


def _run(pass_, inputs, params):
    """Run a pass's stages and products by PyTorch; returns its results."""
    arrays = {v: inputs[key] for key, v in pass_.statements.inputs.items() if key in inputs}
    size, results = inputs["state", 0].shape, {}
    first = {value for value in arrays if value in pass_.carried}
    for number, stage in enumerate(pass_.stages):
        readable = {v: x for v, x in arrays.items() if not (number and v in first)}
        nodes = {value.node: x for value, x in readable.items()}
        nodes |= {v.node: results["carried", i] for v, i in pass_.carried.items()
                  if ("carried", i) in results}  # fmt: skip
        for value in stage.points:
            nodes[value.node] = _call(value.node, nodes)
        for target, value in stage.writes:
            is_number = isinstance(value, (int, float))
            results[target[:2]] = torch.tensor(value) if is_number else nodes[value.node]
        for product in stage.products:
            definition = product.definition
            x = results["operand", pass_.operands[definition.source]].expand(size)
            matrix = params[definition.param]
            arrays[product] = pararnn.cells.products.product(x, matrix, definition.transposes)
    return results


def _inputs(mixing, step, tensors):
    """A pass's inputs by kind and number, and all params."""
    params = tensors[step.num_rows :]
    counts = {"state": step.num_states, "gate": len(step.cls.gates), "field": len(step.cls.fields)}
    keys = [(kind, i) for kind, count in counts.items() for i in range(count)]
    inputs = dict(zip(keys, tensors, strict=False))
    return inputs | {("param", i): params[i] for i in mixing.channel_params}, params


@pytest.mark.parametrize("cell_class", [*CELLS, Dense], ids=lambda c: c.__name__)
def test_stages_make_up_the_step_and_its_gradient(cell_class):
    mixing, step = _mixing(cell_class), program_of(cell_class(8, num_heads=2)).step
    tensors = [t - 0.7 for t in example(step, (), 24, torch.float64, heads=3)]
    cotangents = example(step, (), 24, torch.float64, seed=1)[: step.num_states]
    leaves = leaves_of(tensors)
    truth = flat(step, step)(*leaves)
    grads = gradients(truth, leaves, cotangents)
    inputs, params = _inputs(mixing, step, tensors)
    results = _run(mixing.forward, inputs, params)
    for n, new in enumerate(truth):
        torch.testing.assert_close(results["new_state", n], new.detach())
    inputs |= {("grad_new_state", n): grad for n, grad in enumerate(cotangents)}
    inputs |= {("sum", i): results["sum", i] for i in range(mixing.num_preactivations)}
    results = _run(mixing.backward, inputs, params)
    keys = [(f"grad_{kind}", i) for kind, i in inputs if kind in ("state", "gate", "field")]
    for key, grad in zip(keys, grads, strict=False):
        torch.testing.assert_close(results[key].double().expand_as(grad), grad)
    for i in mixing.channel_params:
        torch.testing.assert_close(results["grad_param", i], grads[step.num_rows + i])
    for at in mixing.matrices:
        own = [outer for outer in mixing.outers if outer.matrix == at]
        pairs = [(results["left", o.left_vector], results["right", o.right_vector]) for o in own]
        whole = sum(pararnn.cells.products.outer(*pair, params[at]) for pair in pairs)
        torch.testing.assert_close(whole, grads[step.num_rows + at])


@pytest.mark.parametrize("cell_class", [HeadGRU, Mixture, Dense], ids=lambda c: c.__name__)
@pytest.mark.one_in(4)
def test_graphs_over_rows_are_those_of_symbolic_sizes(cell_class):
    """`derive` makes the same graphs with symbolic sizes, in ten times the time."""
    program = program_of(cell_class(8, num_heads=2))
    own = program.graphs[torch.float64]
    with torch.no_grad():
        symbolic = derive(program.step, program.structure, [torch.float64])[torch.float64]
    tensors = [t - 0.7 for t in example(program.step, (5,), 24, torch.float64, heads=3)]
    cotangents = example(program.step, (5,), 24, torch.float64, seed=1)[: program.num_states]
    for name, inputs in (
        ("step", tensors),
        ("jacobian", [*tensors, *cotangents]),
        ("vjp", [*tensors, *cotangents]),
    ):
        results = getattr(own, name)(*inputs)
        truths = getattr(symbolic, name)(*inputs)
        assert len(results) == len(truths)
        for result, truth in zip(results, truths, strict=True):
            torch.testing.assert_close(torch.as_tensor(result).double().expand_as(truth), truth)


def test_rounds_of_a_gru_with_the_reset_before_the_product():
    mixing = _mixing(HeadGRU)
    assert [len(stage.products) for stage in mixing.forward.stages] == [2, 1, 0]
    backward = mixing.backward
    assert [len(stage.products) for stage in backward.stages] == [0, 2, 1, 0]
    assert all(product.definition.transposes for product in backward.products)
    assert len(mixing.outers) == 3


def test_a_gradient_reads_sums_of_products_and_gates():
    """Of the GRU with the reset after the product, one gate is added to what is no product."""
    for cell_class, sums, gates in ((HeadLSTM, 4, []), (HeadGRU, 3, []), (ResetAfter, 3, [2])):
        mixing = _mixing(cell_class)
        assert (mixing.num_preactivations, mixing.backward.reads("gate")) == (sums, gates)
    assert _mixing(HeadLSTM).backward.reads("state") == [0, 1]


def test_products_of_one_operand_are_adjacent_and_read_it_once():
    (first, last) = _mixing(HeadLSTM).forward.stages
    assert len({product.definition.source for product in first.products}) == 1
    assert first.count("operand") == 1
    assert last.count("new_state") == 2


def _cell(step, **parts):
    namespace = {"states": ("h",), "gates": ("x",), "params": matrices("R"), "structure": "dense"}
    return type("Own", (Cell,), {**namespace, **parts, "step": step})


def _of_a_gate(self, state, gate, param):
    return torch.tanh(state.h + gate.x @ param.R)


def _four_rounds(self, state, gate, param):
    h = state.h
    for _ in range(MAX_ROUNDS + 1):
        h = torch.tanh(gate.x + h @ param.R)
    return h


def _sum(self, state, gate, param):
    return torch.tanh(gate.x + state.h @ param.R) / (1 + state.h.square().sum(-1, keepdim=True))


def _scaled_matrix(self, state, gate, param):
    return torch.tanh(gate.x + state.h @ (2 * param.R))


def _by_hand(self, state, gate, param):
    return torch.tanh(gate.x + torch.einsum("...i,ij->...j", state.h, param.R))


def _two_kinds(self, state, gate, param):
    return torch.tanh(gate.x + state.h @ param.R + state.h @ param.S)


DENSE = {"params": {"R": Param("D,D")}}


REASONS = [
    (_of_a_gate, {}, "which no state decides"),
    (_four_rounds, {}, "4 products of which each reads the one before"),
    (_sum, {}, "it uses aten.sum"),
    (_scaled_matrix, DENSE, "it uses aten.mm|more with a matrix|it uses aten"),
    (_by_hand, DENSE, "it uses aten"),
    (_two_kinds, {"params": {**matrices("R"), "S": Param("D,D")}}, "one kind"),
]
OF_NO_HEAD = (_sum, _scaled_matrix)
"""Steps that kernels of heads do not take either: one couples two heads."""


@pytest.mark.parametrize(("step", "parts", "why"), REASONS)
def test_a_step_that_is_not_stages_between_products_has_a_reason(step, parts, why):
    cell = _cell(step, **parts)
    traces = trace_mixing(Step(cell, {}), COMPUTE_DTYPES)
    assert not traces.statements
    assert re.search(why, traces.reason)


@pytest.mark.parametrize(("step", "parts"), [own[:2] for own in REASONS])
@pytest.mark.one_in(3)
def test_kernels_of_heads_take_it_or_say_why_not(step, parts):
    cell = _cell(step, **parts)(8, num_heads=1 if "params" in parts else 2)
    gates = torch.randn(2, 20, 1, 8)
    program = program_of(cell)
    if step in OF_NO_HEAD:
        assert program.family is None
        with pytest.raises(pararnn.EngineError, match=r"mixes channels, and .*; as a head, it"):
            pararnn.solve(cell, gates, backend="fused")
    else:
        assert program.family == "heads"
        if has_compiler():
            ours, loop = (pararnn.solve(cell, gates, backend=own)[0] for own in ("fused", "torch"))
            torch.testing.assert_close(ours, loop)


@pytest.mark.parametrize("matrix", [lambda r: 2 * r, lambda r: r + r.mT, lambda r: r.softmax(-1)])
def test_a_function_of_a_matrix_is_refused_with_the_cure(matrix):
    def step(self, state, gate, param):
        return torch.tanh(gate.x + state.h @ matrix(param.R))

    with pytest.raises(pararnn.CellError, match=r"as it is, x @ param.R or x @ param.R.mT: write"):
        program_of(_cell(step)(8, num_heads=2))


def test_programs_hold_what_can_run_them():
    """Graphs for solvers in PyTorch, statements for kernels where channels couple."""
    held = {
        cell: (bool(program.graphs), bool(program.statements))
        for cell in (pararnn.GRUCell, HeadGRU, pararnn.zoo.M2RNNCell)
        if (program := program_of(cell(8, num_heads=2)))
    }
    assert [*held.values()] == [(True, False), (True, True), (False, True)]


def test_families():
    assert program_of(HeadGRU(8, num_heads=2)).family == "mixing"
    assert program_of(pararnn.GRUCell(8)).family == "elementwise"
    assert program_of(pararnn.GRUCell(8)).why_no_family is None
    assert program_of(Dense(8)).family == "mixing"


def test_a_mixing_step_warns_of_nothing(recwarn):
    class Quiet(HeadGRU):
        pass

    program_of(Quiet(8, num_heads=2))
    assert not recwarn.list
