"""Cells are the published equations; their derived Jacobians are the paper's closed forms."""

import math

import pytest
import torch
from table import check_contract, make_case

import pararnn
from pararnn.base import cache
from pararnn.cells import NONLINEARITIES
from pararnn.program import program
from pararnn.program.derive import linearise


def _jacobian(cell, state, gates):
    program = pararnn.program_of(cell)
    params = cell.lifted_params(torch.float64)
    tensors = [*state, *gates, *params]
    graphs = program.graphs[torch.float64]
    new, jacobian = linearise(program.step, program.structure, graphs, tensors)
    return new, jacobian, dict(zip(program.params, params, strict=True))


def _draw(count, size=(7, 5)):
    return [torch.randn(size, dtype=torch.float64) for _ in range(count)]


def test_gru_jacobian_is_the_papers():
    torch.manual_seed(0)
    cell = pararnn.GRUCell(5, dtype=torch.float64)
    (h,), (z_in, r_in, c_in) = _draw(1), _draw(3)
    (new,), jacobian, a = _jacobian(cell, [h], [z_in, r_in, c_in])
    z = torch.sigmoid(a["a_z"] * h + z_in)
    r = torch.sigmoid(a["a_r"] * h + r_in)
    c = torch.tanh(a["a_c"] * (h * r) + c_in)
    assert torch.allclose(new, (1 - z) * h + z * c, rtol=1e-14, atol=1e-14)
    dz, dr, dc = z * (1 - z), r * (1 - r), 1 - c**2
    reference = 1 - z + (c - h) * dz * a["a_z"] + z * dc * a["a_c"] * (r + h * dr * a["a_r"])
    assert torch.allclose(jacobian[:, 0], reference, rtol=1e-13, atol=1e-14)


def test_lstm_jacobian_is_the_papers():
    torch.manual_seed(0)
    cell = pararnn.LSTMCell(5, dtype=torch.float64)
    (h, c_old), (f_in, z_in, o_in) = _draw(2), _draw(3)
    (h_new, c_new), jacobian, a = _jacobian(cell, [h, c_old], [f_in, z_in, o_in])
    f = torch.sigmoid(a["a_f"] * h + a["c_f"] * c_old + f_in)
    z = torch.tanh(a["a_z"] * h + z_in)
    c = f * c_old + (1 - f) * z
    o = torch.sigmoid(a["a_o"] * h + a["c_o"] * c + o_in)
    assert torch.allclose(c_new, c, rtol=1e-14, atol=1e-14)
    assert torch.allclose(h_new, o * torch.tanh(c), rtol=1e-14, atol=1e-14)
    df, dz, do, tanh_c = f * (1 - f), 1 - z**2, o * (1 - o), torch.tanh(c)
    cc = f + (c_old - z) * df * a["c_f"]
    ch = (c_old - z) * df * a["a_f"] + (1 - f) * dz * a["a_z"]
    slope = tanh_c * do * a["c_o"] + o * (1 - tanh_c**2)
    hc = slope * cc
    hh = tanh_c * do * (a["a_o"] + a["c_o"] * ch) + o * (1 - tanh_c**2) * ch
    for (i, j), entry in {(1, 1): cc, (1, 0): ch, (0, 1): hc, (0, 0): hh}.items():
        assert torch.allclose(jacobian[:, i, j], entry, rtol=1e-12, atol=1e-14), (i, j)


def test_slstm_does_not_overflow():
    case = make_case(pararnn.SLSTMCell, torch.float32, 50)
    (h, _, _), _ = pararnn.solve(case.cell, case.gates * 300, solver="sequential")
    assert h.isfinite().all()


def test_lrc_reads_its_time_gaps():
    case = make_case(pararnn.LRCCell, torch.float64, 12)
    still, _ = pararnn.solve(case.cell, case.gates, case.initial, fields={"dt": 0.0})
    assert not still.any()
    moving, _ = pararnn.solve(case.cell, case.gates, fields={"dt": 0.5})
    assert moving.abs().min() > 0
    full = pararnn.solve(case.cell, case.gates, fields={"dt": torch.full((2, 12), 0.5)})[0]
    assert torch.equal(full, moving)


@pytest.mark.parametrize("name", sorted(NONLINEARITIES))
def test_nonlinearities_are_configurable_everywhere(name):
    case = make_case(pararnn.GRUCell, torch.float64, 40, state_nonlinearity=name)
    check_contract(case.cell, case.gates * 0.3, solver="newton", backend="torch")
    h, _ = pararnn.solve(case.cell, case.gates[:, :1], backend="torch")
    z, _, c = case.gates[:, 0].unbind(1)
    assert torch.allclose(h[:, 0], torch.sigmoid(z) * NONLINEARITIES[name](c), atol=1e-12)


def test_initialisation():
    torch.manual_seed(0)
    cell = pararnn.GRUCell(10_000)
    for parameter in cell.parameters():
        assert parameter.std().item() == pytest.approx(1 / math.sqrt(10_000), rel=0.05)
        assert abs(parameter.mean().item()) < 5e-4

    class Shapes(pararnn.Cell):
        states = ("h",)
        gates = ("x",)
        params = {
            "d": pararnn.Param("D", std=0.0, mean=1.0),
            "per_head": pararnn.Param("H", std=0.0, mean=2.0),
            "scalar": pararnn.Param("", std=0.0, mean=3.0),
            "fixed": pararnn.Param("D", std=0.0, mean=4.0, trainable=False),
        }

        def step(self, state, gate, param):
            return gate.x + param.d + param.per_head + param.scalar + param.fixed + 0 * state.h

    cell = Shapes(6, num_heads=3)
    assert {n: tuple(p.shape) for n, p in cell.named_parameters()} == {
        "d": (6,),
        "per_head": (3,),
        "scalar": (),
    }
    assert [n for n, _ in cell.named_buffers()] == ["fixed"]
    gates = torch.zeros(1, 2, 1, 6, requires_grad=True)
    for solver in ("sequential", "newton"):
        states, _ = pararnn.solve(cell, gates, solver=solver)
        assert torch.equal(states, torch.full((1, 2, 6), 10.0))
        grads = torch.autograd.grad(states.sum(), [cell.per_head, cell.scalar, gates])
        assert torch.equal(grads[0], torch.full((3,), 4.0))
        assert grads[1].item() == 12


def test_config_is_immutable_and_checked():
    cell = pararnn.LEMCell(3, dt=0.5)
    assert cell.dt == 0.5
    with pytest.raises(AttributeError, match="config is immutable"):
        cell.dt = 1.0
    with pytest.raises(pararnn.CellError, match="no config 'gain'"):
        pararnn.LEMCell(3, gain=2)
    with pytest.raises(pararnn.CellError, match="must be a JSON value"):
        pararnn.LEMCell(3, dt=torch.tensor(1.0))
    with pytest.raises(pararnn.CellError, match="unknown nonlinearity 'swash'"):
        pararnn.program_of(pararnn.GRUCell(3, gate_nonlinearity="swash"))
    with pytest.raises(pararnn.CellError, match="multiple of num_heads"):
        pararnn.GRUCell(5, num_heads=2)


def _cell(**attributes):
    return type("Bad", (pararnn.Cell,), {"states": ("h",), "gates": ("x",), **attributes})


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"states": "h"}, "must be a tuple of names"),
        ({"gates": ("x", "x")}, "must be distinct"),
        ({"gates": ("x",), "fields": ("x",)}, "must be distinct"),
        ({"gates": ("not a name",)}, "must be identifiers"),
        ({"gates": ("lambda",)}, "must be identifiers"),
        ({"gates": ("_x",)}, "may not be called"),
        ({"gates": ("count",)}, "may not be called"),
        ({"params": {"a": 1.0}}, "must be a Param"),
        ({"params": {"training": pararnn.Param()}}, "is a name of torch.nn.Module"),
        ({"config": {"forward": 1}}, "is a name of torch.nn.Module"),
    ],
)
def test_malformed_classes_raise(attributes, message):
    with pytest.raises(pararnn.CellError, match=message):
        _cell(**attributes)


def test_missing_parts_raise():
    with pytest.raises(pararnn.CellError, match="at least one state"):
        _cell(states=())(3)
    with pytest.raises(pararnn.CellError, match="Param shape must be one of"):
        pararnn.Param("T")
    with pytest.raises(pararnn.CellError, match="must define step"):
        pararnn.program_of(_cell()(3))


class Numbered(pararnn.Cell):
    """A leaky integrator whose rate is a number of its class's config."""

    states = ("h",)
    gates = ("x",)
    config = {"rate": 0.1}

    def step(self, state, gate, param):
        return state.h + self.rate * (torch.tanh(gate.x) - state.h)


class Swept(Numbered):
    """The same with the rate as a scalar Param."""

    params = {"rate": pararnn.Param("", mean=0.1, std=0.0, trainable=False)}
    config = {}

    def step(self, state, gate, param):
        return state.h + param.rate * (torch.tanh(gate.x) - state.h)


def test_a_scalar_param_serves_all_its_values(monkeypatch):
    torch.manual_seed(0)
    swept, gates = Swept(6), torch.randn(2, 40, 1, 6)
    assert swept.rate == 0.1
    assert not list(swept.parameters())
    pararnn.solve(swept, gates)
    reference = {rate: pararnn.solve(Numbered(6, rate=rate), gates)[0] for rate in (0.2, 0.3)}
    monkeypatch.setattr(program, "_build", None)  # nothing is traced
    monkeypatch.setattr(cache, "load", None)  # nor compiled
    for rate, states in reference.items():
        swept.rate.fill_(rate)
        torch.testing.assert_close(pararnn.solve(swept, gates)[0], states)
        other = Swept(6)
        other.rate.fill_(rate)
        torch.testing.assert_close(pararnn.solve(other, gates)[0], states)
    with pytest.raises(TypeError):
        pararnn.solve(Numbered(6, rate=0.4), gates)


class LSTMCell(pararnn.LSTMCell):
    """A cell of one's own by the name of torch.nn's."""


@pytest.mark.parametrize("cell_class", [LSTMCell, pararnn.HeadGRUCell, pararnn.LEMCell])
@pytest.mark.parametrize(
    ("positional", "by_name", "got"),
    [
        ((8, 16), {}, r"got \(8, 16\)"),
        ((16,), {"input_size": 8, "bias": False}, r"got \(16, input_size=8, bias=False\)"),
    ],
)
def test_a_cell_is_no_layer(cell_class, positional, by_name, got):
    """Who takes it for that of torch.nn reads what runs one step of that."""
    with pytest.raises(TypeError, match=got) as error:
        cell_class(*positional, **by_name)
    name, text = cell_class.__name__, str(error.value)
    assert f"pararnn.ParaRNN({name}, input_size, hidden_size)" in text
    for hint in (f"not torch.nn.{name}", f"pararnn.{name}(input_size, hidden_size)"):
        assert (hint in text) == hasattr(torch.nn, name)


def test_a_call_of_a_cell_is_no_step():
    with pytest.raises(TypeError, match=r"is pararnn\.GRUCell\(input_size, hidden_size\)"):
        pararnn.GRUCell(6)(torch.randn(2, 6), torch.randn(2, 6))
