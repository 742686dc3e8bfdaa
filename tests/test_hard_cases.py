"""Inputs that break fixed-iteration solvers end right by the contract, or raise."""

import warnings

import pytest
import torch
from call_results import as_tuple
from table import (
    FUSED,
    OPS,
    PAIRS,
    PLAIN,
    ROWS,
    SCAN,
    cell_of,
    check_case,
    check_contract,
    make_case,
    passed,
)

import pararnn
from pararnn.check.contract import check_solve, check_solves
from pararnn.engines import newton_torch

LONG = 256
# A loop does nothing else at one scale than at another, and one scan nothing else than another.
SCALES = {FUSED: (1, 8), SCAN: (2,)}


@pytest.fixture(autouse=True)
def _warn_again():
    newton_torch._WARNED.clear()


def _scale(name, dtype, scale, bias=0.0):
    """Recurrent weights of standard deviation `scale`, inputs times 3, first gate shifted."""
    case = make_case(pararnn.CELLS[name], dtype, LONG, channels=16)
    with torch.no_grad():
        for parameter in case.cell.recurrent_parameters():
            parameter.copy_(torch.randn_like(parameter) * scale)
        case.gates.mul_(3)
        case.gates[:, :, 0] += bias
    return case


@pytest.mark.filterwarnings("ignore::pararnn.ConvergenceWarning")
@pytest.mark.parametrize(
    ("dtype", "scale"),
    # In float64 the claim is the same; loops and their other roundings take longest there. 16 bits
    # are solved in float32: each pair meets them at one scale or two.
    [
        *((torch.float32, scale) for scale in (1, 2, 4, 8)),
        *((torch.bfloat16, scale) for scale in (2, 8)),
        (torch.float64, 2),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["gru", "lstm", "elman", "lem", "slstm", "lrc"])
@pytest.mark.one_in(23)
def test_large_recurrent_weights(name, dtype, scale):
    case = _scale(name, dtype, scale)
    pairs = [pair for pair in OPS if scale in SCALES.get(pair, (scale,))]
    for result in check_solves(case.cell, case.gates, pairs=pairs, **case.options):
        passed(result)


def test_slow_gates_converge():
    case = _scale("gru", torch.float32, 0.3, bias=-6.0)
    result = check_contract(case.cell, case.gates, solver="newton", backend="torch")
    assert result.mended == 0


def test_unconverged_columns_warn_once_and_equal_the_loop():
    case = _scale("gru", torch.float32, 8)
    with pytest.warns(pararnn.ConvergenceWarning) as caught:
        states, _ = pararnn.solve(case.cell, case.gates, solver="newton", backend="torch")
    pararnn.solve(
        case.cell, case.gates, solver="newton", backend="torch"
    )  # a second warning would be an error
    messages = [str(w.message) for w in caught if w.category is pararnn.ConvergenceWarning]
    assert len(messages) == 1
    assert caught[0].filename == __file__
    for part in ("GRUCell", f"T = {LONG}", "defect", "recurrent_clip", "solver='sequential'"):
        assert part in messages[0]
    assert states.isfinite().all()
    defect = check_solve(case.cell, case.gates, solver="newton", backend="torch").checks[0]
    assert defect.passed


def test_raise_on_failure():
    case = _scale("gru", torch.float32, 8)
    with pytest.raises(pararnn.ConvergenceError, match="did not converge on"):
        pararnn.solve(case.cell, case.gates, solver="newton", backend="torch", on_failure="raise")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")], ids=str)
@pytest.mark.parametrize(("name", "pair"), ROWS)
@pytest.mark.one_in(29)
def test_non_finite_inputs_spread_no_further_than_in_the_loop(name, pair, value):
    case = make_case(cell_of(name), torch.float32, 100, "resets", channels=5)
    case.gates[0, 40, 0, 2] = value
    case.gates[1, 7, -1, 0] = value
    runs = {}
    for solver, backend in (PLAIN, pair):
        gates = case.gates.clone().requires_grad_()
        states, final = pararnn.solve(
            case.cell, gates, case.initial, solver=solver, backend=backend, **case.options
        )
        states = torch.stack(states) if isinstance(states, tuple) else states
        final = torch.stack(final) if isinstance(final, tuple) else final
        runs[solver, backend] = (states, final)
    for got, loop in zip(runs[pair], runs[PLAIN], strict=True):
        assert torch.equal(got.isnan(), loop.isnan())
        assert torch.equal(got.isinf(), loop.isinf())
        finite = loop.isfinite()
        assert torch.allclose(got[finite], loop[finite], atol=2e-5, rtol=2e-5)


def test_a_non_finite_channel_is_no_failure():
    case = make_case(pararnn.GRUCell, torch.float32, 64)
    case.gates[0, 10] = float("nan")
    states, _ = pararnn.solve(
        case.cell, case.gates, solver="newton", backend="torch", on_failure="raise"
    )
    assert states[0, 10:].isnan().all()
    assert states[0, :10].isfinite().all()
    assert states[1].isfinite().all()


@pytest.mark.thorough
def test_overflowing_jacobians_are_redone_in_the_backward_pass():
    # J = 1e30 at some steps and 0 at others: composed Jacobians reach inf * 0, the loop does not.
    class Gain(pararnn.Cell):
        states = ("h",)
        gates = ("gain", "x")
        structure = "diagonal"

        def step(self, state, gate, param):
            return gate.gain * state.h + gate.x

    cell = Gain(1, dtype=torch.float32)
    gates = torch.zeros(1, 64, 2, 1)
    gates[:, 1::4, 0] = 1e30
    gates[:, 2::4, 0] = 1e30
    gates[:, :, 1] = 1e-30
    gates[:, 1::2, 1] = 0.0
    grads = []
    for solver in ("sequential", "newton"):
        leaf = gates.clone().requires_grad_()
        states, _ = pararnn.solve(cell, leaf, solver=solver)
        (grad,) = torch.autograd.grad((states[:, 3::4]).sum(), leaf)
        grads.append((states.detach(), grad))
    (loop, loop_grad), (states, grad) = grads
    assert loop.isfinite().all()
    assert torch.equal(states.isfinite(), loop.isfinite())
    assert torch.allclose(states, loop, rtol=1e-5)
    assert torch.equal(grad.isfinite(), loop_grad.isfinite())
    finite = loop_grad.isfinite()
    assert torch.allclose(grad[finite], loop_grad[finite], rtol=1e-5)


@pytest.mark.parametrize("size", [(0, 5), (2, 0), (0, 0)])
@pytest.mark.parametrize(("name", "pair"), ROWS)
@pytest.mark.one_in(11)
def test_empty_batches_and_sequences(name, size, pair):
    batch, length = size
    case = make_case(cell_of(name), torch.float32, length, "initial", batch=batch)
    gates = case.gates.requires_grad_()
    initial = [h.requires_grad_() for h in case.initial]
    solver, backend = pair
    states, final = pararnn.solve(
        case.cell, gates, initial, solver=solver, backend=backend, **case.options
    )
    states, final = as_tuple(states), as_tuple(final)
    assert states[0].shape == (batch, length, 4)
    if not length:
        assert all(torch.equal(f, h) for f, h in zip(final, initial, strict=True))
    sum(f.sum() for f in final).backward()
    if not length:
        assert all(torch.equal(h.grad, torch.ones_like(h)) for h in initial)


@pytest.mark.parametrize("initial", [False, True], ids=["zero", "initial"])
@pytest.mark.parametrize(
    ("length", "cuts"), [(0, None), (0, [0]), (0, [0, 0, 0]), (5, [0])], ids=str
)
@pytest.mark.parametrize(("name", "pair"), ROWS)
@pytest.mark.one_in(17)
def test_what_no_step_made_still_has_gradients(name, length, cuts, initial, pair):
    case = make_case(cell_of(name), torch.float32, length, batch=1)
    sequences = 1 if cuts is None else len(cuts) - 1
    where = {} if cuts is None else {"cu_seqlens": torch.tensor(cuts)}
    gates = case.gates.requires_grad_()
    start = [torch.randn(sequences, 4, requires_grad=True) for _ in case.cell.states]
    options = {"solver": pair[0], "backend": pair[1], **case.options, **where}
    states, final = pararnn.solve(case.cell, gates, start if initial else None, **options)
    states, final = as_tuple(states), as_tuple(final)
    assert all(t.requires_grad for t in (*states, *final))
    sum(t.sum() for t in (*states, *final)).backward()
    for leaf in (gates, *case.cell.parameters()):
        assert torch.equal(leaf.grad, torch.zeros_like(leaf))
    if initial:
        assert all(torch.equal(h.grad, torch.ones_like(h)) for h in start)


@pytest.mark.parametrize(("name", "pair"), ROWS)
@pytest.mark.one_in(19)
def test_one_channel_and_odd_lengths(name, pair):
    for length in (1, 5, 31, 33, 63, 65):
        case = make_case(cell_of(name), torch.float64, length, "resets", channels=1)
        check_case(case, solver=pair[0], backend=pair[1])


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
@pytest.mark.one_in(5)
def test_non_contiguous_and_expanded_inputs(pair):
    cell = pararnn.LSTMCell(6, dtype=torch.float64)
    base = torch.randn(6, 3, 2, 33, dtype=torch.float64)
    views = {
        "transposed": base.permute(2, 3, 1, 0),
        "expanded": torch.randn(1, 33, 3, 6, dtype=torch.float64).expand(2, -1, -1, -1),
        "heads": torch.randn(3, 2, 33, 3, 2, dtype=torch.float64).permute(1, 2, 3, 0, 4),
        "strided": torch.randn(2, 66, 3, 6, dtype=torch.float64)[:, ::2],
    }
    for gates in views.values():
        check_contract(cell, gates, solver=pair[0], backend=pair[1])


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
@pytest.mark.one_in(3)
def test_frozen_and_unused_parameters(pair):
    class Unused(pararnn.Cell):
        states = ("h",)
        gates = ("x",)
        params = {"a": pararnn.Param(), "spare": pararnn.Param()}
        structure = "diagonal"

        def step(self, state, gate, param):
            return torch.tanh(gate.x + param.a * state.h)

    cell = Unused(3)
    cell.a.requires_grad_(False)
    gates = torch.randn(2, 70, 1, 3, requires_grad=True)
    states, _ = pararnn.solve(cell, gates, solver=pair[0], backend=pair[1])
    states.sum().backward()
    assert cell.a.grad is None
    assert cell.spare.grad is None or not cell.spare.grad.any()
    assert gates.grad.abs().sum() > 0


def test_a_linear_cell_converges_in_one_iteration():
    class Linear(pararnn.Cell):
        states = ("h",)
        gates = ("x", "decay")
        structure = "diagonal"

        def step(self, state, gate, param):
            return torch.sigmoid(gate.decay) * state.h + gate.x

    for dtype in (torch.float32, torch.float64):
        gates = torch.randn(2, 300, 2, 8).to(dtype)
        assert check_contract(Linear(8), gates, solver="newton", backend="torch").sweeps == 1


class Threshold(pararnn.Cell):
    """A slow state, and an output that jumps with its last bits."""

    states = ("h", "y")
    gates = ("x", "keep")

    def step(self, state, gate, param):
        h = torch.lerp(state.h, torch.tanh(gate.x), torch.sigmoid(gate.keep))
        fine = state.h * 2**22
        return h, 2 * (fine - torch.floor(fine) >= 0.5).to(h.dtype) - 1


def threshold_case(length, channels, shift):
    """Gates of which channels forget slowly."""
    gates = torch.randn(1, length, 2, channels)
    gates[:, :, 1] += torch.linspace(0, shift, channels)
    return Threshold(channels), gates


def assert_no_jump_is_missed(h, y):
    """Every y is what the step makes of the state before it, as it was returned."""
    previous = torch.cat([torch.zeros_like(h[:, :1]), h[:, :-1]], 1) * 2**22
    assert torch.equal(y, 2 * (previous - previous.floor() >= 0.5).float() - 1)


@pytest.mark.parametrize("pair", OPS, ids="-".join)
@pytest.mark.one_in(3)
def test_steps_that_jump_take_the_states_that_are_returned(pair):
    cell, gates = threshold_case(4096, 32, -10.0)
    with pararnn.using(*pair, segments=16), warnings.catch_warnings():
        warnings.simplefilter("ignore", pararnn.ConvergenceWarning)
        (h, y), _ = pararnn.solve(cell, gates)
    loop, _ = pararnn.solve(cell, gates, solver="sequential", backend="torch")
    assert_no_jump_is_missed(h, y)
    assert (h - loop[0]).abs().max() < 1e-5
