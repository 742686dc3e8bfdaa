"""What one class has several Programs for: the mode, sizes in config, the default dtype."""

import copy
import pickle
import re

import pytest
import torch

import pararnn
from pararnn import Param
from pararnn.program.program import program_by_key


class Hard(pararnn.Cell):
    """A soft gate in training, a hard one in evaluation."""

    states, gates, params = ("h",), ("x", "g"), {"a": Param()}

    def step(self, state, gate, param):
        keep = torch.sigmoid(gate.g + param.a * state.h)
        if not self.training:
            keep = (keep > 0.5).to(keep.dtype)
        return torch.lerp(torch.tanh(gate.x), state.h, keep)

    def readout(self, state, gate, param):
        return state.h if self.training else 0.5 * state.h


class ReadOut(pararnn.ElmanCell):
    """Another readout in evaluation, of the same step."""

    def readout(self, state, gate, param):
        return state.h if self.training else 0.5 * state.h


X = torch.randn(2, 20, 4, generator=torch.Generator().manual_seed(0))


class AlwaysHard(Hard):
    """`Hard` as it is in evaluation."""

    def step(self, state, gate, param):
        keep = torch.sigmoid(gate.g + param.a * state.h) > 0.5
        return torch.where(keep, state.h, torch.tanh(gate.x))

    def readout(self, state, gate, param):
        return 0.5 * state.h


@pytest.mark.parametrize("pair", [("sequential", "fused"), ("newton", "torch")], ids="-".join)
def test_a_step_may_read_its_mode(pair):
    torch.manual_seed(0)
    layer = pararnn.RecurrentLayer(Hard, 4, 8, solver=pair[0], backend=pair[1])
    in_training, _ = layer(X)
    in_evaluation, h_n = layer.eval()(X)
    other = pararnn.RecurrentLayer(AlwaysHard, 4, 8, solver=pair[0], backend=pair[1])
    other.load_state_dict(layer.state_dict())
    for got, wanted in zip((in_evaluation, h_n), other(X), strict=True):
        torch.testing.assert_close(got, wanted)
    torch.testing.assert_close(layer.step(X[:, 0])[0], in_evaluation[:, 0])
    assert pararnn.verify(layer, X).passed
    assert torch.equal(layer.train()(X)[0], in_training)
    assert not torch.equal(in_training, in_evaluation)
    for other in (copy.deepcopy(layer.eval()), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(other(X)[0], in_evaluation)


def test_modes_have_keys_of_their_own():
    cell = Hard(8)
    keys = [pararnn.program_of(cell.train(mode)).key for mode in (True, False, True)]
    assert keys[0] == keys[2] != keys[1]
    assert [program_by_key(key).training for key in keys] == [True, False, True]
    plain = pararnn.GRUCell(8)
    assert pararnn.program_of(plain) is pararnn.program_of(plain.eval())


@pytest.mark.thorough
def test_compiled_code_takes_notice_of_the_mode():
    torch.manual_seed(0)
    layer = pararnn.RecurrentLayer(ReadOut, 4, 8)
    program = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for mode in (True, False, True):
        layer.train(mode)
        torch.testing.assert_close(program(X)[0], layer(X)[0])
    assert torch.equal(layer.eval()(X)[0], 0.5 * layer.train()(X)[0])


class Gain(pararnn.Cell):
    """Config in lists and dictionaries."""

    states, gates, params = ("h",), ("x",), {"a": Param()}
    config = {"taps": [1.0, {"gain": [0.5]}]}

    def step(self, state, gate, param):
        return torch.tanh(self.taps[0] * gate.x + param.a * state.h)


def test_config_is_nobodys_to_change():
    taps = [0.9, {"gain": [0.5]}]
    layer = pararnn.RecurrentLayer(Gain, 4, 8, taps=taps)
    old = layer(X)[0]
    taps[0] = taps[1]["gain"][0] = 0.1
    assert torch.equal(layer(X)[0], old)
    assert layer.cell.taps == (0.9, {"gain": (0.5,)})
    with pytest.raises(TypeError):
        layer.cell.taps[0] = 0.1
    with pytest.raises(TypeError, match="config is immutable: make a new cell"):
        layer.cell.taps[1]["gain"] = 0.1
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(other(X)[0], old)
    Gain.config["taps"][0] = 0.1
    try:
        assert pararnn.RecurrentLayer(Gain, 4, 8).cell.taps[0] == 0.1
        assert torch.equal(layer(X)[0], old)
    finally:
        Gain.config["taps"][0] = 1.0
    for value in ({1: 2}, {1}, [torch.ones(1)], 1j):
        with pytest.raises(pararnn.CellError, match="Gain: config taps must be a JSON value"):
            Gain(8, taps=value)


class Centred(pararnn.Cell):
    """A step that mixes channels within heads, whose number is config."""

    states, gates, params, structure = ("h",), ("x",), {"a": Param()}, "dense"
    config = {"heads": 4}

    def step(self, state, gate, param):
        heads = state.h.unflatten(-1, (self.heads, -1))
        return torch.tanh(gate.x + param.a * (heads - heads.mean(-1, keepdim=True)).flatten(-2))


@pytest.mark.thorough
def test_sizes_in_config_fit_the_layers_own_channels():
    gates = torch.randn(2, 7, 1, 32)
    for heads in (4, 16):  # the second does not divide the channels that steps are traced on
        cell = Centred(32, heads=heads)
        newton = pararnn.solve(cell, gates, solver="newton", backend="torch")[0]
        loop = pararnn.solve(cell, gates, solver="sequential", backend="torch")[0]
        torch.testing.assert_close(newton, loop)
        program = pararnn.program_of(cell)
        assert program.sizes == (None if heads == 4 else (32, 1))
        assert program_by_key(program.key) is program
    other = pararnn.program_of(Centred(48, heads=16))
    assert other is not program
    assert other.sizes == (48, 1)
    with pytest.raises(pararnn.CellError, match=r"traced on 24 channels \(8, or the layer's own"):
        Centred(24, heads=16) and pararnn.program_of(Centred(24, heads=16))


class Ten(pararnn.Cell):
    """A constant in the default dtype."""

    states, gates = ("h",), ("x",)

    def step(self, state, gate, param):
        return torch.tanh(gate.x + torch.tensor(0.1) * state.h)


@pytest.mark.parametrize("structure", [None, "dense"])
def test_constants_have_the_default_dtype_of_now(structure):
    cls = type("Ten", (Ten,), {"structure": structure, "__module__": __name__})
    gates = torch.randn(2, 20, 1, 8, dtype=torch.float64)

    def gap():
        cell = cls(8, dtype=torch.float64)
        newton = pararnn.solve(cell, gates, solver="newton", backend="torch")[0]
        loop = pararnn.solve(cell, gates, solver="sequential", backend="torch")[0]
        return float((newton - loop).abs().max())

    assert gap() < 1e-14
    torch.set_default_dtype(torch.float64)
    try:
        assert gap() < 1e-14
    finally:
        torch.set_default_dtype(torch.float32)
    assert gap() < 1e-14
    assert pararnn.program_of(pararnn.GRUCell(3)).default_dtype is None  # it has no such constant


def test_writing_into_a_state_is_said_with_its_line():
    def step(self, state, gate, param):
        h = state.h
        h += gate.x
        return h.tanh()

    body = {"states": ("h",), "gates": ("x",), "step": step}
    line = step.__code__.co_firstlineno + 2
    message = rf"C\.step writes into a tensor in place .*{re.escape(__file__)}, line {line}\)"
    with pytest.raises(pararnn.CellError, match=message):
        pararnn.program_of(type("C", (pararnn.Cell,), body)(3))
