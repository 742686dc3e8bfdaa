"""Exported layers in onnxruntime: they give the layers' results at any batch and length."""

import io
from collections import Counter

import numpy as np
import pytest
import torch
from matrix_cells import CONFIG
from torch.utils._pytree import tree_leaves
from user_cells import Memory

import pararnn
from pararnn import zoo
from pararnn.solvers.onnx_math import PRECISE

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

DYNAMIC = torch.export.Dim.DYNAMIC
ROWS, BATCH = {0: DYNAMIC, 1: DYNAMIC}, {0: DYNAMIC}
SIZES = ((5, 6), (1, 1), (3, 40))


class Padded(torch.nn.Module):
    """Layers that run on the same padded rows, and return all that they can."""

    def __init__(self, layers, with_states=True):
        super().__init__()
        self.layers, self.with_states = torch.nn.ModuleList(layers), with_states
        with torch.no_grad():
            for parameter in self.parameters():  # biases of zero would hide errors
                parameter.add_(0.2 * torch.randn_like(parameter))

        self.fields = [layer.cell.fields for layer in layers]
        self.starts = [
            [torch.randn(len(layer.all_weights), 1, *size) for size in layer.cell.state_sizes]
            for layer in layers
        ]

    def forward(self, x, lengths, gap, scale):
        runs = []
        for layer, fields, starts in zip(self.layers, self.fields, self.starts, strict=True):
            states = [scale.view(1, -1, *[1] * (start.ndim - 2)) * start for start in starts]
            options = {"lengths": lengths, "fields": dict.fromkeys(fields, gap)}
            runs.append(layer(x, tuple(states) if self.with_states else None, **options))
        return tree_leaves(runs)


def _torch_nn():
    """Return layers by ONNX's own operators."""
    first = {"batch_first": True}
    lstm = pararnn.LSTM(4, 8, bidirectional=True, **first)
    gru = pararnn.GRU(4, 8, bias=False, **first)
    return Padded([lstm, gru, pararnn.RNN(4, 8, nonlinearity="relu", **first)])


def _more_of_torch_nn():
    """Return others, of which those with heads or another nonlinearity are scans."""
    first = {"batch_first": True}
    lstm = pararnn.LSTM(4, 8, 2, **first)
    gru = pararnn.GRU(4, 8, bidirectional=True, **first)
    rnn = pararnn.RNN(4, 8, nonlinearity="softsign", **first)
    return Padded([lstm, gru, rnn, pararnn.LSTM(4, 8, num_heads=2, **first)])


def _mixing():
    """Return a layer of vectors in several heads."""
    return Padded([pararnn.ParaRNN(zoo.CELLS["head-lstm"], 4, 8, num_heads=2)])


def _matrix():
    """Return a layer of matrices in several heads."""
    return Padded([pararnn.ParaRNN(zoo.GatedDeltaCell, 4, 8, num_heads=2, K=4)])


def _several_states():
    """Return a layer of a matrix cell with more than one state, in both directions."""
    return Padded([pararnn.ParaRNN(zoo.MLSTMCell, 4, 8, bidirectional=True, num_heads=2, K=4)])


def _elementwise():
    memory = pararnn.ParaRNN(Memory, 4, 8, num_heads=2)
    return Padded([pararnn.ParaGRU(4, 8), pararnn.ParaLSTM(4, 8), memory])


def _zoo():
    layers = [
        pararnn.ParaRNN(cell, 4, 8, num_heads=2, **CONFIG.get(name, {}))
        for name, cell in {**zoo.CELLS, **zoo.MATRIX_CELLS}.items()
    ]
    return Padded(layers, with_states=False)


def _far_from_0():
    """Return layers whose gates are large, for functions that translations round or overflow."""
    names = ("slstm", "min-lstm", "head-slstm")
    layers = [pararnn.ParaRNN(zoo.CELLS[name], 4, 8) for name in names]
    padded = Padded([*layers, pararnn.ParaRNN(zoo.MLSTMCell, 4, 8, K=4)])
    with torch.no_grad():
        for layer in padded.layers:
            layer.layers[0].proj.weight.mul_(20)
    return padded


CASES = {
    "torch.nn": (_torch_nn, {"LSTM": 2, "GRU": 1, "RNN": 1}),
    "more of torch.nn": (_more_of_torch_nn, {"LSTM": 2, "GRU": 2, "Scan": 2}),
    "elementwise": (_elementwise, {"Scan": 3}),
    "several states": (_several_states, {"Scan": 2}),
    "matrix": (_matrix, {"Scan": 1}),
    "mixing": (_mixing, {"Scan": 1}),
    "zoo": (_zoo, {"Scan": len(zoo.CELLS) + len(zoo.MATRIX_CELLS)}),
    "gates far from 0": (_far_from_0, {"Scan": 4}),
}


def _inputs(batch, steps):
    lengths = steps - torch.arange(batch) * steps // max(batch - 1, 1)  # the last has no step
    x, gap = torch.randn(batch, steps, 4), torch.rand(batch, steps)
    return x, lengths, gap, torch.randn(batch)


def _session(module, inputs, shapes):
    program = torch.onnx.export(
        module.eval(), inputs, dynamic_shapes=shapes, dynamo=True, verbose=False
    )
    file = io.BytesIO()
    program.save(file)
    model = onnx.load_from_string(file.getvalue())
    onnx.checker.check_model(model, full_check=True)
    return program, model, onnxruntime.InferenceSession(file.getvalue())


def _results(session, inputs):
    names = [value.name for value in session.get_inputs()]
    feed = {n: t.numpy() for n, t in zip(names, tree_leaves(inputs), strict=True)}
    return session.run(None, feed)


@pytest.mark.one_in(8)
@pytest.mark.parametrize("case", CASES)
def test_exported_layers_run_in_onnxruntime(case):
    torch.manual_seed(0)
    make, operators = CASES[case]
    module = make()
    program, model, session = _session(module, _inputs(5, 6), (ROWS, BATCH, ROWS, BATCH))
    counts = Counter(node.op_type for node in model.graph.node)
    assert {name: counts[name] for name in ("LSTM", "GRU", "RNN", "Scan") if counts[name]} == (
        operators
    )
    for size in SIZES:
        inputs = _inputs(*size)
        with torch.no_grad():
            references = module(*inputs)
        results = _results(session, inputs)
        assert len(results) == len(references)
        for result, reference in zip(results, references, strict=True):
            scale = 1 + reference.abs().max().item()
            np.testing.assert_allclose(result, reference.numpy(), rtol=0, atol=1e-5 * scale)
    if case == "torch.nn":  # whose operators PyTorch does not have
        first, *_ = program.exported_program.module()(*inputs)
        assert first.isnan().any()


class Marked(torch.nn.Module):
    """Layers whose sequences end where rows do not."""

    def __init__(self):
        super().__init__()
        self.gru, self.lstm = pararnn.ParaGRU(4, 8), pararnn.LSTM(4, 8)
        self.delta = pararnn.ParaRNN(zoo.GatedDeltaCell, 4, 8, num_heads=2)

    def forward(self, x, cu_seqlens, reset, states):
        packed = [self.gru(x[:1], cu_seqlens=cu_seqlens), self.delta(x[:1], cu_seqlens=cu_seqlens)]
        restarted = self.gru(x, reset=reset, reset_states=states)
        return tree_leaves([*packed, restarted, self.delta(x, reset=reset), self.lstm(x[0])])


class Attends(torch.nn.Module):
    """A layer that reads a memory by windows of its past attention."""

    def __init__(self):
        super().__init__()
        sizes = {"K": 3, "E": 4, "J": 3, "C": 2}
        self.layer = pararnn.ParaRNN(zoo.LocationAttentionLSTMCell, 4, 6, **sizes)

    def forward(self, x, keys, values, mask):
        output, final = self.layer(x, memory={"keys": keys, "values": values, "mask": mask})
        return [output, *final]


@pytest.mark.thorough
def test_windows_run_in_onnxruntime():
    torch.manual_seed(0)
    module = Attends()
    inputs = tuple(torch.randn(2, *size) for size in ((6, 4), (5, 3), (5, 4), (5,)))
    _, _, session = _session(module, inputs, None)
    with torch.no_grad():
        references = module(*inputs)
    for result, reference in zip(_results(session, inputs), references, strict=True):
        np.testing.assert_allclose(result, reference.numpy(), rtol=0, atol=2e-5)


@pytest.mark.thorough
def test_marks_of_sequences_run_in_onnxruntime():
    torch.manual_seed(0)

    def inputs_of(batch, steps):
        reset = torch.rand(batch, steps) < 0.3
        ends = torch.tensor([0, 2, 2, steps - 1, *[steps] * (steps // 20)])
        return torch.randn(batch, steps, 4), ends, reset, torch.randn(1, int(reset.sum()), 8)

    module = Marked()
    *_, session = _session(module, inputs_of(3, 9), (ROWS, BATCH, ROWS, {1: DYNAMIC}))
    for size in ((3, 9), (2, 45)):
        inputs = inputs_of(*size)
        with torch.no_grad():
            references = module(*inputs)
        for result, reference in zip(_results(session, inputs), references, strict=True):
            np.testing.assert_allclose(result, reference.numpy(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("function", PRECISE)
def test_functions_in_place_of_pytorchs_are_as_precise(function):
    sizes = torch.logspace(-12, 2.5, 200)
    x = torch.cat([sizes, -sizes, torch.tensor([0.0, -1.0, torch.inf, -torch.inf])])
    pairs = function in (torch.logaddexp, torch.Tensor.logaddexp)
    values = torch.meshgrid(x, x, indexing="ij") if pairs else [x]
    exact = function(*[v.double() for v in values]).float()
    tolerance = {"rtol": 1e-6, "atol": 1e-6 if pairs else 1e-37}
    torch.testing.assert_close(PRECISE[function](*values), exact, equal_nan=True, **tolerance)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("inside", [False, True])
def test_the_exporter_that_traces_is_refused(inside):
    layer = pararnn.GRU(4, 8)
    module = torch.nn.Sequential(layer) if inside else layer
    with pytest.raises(pararnn.EngineError, match="dynamo=True"):
        torch.onnx.export(module, (torch.randn(5, 2, 4),), io.BytesIO(), dynamo=False)
