"""Exported loops in onnxruntime: `Scan`s that give the layer's results at any batch and length."""

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_leaves
from user_cells import Memory

import pararnn

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

DYNAMIC = torch.export.Dim.DYNAMIC
ROWS = {0: DYNAMIC, 1: DYNAMIC}


class Whole(torch.nn.Module):
    """Layers with initial states and the padding of rows, which return all that they can."""

    def __init__(self):
        super().__init__()
        self.gru, self.lstm = pararnn.ParaGRU(4, 8), pararnn.ParaLSTM(4, 8)
        self.own = pararnn.ParaRNN(Memory, 4, 8, num_heads=2)

    def forward(self, x, lengths, gap, gru_state, lstm_states, own_states):
        runs = [
            self.gru(x, gru_state, lengths=lengths),
            self.lstm(x, lstm_states, lengths=lengths),
            self.own(x, own_states, lengths=lengths, fields={"gap": gap}),
        ]
        return tree_leaves(runs)


def _inputs(batch, steps):
    h, *others = torch.randn(6, 1, batch, 8)
    x, lengths = torch.randn(batch, steps, 4), torch.arange(batch) % steps + 1
    return x, lengths, torch.rand(batch, steps), h, (*others[:2],), (*others[2:],)


@pytest.mark.thorough
def test_exported_loops_run_in_onnxruntime(tmp_path):
    torch.manual_seed(0)
    module = Whole().eval()
    states = {1: DYNAMIC}
    sizes = (ROWS, {0: DYNAMIC}, ROWS, states, 2 * (states,), 3 * (states,))
    path = tmp_path / "layer.onnx"
    with torch.no_grad():
        program = torch.onnx.export(
            module, _inputs(5, 6), dynamic_shapes=sizes, dynamo=True, verbose=False, optimize=False
        )
    program.save(path)
    model = onnx.load(path)
    onnx.checker.check_model(model, full_check=True)
    assert [node.op_type for node in model.graph.node].count("Scan") == 3
    session = onnxruntime.InferenceSession(path)
    names = [each.name for each in session.get_inputs()]
    for batch_size, steps in ((5, 6), (1, 1), (3, 40)):
        inputs = _inputs(batch_size, steps)
        with torch.no_grad():
            references = module(*inputs)
        feed = {n: t.numpy() for n, t in zip(names, tree_leaves(inputs), strict=True)}
        results = session.run(None, feed)
        assert len(results) == len(references)
        for result, reference in zip(results, references, strict=True):
            np.testing.assert_allclose(result, reference.numpy(), rtol=1e-5, atol=1e-6)
