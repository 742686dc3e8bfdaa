"""Elman's simple recurrent network with a diagonal recurrence."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from pararnn.cells.base import Cell, Param
from pararnn.cells.nonlinearity import nonlinearity


class ElmanCell(Cell):
    """Simple recurrent network, diagonal recurrence: state h, gate h_in.

    :equation: ``h' = tanh(x_h_in + a_h h)``
    :source: Elman 1990, Finding Structure in Time, its matrix a diagonal

    Config: state_nonlinearity (a name in `pararnn.NONLINEARITIES`).
    """

    states = ("h",)
    gates = ("h_in",)
    params = {"a_h": Param("D")}
    config = {"state_nonlinearity": "tanh"}
    structure = "diagonal"

    def step(self, state: Any, gate: Any, param: Any) -> Tensor:
        return nonlinearity(self.state_nonlinearity)(gate.h_in + param.a_h * state.h)
