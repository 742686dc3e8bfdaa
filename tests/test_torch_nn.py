"""pararnn.LSTM, GRU and RNN are torch.nn's: results, gradients, weights, arguments."""

import copy
import io
import pickle
import warnings

import pytest
import torch
from call_results import as_tuple
from table import needs_compiler
from torch import nn
from torch.nn.utils import prune
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import pararnn

pytestmark = needs_compiler

PAIRS = {
    "LSTM": (pararnn.LSTM, nn.LSTM),
    "GRU": (pararnn.GRU, nn.GRU),
    "RNN": (pararnn.RNN, nn.RNN),
}
TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-5}
VARIANTS = {
    "plain": {},
    "two layers in both directions": {"num_layers": 2, "bidirectional": True, "dropout": 0.5},
    "no bias, batch first": {"bias": False, "batch_first": True},
    "initial states": {"initial": True, "bidirectional": True},
    "unbatched": {"batch": None, "initial": True},
    "packed": {"lengths": [3, 9, 1, 9], "batch": 4, "bidirectional": True, "initial": True},
    "packed, sorted": {"lengths": [9, 4, 4], "sort": True, "num_layers": 2},
    "one step": {"steps": 1},
}
"""Arguments of the layers, and of `_inputs`."""


def _pair(name, dtype=torch.float64, inputs=5, width=12, **options):
    """Our layer and torch.nn's, in evaluation, with the same weights."""
    torch.manual_seed(0)
    ours, theirs = (cls(inputs, width, dtype=dtype, **options).eval() for cls in PAIRS[name])
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def _inputs(layer, dtype, batch=3, steps=9, initial=False, lengths=None, sort=False):
    """Return an input and initial states, leaves."""
    size = (steps, layer.input_size) if batch is None else (steps, batch, layer.input_size)
    if layer.batch_first:
        size = (batch, steps, layer.input_size)
    x = torch.randn(size, dtype=dtype, requires_grad=True)
    hx = None
    if initial:
        count = layer.num_layers * (1 + layer.bidirectional)
        size = (count,) if batch is None else (count, batch)
        widths = [layer.proj_size or layer.hidden_size, layer.hidden_size]
        hx = tuple(
            torch.randn(*size, width, dtype=dtype, requires_grad=True)
            for width in widths[: 1 + (layer.mode == "LSTM")]
        )
    return x, hx, None if lengths is None else (lengths, sort)


def _run(layer, x, hx, packing):
    """Outputs, and gradients of the input, the initial states and all weights in their order."""
    data = x
    if packing is not None:
        data = pack_padded_sequence(x, packing[0], enforce_sorted=packing[1])
    out, final = layer(data, hx if hx is None or len(hx) > 1 else hx[0])
    if packing is not None:
        out, lengths = pad_packed_sequence(out)
        assert lengths.tolist() == packing[0]
    results = [out, *as_tuple(final)]
    torch.manual_seed(1)
    noise = [torch.randn(result.shape, dtype=result.dtype) for result in results]
    loss = sum((own * result).sum() for own, result in zip(noise, results, strict=True))
    return [*results, *torch.autograd.grad(loss, [x, *(hx or ()), *layer.parameters()])]


def _differences(own, reference):
    assert len(own) == len(reference)
    for a, b in zip(own, reference, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
    return [
        float((a - b).detach().abs().max() / b.detach().abs().max().clamp(min=1e-30))
        for a, b in zip(own, reference, strict=True)
    ]


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.one_in(5)
def test_results_and_gradients_are_those_of_torch_nn(name, variant, dtype):
    options = dict(VARIANTS[variant])
    kinds = ("batch", "steps", "initial", "lengths", "sort")
    inputs = {kind: options.pop(kind) for kind in kinds if kind in options}
    ours, theirs = _pair(name, dtype, **options)
    case = _inputs(ours, dtype, **inputs)
    assert max(_differences(_run(ours, *case), _run(theirs, *case))) <= TOLERANCES[dtype]


PROJECTED = {
    "plain": {},
    "two layers in both directions": {"num_layers": 2, "bidirectional": True},
    "no bias, batch first": {"bias": False, "batch_first": True},
    "initial states": {"initial": True, "bidirectional": True},
    "unbatched": {"batch": None, "initial": True},
    "packed": {"lengths": [3, 9, 1, 9], "batch": 4, "bidirectional": True, "initial": True},
}


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("variant", PROJECTED)
def test_projected_lstms_are_those_of_torch_nn(variant, dtype):
    """With the states' two lengths, and weight_hr_l0."""
    options = dict(PROJECTED[variant])
    kinds = ("batch", "steps", "initial", "lengths", "sort")
    inputs = {kind: options.pop(kind) for kind in kinds if kind in options}
    ours, theirs = _pair("LSTM", dtype, proj_size=4, **options)
    case = _inputs(ours, dtype, **inputs)
    assert max(_differences(_run(ours, *case), _run(theirs, *case))) <= TOLERANCES[dtype]
    assert ours.layers[0].choice.pair == ("sequential", "fused")


def test_projected_lstms_have_what_layers_have():
    """Weights from a seed, steps, resets to given states, lengths, copies, verify, attributes."""
    layers = []
    for cls in PAIRS["LSTM"]:
        torch.manual_seed(3)
        layers.append(cls(5, 12, 2, proj_size=4, batch_first=True))
    layer, theirs = layers
    assert list(layer.state_dict()) == list(theirs.state_dict())
    assert all(map(torch.equal, layer.parameters(), theirs.parameters()))
    for name in ("hidden_size", "proj_size", "input_size", "num_layers", "mode"):
        assert getattr(layer, name) == getattr(theirs, name)
    x = torch.randn(3, 7, 5)
    layer.check_forward_args(x, (torch.zeros(2, 3, 4), torch.zeros(2, 3, 12)), None)
    assert "proj_size=4" in repr(layer)
    output, final = layer(x)
    for grad in (torch.enable_grad(), torch.no_grad()):
        with grad:
            state, outputs = None, []
            for t in range(7):
                y, state = layer.step(x[:, t], state)
                outputs.append(y)
        torch.testing.assert_close(torch.stack(outputs, 1), output)
        torch.testing.assert_close(state, final)
    reset = torch.zeros(3, 7, dtype=torch.bool)
    reset[:, 4] = True
    start = torch.randn(2, 3, 4), torch.randn(2, 3, 12)
    restarted = layer(x, reset=reset, reset_states=start)
    torch.testing.assert_close(restarted[0][:, 4:], layer(x[:, 4:], start)[0])
    short, _ = layer(x, lengths=[7, 2, 5])
    torch.testing.assert_close(short[1, :2], output[1, :2])
    assert not short[1, 2:].any()
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(other(x)[0], output)
    assert pararnn.verify(layer, x, start, reset=reset, reset_states=start).passed
    half = layer.to(torch.bfloat16)
    states = half(x.bfloat16())[1]
    assert {h.dtype for h in states} == {torch.bfloat16}
    with pytest.raises(ValueError, match=r"sizes \[\(2, 3, 4\), \(2, 3, 12\)\]"):
        layer(x, (start[1], start[1]))


@pytest.mark.parametrize("nonlinearity", ["tanh", "relu"])
def test_nonlinearities_of_rnn(nonlinearity):
    """As the fourth argument, where torch.nn.RNN has it."""
    ours, theirs = (cls(5, 12, 1, nonlinearity, dtype=torch.float64) for cls in PAIRS["RNN"])
    ours.load_state_dict(theirs.state_dict())
    assert ours.mode == theirs.mode
    case = _inputs(ours, torch.float64)
    assert max(_differences(_run(ours, *case), _run(theirs, *case))) <= 1e-12


@pytest.mark.parametrize("name", PAIRS)
def test_another_order_of_gates_is_seen(name):
    """The comparison above fails if gates, a matrix's sides or biases change places."""
    ours, theirs = _pair(name)
    case = _inputs(ours, torch.float64)
    reference = _run(theirs, *case)
    weights = theirs.state_dict()
    gates = len(weights["weight_hh_l0"]) // 12
    others = [{"weight_hh_l0": weights["weight_hh_l0"].T.contiguous()}] if gates == 1 else []
    for first in range(gates - 1):
        order = torch.arange(gates)
        order[[first, first + 1]] = order[[first + 1, first]]
        others += [
            {key: weights[key].unflatten(0, (gates, 12))[order].flatten(0, 1)}
            for key in ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0")
        ]
    if name == "GRU":
        exchange = {"bias_ih_l0": weights["bias_hh_l0"], "bias_hh_l0": weights["bias_ih_l0"]}
        others.append(exchange)
    assert others
    for other in others:
        ours.load_state_dict({**weights, **other})
        assert max(_differences(_run(ours, *case)[:2], reference[:2])) > 1e-3


@pytest.mark.parametrize("name", PAIRS)
def test_heads_are_layers_of_their_own(name):
    """Head i has the recurrent matrix weight_hh_l0[i], of a torch.nn layer of its channels."""
    torch.manual_seed(0)
    heads, width = 3, 8
    ours = PAIRS[name][0](5, heads * width, dtype=torch.float64, num_heads=heads)
    assert ours.weight_hh_l0.shape == (heads, len(ours.weight_ih_l0) // heads, width)
    assert ours.weight_hh_l0.abs().max() <= width**-0.5
    assert ours.weight_hh_l0.abs().max() > (heads * width) ** -0.5
    x = torch.randn(7, 2, 5, dtype=torch.float64)
    out, _ = ours(x)
    for head in range(heads):
        theirs = PAIRS[name][1](5, width, dtype=torch.float64)

        def rows(weight, head=head):
            return weight.detach().unflatten(0, (-1, heads, width))[:, head].flatten(0, 1)

        theirs.load_state_dict(
            {
                "weight_ih_l0": rows(ours.weight_ih_l0),
                "weight_hh_l0": ours.weight_hh_l0[head],
                "bias_ih_l0": rows(ours.bias_ih_l0),
                "bias_hh_l0": rows(ours.bias_hh_l0),
            }
        )
        own = out[..., head * width : (head + 1) * width]
        torch.testing.assert_close(own, theirs(x)[0], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", PAIRS)
def test_weights_are_those_of_torch_nn(name):
    """Names, their order, shapes and, from a seed, values; they load both ways."""
    options = {"num_layers": 2, "bidirectional": True}
    layers = []
    for cls in PAIRS[name]:
        torch.manual_seed(3)
        layers.append(cls(5, 12, **options))
    own, reference = (layer.state_dict() for layer in layers)
    assert list(own) == list(reference)
    assert [n for n, _ in layers[0].named_parameters()] == [*reference]
    assert all(torch.equal(own[key], reference[key]) for key in reference)
    for a, b in zip(layers[0].all_weights, layers[1].all_weights, strict=True):
        assert [w.shape for w in a] == [w.shape for w in b]
    layers[0].reset_parameters()
    assert not torch.equal(layers[0].weight_hh_l1, layers[1].weight_hh_l1)
    layers[1].load_state_dict(layers[0].state_dict())
    assert torch.equal(layers[0].weight_hh_l1, layers[1].weight_hh_l1)
    layers[0].flatten_parameters()


def test_attributes_are_those_of_torch_nn():
    for ours, theirs in PAIRS.values():
        own, reference = ours(5, 12, 2), theirs(5, 12, 2)
        for name in ("mode", "input_size", "hidden_size", "num_layers", "bias", "batch_first"):
            assert getattr(own, name) == getattr(reference, name)
        for name in ("dropout", "bidirectional", "proj_size"):
            assert getattr(own, name) == getattr(reference, name)


def _orthogonal(module):
    """What code for torch.nn does with `Module.apply`."""
    if isinstance(module, nn.RNNBase):
        for name, weight in module.named_parameters():
            (nn.init.orthogonal_ if "weight_hh" in name else nn.init.zeros_)(weight)


@pytest.mark.parametrize("name", PAIRS)
def test_what_rnnbase_promises_holds(name):
    """isinstance(module, nn.RNNBase), which initialisations and groups of parameters look for."""
    ours, theirs = (nn.Sequential(cls(5, 12, 2, bidirectional=True)) for cls in PAIRS[name])
    for model in (ours, theirs):
        torch.manual_seed(0)
        model.apply(_orthogonal)
    (ours,), (theirs,) = ours, theirs
    assert isinstance(ours, nn.RNNBase)
    for own, weight in zip(ours._flat_weights, theirs._flat_weights, strict=True):
        assert torch.equal(own, weight)
    assert ours._flat_weights_names == theirs._flat_weights_names
    x, packed = torch.randn(7, 3, 5), torch.tensor([3, 2])
    for layer in (ours, theirs):
        layer.check_input(x, None)
        with pytest.raises(RuntimeError, match=r"equal to input_size\. Expected 5, got 4"):
            layer.check_input(x[..., :4], None)
        assert layer.get_expected_hidden_size(x, None) == (4, 3, 12)
        assert layer.get_expected_hidden_size(x[0], packed) == (4, 3, 12)
        layer.check_hidden_size(torch.zeros(4, 3, 12), (4, 3, 12))
        hx = torch.arange(144.0).view(4, 3, 12)
        hx = (hx, hx) if name == "LSTM" else hx
        layer.check_forward_args(x, hx, None)
        hx = layer.permute_hidden(hx, torch.tensor([2, 0, 1]))
        assert float((hx[0] if name == "LSTM" else hx)[0, 0, 0]) == 24
    ours.weight_hh_l1 = nn.Parameter(torch.ones(ours.weight_hh_l1.shape))
    ours.double()
    flat = [weight for weights in ours.all_weights for weight in weights]
    assert all(a is b for a, b in zip(ours._flat_weights, flat, strict=True))
    assert torch.equal(flat[9], torch.ones_like(flat[9]))
    for other in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert other._flat_weights[0] is other.weight_ih_l0 is not ours.weight_ih_l0
        assert torch.equal(other(x.double())[0], ours(x.double())[0])
    assert len(ours._replicate_for_data_parallel()._flat_weights) == 16


def test_dynamic_quantisation_leaves_them():
    """It looks for the classes of torch.nn alone; weights may go to one of them first."""
    model = nn.Sequential(pararnn.LSTM(5, 12), nn.LSTM(5, 12))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model[1].load_state_dict(model[0].state_dict())
        other = torch.ao.quantization.quantize_dynamic(model)
    x = torch.randn(7, 3, 5)
    assert type(other[0]) is pararnn.LSTM
    assert type(other[1]) is not nn.LSTM
    assert torch.equal(other[0](x)[0], model[0](x)[0])
    torch.testing.assert_close(other[1](x)[0], model[0](x)[0], rtol=0.05, atol=0.05)


COMPUTED = {
    "weight_norm": lambda m: nn.utils.parametrizations.weight_norm(m, "weight_hh_l0"),
    "spectral_norm": lambda m: nn.utils.parametrizations.spectral_norm(m, "weight_hh_l0"),
    "orthogonal": lambda m: nn.utils.parametrizations.orthogonal(m, "weight_hh_l0"),
    "older weight_norm": lambda m: nn.utils.weight_norm(m, "weight_hh_l0"),
    "prune": lambda m: prune.l1_unstructured(m, "weight_hh_l0", 0.5),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("how", COMPUTED)
@pytest.mark.parametrize("name", PAIRS)
def test_weights_that_are_computed(name, how):
    """By parametrisations and hooks: as in torch.nn, with their gradients, and in `step`, too."""
    ours, theirs = _pair(name, batch_first=True)
    x = torch.randn(3, 6, 5, dtype=torch.float64)
    for module in (ours, theirs):
        torch.manual_seed(0)
        COMPUTED[how](module)
        with torch.no_grad():
            for weight in module.parameters():
                weight.mul_(1.5)
    assert [n for n, _ in ours.named_parameters()] == [n for n, _ in theirs.named_parameters()]
    # `step` first: no forward pass has run hooks yet.
    state, outputs = None, []
    for t in range(6):
        y, state = ours.step(x[:, t], state)
        outputs.append(y)
    for module in (ours, theirs):
        module(x)[0].square().sum().backward()
    reference = theirs(x)[0]
    torch.testing.assert_close(ours(x)[0], reference)
    torch.testing.assert_close(torch.stack(outputs, 1), reference)
    for own, weight in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(own.grad, weight.grad)


def test_repr_shows_the_nonlinearity():
    assert "nonlinearity='relu'" in repr(pararnn.RNN(5, 12, nonlinearity="relu"))


def test_dropout_is_between_layers_in_training_only():
    ours, _ = _pair("GRU", num_layers=2, dropout=1.0)
    x = torch.randn(6, 2, 5, dtype=torch.float64)
    evaluation = ours(x)[0]
    ours.train()
    silent = ours(x)[0]
    assert not torch.allclose(silent, evaluation)
    torch.testing.assert_close(silent, ours(x + 1)[0])  # the second layer sees zeros
    whole = copy.deepcopy(ours).eval()
    torch.testing.assert_close(whole(x)[0], evaluation)


def test_what_is_not_supported_says_so():
    for size in (12, -1):
        with pytest.raises(ValueError, match=f"from 1 to hidden_size - 1 = 11, got {size}"):
            pararnn.LSTM(5, 12, proj_size=size)
    with pytest.raises(ValueError, match="one head, got num_heads = 2"):
        pararnn.LSTM(5, 12, proj_size=3, num_heads=2)
    with pytest.raises(ValueError, match="all_states of ProjectedLSTMCell"):
        pararnn.LSTM(5, 12, proj_size=3)(torch.randn(3, 2, 5), all_states=True)
    for cls in (pararnn.GRU, pararnn.RNN, pararnn.LayerNormLSTM, pararnn.LayerNormGRU):
        with pytest.raises(ValueError, match="has no proj_size, got 3"):
            cls(5, 12, proj_size=3)
    with pytest.raises(ValueError, match="hidden_size must be a multiple of num_heads = 5, got 12"):
        pararnn.GRU(5, 12, num_heads=5)
    with pytest.raises(ValueError, match="num_heads must be positive, got 0"):
        pararnn.LSTM(5, 12, num_heads=0)
    with pytest.raises(TypeError, match="hidden_size must be an integer, got '12'"):
        pararnn.LSTM(5, "12")
    with pytest.raises(AttributeError, match="mode names the cell, LSTM"):
        pararnn.LSTM(5, 12).mode = "PARALLEL"
    with pytest.raises(TypeError, match="RNN has no recurrent_std"):
        pararnn.RNN(5, 12, recurrent_std=0.1)
    layer = pararnn.GRU(5, 12)
    with pytest.raises(TypeError, match="hold no weights: call the whole"):
        layer.layers[0](torch.randn(2, 3, 5))


def test_calls_of_pararnn_work_too():
    """Steps, resets, lengths, all states, recomputed gates, requests of solvers."""
    torch.manual_seed(0)
    options = {"num_layers": 2, "batch_first": True, "dtype": torch.float64, "num_heads": 2}
    layer = pararnn.LSTM(5, 12, **options)
    x = torch.randn(3, 7, 5, dtype=torch.float64)
    reset = torch.zeros(3, 7, dtype=torch.bool)
    reset[:, 4] = True
    out, final, states = layer(x, reset=reset, all_states=True)
    torch.testing.assert_close(out[:, 4:], layer(x[:, 4:])[0])
    assert torch.equal(states[1][0], out)
    state, outputs = None, []
    for t in range(7):
        own, state = layer.step(x[:, t], state, reset=reset[:, t])
        outputs.append(own)
    torch.testing.assert_close(torch.stack(outputs, 1), out)
    torch.testing.assert_close(state, final)
    loop = layer(x, reset=reset, solver="sequential", backend="torch")[0]
    torch.testing.assert_close(loop, out)
    assert layer.layers[0].choice.pair == ("sequential", "torch")
    _, last = layer(x, lengths=[7, 2, 5])
    torch.testing.assert_close(last[0][1, 1], layer(x[1:2, :2])[0][0, -1])
    frugal = pararnn.LSTM(5, 12, recompute_gates=True, **options)
    frugal.load_state_dict(layer.state_dict())
    for own, reference in zip(*(_grads(m, x) for m in (frugal, layer)), strict=True):
        torch.testing.assert_close(own, reference)


def _grads(module, x):
    return torch.autograd.grad(module(x)[0].sin().sum(), list(module.parameters()))


def test_tools_take_them():
    torch.manual_seed(0)
    model = nn.Sequential(pararnn.GRU(5, 12, 2, num_heads=2, bidirectional=True))
    report = pararnn.verify(model, torch.randn(6, 2, 5))
    assert report.passed, report
    assert len(report.layers) == 4
    layer = model[0]
    assert pararnn.explain(layer, (6, 2, 5)).size == (2, 6, 12)
    assert torch.equal(layer.cell.R_z[1], layer.weight_hh_l0[1, 6:12])
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    pararnn.clip_after_step(optimizer, model, to=0.1)
    optimizer.step()
    assert layer.weight_hh_l1_reverse.abs().max() <= 0.1 < layer.weight_ih_l0.abs().max()


def test_modules_are_copied_stored_moved_and_compiled():
    ours, _ = _pair("LSTM", bidirectional=True)
    x = torch.randn(6, 2, 5, dtype=torch.float64)
    reference = ours(x)[0]
    buffer = io.BytesIO()
    torch.save(ours, buffer)
    buffer.seek(0)
    others = [copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))]
    others.append(torch.load(buffer, weights_only=False))
    with torch.no_grad():
        ours.weight_hh_l0.zero_()
    assert not torch.allclose(ours(x)[0], reference)
    for other in others:
        assert torch.equal(other(x)[0], reference)
    other = others[0]
    weights = {n: p.detach() * 0 for n, p in other.named_parameters()}
    assert not torch.func.functional_call(other, weights, (x,))[0].any()
    torch.compiler.reset()
    whole = torch.compile(other, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(whole(x)[0], reference)
    dims = ({0: torch.export.Dim("steps"), 1: torch.export.Dim("batch")},)
    program = torch.export.export(other, (x,), dynamic_shapes=dims)
    torch.testing.assert_close(program.module()(x.repeat(2, 3, 1)), other(x.repeat(2, 3, 1)))
    torch.nn.utils.parametrizations.weight_norm(other, "weight_hh_l0")
    torch.testing.assert_close(other(x)[0], reference)
    with pytest.raises(ValueError, match="weight_hh_l0 is computed by a parametrisation"):
        other.clip_recurrent(to=0.1)
    half = others[1].to(torch.bfloat16)
    out, (h_n, c_n) = half(x.bfloat16())
    assert {t.dtype for t in (out, h_n, c_n)} == {torch.bfloat16}
    with torch.device("meta"):
        empty = pararnn.LSTM(5, 12, bidirectional=True, dtype=torch.float64)
    empty.load_state_dict(others[2].state_dict(), assign=True)
    assert torch.equal(empty(x)[0], reference)
