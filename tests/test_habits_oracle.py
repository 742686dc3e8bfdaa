"""ParaGRU against torch.nn.GRU, where both can say the same thing: diagonal recurrence.

The paper's z is 1 - z of torch.nn.GRU, and its reset gate comes before the recurrent product:
where that is diagonal and has no bias, both orders agree.
"""

import pytest
import torch
from test_habits import agree, input_of, layer_of, pairs, results
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

import pararnn


def _parts(layer):
    """The parts of each layer and direction by the suffix that torch.nn.GRU gives them."""
    yield from ((f"_l{i}", part) for i, part in enumerate(layer.layers))
    if layer.bidirectional:
        yield from ((f"_l{i}_reverse", part) for i, part in enumerate(layer.reverse_layers))


def _torch_gru(layer):
    """torch.nn.GRU with the weights of a ParaGRU of one head."""
    options = {"batch_first": layer.batch_first, "bidirectional": layer.bidirectional}
    a = layer.cell.a_z
    gru = nn.GRU(4, 6, layer.num_layers, device=a.device, dtype=a.dtype, **options)
    weights = {}
    for suffix, part in _parts(layer):
        z, r, c = part.proj.weight[0].chunk(3)
        weights[f"weight_ih{suffix}"] = torch.cat([r, -z, c])
        z, r, c = (part.cell.get_parameter(f"a_{gate}").diag() for gate in "zrc")
        weights[f"weight_hh{suffix}"] = torch.cat([r, -z, c])
        z, r, c = part.bias
        weights[f"bias_ih{suffix}"] = torch.cat([0.25 * r, -0.25 * z, c])
        weights[f"bias_hh{suffix}"] = torch.cat([0.75 * r, -0.75 * z, 0 * c])
    gru.load_state_dict(weights)
    return gru


def _as_ours(layer, theirs):
    """Results of torch.nn.GRU by the names of a ParaGRU's."""
    ours = {name: value for name, value in theirs.items() if "_l" not in name}
    names = {id(p): f"grad {name}" for name, p in layer.named_parameters()}
    for suffix, part in _parts(layer):
        r, z, c = theirs[f"grad weight_ih{suffix}"].chunk(3)
        ours[names[id(part.proj.weight)]] = torch.cat([-z, r, c]).unsqueeze(0)
        r, z, c = theirs[f"grad bias_ih{suffix}"].chunk(3)
        ours[names[id(part.bias)]] = torch.stack([-z, r, c])
        again = theirs[f"grad bias_hh{suffix}"].chunk(3)
        assert torch.allclose(again[0], r)
        assert torch.allclose(again[1], z)
        r, z, c = (block.diagonal() for block in theirs[f"grad weight_hh{suffix}"].chunk(3))
        for gate, grad in {"z": -z, "r": r, "c": c}.items():
            ours[names[id(part.cell.get_parameter(f"a_{gate}"))]] = grad
    return ours


def _run(module, layout):
    """The module as a function of a padded batch (B, T, C)."""

    def run(x, h_0):
        if layout == "time first":
            x = x.transpose(0, 1)
        if layout == "packed":
            x = pack_padded_sequence(x, [4, 9, 7], batch_first=True, enforce_sorted=False)
        output, h_n = module(x, h_0)
        return output.data if isinstance(output, PackedSequence) else output, h_n

    return run


@pytest.mark.parametrize("layout", ["batch first", "time first", "packed"])
@pytest.mark.parametrize("bidirectional", [False, True], ids=["forward", "both"])
@pytest.mark.parametrize("num_layers", [1, 2])
@pairs
def test_torch_gru(pair, num_layers, bidirectional, layout, device):
    options = {"num_layers": num_layers, "bidirectional": bidirectional, "num_heads": 1}
    options["batch_first"] = layout != "time first"
    layer = layer_of(pararnn.ParaGRU, pair, device, **options)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if "bias" in name or "cell" in name:
                parameter.normal_()
    gru, x = _torch_gru(layer), input_of(layer)
    theirs = results(layer, x, _run(gru, layout), parameters=dict(gru.named_parameters()))
    agree(results(layer, x, _run(layer, layout)), _as_ours(layer, theirs), 1e-9)
    x = x if layer.batch_first else x.transpose(0, 1)
    for got, reference in zip(layer(x), gru(x), strict=True):
        assert torch.allclose(got, reference, atol=1e-10)
