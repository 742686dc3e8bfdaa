"""The paper's GRU: diagonal recurrence, eq. GRU with eq. GRU_LSTM_simp."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from pararnn.cells.base import Cell, Param
from pararnn.cells.nonlinearity import nonlinearity


class GRUCell(Cell):
    """Gated recurrent unit: state h, gates z (update), r (reset), c (candidate); paper eq. GRU."""

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
