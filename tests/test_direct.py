"""Calls without gradients, whose kernels on a CPU project their inputs: the layer's results."""

import pytest
import torch
from call_results import as_tuple
from hypothesis import given, settings
from hypothesis import strategies as st
from table import needs_compiler

import pararnn
from pararnn.layers import direct
from pararnn.layers.projection import HeadwiseLinear
from pararnn.layers.torch_nn import StackedLayer
from pararnn.zoo import DenseGRUCell, HeadGRUCell, HeadLSTMCell

pytestmark = needs_compiler
TOLERANCES = {torch.float64: 1e-13, torch.float32: 1e-5}
LAYERS = {
    "LSTM": (pararnn.LSTM, {}),
    "GRU": (pararnn.GRU, {}),
    "RNN": (pararnn.RNN, {}),
    "heads, one projection": (pararnn.LSTM, {"num_heads": 3}),
    "heads, a projection for one": (
        lambda *a, **k: pararnn.ParaRNN(HeadLSTMCell, *a, **k),
        {"num_heads": 3, "batch_first": False},
    ),
    "one head": (lambda *a, **k: pararnn.ParaRNN(HeadGRUCell, *a, **k), {"batch_first": False}),
}


def _launches(call):
    """Return the result of a call, and the launches that it has planned."""
    direct._LAUNCHES.clear()
    result = call()
    return result, [launch for launch in direct._LAUNCHES.values() if launch is not None]


def _values(result):
    output, final = result
    return [output, *as_tuple(final)]


def _agree(ours, reference, dtype):
    for a, b in zip(_values(ours), _values(reference), strict=True):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b.detach(), rtol=0, atol=TOLERANCES[dtype])


@pytest.mark.parametrize("name", LAYERS)
@settings(max_examples=15)
@given(
    batch=st.integers(1, 35),
    steps=st.integers(1, 40),
    inputs=st.integers(1, 150),
    channels=st.integers(1, 40),
    both=st.booleans(),
    bias=st.booleans(),
    initial=st.booleans(),
    by_rows=st.booleans(),
    dtype=st.sampled_from(list(TOLERANCES)),
)
def test_results_are_those_of_calls_with_gradients(
    name, batch, steps, inputs, channels, both, bias, initial, by_rows, dtype
):
    """By chunks of steps and a part of one, in both directions, with rows of any stride."""
    make, options = LAYERS[name]
    heads = options.get("num_heads", 1)
    torch.manual_seed(0)
    layer = make(
        inputs * heads, channels * heads, bias=bias, bidirectional=both, dtype=dtype, **options
    ).eval()
    x = torch.randn(steps, batch, inputs * heads, dtype=dtype)
    if by_rows:
        x = x.transpose(0, 1).contiguous().transpose(0, 1)
    states = tuple(
        torch.randn(1 + both, batch, channels * heads, dtype=dtype)
        for _ in layer._all_layers()[0].cell.states
    )
    given = (states if len(states) > 1 else states[0]) if initial else None
    with torch.no_grad():
        ours, launches = _launches(lambda: layer(x, given))
    assert launches or name == "heads, one projection"  # whose matrices are copied
    reference, none = _launches(lambda: layer(x, given))
    assert not none
    _agree(ours, reference, dtype)


@pytest.mark.parametrize("steps", [1, 9])
def test_a_projection_of_several_heads_for_matrices_of_one(steps):
    """A head of the kernel would read the inputs of several heads of the projection."""
    torch.manual_seed(0)
    layer = pararnn.ParaRNN(DenseGRUCell, 6, 8, num_heads=2, bidirectional=True)
    x, h = torch.randn(3, steps, 6), torch.randn(2, 3, 8)
    for start in (None, h):
        with torch.no_grad():
            ours, launches = _launches(lambda start=start: layer(x, start))
        assert not launches
        _agree(ours, layer(x, start), torch.float32)


def test_many_steps_and_few_rows_of_gates_at_once():
    """A chunk may be all steps, or one where gates of a step are many."""
    torch.manual_seed(0)
    for channels, batch in ((1024, 16), (700, 3), (8, 2)):
        layer = pararnn.LSTM(5, channels)
        x = torch.randn(7, batch, 5)
        with torch.no_grad():
            ours, launches = _launches(lambda layer=layer, x=x: layer(x))
        assert launches
        _agree(ours, layer(x), torch.float32)


def test_inputs_that_a_launch_does_not_take_run_as_others():
    """Channels with a stride, states of another dtype or copies, and calls with lengths."""
    torch.manual_seed(0)
    layer = pararnn.LSTM(6, 8)
    x, h = torch.randn(9, 2, 12)[..., ::2], torch.randn(1, 8, 2).mT
    reset = torch.rand(9, 2) < 0.3
    for options in (
        {},
        {"hx": (h, h), "x": x.contiguous()},
        {"x": x.contiguous(), "lengths": [9, 4]},
        {"x": x.contiguous(), "reset": reset},
    ):
        call = {"x": x, **options}
        with torch.no_grad():
            ours, launches = _launches(lambda call=call: layer(**call))
        assert not launches
        _agree(ours, layer(**call), torch.float32)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        (output, _), launches = _launches(lambda: layer(x.contiguous()))
    assert not launches
    assert output.dtype == torch.bfloat16


class _Doubled(StackedLayer):
    def _project(self, *call):
        return 2 * super()._project(*call)


class DoubledLSTM(pararnn.LSTM):
    layer_class = _Doubled


class DoubledLinear(HeadwiseLinear):
    def forward(self, x):
        return 2 * super().forward(x)


def test_layers_with_a_projection_of_their_own_call_it():
    torch.manual_seed(0)
    x = torch.randn(9, 2, 6)
    of_layer = DoubledLSTM(6, 8)
    of_module = pararnn.ParaRNN(HeadGRUCell, 6, 8, batch_first=False)
    of_module.layers[0].proj.__class__ = DoubledLinear
    for layer in (of_layer, of_module):
        with torch.no_grad():
            ours, launches = _launches(lambda layer=layer: layer(x))
        assert not launches
        _agree(ours, layer(x), torch.float32)


def test_a_changed_weight_is_seen_and_errors_are_those_of_other_calls():
    torch.manual_seed(0)
    layer = pararnn.GRU(6, 8)
    x = torch.randn(9, 2, 6)
    with torch.no_grad():
        before = layer(x)[0]
        layer.weight_ih_l0.mul_(2)
        layer.weight_hh_l0.mul_(0.5)
        after = layer(x)[0]
        _agree((after, after), (layer(x.clone())[0],) * 2, torch.float32)
        with pytest.raises(ValueError, match="does not match weight dtype"):
            layer(x.double())
        for run in (layer, lambda x, **options: layer.step(x[0], **options)):
            with pytest.raises(ValueError, match="takes the memory"):
                run(x, memory={"keys": x})
        with pytest.raises(ValueError, match="initial"):
            layer.layers[0](x.transpose(0, 1), (x, x), weights=layer._with(0)["weights"])
    _agree((after, after), (layer(x)[0],) * 2, torch.float32)
    assert (after - before).abs().max() > 0.01


def test_what_a_call_reports_is_of_that_call():
    layer = pararnn.LSTM(6, 8)
    with torch.no_grad():
        layer(torch.randn(9, 2, 6))
    assert layer.last_solve.sweeps.tolist() == [0]
    choice = layer.layers[0].choice
    assert (choice.solver, choice.backend) == ("sequential", "fused")
    assert choice.workload.size == (2, 9, 8)
