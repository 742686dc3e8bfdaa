"""The LSTM of torch.nn with a projection of its output, as proj_size makes it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pararnn.cells.base import Cell, Param

GATES = ("i", "f", "g", "o")


class ProjectedLSTMCell(Cell):
    """Long short-term memory whose output is projected inside the recurrence: states h (V), c (K);
    gates i, f, g, o (K). With one head it is torch.nn.LSTM's with proj_size V and hidden_size K.

    :equation: ``c' = f c + i tanh(x_g + R_g h)``, ``h' = W^T (o tanh(c'))``;
        ``i, f, o = sigmoid(x + R h)``
    :source: Sak, Senior and Beaufays 2014, Long Short-Term Memory Recurrent Neural Network
        Architectures for Large Scale Acoustic Modeling, as torch.nn.LSTM has it

    Rows of R are outputs, as in weight_hh of torch.nn; W is the transpose of weight_hr.
    """

    states = {"h": "V", "c": "K"}
    gates = dict.fromkeys(GATES, "K")
    params = {**{f"R_{name}": Param("H,K,V") for name in GATES}, "W": Param("H,K,V")}

    def step(self, state: Any, gate: Any, param: Any) -> tuple[Tensor, Tensor]:
        def gate_of(x: Tensor, matrix: Tensor) -> Tensor:
            return x + (matrix @ state.h[..., None]).squeeze(-1)

        i, f = torch.sigmoid(gate_of(gate.i, param.R_i)), torch.sigmoid(gate_of(gate.f, param.R_f))
        o = torch.sigmoid(gate_of(gate.o, param.R_o))
        c = f * state.c + i * torch.tanh(gate_of(gate.g, param.R_g))
        return ((o * torch.tanh(c))[..., None, :] @ param.W).squeeze(-2), c
