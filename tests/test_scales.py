"""No units: another scale of the loss, or another unit of a state, changes no more than the scale.

Powers of two scale floating-point numbers exactly, so results are equal to the bit: a tolerance
with an absolute part shows wherever it decides anything.
"""

from functools import cache

import pytest
import torch
from call_results import as_tuple
from table import FUSED, MIXING, PLAIN, in_units, make_case, needs_compiler, pairs_of

import pararnn

pytestmark = pytest.mark.two_dtypes

LENGTH, CHANNELS, SEGMENTS = 640, 33, 8
SLOW = {"lstm": 4.0}  # what the first gate is shifted by, for channels that forget slowly; else -4
F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
ROWS = [(name, F32) for name in ("gru", "lstm", "lem", "slstm")]
ROWS += [("gru", BF16), ("gru", F64), ("lstm", BF16)]


def newton_pairs(name):
    """The pairs that stop where a tolerance says so; loops have none."""
    return [pair for pair in pairs_of(name) if pair[0] == "newton"]


def slow_case(cell_class, dtype, shift, length=LENGTH, device="cpu"):
    """Inputs of a solve in which channels forget slowly; no initial state."""
    case = make_case(cell_class, dtype, length, channels=CHANNELS, batch=1, device=device)
    case.gates[:, :, 0] += shift
    return case


def solve_case(case, pair, loss_scale, units=()):
    """States, and the gradients of a mean-like loss on the first of them, by one pair."""
    gates = case.gates.clone().requires_grad_()
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(gates[:, :, 0].shape, generator=generator).to(gates.device)
    with pararnn.using(*pair, segments=SEGMENTS):
        states, _ = pararnn.solve(case.cell, gates, **case.options)
    states = as_tuple(states)
    loss = (states[0].double() / (units or (1.0,))[0] * weights * loss_scale).sum()
    leaves = [gates, *case.cell.parameters()]
    return [s.detach() for s in states], torch.autograd.grad(loss, leaves)


@cache
def at_scale_one(name, dtype, pair):
    """The same case's result for all scales of its loss."""
    case = slow_case(pararnn.CELLS[name], dtype, SLOW.get(name, -4.0))
    return case, solve_case(case, pair, 1.0)[1]


@pytest.mark.parametrize("exponent", [-30, 30])
@pytest.mark.parametrize(("name", "dtype"), ROWS, ids=str)
@pytest.mark.one_in(5)
def test_the_scale_of_the_loss_scales_gradients(name, dtype, exponent):
    for pair in newton_pairs(name):
        case, usual = at_scale_one(name, dtype, pair)
        _, grads = solve_case(case, pair, 2.0**exponent)
        for one, other in zip(usual, grads, strict=True):
            assert torch.equal(one.double() * 2.0**exponent, other.double()), pair


UNITS = [(0, 0, 0, 0), (-20, 30, 35, -25), (-50, 1, 10, 40)]  # exponents of two, by state


@pytest.mark.parametrize(("name", "dtype"), ROWS, ids=str)
@pytest.mark.one_in(7)
def test_units_of_states_scale_states(name, dtype):
    usual = pararnn.CELLS[name]
    cell_class = in_units(usual)
    names = cell_class.fields[len(usual.fields) :]
    for pair in newton_pairs(name):
        results = []
        for exponents in UNITS:
            units = [2.0**e for e in exponents[: len(usual.states)]]
            case = slow_case(cell_class, dtype, SLOW.get(name, -4.0))
            fields = {**case.options["fields"], **dict(zip(names, [*units, 1.0], strict=True))}
            case.options["fields"] = fields
            states, grads = solve_case(case, pair, 1.0, units)
            plain = [s.double() / u for s, u in zip(states, units, strict=True)]
            results.append([*plain, *grads])
        for other in results[1:]:
            for one, two in zip(results[0], other, strict=True):
                assert torch.equal(one, two), pair


def _mixing_case(cell_class):
    case = make_case(cell_class, F32, 24, channels=10, num_heads=2)
    case.gates[:, :, 0] += 1.0
    return case


@needs_compiler
@pytest.mark.parametrize("name", MIXING)
@pytest.mark.one_in(5)
def test_kernels_of_mixing_cells_know_no_scale(name):
    """They have no tolerance, and no order of sums that sizes of numbers decide."""
    usual = MIXING[name]
    case = _mixing_case(usual)
    grads = [solve_case(case, FUSED, scale)[1] for scale in (1.0, 2.0**-30, 2.0**30)]
    for one, small, large in zip(*grads, strict=True):
        assert torch.equal(one * 2.0**-30, small)
        assert torch.equal(one * 2.0**30, large)
    cell_class, results = in_units(usual), []
    names = cell_class.fields[len(usual.fields) :]
    for exponents in UNITS:
        units = [2.0**e for e in exponents[: len(usual.states)]]
        case = _mixing_case(cell_class)
        case.options["fields"] |= dict(zip(names, [*units, 1.0], strict=True))
        states, grads = solve_case(case, FUSED, 1.0, units)
        results.append([*(s.double() / u for s, u in zip(states, units, strict=True)), *grads])
    for other in results[1:]:
        for one, two in zip(results[0], other, strict=True):
            assert torch.equal(one, two)


class Running(pararnn.Cell):
    """A sum, in a unit of its own."""

    states = ("h",)
    gates = ("x",)
    fields = ("unit",)

    def step(self, state, gate, param):
        return state.h + gate.unit * torch.tanh(gate.x)


class Amplified(pararnn.Cell):
    """A memory of its own unit, which the output needs at another."""

    states = ("y", "m")
    gates = ("x", "keep")
    fields = ("unit",)

    def step(self, state, gate, param):
        keep = torch.sigmoid(gate.keep + 4)
        m = keep * state.m + (1 - keep) * gate.unit * torch.tanh(gate.x)
        return torch.tanh(0.5 * state.y + state.m / gate.unit), m


@pytest.mark.parametrize("unit", [1e-30, 1e-9, 1e-6, 1e-3, 1e9, 1e20])
@pytest.mark.parametrize("cell_class", [Running, Amplified])
@pytest.mark.one_in(5)
def test_any_unit_has_the_error_of_a_loop(cell_class, unit):
    torch.manual_seed(0)
    gates = torch.randn(1, LENGTH, len(cell_class.gates), CHANNELS)
    exact = solved_in(cell_class, gates, unit, PLAIN, torch.float64)
    loop = solved_in(cell_class, gates, unit, PLAIN, torch.float32)
    for pair in newton_pairs(""):
        own = solved_in(cell_class, gates, unit, pair, torch.float32)
        for true, plain, got in zip(exact, loop, own, strict=True):
            size = true.abs().amax((0, 1), keepdim=True)
            limit = 2e-5 + 4 * ((plain - true).abs() / size).max()
            assert ((got - true).abs() / size).max() <= limit, pair


def solved_in(cell_class, gates, unit, pair, dtype):
    """All states and the gates' gradient of a small loss, in float64."""
    gates = gates.to(dtype).requires_grad_()
    with pararnn.using(*pair, segments=SEGMENTS):
        states, _ = pararnn.solve(cell_class(CHANNELS, dtype=dtype), gates, fields={"unit": unit})
    states = as_tuple(states)
    (grad,) = torch.autograd.grad((states[0] * 1e-7).sum() / unit ** (len(states) == 1), gates)
    return [t.detach().double() for t in (*states, grad.flatten(2))]
