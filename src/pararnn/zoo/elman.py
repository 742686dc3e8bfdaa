"""Elman's simple recurrent network with a diagonal recurrence."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from pararnn.cells.base import Cell, Param
from pararnn.cells.nonlinearity import nonlinearity


class ElmanCell(Cell):
    """h = tanh(a h + B x + b) (Elman 1990, recurrent weights diagonal)."""

    states = ("h",)
    gates = ("h_in",)
    params = {"a_h": Param("D")}
    config = {"state_nonlinearity": "tanh"}
    structure = "diagonal"

    def step(self, state: Any, gate: Any, param: Any) -> Tensor:
        return nonlinearity(self.state_nonlinearity)(gate.h_in + param.a_h * state.h)
