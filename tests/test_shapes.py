"""The meta device: forward and backward passes give the shapes and dtypes of a run, and no more."""

import copy

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence
from torch.utils._pytree import tree_leaves

import pararnn


class Put(pararnn.Cell):
    """A step that no kernel takes, and a readout."""

    states = ("h",)
    gates = ("x",)
    structure = "sequential"

    def step(self, state, gate, param):
        return 0.5 * state.h + gate.x

    def readout(self, state, gate, param):
        return state.h * gate.x


LAYERS = {
    "gru": (pararnn.GRUCell, {}),
    "lstm": (pararnn.LSTMCell, {"num_layers": 2, "bidirectional": True, "num_heads": 2}),
    "fused": (pararnn.LSTMCell, {"solver": "newton", "backend": "fused"}),
    "bfloat16": (pararnn.GRUCell, {"dtype": torch.bfloat16, "recompute_gates": True}),
    "readout": (Put, {}),
}
CALLS = {
    "plain": {},
    "lengths": {"lengths": [3, 20]},
    "reset": {"reset": torch.zeros(2, 20, dtype=torch.bool)},
}


def _on_meta(value):
    return value.to("meta") if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("name", LAYERS)
def test_shapes_of_a_run(name, call):
    cell, options = LAYERS[name]
    layer = pararnn.ParaRNN(cell, 4, 6, **options)
    x = torch.randn(2, 20, 4, dtype=options.get("dtype"))
    other = copy.deepcopy(layer).to("meta")
    with pararnn.using(*(("sequential", "torch") if name == "fused" else ())):
        reference = layer(x, **call)
    x = x.to("meta").requires_grad_()
    got = other(x, **{name: _on_meta(value) for name, value in call.items()})
    for mine, own in zip(tree_leaves(got), tree_leaves(reference), strict=True):
        assert (mine.shape, mine.dtype, mine.device.type) == (own.shape, own.dtype, "meta")
    got[0].sum().backward()
    for leaf in (x, *other.parameters()):
        assert (leaf.grad.shape, leaf.grad.dtype) == (leaf.shape, leaf.dtype)


def test_other_calls():
    where = {"device": "meta"}
    layer, x = pararnn.ParaGRU(4, 6, **where), torch.randn(1, 20, 4, **where)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        assert layer.step(x[:, 0])[0].shape == (1, 6)
    assert layer(x, cu_seqlens=torch.zeros(3, dtype=torch.int64, **where))[1].shape == (1, 2, 6)
    rows = pack_sequence([torch.zeros(3, 4, **where), torch.zeros(2, 4, **where)])
    assert layer(rows)[0].data.shape == (5, 6)
    reset, states = torch.zeros(1, 20, dtype=torch.bool, **where), torch.zeros(1, 3, 6, **where)
    assert layer(x, reset=reset, reset_states=states)[0].shape == (1, 20, 6)
    assert pararnn.scan(torch.ones(3, **where), torch.ones(2, 4, 3, **where)).shape == (2, 4, 3)
    assert "shapes alone" in pararnn.explain(layer, x.shape).why
    with pytest.raises(ValueError, match="the meta device takes no time"):
        pararnn.autotune(layer, x.shape)
