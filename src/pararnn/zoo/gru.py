"""The paper's GRU: diagonal recurrence, eq. GRU with eq. GRU_LSTM_simp."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from pararnn.cells.base import Cell, Param
from pararnn.cells.nonlinearity import nonlinearity


class GRUCell(Cell):
    """Gated recurrent unit, diagonal recurrence: state h; gates z (update), r (reset), c.

    :equation: ``h' = (1 - z) h + z tanh(x_c + a_c (r h))``; ``z, r = sigmoid(x + a h)``
    :source: Danieli et al. 2025, ParaRNN, eq. GRU with eq. GRU_LSTM_simp, after Cho et al. 2014

    Config: gate_nonlinearity, state_nonlinearity (names in `pararnn.NONLINEARITIES`).
    """

    states = ("h",)
    gates = ("z", "r", "c")
    params = {name: Param("D") for name in ("a_z", "a_r", "a_c")}
    config = {"gate_nonlinearity": "sigmoid", "state_nonlinearity": "tanh"}
    structure = "diagonal"

    def step(self, state: Any, gate: Any, param: Any) -> Tensor:
        sigma_g = nonlinearity(self.gate_nonlinearity)
        sigma_h = nonlinearity(self.state_nonlinearity)
        z = sigma_g(gate.z + param.a_z * state.h)
        r = sigma_g(gate.r + param.a_r * state.h)
        c = sigma_h(gate.c + param.a_c * (state.h * r))
        return (1 - z) * state.h + z * c
