"""Layers on a GPU: outputs, states and gradients are those of the same layer on the CPU."""

import copy
import warnings

import pytest
import torch

import pararnn
from pararnn.zoo import AttentionLSTMCell, GRUODECell, HeadGRUDCell, TTTLinearCell


def _x(*size):
    return torch.randn(*size, dtype=torch.float64)


def _stack(cls, **options):
    return lambda: (cls(6, 16, 2, batch_first=True, **options), (_x(3, 9, 6),), {})


def _cell(cls):
    states = (_x(3, 16), _x(3, 16)) if cls is pararnn.layers.LSTMCell else _x(3, 16)
    return cls(6, 16), (_x(3, 6), states), {}


def _of_cell(cell, width=16, fields=(), **options):
    layer = pararnn.ParaRNN(cell, 6, width, **options)
    given = {name: torch.rand(3, 9, dtype=torch.float64) for name in fields}
    return layer, (_x(3, 9, 6),), {"fields": given} if given else {}


def _attention():
    layer = pararnn.ParaRNN(AttentionLSTMCell, 6, 16, K=5, E=7)
    mask = torch.zeros(3, 11, dtype=torch.float64)
    mask[1, 4:] = -torch.inf
    memory = {"keys": _x(3, 11, 5), "values": _x(3, 11, 7), "mask": mask}
    return layer, (_x(3, 9, 6),), {"memory": memory}


def _world(cls):
    if cls is pararnn.DreamerGRU:
        layer = cls((5, 3), 16, num_blocks=4, width=8)
        return layer, ([_x(3, 9, 5), _x(3, 9, 3)],), {}
    layer = cls(
        3, 6, belief_size=16, hidden_size=8, num_categoricals=3, num_classes=4, num_blocks=4
    )
    return layer, (_x(3, 9, 3), _x(3, 9, 6)), {"noise": _x(3, 9, 3, 4)}


LAYERS = {
    "SLSTMLayer": lambda: (pararnn.SLSTMLayer(16), (_x(3, 9, 16),), {}),
    "LSTM, proj_size": _stack(pararnn.LSTM, proj_size=5),
    "LayerNormLSTM": _stack(pararnn.LayerNormLSTM),
    "LayerNormGRU": _stack(pararnn.LayerNormGRU),
    "LSTMCell": lambda: _cell(pararnn.layers.LSTMCell),
    "GRUCell": lambda: _cell(pararnn.layers.GRUCell),
    "RNNCell": lambda: _cell(pararnn.RNNCell),
    "GRU-D": lambda: _of_cell(HeadGRUDCell, fields=HeadGRUDCell.fields),
    "GRU-ODE": lambda: _of_cell(GRUODECell, fields=GRUODECell.fields),
    "TTT-Linear": lambda: _of_cell(TTTLinearCell, num_heads=2, K=8),
    "attention": _attention,
    "DreamerGRU": lambda: _world(pararnn.DreamerGRU),
    "RSSM": lambda: _world(pararnn.RSSM),
}


def _moved(value, *to):
    if torch.is_tensor(value):
        return value.detach().to(*to).requires_grad_()
    if isinstance(value, dict):
        return {key: _moved(x, *to) for key, x in value.items()}
    return type(value)(_moved(x, *to) for x in value)


def _leaves(value):
    if torch.is_tensor(value):
        return [value]
    values = value.values() if isinstance(value, dict) else value
    return [leaf for x in values for leaf in _leaves(x)]


def _results(layer, inputs, options):
    results = [x for x in _leaves(layer(*inputs, **options)) if x.requires_grad]
    arriving = [torch.linspace(-1, 1, x.numel(), dtype=torch.float64) for x in results]
    arriving = [a.view(x.shape).to(x) for a, x in zip(arriving, results, strict=True)]
    leaves = [*_leaves([*inputs]), *_leaves(options), *layer.parameters()]
    grads = torch.autograd.grad(results, leaves, arriving, allow_unused=True)
    return [*results, *grads]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_results_are_those_of_the_cpu(name, dtype, device):
    """Of those in float64, by the pair that `auto` takes."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        layer, inputs, options = LAYERS[name]()
        layer = layer.double().train()
        there = copy.deepcopy(layer).to(device, dtype)
        wanted = _results(layer, _moved(inputs, "cpu"), _moved(options, "cpu"))
        found = _results(there, _moved(inputs, device, dtype), _moved(options, device, dtype))
    assert len(found) == len(wanted) > 1
    for ours, reference in zip(found, wanted, strict=True):
        assert (ours is None) == (reference is None)
        if reference is not None:
            scale, bound = reference.abs().max().item(), 1e-10 if dtype == torch.float64 else 1e-4
            ours = ours.cpu().double()
            torch.testing.assert_close(ours, reference.double(), rtol=0, atol=bound * (1 + scale))
