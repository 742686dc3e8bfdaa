"""`explain(layer, x, predict=True)`: exponents, Newton's sweeps, and times by an injected clock."""

import math
import sys
import warnings
from functools import partial

import pytest
import torch
from table import needs_compiler

import pararnn
from pararnn import Cell, Param, zoo
from pararnn.engines.tuned import Workload
from pararnn.program.program import program_of
from pararnn.solve import prepare
from pararnn.solvers.newton import MAX_SWEEPS
from pararnn.tune.predict import Sample, exponents, predict, steps_for, sweeps_at

DECAYS = torch.tensor([0.5, -0.9, 0.0, 1.1], dtype=torch.float64)
LOOP, NEWTON = ("sequential", "torch"), ("newton", "torch")


class Linear(Cell):
    states = ("h",)
    gates = ("x",)
    params = {"a": Param("D")}

    def step(self, state, gate, param):
        return param.a * state.h + gate.x


class Rotation(Cell):
    """States that turn, and shrink by 0.9 a step."""

    states = ("y", "z")
    gates = ("x",)

    def step(self, state, gate, param):
        return 0.72 * state.y - 0.54 * state.z + gate.x, 0.54 * state.y + 0.72 * state.z


class Quadratic(Cell):
    """A chaotic map, conjugate to the tent map at x = 2: its exponent is log 2."""

    states = ("h",)
    gates = ("x",)

    def step(self, state, gate, param):
        return gate.x - state.h * state.h


def _linear():
    cell = Linear(4, dtype=torch.float64)
    with torch.no_grad():
        cell.a.copy_(DECAYS)
    return cell


def _chaos(steps, rows=1):
    gates = torch.full((rows, steps, 1, 3), 2.0, dtype=torch.float64)
    gates[:, 0] = 0.7 * torch.rand(rows, 1, 3, dtype=torch.float64)
    return gates


@pytest.fixture
def quick(monkeypatch):
    """Run few steps."""
    module = sys.modules["pararnn.tune.predict"]
    for name, value in {"LEAST": 64, "MOST": 64, "WINDOW": 48, "PROBE_STEPS": 16}.items():
        monkeypatch.setattr(module, name, value)


@pytest.fixture
def clock(monkeypatch):
    """Seconds of a forward pass by solver, functions of steps and sweeps; a backward pass takes a
    tenth. Calls are in `seen`."""
    seconds = {"sequential": lambda n, _: 1e-3 + 1e-5 * n, "seen": []}

    def least_seconds(phases, device, budget):
        for phase in phases:
            phase()
        call = phases[0].__self__
        steps, solver = call.args.size[1], call.engine.solver
        seconds["seen"].append((solver, steps))
        seconds.setdefault(solver, seconds["sequential"])
        forward = seconds[solver](steps, int(call.solution.info[:, 0].max()))
        return [forward, 0.1 * forward][: len(phases)]

    module = sys.modules["pararnn.tune.predict"]
    monkeypatch.setattr(module, "least_seconds", least_seconds)
    return seconds


def _predict_gates(cell, gates):
    """Predict `solve` in PyTorch, without what `explain` builds."""
    args = prepare(cell, gates[:, : steps_for(gates.shape[1])])
    program = program_of(cell)
    size = (*gates.shape[:2], gates.shape[-1])
    workload = Workload(program.key, size, gates.dtype, gates.device)
    return predict(workload, args, "auto", "torch", True)


def _predict(layer, x, **options):
    return pararnn.explain(layer, x, predict=True, **{"backend": "torch"} | options).prediction


def test_exponents_of_a_linear_recurrence_are_logarithms_of_its_factors(clock):
    cell, gates = _linear(), torch.randn(2, 300, 1, 4, dtype=torch.float64)
    found = exponents(program_of(cell), prepare(cell, gates))
    torch.testing.assert_close(found, DECAYS.abs().log(), rtol=0, atol=1e-12)
    single = exponents(program_of(cell), prepare(cell.float(), gates.float()))
    torch.testing.assert_close(single, DECAYS.abs().log(), rtol=0, atol=1e-6)
    prediction = _predict_gates(_linear(), gates)
    assert prediction.exponent == pytest.approx(math.log(1.1), abs=1e-12)
    assert prediction.expanding == 0.25
    assert (prediction.sweeps, prediction.converges) == (1, True)
    assert "it expands, 25% of the columns" in str(prediction)


def test_states_that_are_not_finite_neither_expand_nor_contract(clock):
    x = torch.randn(2, 300, 4)
    x[0, 100] = torch.nan
    prediction = _predict(pararnn.ParaGRU(4, 8), x)
    assert math.isnan(prediction.exponent)
    assert "nan nats a step: states are not finite, 0%" in str(prediction)


def test_exponents_of_states_that_meet():
    cell, gates = Rotation(4), torch.randn(2, 100, 1, 4)
    found = exponents(program_of(cell), prepare(cell, gates))
    torch.testing.assert_close(found, torch.full((4,), 0.9, dtype=torch.float64).log())


def _step(cell, h, x):
    gates = x.unsqueeze(1) if cell.head_sizes is None else x
    return pararnn.solve(cell, gates, h, backend="torch", solver="sequential")[1]


def test_exponents_of_coupled_channels_and_of_matrix_states_are_those_of_a_row():
    """By the definition: the growth of a direction by one Jacobian after the other."""
    torch.manual_seed(0)
    for cell in (pararnn.DenseGRUCell(5), zoo.M2RNNCell(6, num_heads=2, K=2)):
        sizes = cell.head_sizes
        size = (3, 5) if sizes is None else (1, sizes.heads, sizes.width)
        args = prepare(cell.double(), torch.randn(2, 80, *size, dtype=torch.float64))
        (found,) = exponents(program_of(cell), args).tolist()
        growth = []
        for row in args.gates.unsqueeze(1):
            step = partial(_step, cell)
            h = torch.zeros(1, *cell.state_sizes[0], dtype=torch.float64)
            u, total = torch.randn(h.numel(), dtype=torch.float64), 0.0
            for t in range(80):
                x = row[:, t]
                jacobian = torch.autograd.functional.jacobian(partial(step, x=x), h)
                u = jacobian.reshape(h.numel(), -1) @ u
                total += u.norm().log() if t >= 20 else 0.0
                u, h = u / u.norm(), step(h, x).detach()
            growth.append(float(total) / 60)
        assert found == pytest.approx(sum(growth) / 2, abs=0.05)


def test_a_chaotic_map_has_a_positive_exponent_and_newton_does_not_converge(clock):
    torch.manual_seed(0)
    cell, gates = Quadratic(3, dtype=torch.float64), _chaos(1000, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prediction = _predict_gates(cell, gates)
    assert prediction.exponent == pytest.approx(math.log(2), abs=0.05)
    assert (prediction.expanding, prediction.converges) == (1.0, False)
    assert prediction.sweeps == MAX_SWEEPS
    assert "does not converge within 32 sweeps" in str(prediction)


def test_sweeps_of_layers_that_forget(clock):
    torch.manual_seed(0)
    layer, x = pararnn.ParaGRU(4, 8), torch.randn(2, 1500, 4)
    prediction = _predict(layer, x)
    layer(x, solver="newton", backend="torch")
    assert abs(prediction.sweeps - int(layer.last_solve.sweeps)) <= 1
    assert prediction.converges
    assert prediction.exponent < 0
    assert prediction.steps == 375


def test_times_are_lines_in_the_steps_and_in_newtons_sweeps(clock):
    clock["newton"] = lambda n, sweeps: (1 + sweeps) * (2e-3 + 1e-6 * n)
    layer, x = pararnn.ParaGRU(4, 8), torch.randn(2, 2048, 4)
    prediction = _predict(layer, x)
    loop = 1.1 * (1e-3 + 1e-5 * 2048)
    newton = 1.1 * (1 + prediction.sweeps) * (2e-3 + 1e-6 * 2048)
    assert prediction.times == pytest.approx({NEWTON: 1e3 * newton, LOOP: 1e3 * loop})
    assert (prediction.pair, prediction.backward) == (NEWTON, True)
    assert "forward + backward: (newton, torch) 17.8 ms, (sequential, torch)" in str(prediction)
    with torch.no_grad():
        prediction = _predict(layer, x)
    assert prediction.times[LOOP] == pytest.approx(1e3 * loop / 1.1)
    assert not prediction.backward
    clock["newton"] = lambda n, sweeps: (1 + sweeps) * 1e-4 * n
    assert _predict(layer, x).pair == LOOP


def test_a_hopeless_pair_is_not_timed_at_length(clock):
    clock["newton"] = lambda n, sweeps: 1e-2 * n
    prediction = _predict(pararnn.ParaGRU(4, 8), torch.randn(2, 2048, 4))
    assert [n for solver, n in clock["seen"] if solver == "newton"] == [8, 32]
    assert [n for solver, n in clock["seen"] if solver == "sequential"] == [8, 32, 128, 512]
    assert 3 <= prediction.sweeps <= 5  # counted aside
    assert prediction.pair == LOOP


@needs_compiler
def test_kernels_are_predicted_in_the_segments_of_the_whole(clock):
    layer, x = pararnn.ParaGRU(4, 8), torch.randn(1, 4096, 4)
    explanation = pararnn.explain(layer, x, predict=True)
    assert set(explanation.prediction.times) == {("sequential", "fused"), ("newton", "fused")}
    assert 3 <= explanation.prediction.sweeps <= 5
    assert "nats a step" in str(explanation)
    assert explanation.size == (1, 4096, 8)


@pytest.mark.parametrize("steps", [64, pytest.param(100, marks=pytest.mark.thorough)])
def test_short_sequences_are_run_as_they_are(clock, steps):
    prediction = _predict(pararnn.ParaGRU(4, 8), torch.randn(2, steps, 4))
    assert prediction.steps == steps
    assert prediction.times[LOOP] == pytest.approx(1.1 * (1 + 1e-2 * steps))


def test_layouts_of_layers_and_cells(clock, quick):
    """The same recurrence, called in several ways."""
    torch.manual_seed(0)
    layer, x = pararnn.ParaGRU(4, 6), torch.randn(2, 300, 4)
    expected = _predict(layer, x)
    (inner,) = layer.layers
    gates = (inner.proj(x) + inner.bias).detach()
    time_first = pararnn.ParaGRU(4, 6, batch_first=False, num_layers=2, bidirectional=True)
    time_first.layers[0].load_state_dict(inner.state_dict())
    others = [
        _predict(inner, x),
        _predict(inner.cell, gates),
        _predict(time_first, x.transpose(0, 1)),
    ]
    for other in others:
        assert other.exponent == pytest.approx(expected.exponent, abs=1e-6)
        assert other.sweeps == expected.sweeps
    unbatched = [_predict(layer, x[:1]), _predict(layer, x[0]), _predict(time_first, x[0])]
    assert len({prediction.exponent for prediction in unbatched}) == 1
    x = x[:, :64]  # all of it is run, from either end
    forward, inner.reverse = _predict(layer, x), True
    backward = _predict(inner, x.flip(1)), _predict(layer, x.flip(1))
    assert all(p.exponent == pytest.approx(forward.exponent, abs=1e-6) for p in backward)


def test_drop_ins_of_torch_nn(clock, quick):
    torch.manual_seed(0)
    layer, x = pararnn.LSTM(4, 4, batch_first=True), torch.randn(2, 200, 4)
    prediction = _predict(layer, x)
    with torch.no_grad():
        layer.weight_hh_l0.mul_(30)
    wild = _predict(layer, x)
    assert prediction.exponent < wild.exponent
    assert prediction.sweeps < wild.sweeps


def test_fields_and_memories_of_the_call(clock, quick):
    torch.manual_seed(0)
    layer, x = pararnn.ParaRNN(zoo.CfCCell, 4, 6, batch_first=False), torch.randn(100, 2, 4)
    fields = [1.0, torch.ones(100, 2), torch.rand(100, 2)]
    one, same, other = (_predict(layer, x, fields={"dt": dt}).exponent for dt in fields)
    assert one == pytest.approx(same)
    assert one != pytest.approx(other)
    sizes = {"num_heads": 2, "K": 4, "E": 5}
    layer = pararnn.ParaRNN(zoo.AttentionLSTMCell, 4, 6, **sizes)
    memory = {name: torch.randn(6, 7, n) for name, n in {"keys": 4, "values": 5}.items()}
    memory["mask"] = torch.zeros(6, 7)
    prediction = _predict(layer, torch.randn(6, 70, 4), memory=memory)
    assert prediction.exponent < 0
    assert 1 < prediction.sweeps < 10


def test_updates_of_cells_that_newton_does_not_take(clock, quick):
    torch.manual_seed(0)
    layer = pararnn.ParaRNN(zoo.M2RNNCell, 4, 8, num_heads=2, K=4)
    x = torch.randn(1, 64, 4)
    prediction = _predict(layer, x)
    assert list(prediction.times) == [LOOP]
    assert 3 <= prediction.sweeps <= 8
    with torch.no_grad():
        for weight in layer.cell.recurrent_parameters():
            weight.mul_(20)
    wild = _predict(layer, x)
    assert wild.sweeps > 10


CASES = [(pararnn.DenseGRUCell, 3), (pararnn.LSTMCell, 3), (Linear, 1)]


@pytest.mark.parametrize("reverse", [False, pytest.param(True, marks=pytest.mark.thorough)])
@pytest.mark.parametrize(("cell_class", "scale"), CASES)
def test_updates_without_jacobians_are_newtons(cell_class, scale, reverse):
    module = sys.modules["pararnn.tune.predict"]
    torch.manual_seed(0)
    cell = cell_class(6)
    program, gates = program_of(cell), torch.randn(2, 48, cell.num_gates, 6)
    with torch.no_grad():
        for weight in cell.recurrent_parameters():
            weight.mul_(scale)
    args = prepare(cell, gates, reverse=reverse)
    newton, found = module._probe(program, args), module._count_by_loop(program, args)
    for one, other in zip(newton, found, strict=True):
        assert one.steps == other.steps
        assert abs(one.sweeps - other.sweeps) <= 1
        assert bool(one.mended) == bool(other.mended)


def test_updates_without_jacobians_of_what_does_not_converge():
    module = sys.modules["pararnn.tune.predict"]
    torch.manual_seed(0)
    cell, gates = Quadratic(3, dtype=torch.float64), _chaos(48)
    few, many = module._count_by_loop(program_of(cell), prepare(cell, gates))
    assert (many.sweeps, many.mended) == (MAX_SWEEPS, 1)
    assert (few.steps, few.mended) == (12, 0)
    assert 2 < few.sweeps <= 12


def test_sweeps_to_expect_on_more_steps():
    def samples(few, many):
        return [Sample(64, 0.0, 0.0, few, 0), Sample(256, 0.0, 0.0, many, 0)]

    assert sweeps_at(256, samples(2, 3), -1.0) == 3
    assert sweeps_at(4096, samples(3, 3), 1.0) == 3
    assert sweeps_at(1024, samples(4, 3), 1.0) == 3
    assert sweeps_at(4096, samples(2, 3), -1.0) == pytest.approx(5)
    assert sweeps_at(1024, samples(4, 8), 1.0) == pytest.approx(16)
    assert sweeps_at(1024, samples(1, 8), 1.0) == pytest.approx(32)  # no faster than the steps
    assert [steps_for(n) for n in (64, 300, 2048, 10**6)] == [64, 256, 512, 1024]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda layer: pararnn.explain(layer, (2, 100, 4), predict=True), "its input"),
        (lambda layer: pararnn.explain(pararnn.scan, torch.ones(1, 99, 4), predict=True), "scan"),
        (lambda layer: _predict(layer, torch.randn(2, 63, 4)), "64 steps or more, got 63"),
        (lambda layer: _predict(layer, torch.randn(100)), "time and channels"),
        (lambda layer: _predict(layer, torch.randn(2, 99, 4), device="cpu"), "leave them out"),
        (lambda layer: _predict(layer, torch.randn(2, 99, 5)), "4"),
    ],
)
def test_what_cannot_be_predicted_raises(call, message):
    with pytest.raises(ValueError, match=message):
        call(pararnn.ParaGRU(4, 6))


def test_a_real_clock_ranks_all_pairs_and_leaves_the_callers_state():
    layer, x = pararnn.ParaGRU(4, 6), torch.randn(1, 300, 4)
    random = torch.get_rng_state()
    prediction = _predict(layer, x)
    assert torch.equal(torch.get_rng_state(), random)
    assert layer.last_solve is None
    assert all(parameter.grad is None for parameter in layer.parameters())
    assert set(prediction.times) == {LOOP, NEWTON}
    assert all(0 < ms < 1e5 for ms in prediction.times.values())
