"""The paper's LSTM: coupled input and forget gates, peepholes, diagonal recurrence; eq. LSTM."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from pararnn.cells.base import Cell, Param
from pararnn.cells.nonlinearity import nonlinearity


class LSTMCell(Cell):
    """Long short-term memory (CIFG, peepholes), diagonal recurrence: states h, c; gates f, z, o.

    :equation: ``c' = f c + (1 - f) tanh(x_z + a_z h)``, ``h' = o tanh(c')``;
        ``f = sigmoid(x_f + a_f h + c_f c)``, ``o = sigmoid(x_o + a_o h + c_o c')``
    :source: Danieli et al. 2025, ParaRNN, eq. LSTM with eq. GRU_LSTM_simp

    Config: gate_nonlinearity, input_nonlinearity, state_nonlinearity (names in
    `pararnn.NONLINEARITIES`).
    """

    states = ("h", "c")
    gates = ("f", "z", "o")
    params = {name: Param("D") for name in ("a_f", "a_z", "a_o", "c_f", "c_o")}
    config = {
        "gate_nonlinearity": "sigmoid",
        "input_nonlinearity": "tanh",
        "state_nonlinearity": "tanh",
    }
    structure = "block_diagonal"

    def step(self, state: Any, gate: Any, param: Any) -> tuple[Tensor, Tensor]:
        sigma_g = nonlinearity(self.gate_nonlinearity)
        sigma_z = nonlinearity(self.input_nonlinearity)
        sigma_h = nonlinearity(self.state_nonlinearity)
        f = sigma_g(gate.f + param.c_f * state.c + param.a_f * state.h)  # h is known last
        z = sigma_z(gate.z + param.a_z * state.h)
        c = f * state.c + (1 - f) * z
        o = sigma_g(gate.o + param.a_o * state.h + param.c_o * c)
        return o * sigma_h(c), c
