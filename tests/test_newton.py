"""The Newton solver's own rules: when it stops, what it redoes, what it leaves alone."""

import pytest
import torch
from table import check_contract, make_case

import pararnn
from pararnn.engines.forward_time import to_system
from pararnn.program.coupling import APART, TOGETHER
from pararnn.program.program import program_of
from pararnn.solve import prepare
from pararnn.solvers.newton import MAX_SWEEPS, newton
from pararnn.solvers.sequential import unroll
from pararnn.solvers.system import running_max


def _system(case):
    with torch.no_grad():
        args = prepare(case.cell, case.gates, case.initial, **case.options)
        args = args.complete(program_of(case.cell))
        return to_system(program_of(case.cell), args)


@pytest.mark.parametrize("name", ["gru", "lstm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_few_sweeps_at_initialisation(name, dtype):
    for length in (256, 2048):
        case = make_case(pararnn.CELLS[name], dtype, length, channels=64)
        result = newton(_system(case))
        assert 2 <= result.sweeps <= 5
        assert result.redone == 0


def test_hard_columns_do_not_disturb_the_others():
    case = make_case(pararnn.GRUCell, torch.float64, 500, channels=12)
    easy = newton(_system(case)).states
    with torch.no_grad():
        for parameter in case.cell.recurrent_parameters():
            parameter[3] = 9.0
    result = newton(_system(case))
    keep = [d for d in range(12) if d != 3]
    assert torch.allclose(result.states[..., keep], easy[..., keep], atol=1e-13)
    loop = unroll(_system(case))
    assert torch.allclose(result.states[..., keep], loop[..., keep], atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_states_near_the_dtypes_largest_number_have_a_tolerance(dtype):
    """Four times such a size is infinite, and every state fits an infinite tolerance."""
    large = torch.finfo(dtype).max / 3
    cell, gates = pararnn.GRUCell(4, dtype=dtype), torch.randn(2, 40, 3, 4, dtype=dtype)
    with torch.no_grad():
        cell.a_z.fill_(-1)  # which closes the gate of a large state
    initial = torch.randn(2, 4, dtype=dtype).index_fill(1, torch.tensor([1]), large)
    args = prepare(cell, gates, initial).complete(program_of(cell))
    states = newton(to_system(program_of(cell), args)).states
    assert (states[..., 1] / large).sub(1).abs().max() < 1e-5


def test_the_budget_bounds_the_work(monkeypatch):
    case = make_case(pararnn.GRUCell, torch.float32, 600, channels=8)
    with torch.no_grad():
        for parameter in case.cell.recurrent_parameters():
            parameter.normal_(0, 8)
    system = _system(case)
    result = newton(system)
    assert result.sweeps <= MAX_SWEEPS
    assert 0 < result.redone <= 16
    assert result.defect > 0
    monkeypatch.setattr("pararnn.solvers.newton.MAX_SWEEPS", 0)
    nothing = newton(system)
    assert nothing.sweeps == 0
    assert torch.equal(nothing.states, unroll(system))  # all of it redone: the loop, to the bit


def test_results_do_not_depend_on_the_batch_beyond_rounding():
    case = make_case(pararnn.LSTMCell, torch.float32, 300, channels=16, batch=6)
    whole, _ = pararnn.solve(case.cell, case.gates, solver="newton")
    single, _ = pararnn.solve(case.cell, case.gates[2:3], solver="newton")
    assert torch.allclose(whole[0][2:3], single[0], atol=1e-6)
    again, _ = pararnn.solve(case.cell, case.gates, solver="newton")
    assert torch.equal(whole[0], again[0])


class Grouped(pararnn.Cell):
    """Its product folds rows and groups of channels, which only adjacent rows allow by a view."""

    states = ("h", "c")
    gates = ("x", "z")
    params = {"A": pararnn.Param("D,D")}
    structure = "dense"

    def step(self, state, gate, param):
        product = state.h.unflatten(-1, (-1, 4)) @ param.A[:4, :4]
        h = torch.tanh(gate.x + product.flatten(-2) + state.c)
        return h, 0.5 * state.c + gate.z * h


def test_dense_steps_may_fold_rows_and_channels():
    check_contract(Grouped(8), torch.randn(2, 40, 2, 8), solver="newton")


@pytest.mark.parametrize("shape", [(3, 7, 2, 5), (3, 2, 5), (3, 6, 2, 2, 5)])
def test_columns_round_trip(shape):
    whole = torch.randn(shape)
    mask = torch.rand(3, 5) < 0.4
    part = APART.take(whole, mask)
    assert part.shape == (1, *shape[1:-1], int(mask.sum()))
    assert torch.equal(APART.put(whole, mask, part), whole)
    zeros = APART.put(whole, mask, torch.zeros_like(part))
    assert torch.equal(zeros == 0, mask.reshape(3, *[1] * (len(shape) - 2), 5).expand(shape))
    rows = torch.tensor([True, False, True])
    assert torch.equal(TOGETHER.put(whole, rows, TOGETHER.take(whole, rows)), whole)


@pytest.mark.parametrize("length", [0, 1, 2, 3, 4, 5, 13, 64, 65])
@pytest.mark.parametrize("channels", [1, 4], ids=["all channels", "each channel"])
@pytest.mark.parametrize("part", [None, 0.0, 0.3, 1.0])
def test_the_largest_so_far_is_a_loops(part, channels, length):
    torch.manual_seed(0)
    x = torch.rand(2, length, 3, 4)
    cuts = None if part is None else torch.rand(2, length, 1, channels) < part
    reference = x.clone()
    for t in range(1, length):
        further = torch.maximum(reference[:, t - 1], x[:, t])
        reference[:, t] = further if cuts is None else further.where(~cuts[:, t], x[:, t])
    assert torch.equal(running_max(x, cuts), reference)
