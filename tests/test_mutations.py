"""The checks can fail: a right result passes, and each mutant of it does not."""

from __future__ import annotations

import pytest
import torch
from table import CELLS, COUPLED, DTYPES, MIXING, cell_of, dtype_name, make_case, passed
from torch import Tensor

import pararnn
from pararnn.check.oracle import Oracle, Run

LENGTH, SHORT = 64, 16  # dense cells take longest
LONGER = 128
"""Steps in bfloat16, where a few percent of a gradient show in long sequences only."""
SCALED = {torch.float64: 1.01, torch.float32: 1.01, torch.bfloat16: 1.04, torch.float16: 1.01}
# A sum of many contributions says little of a few percent, where 16 bits may be off by 2e-3 of it.
SCALED_SUM = {torch.float64: 1.01, torch.float32: 1.01, torch.bfloat16: 2.0, torch.float16: 2.0}


def _oracle(name: str, dtype: torch.dtype, weights: float, loss_scale: float, length: int):
    case = make_case(cell_of(name), dtype, length, "initial", channels=8)
    with torch.no_grad():
        for parameter in case.cell.recurrent_parameters():
            parameter.copy_(torch.randn_like(parameter) * weights)
    options = {"loss_scale": loss_scale, **case.options}
    return Oracle.of(case.cell, case.gates, case.initial, **options)


def _swap(x: Tensor) -> Tensor:
    """The channel of the largest entry, and its neighbour."""
    order = list(range(x.shape[-1]))
    one = int(x.abs().flatten(0, -2).amax(0).argmax()) if x.ndim > 1 else int(x.abs().argmax())
    two = one - 1 if one else 1
    order[one], order[two] = two, one
    return x[..., order]


def _drop(x: Tensor) -> Tensor:
    segment = x.shape[1] // 8
    out = x.clone()
    out[:, 4 * segment : 5 * segment] = 0
    return out


def _nudge(x: Tensor) -> Tensor:
    """One step, that of the largest state, off by 16 epsilons of itself."""
    out, step = x.clone(), int(x.abs().amax((0, 2)).argmax())
    out[:, step] *= 1 + 16 * torch.finfo(x.dtype).eps
    return out


def _shift(x: Tensor) -> Tensor:
    return x.roll(1, 1)


def _sequential(oracle: Oracle) -> Run:
    """Return the loop in the trial's dtype, as an engine with a backward would return it."""
    none = torch.zeros(1, 2, dtype=torch.int64)
    return Run(oracle.loop, oracle.loop_grads(0), none)


def _mutants(oracle: Oracle, factor: float):
    """(what was done to what, the run that has it); sums are scaled by `factor`."""
    run, cell = _sequential(oracle), oracle.trial.cell
    dtype = oracle.dtype
    whole = {"zeroed": torch.zeros_like, "swapped": _swap}
    steps = {"shifted": _shift, "dropped": _drop}
    grads = {"gates": {**whole, **steps, "scaled": lambda x: x * SCALED[dtype]}}
    for name in (f"initial {cell.states[0]}", next(iter(cell.params))):
        grads[name] = {**whole, "scaled": lambda x: x * factor}
    states = {"nudged": _nudge, "shifted": _shift, "swapped": _swap}
    for name, kinds in grads.items():
        for kind, change in kinds.items():
            mutant = {**run.grads, name: change(run.grads[name])}
            yield f"grad {name} {kind}", Run(run.values, mutant, run.info)
    for kind, change in states.items():
        name = cell.states[0]
        mutant = {**run.values, name: change(run.values[name])}
        yield f"{name} {kind}", Run(mutant, run.grads, run.info)


def _survivors(oracle: Oracle, factor: float | None = None) -> list[str]:
    passed(oracle.judge(_sequential(oracle)))
    mutants = _mutants(oracle, factor or SCALED_SUM[oracle.dtype])
    # The first claim that fails is enough: what is left to check takes most of the time.
    return [what for what, run in mutants if all(check.passed for check in oracle.checks(run))]


# Weights' standard deviations and scales of the loss. Gradients in float16 lie between 6e-8 and
# 65504: it is trained with a scaled loss.
ALL = [(1, 1.0), (4, 1.0), (8, 1.0), (1, 1e-7), (4, 1e-7), (8, 1e-7)]
GRID = {
    torch.float64: [(1, 1e-7), (8, 1.0)],
    torch.float32: ALL,
    torch.bfloat16: [(1, 1e-7), (4, 1.0), (8, 1e-7)],
    torch.float16: [(1, 1e-2), (8, 1e-3)],
}


def _in_two_dtypes():
    """Return (cell, dtype): each cell in two dtypes, and each dtype with half of the cells."""
    return [
        pytest.param(name, dtype, id=f"{name}-{dtype_name(dtype)}")
        for n, name in enumerate(CELLS)
        for dtype in DTYPES[n % 2 :: 2]
    ]


@pytest.mark.parametrize(("name", "dtype"), _in_two_dtypes())
@pytest.mark.one_in(11)
def test_mutants_fail(name, dtype):
    for weights, loss_scale in GRID[dtype]:
        length = LONGER if dtype == torch.bfloat16 else LENGTH
        length = SHORT if name in COUPLED else length
        survivors = _survivors(_oracle(name, dtype, weights, loss_scale, length))
        assert not survivors, (weights, loss_scale)


@pytest.mark.parametrize("name", [name for name in MIXING if name != "Dense"])
@pytest.mark.one_in(5)
def test_mutants_of_mixing_cells_fail(name):
    assert not _survivors(_oracle(name, torch.float32, 1, 1e-7, SHORT))


@pytest.mark.parametrize(("name", "weights"), [("gru", 8), ("lstm", 8), ("slstm", 8), ("lem", 4)])
@pytest.mark.one_in(5)
def test_mutants_fail_where_rounding_moves_everything(name, weights):
    oracle = _oracle(name, torch.float32, weights, 1.0, 512)
    # What is left of an initial state's or a parameter's gradient is known to a few percent.
    assert not _survivors(oracle, 1.3)


class Small(pararnn.Cell):
    """An Elman cell whose state is in another unit."""

    states = ("h",)
    gates = ("x",)
    params = {"a": pararnn.Param()}
    config = {"unit": 1.0}

    def step(self, state, gate, param):
        return self.unit * torch.tanh(gate.x + param.a * (state.h / self.unit))


@pytest.mark.parametrize("power", [-20, -80, 60])
def test_units_change_nothing(power):
    """Neither a state's nor the loss's, in powers of two; and mutants fail in any."""
    numbers = []
    for exponent in (0, power):
        torch.manual_seed(0)
        cell, unit = Small(8, unit=2.0**exponent), 2.0**exponent
        gates, start = torch.randn(2, LENGTH, 1, 8), unit * torch.randn(2, 8)
        oracle = Oracle.of(cell, gates, start, loss_scale=1 / unit)
        assert not _survivors(oracle)
        checks = oracle.judge(_sequential(oracle)).checks
        numbers.append([number for check in checks for number in (check.error, check.limit)])
    assert numbers[0] == pytest.approx(numbers[1], rel=1e-3)


def test_a_small_state_beside_a_large_one():
    """An error in a memory of 1e-9 is found next to a state of 1e9."""

    class Two(pararnn.Cell):
        states = ("large", "small")
        gates = ("x", "y")

        def step(self, state, gate, param):
            return 0.5 * state.large + 1e9 * gate.x, 0.9 * state.small + 1e-9 * gate.y

    oracle = Oracle.of(Two(4), torch.randn(2, LENGTH, 2, 4))
    run = _sequential(oracle)
    wrong = run.values | {"small": run.values["small"] * (1 + 1e-3 * torch.randn(2, LENGTH, 4))}
    failures = [c.name for c in oracle.judge(run._replace(values=wrong)).checks if not c.passed]
    assert failures[:2] == ["defect in epsilons", "small"]


class Growing(pararnn.Cell):
    """A sum that grows by a gate."""

    states, gates = ("h",), ("x", "a")

    def step(self, state, gate, param):
        return torch.exp(gate.a) * state.h + gate.x


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
@pytest.mark.parametrize("name", ["h", "final h", "gates"])
@pytest.mark.parametrize("row", [0, 1])
def test_either_may_overflow_near_the_largest_number(row, name, dtype):
    """Rounding decides where; entries of another size, as those of row 0, may not."""
    torch.manual_seed(0)
    gates = torch.randn(2, 55, 2, 4, dtype=torch.float64)
    largest = torch.finfo(dtype).max
    gates[0, :, 1], gates[1, :, 1] = -1, torch.tensor(largest / 50, dtype=torch.float64).log() / 54
    oracle = Oracle.of(Growing(4), gates.to(dtype))
    run = _sequential(oracle)
    passed(oracle.judge(run))
    values = run.values if name in run.values else run.grads
    wrong = values[name].clone()
    wrong[row].view(-1)[wrong[row].abs().nan_to_num(0, 0, 0).argmax()] = torch.inf
    replaced = run._replace(
        **{"values" if values is run.values else "grads": values | {name: wrong}}
    )
    assert oracle.judge(replaced).passed is (row == 1)
