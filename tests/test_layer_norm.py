"""LayerNormLSTM and LayerNormGRU: the modules that people have, by their weights."""

import copy
import pickle

import pytest
import torch
from call_results import as_tuple
from table import needs_compiler
from torch import nn
from torch.nn.utils.rnn import pack_sequence, pad_packed_sequence, pad_sequence

import pararnn

pytestmark = needs_compiler

INPUTS, WIDTH = 5, 12


class OfTorchScript(nn.Module):
    """The layer-norm LSTM of PyTorch's example of TorchScript."""

    def __init__(self):
        super().__init__()
        self.weight_ih = nn.Parameter(torch.randn(4 * WIDTH, INPUTS))
        self.weight_hh = nn.Parameter(torch.randn(4 * WIDTH, WIDTH))
        self.layernorm_i, self.layernorm_h = nn.LayerNorm(4 * WIDTH), nn.LayerNorm(4 * WIDTH)
        self.layernorm_c = nn.LayerNorm(WIDTH)

    def forward(self, x, state):
        h, c = state
        gates = self.layernorm_i(x @ self.weight_ih.t()) + self.layernorm_h(h @ self.weight_hh.t())
        i, f, g, o = gates.chunk(4, 1)
        c = self.layernorm_c(f.sigmoid() * c + i.sigmoid() * g.tanh())
        return o.sigmoid() * c.tanh(), c


class OfTorchaudio(nn.Module):
    """The layer-norm LSTM of torchaudio's RNN-T."""

    def __init__(self):
        super().__init__()
        self.x2g = nn.Linear(INPUTS, 4 * WIDTH, bias=False)
        self.p2g = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.c_norm, self.g_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(4 * WIDTH)

    def forward(self, x, state):
        h, c = state
        i, f, g, o = self.g_norm(self.x2g(x) + self.p2g(h)).chunk(4, 1)
        c = self.c_norm(f.sigmoid() * c + i.sigmoid() * g.tanh())
        return o.sigmoid() * c.tanh(), c


class OfDreamer(nn.Module):
    """DreamerV2's GRU with its norm: one dense layer of the input and the state."""

    def __init__(self, bias=True):
        super().__init__()
        self.layer = nn.Linear(INPUTS + WIDTH, 3 * WIDTH, bias=bias)
        self.norm = nn.LayerNorm(3 * WIDTH, eps=1e-3)

    def forward(self, x, state):
        (h,) = state
        reset, candidate, update = self.norm(self.layer(torch.cat([x, h], -1))).chunk(3, -1)
        candidate, update = torch.tanh(reset.sigmoid() * candidate), torch.sigmoid(update - 1)
        return (update * candidate + (1 - update) * h,)


def _norms(**names):
    return {
        f"{ours}_{kind}": f"{theirs}.{kind}"
        for ours, theirs in names.items()
        for kind in ("weight", "bias")
    }


NAMES = {
    OfTorchScript: {"weight_ih": "weight_ih", "weight_hh": "weight_hh"}
    | _norms(norm_ih="layernorm_i", norm_hh="layernorm_h", norm_c="layernorm_c"),
    OfTorchaudio: {"weight_ih": "x2g.weight", "weight_hh": "p2g.weight"}
    | _norms(norm_hh="g_norm", norm_c="c_norm"),
}
"""Our names of weights, without the layer's number, and theirs: as the docs have them."""


def _weights(module):
    """Weights of a module by our names."""
    values = dict(module.named_parameters())
    if isinstance(module, OfDreamer):
        of_input, of_state = values["layer.weight"].split([INPUTS, WIDTH], 1)
        bias = {"bias": values["layer.bias"]} if "layer.bias" in values else {}
        norm = {f"norm_{kind}": values[f"norm.{kind}"] for kind in ("weight", "bias")}
        return {"weight_ih": of_input, "weight_hh": of_state, **bias, **norm}
    return {ours: values[theirs] for ours, theirs in NAMES[type(module)].items()}


MODULES = {
    "TorchScript's": (OfTorchScript, pararnn.LayerNormLSTM, {}),
    "torchaudio's": (OfTorchaudio, pararnn.LayerNormLSTM, {"norm_of_sum": True}),
    "Dreamer's": (OfDreamer, pararnn.LayerNormGRU, {}),
    "Dreamer's, without a bias": (lambda: OfDreamer(False), pararnn.LayerNormGRU, {"bias": False}),
}


def _layer(name, **more):
    torch.manual_seed(0)
    _, cls, options = MODULES[name]
    options = {"dtype": torch.float64, **options, **more}
    layer = cls(INPUTS, WIDTH, **options)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, mean=float(parameter.ndim == 1), std=0.4)
    return layer


def _pair(name):
    """Their module and our layer, with the same weights."""
    torch.manual_seed(0)
    theirs = MODULES[name][0]().double()
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, mean=float(parameter.ndim == 1), std=0.4)
    ours = _layer(name)
    ours.load_state_dict({f"{key}_l0": value for key, value in _weights(theirs).items()})
    return ours, theirs


def _flat(result):
    output, final = result
    return [output, *as_tuple(final)]


@pytest.mark.parametrize("name", MODULES)
def test_results_and_gradients_are_those_of_the_module(name):
    ours, theirs = _pair(name)
    x = torch.randn(9, 3, INPUTS, dtype=torch.float64, requires_grad=True)
    start = tuple(torch.randn(3, WIDTH, dtype=torch.float64) for _ in ours.layers[0].cell.states)
    state, outputs = start, []
    for x_t in x:
        state = theirs(x_t, state)
        outputs.append(state[0])
    given = tuple(h[None] for h in start)
    output, *final = _flat(ours(x, given if len(given) > 1 else given[0]))
    runs = []
    for results, weights in (
        ([torch.stack(outputs), *state], _weights(theirs)),
        ([output, *(h[0] for h in final)], {k[:-3]: w for k, w in ours.named_parameters()}),
    ):
        torch.manual_seed(1)
        loss = sum((result * torch.randn(result.shape).double()).sum() for result in results)
        names = sorted(weights)
        # Slices of a dense layer's weight have gradients of their own.
        leaves = [x, *(w for n in names if (w := weights[n]).is_leaf)]
        grads = torch.autograd.grad(loss, leaves, retain_graph=True)
        if not all(w.is_leaf for w in weights.values()):
            (whole,) = torch.autograd.grad(loss, theirs.layer.weight)
            of_input, of_state = whole.split([INPUTS, WIDTH], 1)
            at = {"weight_ih": of_input, "weight_hh": of_state}
            rest = iter(grads[1:])
            grads = [grads[0], *(at[n] if n in at else next(rest) for n in names)]
        runs.append([*results, *grads])
    for mine, own in zip(*runs, strict=True):
        torch.testing.assert_close(mine, own, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.one_in(3)
def test_layers_directions_lengths_and_resets(name):
    """A stack in both directions, by its kernels, against the loop in PyTorch."""
    layer = _layer(name, num_layers=2, bidirectional=True, batch_first=True, dropout=0.5).eval()
    rows = [torch.randn(n, INPUTS, dtype=torch.float64) for n in (4, 9, 1)]
    packed, h_packed = layer(pack_sequence(rows, enforce_sorted=False))
    padded, h_padded = layer(pad_sequence(rows, batch_first=True), lengths=[4, 9, 1])
    torch.testing.assert_close(pad_packed_sequence(packed, batch_first=True)[0], padded)
    torch.testing.assert_close(h_packed, h_padded)
    x = torch.randn(3, 9, INPUTS, dtype=torch.float64)
    reset = torch.zeros(3, 9, dtype=torch.bool)
    reset[:, 5] = True
    results = []
    for backend in ("fused", "torch"):
        with pararnn.using("sequential", backend):
            results.append(layer(x, reset=reset))
    torch.testing.assert_close(*results)
    one = _layer(name, batch_first=True)
    torch.testing.assert_close(one(x, reset=reset)[0][:, 5:], one(x[:, 5:])[0])
    assert one(x, all_states=True)[2][0][0].shape == (3, 9, WIDTH)


@pytest.mark.parametrize("name", MODULES)
def test_steps_are_those_of_the_layer(name):
    layer = _layer(name, num_layers=2)
    x = torch.randn(6, 3, INPUTS, dtype=torch.float64)
    output, final = layer(x)
    state, outputs = None, []
    with torch.no_grad():
        for x_t in x:
            y, state = layer.step(x_t, state)
            outputs.append(y)
    torch.testing.assert_close(torch.stack(outputs), output)
    torch.testing.assert_close(state, final)
    layer = _layer(name)
    torch.testing.assert_close(layer.step(x[0])[0], layer(x[:1])[0][0])


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.one_in(3)
def test_they_run_by_kernels_and_are_verified(name):
    layer = _layer(name, dtype=torch.float32)
    x = torch.randn(20, 3, INPUTS)
    layer(x)
    assert layer.layers[0].choice.pair == ("sequential", "fused")
    assert pararnn.verify(layer, x).passed
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x)[0].dtype == torch.bfloat16
    half = layer.to(torch.bfloat16)
    assert {t.dtype for t in _flat(half(x.bfloat16()))} == {torch.bfloat16}
    assert pararnn.verify(half, x.bfloat16()).passed


@pytest.mark.parametrize("name", MODULES)
def test_first_values_and_copies(name):
    _, cls, options = MODULES[name]
    layer = cls(INPUTS, WIDTH, 2, bidirectional=True, **options)
    for key, value in layer.named_parameters():
        if key.startswith("weight"):
            assert 0 < float(value.detach().abs().max()) <= WIDTH**-0.5
        else:
            assert torch.equal(value, torch.full_like(value, float("_weight_" in key)))
    x = torch.randn(4, 2, INPUTS)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(other(x)[0], layer(x)[0])
    assert len(layer.all_weights) == 4


def test_options():
    with pytest.raises(ValueError, match="recompute_gates=True computes gates by a matrix product"):
        pararnn.LayerNormLSTM(INPUTS, WIDTH, recompute_gates=True)
    layer = _layer("torchaudio's")
    again = _layer("torchaudio's", recompute_gates=True)
    again.load_state_dict(layer.state_dict())
    x = torch.randn(4, 2, INPUTS, dtype=torch.float64)
    grads = []
    for module in (layer, again):
        loss = module(x)[0].square().sum()
        grads.append(torch.autograd.grad(loss, list(module.parameters())))
    torch.testing.assert_close(*grads)
    assert layer.mode == "LayerNormLSTM"
    other = _layer("Dreamer's", eps=0.5, update_bias=0.0)
    other.load_state_dict(_layer("Dreamer's").state_dict())
    assert not torch.allclose(other(x)[0], _layer("Dreamer's")(x)[0])
