"""Slips of users meet errors that name the slip, its line and the cure."""

import inspect
import traceback
from pathlib import Path

import pytest
import torch

import pararnn
from pararnn.cells.base import LAYER_ARGUMENTS


def make_class(step, states=("h",), **attributes):
    body = {"states": states, "gates": ("x",), "step": step, **attributes}
    return type("Made", (pararnn.Cell,), body)


def sets_a_state(self, state, gate, param):
    state.h += gate.x
    return state.h


def writes_by_mask(self, state, gate, param):
    h = torch.tanh(state.h + gate.x)
    h[h > 0.5] = 0.5
    return h


def holds_a_size(self, state, gate, param):
    return state.h + torch.ones(16) * gate.x


def misspells(self, state, gate, param):
    return torch.tanh(state.hidden + gate.x)


STEPS = {
    sets_a_state: (
        r"Made.step fails: state.h cannot be set: state, gate and param may only be read. Name the "
        r"new tensor \(h = ...\) and return it \(.*test_slips.py, line \d+\)"
    ),
    writes_by_mask: (
        r"Made.step writes into a tensor in place \(h \+= ..., h\[mask\] = ..., h.add_\(\)\), "
        "and its gradient needs what was there: make a new one, by torch.where for a mask"
    ),
    holds_a_size: (
        r"Made.step cannot be traced: .*size of tensor a \(16\).* \(.*test_slips.py, line \d+\). "
        r"It was traced on 12 channels \(8, or the layer's own where those do not fit\): read sizes"
    ),
    misspells: (
        r"Made.step fails: state.hidden is not there: it has h \(.*test_slips.py, line \d+\)"
    ),
}


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_what_a_step_may_not_do_is_said_of_its_line(step):
    with pytest.raises(pararnn.CellError, match=STEPS[step]) as caught:
        pararnn.program_of(make_class(step)(12))
    assert len(traceback.extract_tb(caught.tb)) <= 4
    if step is not writes_by_mask:  # whose gradient fails, not its line
        frames = traceback.extract_tb(caught.value.__cause__.__traceback__)
        assert Path(frames[0].filename).name == "test_slips.py"


SLIPS = {
    "explain(gru, x)": (
        lambda: pararnn.explain(pararnn.ParaGRU(4, 6), torch.randn(2, 9, 4)),
        ValueError,
        "shape must be a tuple of sizes, such as x.shape, got a tensor",
    ),
    "a name for a class": (
        lambda: pararnn.ParaRNN("gru", 4, 6),
        pararnn.CellError,
        "cell_class must be a subclass of pararnn.Cell, got 'gru': pararnn.CELLS has those",
    ),
    "a cell for a class": (
        lambda: pararnn.ParaRNN(pararnn.GRUCell(6), 4, 6),
        pararnn.CellError,
        "got GRUCell.*: GRUCell is one, and what you gave is a cell",
    ),
    "a list for params": (
        lambda: make_class(misspells, params=["a"]),
        pararnn.CellError,
        r"Made.params must be a dict of each name's Param, got \['a'\]",
    ),
    "a list for config": (
        lambda: make_class(misspells, config=["a"]),
        pararnn.CellError,
        r"Made.config must be a dict of each name's default, got \['a'\]",
    ),
    "an argument's name": (
        lambda: make_class(misspells, config={"solver": 1}),
        pararnn.CellError,
        "Made: config 'solver' could not be given to a layer, which has an argument of that name",
    ),
}


@pytest.mark.parametrize("slip", SLIPS)
def test_slips(slip):
    call, error, message = SLIPS[slip]
    with pytest.raises(error, match=message):
        call()


def test_names_that_no_config_may_have_are_those_of_arguments():
    names = {
        name
        for owner in (pararnn.ParaRNN, pararnn.RecurrentLayer, pararnn.Cell)
        for name in inspect.signature(owner).parameters
    }
    assert names - {"config", "options", "positional"} == LAYER_ARGUMENTS


def test_more_states_than_kernels_take_are_said():
    names = tuple(f"h{n}" for n in range(9))

    def step(self, state, gate, param):
        return tuple(torch.tanh(h + gate.x) for h in state)

    with pytest.warns(
        pararnn.CellCostWarning,
        match="Made has 9 states, and generated kernels take 8: PyTorch runs it, some 50",
    ):
        pararnn.program_of(make_class(step, names)(3))
