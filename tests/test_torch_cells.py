"""pararnn.LSTMCell, GRUCell and RNNCell are torch.nn's: results, gradients, weights, arguments."""

import copy
import pickle

import pytest
import torch
from call_results import as_tuple
from table import needs_compiler
from test_layer_norm import _flat
from torch import nn
from torch.nn.utils import parametrizations, prune

import pararnn
from pararnn.layers import direct

pytestmark = needs_compiler

NAMES = ("LSTMCell", "GRUCell", "RNNCell")
TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 2e-2}


def _pair(name, dtype=torch.float64, inputs=5, width=12, **options):
    """Our module and torch.nn's, with the same weights."""
    torch.manual_seed(0)
    ours, theirs = (
        getattr(library, name)(inputs, width, dtype=dtype, **options) for library in (pararnn, nn)
    )
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def _start(name, *size, dtype=torch.float64):
    torch.manual_seed(2)
    states = tuple(torch.randn(size, dtype=dtype) for _ in range(1 + (name == "LSTMCell")))
    return states if len(states) > 1 else states[0]


def _loop(module, x, state=None):
    """What old loops do: the first state of each step, and the last states."""
    outputs = []
    for x_t in x:
        state = module(x_t, state)
        outputs.append(state[0] if isinstance(state, tuple) else state)
    return [torch.stack(outputs), *as_tuple(state)]


def _assert_near(ours, theirs, tolerance):
    for a, b in zip(ours, theirs, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert float((a - b).detach().abs().max()) <= tolerance * float(b.detach().abs().max())


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("batch", [(), (3,)], ids=["unbatched", "batched"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.one_in(4)
def test_results_and_gradients_are_those_of_torch_nn(name, batch, bias, dtype):
    """With gradients and, by cached launches, without; from zero and from given states."""
    pair = _pair(name, dtype, bias=bias)
    x = torch.randn(7, *batch, 5, dtype=dtype, requires_grad=True)
    for start in (None, _start(name, *batch, 12, dtype=dtype)):
        runs = []
        for module in pair:
            results = _loop(module, x, start)
            loss = sum((r * torch.arange(r.numel()).view(r.shape).cos()).sum() for r in results)
            grads = torch.autograd.grad(loss, [x, *module.parameters()])
            with torch.no_grad():
                runs.append([*results, *_loop(module, x, start), *grads])
        _assert_near(*runs, TOLERANCES[dtype])


@pytest.mark.parametrize("nonlinearity", ["tanh", "relu"])
def test_nonlinearities_of_the_rnn(nonlinearity):
    pair = _pair("RNNCell", nonlinearity=nonlinearity)
    x = torch.randn(4, 3, 5, dtype=torch.float64)
    _assert_near(*(_loop(module, x) for module in pair), 1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_those_of_torch_nn(name):
    """Names, their order, shapes and, from a seed, values; they load both ways."""
    modules = []
    for library in (pararnn, nn):
        torch.manual_seed(3)
        modules.append(getattr(library, name)(5, 12))
    ours, theirs = modules
    assert isinstance(ours, getattr(nn, name))
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert all(
        torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True)
    )
    theirs.load_state_dict(ours.state_dict())
    assert (ours.input_size, ours.hidden_size, ours.bias) == (5, 12, True)
    for other in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        x = torch.randn(2, 5)
        assert torch.equal(_loop(other, [x])[0], _loop(ours, [x])[0])


COMPUTED = {
    "weight_norm": lambda m: parametrizations.weight_norm(m, "weight_hh"),
    "prune": lambda m: prune.l1_unstructured(m, "weight_ih", 0.5),
}


@pytest.mark.parametrize("how", COMPUTED)
@pytest.mark.parametrize("name", NAMES)
def test_weights_that_are_computed(name, how):
    pair = _pair(name)
    x = torch.randn(4, 3, 5, dtype=torch.float64)
    runs = []
    for module in pair:
        COMPUTED[how](module)
        with torch.no_grad():
            for weight in module.parameters():
                weight.mul_(1.5)
            results = _loop(module, x)
        runs.append(results + _loop(module, x))
    _assert_near(*runs, 1e-12)


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
def test_steps_of_cells_and_layers_have_the_same_bits(name):
    cell = getattr(pararnn, name)(8, 32)
    layer = getattr(pararnn, name.removesuffix("Cell"))(8, 32)
    layer.load_state_dict({f"{key}_l0": value for key, value in cell.state_dict().items()})
    state, of_layer = None, None
    for x in torch.randn(4, 3, 8):
        state, (_, of_layer) = cell(x, state), layer.step(x, of_layer)
        for own, other in zip(_flat((x, state))[1:], _flat((x, of_layer))[1:], strict=True):
            assert torch.equal(own, other[0])


@pytest.mark.parametrize("name", NAMES)
def test_autocast_keeps_the_dtype_of_states(name):
    ours, theirs = _pair(name, torch.float32)
    x, start = torch.randn(3, 5), _start(name, 3, 12, dtype=torch.float32)
    for grad in (torch.enable_grad(), torch.no_grad()):
        with torch.autocast("cpu", torch.bfloat16), grad:
            results = [_loop(module, [x], start) for module in (ours, theirs)]
        assert {r.dtype for r in results[0]} == {torch.float32}
        _assert_near(*([r.float() for r in run] for run in results), 2e-2)


@pytest.mark.one_in(7)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_in_one_graph(name, backend):
    ours, theirs = _pair(name)
    x = torch.randn(3, 3, 5, dtype=torch.float64, requires_grad=True)
    runs = []
    for run in (torch.compile(ours, fullgraph=True, backend=backend), theirs):
        results = _loop(run, x, _start(name, 3, 12))
        runs.append([*results, torch.autograd.grad(results[0].sum(), x)[0]])
    _assert_near(*runs, 1e-12)


def test_second_derivatives():
    """By kernels, and by the loop in PyTorch, they are torch.nn's."""
    ours, theirs = _pair("GRUCell")
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)

    def second(module):
        (first,) = torch.autograd.grad(module(x).sin().sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)[0]

    torch.testing.assert_close(second(ours), second(theirs))
    with pararnn.using(backend="torch"):
        torch.testing.assert_close(second(ours), second(theirs))
    by_torch = pararnn.GRUCell(5, 12, dtype=torch.float64, backend="torch")
    by_torch.load_state_dict(theirs.state_dict())
    torch.testing.assert_close(second(by_torch), second(theirs))


def test_one_name_for_a_cell_and_a_module():
    """An input size, which no cell has and torch.nn's always have, tells them apart."""
    for name in ("LSTMCell", "GRUCell"):
        cell, module = getattr(pararnn, name), getattr(pararnn.layers, name)
        for args, options in (
            ((8, 16), {}),
            ((8, 16, False), {}),
            ((8,), {"hidden_size": 16}),
            ((), {"input_size": 8, "hidden_size": 16, "bias": False}),
        ):
            assert type(cell(*args, **options)) is module
        for args, options in (((16,), {}), ((), {"hidden_size": 16, "num_heads": 2})):
            assert type(cell(*args, **options)) is cell
        assert type(copy.deepcopy(cell(16))) is cell
        assert cell is pararnn.CELLS[name.removesuffix("Cell").lower()]
        made = type("Made", (cell,), {})
        with pytest.raises(TypeError, match="recurrence alone"):
            made(8, 16)
    assert pararnn.RNNCell is pararnn.layers.RNNCell


def test_what_does_not_fit_is_named():
    cell = pararnn.LSTMCell(5, 12)
    x, h = torch.randn(3, 5), torch.zeros(3, 12)
    for grad in (torch.enable_grad(), torch.no_grad()):
        with grad:
            with pytest.raises(ValueError, match="LSTMCell: Expected input to be 1D or 2D, got 3D"):
                cell(x[None])
            with pytest.raises(ValueError, match="Expected 5, got 4"):
                cell(x[:, :4])
            with pytest.raises(ValueError, match="initial state 'c' must be "):
                cell(x, (h, h[:2]))
            with pytest.raises(ValueError, match=r"must hold 2 tensor\(s\)"):
                cell(x, h)
            with pytest.raises(TypeError, match="hx must be a tensor, got list"):
                cell(x, (h, [0.0]))
            with pytest.raises(ValueError, match="does not match weight dtype"):
                cell(x.double())
    with torch.no_grad(), pytest.raises(ValueError, match=r"LRCCell takes the fields \['dt'\]"):
        pararnn.ParaRNN(pararnn.LRCCell, 5, 12).step(x)
    with torch.no_grad(), pytest.raises(ValueError, match=r"Expected hidden states \('h',\)"):
        pararnn.ParaGRU(5, 12).step(x, h)
    with pytest.raises(pararnn.EngineError, match="backend"):
        pararnn.GRUCell(5, 12, backend="cuda")


# Cached launches, which steps without gradients run by: of layers, stacks and these modules.


LAYERS = {
    "RecurrentLayer": lambda **o: pararnn.RecurrentLayer(pararnn.LSTMCell, 8, 32, **o),
    "by heads": lambda **o: pararnn.RecurrentLayer(pararnn.HeadLSTMCell, 8, 32, num_heads=4, **o),
    "ParaGRU": lambda **o: pararnn.ParaGRU(8, 32, **o),
    "LSTM": lambda **o: pararnn.LSTM(8, 32, **o),
    "GRU": lambda **o: pararnn.GRU(8, 32, bias=False, **o),
    "GRU of heads": lambda **o: pararnn.GRU(8, 32, num_heads=2, **o),
    "stack": lambda **o: pararnn.GRU(8, 32, num_layers=2, **o),
    # Without a launch of this kind: readouts, matrix states, PyTorch.
    "SLSTM": lambda **o: pararnn.SLSTM(8, 32, num_heads=2, **o),
    "M2RNN": lambda **o: pararnn.ParaRNN(pararnn.zoo.M2RNNCell, 8, 32, num_heads=4, K=4, **o),
    "projected": lambda **o: pararnn.LSTM(8, 32, proj_size=6, **o),
    "loop": lambda **o: pararnn.ParaGRU(8, 32, backend="torch", **o),
}


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_steps_without_gradients_are_those_with_them(name, dtype):
    layer = LAYERS[name](dtype=dtype)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.3)
    state = None
    for x in torch.randn(3, 2, 8, dtype=dtype):
        usual = layer.step(x, state)
        with torch.no_grad():
            result = layer.step(x, state)
        # To the bit: acting and learning must not differ.
        assert all(map(torch.equal, _flat(result), _flat(usual)))
        assert len({t.data_ptr() for t in _flat(result)}) == len(_flat(result))
        state = usual[1]


@torch.no_grad()
def test_a_launch_is_found_by_the_layout_of_its_tensors(monkeypatch):
    """One plan a layout; what a launch does not take runs as before."""
    plans = []
    plan = direct._plan_step
    monkeypatch.setattr(direct, "_plan_step", lambda *args: plans.append(plan(*args)) or plans[-1])
    pararnn.clear_caches()
    layer = pararnn.GRU(8, 32)
    x, h = torch.randn(2, 8), torch.randn(1, 2, 32)
    for _ in range(3):
        layer.step(x, h)
        layer.step(x.clone(), layer.step(x, h)[1])
    assert len(plans) == 1
    assert plans[0] is not None
    wide = torch.randn(1, 2, 64)
    for state in (None, h.double(), wide[..., ::2], wide[..., :32], h[:, :1].expand(1, 2, 32)):
        expected = layer(x[None], state)[1]
        torch.testing.assert_close(layer.step(x, state)[1], expected.float())
    negative = torch._neg_view(h)
    assert negative.is_neg()
    assert negative.is_contiguous()
    torch.testing.assert_close(layer.step(x, negative), layer.step(x, negative.resolve_neg()))


@torch.no_grad()
def test_both_states_may_be_one_tensor():
    """Launches are planned on memory of their own, whatever the first call's tensors share."""
    pararnn.clear_caches()
    layer = pararnn.LSTM(8, 32)
    x, h = torch.randn(2, 8), torch.randn(1, 2, 32)
    layer.step(x, (h, h))
    state = (h, torch.randn(1, 2, 32))
    torch.testing.assert_close(layer.step(x, state)[1], layer(x[None], state)[1])


def test_steps_are_calls_of_a_forward_of_ones_own():
    class Loud(pararnn.RecurrentLayer):
        def forward(self, *args, **options):
            output, final = super().forward(*args, **options)
            return output + 1, final

    layer = Loud(pararnn.GRUCell, 8, 32)
    x = torch.randn(2, 8)
    with torch.no_grad():
        assert torch.equal(layer.step(x)[0], layer(x[:, None])[0][:, 0])


def test_hooks_and_counts_of_steps_without_gradients():
    layer = pararnn.ParaGRU(8, 32)
    x = torch.randn(2, 8)
    with torch.no_grad():
        layer.step(x)
    assert [int(n) for n in (layer.last_solve.sweeps, layer.last_solve.mended)] == [0, 0]
    calls = []
    layer.layers[0].register_forward_hook(lambda *args: calls.append(args))
    with torch.no_grad():
        layer.step(x)
    assert len(calls) == 1


@torch.no_grad()
def test_steps_notice_weights_that_change():
    """In place, by .data, and by another parameter."""
    for layer in (pararnn.ParaGRU(8, 32), pararnn.LSTM(8, 32), pararnn.GRU(8, 32)):
        x = torch.randn(2, 8)
        layer.step(x)
        name = next(name for name, _ in layer.named_parameters())
        for parameter in layer.parameters():
            parameter.data.add_(0.1)
        owner, _, name = name.rpartition(".")
        module = layer.get_submodule(owner)
        setattr(module, name, nn.Parameter(2 * getattr(module, name)))
        output = layer(x[None] if not layer.batch_first else x[:, None])[0]
        torch.testing.assert_close(layer.step(x)[0], output.view(2, 32))


@pytest.mark.parametrize("name", NAMES)
def test_recurrent_weights_are_clipped(name):
    module, _ = _pair(name)
    with torch.no_grad():
        module.weight_hh.fill_(3.0)
        module.weight_ih.fill_(3.0)
    optimizer = torch.optim.SGD(module.parameters(), 0.0)
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    pararnn.clip_after_step(optimizer, module)
    optimizer.step()
    assert module.weight_hh.eq(3).all()  # no bound of its own
    pararnn.clip_after_step(optimizer, nn.ModuleList([module]), to=0.25)
    optimizer.step()
    assert module.weight_hh.eq(0.25).all()
    assert module.weight_ih.eq(3).all()
    parametrizations.weight_norm(module, "weight_hh")
    with pytest.raises(ValueError, match="weight_hh is computed by a parametrisation"):
        pararnn.clip_after_step(optimizer, module, to=0.25)
