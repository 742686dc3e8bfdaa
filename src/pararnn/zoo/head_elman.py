"""Elman's simple recurrent network with a matrix for each head."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from pararnn.cells.base import Cell, Param
from pararnn.cells.nonlinearity import nonlinearity


class HeadElmanCell(Cell):
    """Simple recurrent network with a matrix of each head: state h, gate h_in. With one head it is
    torch.nn.RNN's.

    :equation: ``h' = tanh(x_h_in + R_h h)``
    :source: Elman 1990, Finding Structure in Time

    Config: state_nonlinearity, a name in `pararnn.NONLINEARITIES`; "relu" is the other one of
    torch.nn.RNN.
    """

    states = ("h",)
    gates = ("h_in",)
    params = {"R_h": Param("H,K,K")}
    config = {"state_nonlinearity": "tanh"}

    def step(self, state: Any, gate: Any, param: Any) -> Tensor:
        return nonlinearity(self.state_nonlinearity)(gate.h_in + state.h @ param.R_h.mT)
