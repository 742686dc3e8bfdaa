"""Layers have torch.nn.GRU's habits, the paper's initialisation, and decode step by step."""

import copy
import io
import math
import pickle
import weakref
from contextlib import nullcontext

import pytest
import torch
from call_results import as_tuple
from table import CELLS
from torch import nn

import pararnn


def _fields(layer, *size):
    return {name: torch.rand(*size) for name in layer.cell.fields}


@pytest.mark.parametrize("name", list(CELLS))
def test_shapes_and_state_passing(name):
    layer = pararnn.ParaRNN(CELLS[name], 6, 8, num_layers=3, num_heads=2)
    x = torch.randn(4, 11, 6)
    fields = _fields(layer, 4, 11)
    output, h_n = layer(x, fields=fields)
    assert output.shape == (4, 11, 8)
    states = as_tuple(h_n)
    assert len(states) == len(layer.cell.states)
    assert {tuple(s.shape) for s in states} == {(3, 4, 8)}
    assert torch.allclose(states[0][-1], output[:, -1])
    half = {k: v[:, :5] for k, v in fields.items()}
    others = {k: v[:, 5:] for k, v in fields.items()}
    first, middle = layer(x[:, :5], fields=half)
    second, end = layer(x[:, 5:], middle, fields=others)
    assert torch.allclose(torch.cat([first, second], 1), output, atol=1e-6)
    ends = as_tuple(end)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(ends, states, strict=True))


@pytest.mark.parametrize("name", list(CELLS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.one_in(7)
def test_step_by_step_equals_forward(name, dtype):
    layer = pararnn.ParaRNN(CELLS[name], 4, 6, num_layers=2, num_heads=2, dtype=dtype)
    x = torch.randn(3, 9, 4, dtype=dtype)
    fields = _fields(layer, 3, 9)
    output, h_n = layer(x, fields=fields)
    state, steps = None, []
    for t in range(9):
        y, state = layer.step(x[:, t], state, fields={k: v[:, t] for k, v in fields.items()})
        steps.append(y)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    assert torch.allclose(torch.stack(steps, 1).double(), output.double(), atol=tolerance)
    pairs = zip(*map(as_tuple, (state, h_n)), strict=True)
    assert all(torch.allclose(a, b, atol=tolerance) for a, b in pairs)


def test_arguments_of_nn_gru():
    torch.manual_seed(0)
    layer = pararnn.ParaGRU(5, 7, 2, False, False, 0.0)  # as torch.nn.GRU(5, 7, 2, False, False)
    x = torch.randn(9, 3, 5)  # (T, B, C) without batch_first
    output, h_n = layer(x)
    assert output.shape == (9, 3, 7)
    assert h_n.shape == (2, 3, 7)
    assert not any("bias" in name for name, _ in layer.named_parameters())
    first = pararnn.ParaGRU(5, 7, 2, bias=False)
    first.load_state_dict(layer.state_dict())
    again, _ = first(x.transpose(0, 1))
    assert torch.equal(again.transpose(0, 1), output)
    reset = torch.zeros(9, 3, dtype=torch.bool)
    reset[4] = True
    tail, _ = layer(x[4:])
    assert torch.allclose(layer(x, reset=reset)[0][4:], tail, atol=1e-6)


def test_argument_names_of_nn_gru():
    layer = pararnn.ParaLSTM(5, 7)
    x, h_0 = torch.randn(2, 9, 5), (torch.randn(1, 2, 7), torch.randn(1, 2, 7))
    reference, one = layer(x, h_0)[0], layer.step(x[:, 0], h_0)[0]
    assert torch.equal(layer(input=x, hx=h_0)[0], reference)
    assert torch.equal(layer(x, hx=h_0)[0], reference)
    assert torch.equal(layer.step(input=x[:, 0], hx=h_0)[0], one)
    for both_names in ({"x": x, "input": x}, {"x": x, "h_0": h_0, "hx": h_0}):
        with pytest.raises(TypeError, match="two names of one argument: give one of them"):
            layer(**both_names)
    with pytest.raises(TypeError, match="state and hx are two names"):
        layer.step(x[:, 0], h_0, hx=h_0)
    with pytest.raises(TypeError, match="ParaLSTM needs its input: x, or input by name"):
        layer(hx=h_0)


def test_attributes_of_nn_gru():
    layer = pararnn.ParaGRU(5, 7, num_layers=2, bidirectional=True)
    assert layer.bias is True
    assert pararnn.ParaGRU(5, 7, bias=False).bias is False
    weights = layer.all_weights
    assert [len(part) for part in weights] == [5] * 4
    assert weights[1][0] is layer.reverse_layers[0].bias
    assert {id(w) for part in weights for w in part} == {id(p) for p in layer.parameters()}


def test_attributes_that_libraries_read():
    """proj_size and mode; the paper's modes cannot be assigned, which did nothing."""
    for ours, theirs in ((pararnn.ParaGRU, nn.GRU), (pararnn.ParaLSTM, nn.LSTM)):
        for name in ("mode", "proj_size"):
            assert getattr(ours(5, 7), name) == getattr(theirs(5, 7), name)
    layer = pararnn.ParaRNN(CELLS["lem"], 5, 7)
    assert layer.mode == "LEM"
    with pytest.raises(AttributeError, match=r"'PARALLEL'\. The paper's modes are arguments"):
        layer.mode = "PARALLEL"


@pytest.mark.parametrize("name", ["gru", "lstm"])
def test_final_states_keep_the_dtype(name):
    x = torch.randn(2, 9, 4)
    layer = pararnn.ParaRNN(CELLS[name], 4, 6, num_layers=2, keep_dtype=True)
    head = nn.Linear(6, 1)
    for run, inputs, dtype in (
        (layer, x, torch.bfloat16),
        (layer.step, x[:, 0], torch.float32),  # as it is carried
    ):
        with torch.autocast("cpu", torch.bfloat16):
            output, h_n = run(inputs)
        states = as_tuple(h_n)
        assert output.dtype == torch.bfloat16
        assert {state.dtype for state in states} == {dtype}
    layer, head = layer.to(torch.bfloat16), head.to(torch.bfloat16)
    wide = pararnn.ParaRNN(CELLS[name], 4, 6, num_layers=2).to(torch.bfloat16)
    wide.load_state_dict(layer.state_dict())
    (_, state), (_, exact) = layer(x.bfloat16()), wide(x.bfloat16())
    pairs = zip(*map(as_tuple, (state, exact)), strict=True)
    for short, long in pairs:
        assert long.dtype == torch.float32
        assert torch.equal(short, long.bfloat16())
        head(short).sum().backward(retain_graph=True)
    assert layer.layers[0].proj.weight.grad.abs().sum() > 0


def test_state_dict_names_and_shapes():
    layer = pararnn.ParaLSTM(6, 8, num_layers=2, num_heads=2)
    sizes = {name: tuple(value.shape) for name, value in layer.state_dict().items()}
    assert sizes["layers.0.proj.weight"] == (2, 3 * 8 // 2, 6 // 2)
    assert sizes["layers.1.proj.weight"] == (2, 3 * 8 // 2, 8 // 2)
    assert sizes["layers.0.bias"] == (3, 8)
    assert sizes["layers.0.cell.a_f"] == (8,)
    assert len(sizes) == 2 * (2 + 5)


OLD = {  # a checkpoint of earlier versions: names and sizes, in their order
    "layers.0.bias": (3, 8),
    "layers.0.proj.weight": (2, 12, 3),
    "layers.0.cell.a_z": (8,),
    "layers.0.cell.a_r": (8,),
    "layers.0.cell.a_c": (8,),
    "layers.1.bias": (3, 8),
    "layers.1.proj.weight": (2, 12, 8),
    "layers.1.cell.a_z": (8,),
    "layers.1.cell.a_r": (8,),
    "layers.1.cell.a_c": (8,),
}


def test_state_dicts_of_earlier_versions_load():
    old = {f"{way}{name}": size for way in ("", "reverse_") for name, size in OLD.items()}
    layer = pararnn.ParaGRU(6, 8, num_layers=2, num_heads=2, bidirectional=True)
    assert [(k, tuple(v.shape)) for k, v in layer.state_dict().items()] == list(old.items())
    values = {name: torch.randn(size) for name, size in old.items()}
    layer.load_state_dict(values)
    assert all(torch.equal(layer.get_parameter(name), value) for name, value in values.items())
    assert torch.equal(layer.reverse_layers[1].cell.a_c, values["reverse_layers.1.cell.a_c"])


@pytest.mark.parametrize("prefix", ["", "rnn."])
def test_loading_a_state_dict_of_torch_nn_warns(prefix):
    old = nn.ModuleDict({"rnn": nn.GRU(6, 8)}) if prefix else nn.GRU(6, 8)
    layer = pararnn.ParaGRU(6, 8)
    model = nn.ModuleDict({"rnn": layer}) if prefix else layer
    for strict in (True, False):
        context = pytest.raises(RuntimeError, match="Missing key") if strict else nullcontext()
        with (
            pytest.warns(UserWarning, match=f"{prefix}weight_hh_l0 .* torch.nn: .*from the start"),
            context,
        ):
            model.load_state_dict(old.state_dict(), strict=strict)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_torch_script_raises():
    layer, other = pararnn.ParaGRU(4, 6), pararnn.LSTM(4, 6)
    modules = (layer, layer.layers[0], layer.cell, other, other.layers[0])
    for module in (nn.Sequential(nn.Linear(4, 4), layer), nn.Sequential(other), *modules):
        with pytest.raises(NotImplementedError, match=r"torch\.jit\.script is not supported: use"):
            torch.jit.script(module)


def test_heads_are_block_diagonal():
    layer = pararnn.ParaGRU(6, 8, num_heads=2)
    x = torch.randn(2, 10, 6)
    other_input = x.clone()
    other_input[..., 3:] += 1  # the second head's input
    a, b = layer(x)[0], layer(other_input)[0]
    assert torch.equal(a[..., :4], b[..., :4])
    assert not torch.allclose(a[..., 4:], b[..., 4:])


def test_the_layer_is_projection_bias_and_cell():
    layer = pararnn.ParaGRU(6, 8, dtype=torch.float64)
    with torch.no_grad():
        layer.layers[0].bias.normal_()
    x = torch.randn(2, 10, 6, dtype=torch.float64)
    weight = layer.layers[0].proj.weight[0]
    gates = (x @ weight.T).unflatten(-1, (3, 8)) + layer.layers[0].bias
    reference, _ = pararnn.solve(layer.cell, gates, solver="sequential")
    assert torch.allclose(layer(x)[0], reference, atol=1e-13)


@pytest.mark.parametrize("solver", ["sequential", "newton"])
def test_gradients_reach_everything(solver):
    torch.manual_seed(0)
    layer = pararnn.ParaLSTM(4, 6, num_layers=2, num_heads=2, solver=solver, dtype=torch.float64)
    other = pararnn.ParaLSTM(4, 6, num_layers=2, num_heads=2, dtype=torch.float64)
    other.load_state_dict(layer.state_dict())
    other.solver = "sequential"
    x = torch.randn(2, 70, 4, dtype=torch.float64)
    h_0 = tuple(torch.randn(2, 2, 6, dtype=torch.float64) for _ in range(2))
    grads = []
    for module in (layer, other):
        inputs = [x.clone().requires_grad_(), *(h.clone().requires_grad_() for h in h_0)]
        output, (h_n, c_n) = module(inputs[0], tuple(inputs[1:]))
        loss = output.sin().sum() + h_n.sum() + c_n.square().sum()
        grads.append(torch.autograd.grad(loss, [*inputs, *module.parameters()]))
    for a, b in zip(*grads, strict=True):
        assert a.abs().sum() > 0
        assert torch.allclose(a, b, rtol=1e-10, atol=1e-12)


def test_appendix_c_initialisation():
    torch.manual_seed(0)
    layer = pararnn.ParaGRU(400, 600, num_heads=2)
    weight = layer.layers[0].proj.weight
    assert weight.abs().max().item() <= math.sqrt(3 / 200)
    assert weight.std().item() == pytest.approx(1 / math.sqrt(200), rel=0.02)
    assert not layer.layers[0].bias.any()
    assert layer.cell.a_z.std().item() == pytest.approx(1 / math.sqrt(600), rel=0.1)
    old_value = weight.clone()
    layer.reset_parameters()
    assert not torch.equal(weight, old_value)


def test_clipping_after_each_step():
    torch.manual_seed(0)
    layer = nn.ModuleDict({"rnn": pararnn.ParaLSTM(3, 4), "head": nn.Linear(4, 1)})
    optimizer = torch.optim.SGD(layer.parameters(), lr=100.0)
    handle = pararnn.clip_after_step(optimizer, layer)

    def step():
        optimizer.zero_grad()
        layer["head"](layer["rnn"](torch.randn(2, 20, 3))[0]).sum().backward()
        optimizer.step()
        cell = layer["rnn"].cell
        return max(p.abs().max().item() for p in cell.recurrent_parameters())

    assert step() == 0.5
    assert layer["head"].weight.abs().max() > 0.5
    layer["rnn"].recurrent_clip = 0.25
    assert step() == 0.25
    layer["rnn"].recurrent_clip = None
    assert step() > 0.5
    layer["rnn"].recurrent_clip = 0.5
    handle.remove()
    assert step() > 0.5


def _largest_after_a_step(layer, optimizer):
    layer(torch.randn(2, 20, 3))[0].sum().backward()
    optimizer.step()
    return max(p.abs().max().item() for p in layer.cell.recurrent_parameters())


def _as_saved(both):
    file = io.BytesIO()
    torch.save(both, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "copied": copy.deepcopy,
    "the optimiser first": lambda both: copy.deepcopy(both[::-1])[::-1],
    "copied twice": lambda both: copy.deepcopy(copy.deepcopy(both)),
    "pickled": lambda both: pickle.loads(pickle.dumps(both)),
    "saved": _as_saved,
}


@pytest.mark.parametrize("copy_both", COPIES.values(), ids=COPIES)
def test_copies_of_an_optimizer_clip_their_own_layers(copy_both):
    layer = pararnn.ParaGRU(3, 4)
    optimizer = torch.optim.SGD(layer.parameters(), lr=100.0)
    handle = pararnn.clip_after_step(optimizer, layer)
    assert _largest_after_a_step(*copy_both((layer, optimizer))) == 0.5
    assert set(optimizer.state_dict()) == {"state", "param_groups"}
    handle.remove()
    assert _largest_after_a_step(*copy_both((layer, optimizer))) > 0.5


def test_clipping_after_the_steps_of_accelerate():
    accelerate = pytest.importorskip("accelerate")
    layer = pararnn.ParaGRU(3, 4)
    optimizer = torch.optim.SGD(layer.parameters(), lr=100.0)
    layer, optimizer = accelerate.Accelerator(cpu=True).prepare(layer, optimizer)
    pararnn.clip_after_step(optimizer, layer)
    assert _largest_after_a_step(layer, optimizer) == 0.5
    assert _largest_after_a_step(*copy.deepcopy((layer, optimizer))) == 0.5


def test_clipping_needs_an_optimizer():
    layer = pararnn.ParaGRU(3, 4)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for other in (layer, torch.optim.lr_scheduler.StepLR(optimizer, 1)):
        with pytest.raises(TypeError, match=f"got {type(other).__name__}. After the steps"):
            pararnn.clip_after_step(other, layer)


@pytest.mark.parametrize("bound", [-0.5, float("nan")])
def test_a_bound_is_not_negative(bound):
    """Clamping to [0.5, -0.5] makes -0.5 of every parameter."""
    layer = pararnn.ParaGRU(3, 4)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    with pytest.raises(ValueError, match="clipped to 0 or more, got"):
        pararnn.clip_after_step(optimizer, layer, to=bound)
    old_value = layer.cell.a_z.clone()
    layer.recurrent_clip = bound
    with pytest.raises(ValueError, match="clipped to 0 or more, got"):
        layer.clip_recurrent()
    assert torch.equal(layer.cell.a_z, old_value)


def test_only_recurrent_parameters_are_clipped():
    layer = pararnn.ParaRNN(pararnn.LRCCell, 3, 4)
    with torch.no_grad():
        for parameter in layer.cell.parameters():
            parameter.fill_(2.0)
    layer.clip_recurrent()
    assert (layer.cell.leak == 2).all()
    assert (layer.cell.b == 2).all()
    assert (layer.cell.a == 0.5).all()


def test_dropout_between_layers_in_training_only():
    torch.manual_seed(0)
    layer = pararnn.ParaGRU(3, 64, num_layers=2, dropout=0.5)
    x = torch.randn(1, 8, 3)
    assert not torch.equal(layer(x)[0], layer(x)[0])
    layer.eval()
    assert torch.equal(layer(x)[0], layer(x)[0])
    with pytest.warns(UserWarning, match=r"dropout = 0\.5 is between layers: one alone has none"):
        single = pararnn.ParaGRU(3, 64, dropout=0.5)
    assert torch.equal(single(x)[0], single(x)[0])


@pytest.mark.parametrize("bidirectional", [False, True])
def test_a_layers_output_is_freed_once_it_is_read(bidirectional):
    model = pararnn.ParaGRU(4, 4, num_layers=3, bidirectional=bidirectional)
    outputs, alive = [], []
    first = [model.layers[0], *([model.reverse_layers[0]] if bidirectional else [])]
    for layer in first:
        layer.register_forward_hook(lambda *call: outputs.append(weakref.ref(call[2][0])))
    after = model.layers[1 if bidirectional else 2]  # both directions are copied into one
    after.register_forward_pre_hook(lambda *call: alive.extend(output() for output in outputs))
    with torch.no_grad():
        model(torch.randn(2, 5, 4))
    assert alive == [None] * len(first)


def test_last_solve_counts():
    layer = pararnn.ParaGRU(3, 5, num_layers=2, solver="newton", backend="torch")
    assert layer.last_solve is None
    layer(torch.randn(2, 100, 3))
    assert layer.last_solve.sweeps.shape == (2,)
    assert (layer.last_solve.sweeps >= 2).all()
    assert not layer.last_solve.mended.any()


def test_dtypes():
    x = torch.randn(2, 70, 4)
    layer = pararnn.ParaGRU(4, 6, solver="newton")
    with torch.autocast("cpu", torch.bfloat16):
        output, h_n = layer(x)
    assert output.dtype == torch.bfloat16
    assert h_n.dtype == torch.float32
    output.float().sum().backward()
    assert {p.grad.dtype for p in layer.parameters()} == {torch.float32}
    half = layer.to(torch.bfloat16)
    output, h_n = half(x.bfloat16())
    assert (output.dtype, h_n.dtype) == (torch.bfloat16, torch.float32)
    output, h_n = layer.double()(x.double())
    assert (output.dtype, h_n.dtype) == (torch.float64, torch.float64)


def test_config_reaches_the_cell():
    layer = pararnn.ParaRNN(pararnn.LEMCell, 3, 4, num_layers=2, dt=0.25)
    assert [part.cell.dt for part in layer.layers] == [0.25, 0.25]
    layer = pararnn.ParaGRU(3, 4, state_nonlinearity="relu")
    assert layer.cell.state_nonlinearity == "relu"


WRONG = [
    ({"input_size": 0}, "input_size must be positive"),
    ({"num_layers": 0}, "num_layers must be positive"),
    ({"num_heads": 3}, "multiples of num_heads = 3, got 4 and 6"),
    ({"dropout": 1.5}, "dropout must be a probability"),
    ({"dropout": True}, "dropout must be a probability"),
    ({"solver": "picard"}, "unknown solver 'picard'"),
    ({"backend": "cuda"}, "unknown backend 'cuda'.*Pairs"),
    ({"gain": 1}, "has no config 'gain'"),
    ({"hidden_size": 12 / 2}, r"hidden_size must be an integer, got 6.0 \(float\)"),
    ({"input_size": "4"}, "input_size must be an integer, got '4'"),
    ({"num_layers": 2.0}, "num_layers must be an integer, got 2.0"),
    ({"reverse": True}, r"ParaGRU has no reverse: .*RecurrentLayer\(..., reverse=True\)"),
]


@pytest.mark.parametrize(("options", "message"), WRONG)
def test_impossible_options(options, message):
    with pytest.raises((ValueError, TypeError, pararnn.CellError), match=message):
        pararnn.ParaGRU(**{"input_size": 4, "hidden_size": 6, **options})


def test_wrong_inputs():
    layer = pararnn.ParaGRU(4, 6, num_layers=2)
    with pytest.raises(ValueError, match="ParaGRU: Expected input to be 2D or 3D, got 4D instead"):
        layer(torch.randn(1, 1, 3, 4))
    with pytest.raises(ValueError, match=r"must be equal to input_size. Expected 4, got 5"):
        layer(torch.randn(1, 3, 5))
    with pytest.raises(ValueError, match=r"of size \(2, 3, 6\) each, got \[\(1, 3, 6\)\]"):
        layer(torch.randn(3, 7, 4), torch.zeros(1, 3, 6))
    with pytest.raises(ValueError, match="Expected input to be 1D or 2D"):
        layer.step(torch.randn(1, 3, 4))
    liquid = pararnn.ParaRNN(pararnn.LRCCell, 4, 6)
    with pytest.raises(ValueError, match=r"takes the fields \['dt'\]"):
        liquid(torch.randn(1, 3, 4))
    gaps, one = torch.ones(1, 3), liquid.layers[0]
    for call, size in ((liquid, (1, 3)), (liquid.step, (1,)), (liquid.step, ()), (one, (1, 3))):
        with pytest.raises(TypeError, match=r"fields must be given by name, .* got Tensor"):
            call(torch.randn(*size, 4), fields=gaps)
    with pytest.raises(TypeError, match=r"fields must be given by name, .* got list"):
        one.step(torch.randn(1, 4), fields=[1.0])
    with pytest.raises(ValueError, match=r"takes the fields \['dt'\]"):
        liquid.step(torch.randn(1, 4))


def test_repr_tells_the_options():
    text = repr(pararnn.ParaLSTM(4, 8, num_layers=2, num_heads=2, solver="newton"))
    assert "ParaLSTM(\n  4, 8, num_layers=2" in text
    assert "solver='newton'" in text
    assert "heads=2" in text
    assert "state_nonlinearity='tanh'" in text
