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
    """A layer with initial states and the padding of rows, which returns all that it can."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x, state, lengths, gap=None):
        fields = {} if gap is None else {"fields": {"gap": gap}}
        return tree_leaves(self.layer(x, state, lengths=lengths, **fields))


def _inputs(layer, batch, steps, fields):
    count = len(type(layer.layers[0].cell).states)
    states = tuple(torch.randn(1, batch, 8) for _ in range(count))
    x, lengths = torch.randn(batch, steps, 4), torch.arange(batch) % steps + 1
    gaps = (torch.rand(batch, steps),) if fields else ()
    return (x, states if count > 1 else states[0], lengths, *gaps)


@pytest.mark.parametrize(
    ("make", "fields"),
    [
        (lambda: pararnn.ParaGRU(4, 8), False),
        (lambda: pararnn.ParaLSTM(4, 8), False),
        (lambda: pararnn.ParaRNN(Memory, 4, 8, num_heads=2), True),
    ],
    ids=["gru", "lstm", "user's"],
)
def test_the_exported_loop_runs_in_onnxruntime(make, fields, tmp_path):
    torch.manual_seed(0)
    layer = make()
    module = Whole(layer).eval()
    example = _inputs(layer, 5, 6, fields)
    states = example[1]
    batch = {1: DYNAMIC}
    sizes = [ROWS, batch if torch.is_tensor(states) else (batch,) * len(states), {0: DYNAMIC}]
    sizes += [ROWS] if fields else []
    path = tmp_path / "layer.onnx"
    with torch.no_grad():
        program = torch.onnx.export(
            module, example, dynamic_shapes=tuple(sizes), dynamo=True, verbose=False, optimize=False
        )
    program.save(path)
    model = onnx.load(path)
    onnx.checker.check_model(model, full_check=True)
    assert [node.op_type for node in model.graph.node].count("Scan") == layer.num_layers
    session = onnxruntime.InferenceSession(path)
    names = [each.name for each in session.get_inputs()]
    for batch_size, steps in ((5, 6), (1, 1), (3, 40)):
        inputs = _inputs(layer, batch_size, steps, fields)
        with torch.no_grad():
            references = module(*inputs)
        feed = {n: t.numpy() for n, t in zip(names, tree_leaves(inputs), strict=True)}
        results = session.run(None, feed)
        assert len(results) == len(references)
        for result, reference in zip(results, references, strict=True):
            np.testing.assert_allclose(result, reference.numpy(), rtol=1e-5, atol=1e-6)
