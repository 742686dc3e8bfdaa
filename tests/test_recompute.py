"""`recompute_gates` gives what the layer without it gives, or raises as that does."""

import weakref

import pytest
import torch
from table import PAIRS
from torch import nn
from torch.func import functional_call
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import pararnn
from pararnn.lm import LanguageModel, LMConfig
from pararnn.sequences import Sequences

PAIR = {pair: dict(zip(("solver", "backend"), pair, strict=True)) for pair in PAIRS}


@pytest.fixture(params=PAIRS, ids="-".join)
def pair(request):
    return PAIR[request.param]


def _layer(recompute, cell=pararnn.LRCCell, **options):
    torch.manual_seed(0)
    options = {"num_heads": 2, "dtype": torch.float64, **options}
    return pararnn.RecurrentLayer(cell, 4, 6, recompute_gates=recompute, **options)


def _inputs():
    torch.manual_seed(1)
    seq = torch.zeros(2, 12, dtype=torch.int32) + torch.tensor([[0], [1]], dtype=torch.int32)
    return {
        "x": torch.randn(2, 12, 4, dtype=torch.float64),
        "initial": torch.randn(2, 6, dtype=torch.float64),
        "dt": torch.rand(2, 12, 6, dtype=torch.float64),
        "reset": torch.rand(2, 12) < 0.2,
        "seq": seq.contiguous(),
    }


def _loss(layer, x, initial, dt, reset, seq):
    options = {"fields": {"dt": dt}, "reset": reset, "sequences": Sequences(seq, 2)}
    return layer(x, initial, **options)[0].square().mean()


def _grads(loss, layer):
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(layer.parameters()))])


CHANGES = {
    "all weights": lambda layer, inputs: [p.mul_(1.5) for p in layer.parameters()],
    "the bias": lambda layer, inputs: layer.bias.add_(1),
    "the cell": lambda layer, inputs: next(layer.cell.parameters()).mul_(3),
    "the projection": lambda layer, inputs: layer.proj.weight.mul_(3),
    "loading": lambda layer, inputs: layer.load_state_dict(
        {k: 2 * v for k, v in layer.state_dict().items()}
    ),
    "the input": lambda layer, inputs: inputs["x"].mul_(3),
    "the state": lambda layer, inputs: inputs["initial"].mul_(3),
    "the field": lambda layer, inputs: inputs["dt"].mul_(3),
    "resets": lambda layer, inputs: inputs["reset"].logical_not_(),
    "sequences": lambda layer, inputs: inputs["seq"].fill_(-1),
}


@pytest.mark.parametrize("what", list(CHANGES))
@pytest.mark.one_in(3)
def test_what_changes_before_the_backward_pass(pair, what):
    """By an optimizer, or a state that is carried along in a buffer."""
    layer, inputs = _layer(False, **pair), _inputs()
    right = _grads(_loss(layer, **inputs), layer)
    for recompute in (False, True):
        layer, inputs = _layer(recompute, **pair), _inputs()
        loss = _loss(layer, **inputs)
        with torch.no_grad():
            CHANGES[what](layer, inputs)
        try:
            got = _grads(loss, layer)
        except RuntimeError as error:
            assert "modified by an inplace operation" in str(error)  # noqa: PT017
        else:
            assert torch.equal(got, right)


def test_other_weights_for_a_call(pair):
    other = _layer(False, **pair)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.7).add_(0.1)
    options = {"fields": {"dt": 0.7}}
    x = _inputs()["x"]
    right = _grads(other(x, **options)[0].square().mean(), other)
    layer = _layer(True, **pair)
    weights = {k: p.detach().requires_grad_() for k, p in other.named_parameters()}
    output, _ = functional_call(layer, weights, (x,), options)
    got = torch.autograd.grad(output.square().mean(), list(weights.values()))
    assert torch.equal(torch.cat([g.flatten() for g in got]), right)

    def loss(weights):
        return functional_call(layer, weights, (x,), options)[0].square().mean()

    got = torch.func.grad(loss)({k: p.detach() for k, p in weights.items()})
    assert torch.allclose(torch.cat([g.flatten() for g in got.values()]), right)


def _old_weight_norm(layer):
    nn.utils.weight_norm(layer.proj, "weight")


def _spectral_norm(layer):
    """Wrap a layer by spectral norm, which makes a step of its iteration at every call."""
    parametrizations.spectral_norm(layer.proj, "weight", dim=1)


def _with_hook(layer):
    layer.proj.register_full_backward_hook(lambda *_: None)


WRAPPED = {"weight norm": _old_weight_norm, "spectral": _spectral_norm, "backward hook": _with_hook}


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("name", list(WRAPPED))
@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
def test_hooks_of_the_projection_run_once(name, heads):
    results, x = [], _inputs()["x"]
    for recompute in (False, True):
        layer = _layer(recompute, pararnn.GRUCell, num_heads=heads)
        torch.manual_seed(2)
        WRAPPED[name](layer)
        calls = []
        layer.proj.register_forward_pre_hook(lambda *_: calls.append(1))  # noqa: B023
        output, _ = layer(x)
        results.append(_grads(output.square().mean(), layer))
        assert calls == [1]
    assert torch.equal(*results)


def test_a_hook_that_changes_what_is_projected():
    results, x = [], _inputs()["x"]
    for recompute, change in ((False, lambda *a: 2 * a[2]), (True, lambda *a: 2 * a[2])):
        layer = _layer(recompute, pararnn.GRUCell)
        layer.proj.register_forward_hook(change)
        if recompute:
            with pytest.warns(UserWarning, match="these gates are kept"):
                output, _ = layer(x)
        else:
            output, _ = layer(x)
        results.append(_grads(output.square().mean(), layer))
    assert torch.equal(*results)
    layer = _layer(True, pararnn.GRUCell)
    layer.proj.register_forward_hook(lambda *a: a[2].add_(1))
    with pytest.warns(UserWarning, match="these gates are kept"):
        layer(x)


def test_recomputing_saves_no_gates(pair):
    layer, refs = _layer(True, **pair), []
    layer.proj.register_forward_hook(lambda module, inputs, gates: refs.append(weakref.ref(gates)))
    loss = _loss(layer, **_inputs())
    assert refs[0]() is None
    loss.backward()


def test_weights_that_are_let_go_and_come_back():
    """As FSDP2 has it: their memory is freed after the forward pass, and filled again."""
    layer, plain, x = _layer(True, pararnn.GRUCell), _layer(False, pararnn.GRUCell), _inputs()["x"]
    loss = layer(x)[0].square().mean()
    parameters = list(layer.parameters())
    values = [p.detach().clone() for p in parameters]
    sizes = [p.untyped_storage().nbytes() for p in parameters]
    for parameter in parameters:
        parameter.untyped_storage().resize_(0)
    for parameter, value, size in zip(parameters, values, sizes, strict=True):
        parameter.untyped_storage().resize_(size)
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(parameter):
            parameter.copy_(value)
    assert torch.equal(_grads(loss, layer), _grads(plain(x)[0].square().mean(), plain))


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("cell", [pararnn.GRUCell, pararnn.SLSTMCell])
def test_autocast_nested_and_twice(heads, cell):
    """Whatever the backward pass is within; a readout is made again as well."""
    results, x = [], torch.randn(2, 12, 4)
    for recompute in (False, True):
        layer = _layer(recompute, cell, num_heads=heads, dtype=torch.float32)
        with torch.autocast("cpu", torch.bfloat16):
            loss = checkpoint(lambda x, of=layer: of(x)[0], x, use_reentrant=False).float().sum()
        once = torch.autograd.grad(loss, list(layer.parameters()), retain_graph=True)
        twice = torch.autograd.grad(loss, list(layer.parameters()), retain_graph=True)
        assert all(map(torch.equal, once, twice))
        with torch.autocast("cpu", torch.float16):
            results.append((*once, _grads(loss, layer)))
    assert all(map(torch.equal, *results))


def test_another_context_in_the_backward_pass():
    """The engine stays that of the forward pass."""
    layer, plain = _layer(True, pararnn.GRUCell), _layer(False, pararnn.GRUCell)
    x = _inputs()["x"]
    with pararnn.using("newton", "torch"):
        losses = [each(x)[0].square().mean() for each in (layer, plain)]
    with pararnn.using("sequential", "torch"):
        assert torch.equal(*map(_grads, losses, (layer, plain)))


def test_compiled_code_checks_too():
    layer, x, state = _layer(True, pararnn.GRUCell), _inputs()["x"], _inputs()["initial"]
    output, _ = torch.compile(layer, backend="aot_eager")(x, state)
    state.mul_(3)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "not strict"])
def test_exported_programs_hold_no_checkpoint(strict):
    layer, x = pararnn.ParaGRU(4, 6, recompute_gates=True), torch.randn(3, 9, 4)
    sizes = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    program = torch.export.export(layer, (x,), dynamic_shapes={"x": sizes}, strict=strict)
    for inputs in (x, torch.randn(2, 30, 4)):
        assert torch.equal(program.module()(inputs)[0], layer(inputs)[0])


def test_language_models():
    config = LMConfig(16, 2, vocab_size=8, num_heads=2, recompute_gates=True)
    torch.manual_seed(0)
    model = LanguageModel(config)
    plain = LanguageModel(LMConfig(16, 2, vocab_size=8, num_heads=2))
    tokens = torch.randint(8, (2, 12))
    weights = {k: p.detach().clone().requires_grad_() for k, p in plain.named_parameters()}
    results = [
        torch.autograd.grad(
            functional_call(each, weights, (tokens,)).square().mean(), list(weights.values())
        )
        for each in (model, plain)
    ]
    assert all(map(torch.equal, *results))
    loss = model(tokens).square().mean()
    with torch.no_grad():
        for layer in model.recurrent_layers():
            layer.bias.mul_(1.5).add_(0.1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
