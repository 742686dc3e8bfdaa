"""The paper's plain tensors A, B, b (and C) become a layer that computes the paper's equations."""

import pytest
import torch

import pararnn

D, INPUTS, HEADS = 6, 4, 2


def _tensors(gates, heads=1, peepholes=0):
    torch.manual_seed(0)
    size = (gates, D, INPUTS) if heads == 1 else (gates, heads, D // heads, INPUTS // heads)
    tensors = {"A": torch.randn(gates, D), "B": torch.randn(size), "b": torch.randn(gates, D)}
    if peepholes:
        tensors["C"] = torch.randn(peepholes, D)
    return {name: value.double() for name, value in tensors.items()}


def _project(B, x):
    """B x for each gate, heads included."""
    if B.ndim == 3:
        return torch.einsum("gdi,bti->gbtd", B, x)
    by_head = x.unflatten(-1, (B.shape[1], -1))
    return torch.einsum("ghdi,bthi->gbthd", B, by_head).flatten(-2)


def _gru(x, A, B, b):
    z_in, r_in, c_in = _project(B, x) + b[:, None, None]
    h, out = torch.zeros(len(x), D, dtype=x.dtype), []
    for t in range(x.shape[1]):
        z = torch.sigmoid(A[0] * h + z_in[:, t])
        r = torch.sigmoid(A[1] * h + r_in[:, t])
        c = torch.tanh(A[2] * (h * r) + c_in[:, t])
        h = (1 - z) * h + z * c
        out.append(h)
    return torch.stack(out, 1)


def _lstm(x, A, B, b, C):
    f_in, z_in, o_in = _project(B, x) + b[:, None, None]
    h, c, out = torch.zeros(len(x), D, dtype=x.dtype), torch.zeros(len(x), D, dtype=x.dtype), []
    for t in range(x.shape[1]):
        f = torch.sigmoid(A[0] * h + f_in[:, t] + C[0] * c)
        c = f * c + (1 - f) * torch.tanh(A[1] * h + z_in[:, t])
        o = torch.sigmoid(A[2] * h + o_in[:, t] + C[1] * c)
        h = o * torch.tanh(c)
        out.append(h)
    return torch.stack(out, 1)


CASES = [(pararnn.ParaGRU, _gru, 0), (pararnn.ParaLSTM, _lstm, 2)]


@pytest.mark.parametrize("heads", [1, HEADS])
@pytest.mark.parametrize(("make", "equations", "peepholes"), CASES)
def test_a_loaded_layer_computes_the_papers_equations(make, equations, peepholes, heads):
    layer = make(INPUTS, D, num_heads=heads, dtype=torch.float64)
    tensors = _tensors(3, heads, peepholes)
    pararnn.load_paper_weights(layer, **tensors)
    x = torch.randn(2, 20, INPUTS, dtype=torch.float64)
    assert torch.allclose(layer(x)[0], equations(x, **tensors), atol=1e-12)
    back = pararnn.paper_weights(layer)
    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[name], tensors[name]) for name in tensors)


def test_parts_of_a_deep_layer_and_tensors_by_head():
    deep = pararnn.ParaGRU(INPUTS, D, num_layers=2, bidirectional=True, num_heads=HEADS)
    tensors = _tensors(3, HEADS)
    by_head = {
        name: value.reshape(3, HEADS, D // HEADS, -1).squeeze(-1) for name, value in tensors.items()
    }
    pararnn.load_paper_weights(deep.reverse_layers[0], **by_head)
    back = pararnn.paper_weights(deep.reverse_layers[0])
    assert all(torch.equal(back[name], tensors[name].float()) for name in tensors)
    with pytest.raises(TypeError, match="one layer's weights"):
        pararnn.load_paper_weights(deep, **tensors)


def test_wrong_weights():
    gru, tensors = pararnn.ParaGRU(INPUTS, D), _tensors(3)
    with pytest.raises(ValueError, match=r"A must be \(3, 6\) or \(3, 1, 6\), got \(2, 6\)"):
        pararnn.load_paper_weights(gru, **{**tensors, "A": tensors["A"][:2]})
    with pytest.raises(ValueError, match=r"B must be .*\(3, 6, 4\), got \(3, 4, 6\)"):
        pararnn.load_paper_weights(gru, **{**tensors, "B": tensors["B"].mT})
    with pytest.raises(ValueError, match="GRUCell has 0 rows of peephole weights C"):
        pararnn.load_paper_weights(gru, **tensors, C=torch.zeros(2, D))
    with pytest.raises(ValueError, match="LSTMCell has 2 rows of peephole weights C"):
        pararnn.load_paper_weights(pararnn.ParaLSTM(INPUTS, D), **tensors)
    with pytest.raises(ValueError, match="make it with bias=True"):
        pararnn.load_paper_weights(pararnn.ParaGRU(INPUTS, D, bias=False), **tensors)
    with pytest.raises(TypeError, match="those of GRUCell, LSTMCell, got ElmanCell"):
        pararnn.load_paper_weights(pararnn.ParaRNN(pararnn.ElmanCell, INPUTS, D), **tensors)
    with pytest.raises(TypeError, match="B must be a tensor, got ndarray"):
        pararnn.load_paper_weights(gru, **{**tensors, "B": tensors["B"].numpy()})
    with pytest.raises(TypeError, match="those of GRUCell, LSTMCell, got HeadGRUCell"):
        pararnn.load_paper_weights(pararnn.GRU(INPUTS, D), **tensors)
