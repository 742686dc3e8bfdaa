"""The LSTM of torch.nn, its recurrent matrices inside heads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pararnn.cells.base import Cell, Param


class HeadLSTMCell(Cell):
    """Long short-term memory with a matrix a gate and head: states h, c; gates i, f, g, o. With one
    head it is torch.nn.LSTM's.

    :equation: ``c' = f c + i tanh(x_g + R_g h)``, ``h' = o tanh(c')``;
        ``i, f, o = sigmoid(x + R h)``
    :source: Hochreiter and Schmidhuber 1997; forget gate: Gers et al. 2000

    Rows of a matrix are outputs, as in weight_hh of torch.nn.
    """

    states = ("h", "c")
    gates = ("i", "f", "g", "o")
    params = {name: Param("H,K,K") for name in ("R_i", "R_f", "R_g", "R_o")}

    def step(self, state: Any, gate: Any, param: Any) -> tuple[Tensor, Tensor]:
        i = torch.sigmoid(gate.i + state.h @ param.R_i.mT)
        f = torch.sigmoid(gate.f + state.h @ param.R_f.mT)
        g = torch.tanh(gate.g + state.h @ param.R_g.mT)
        o = torch.sigmoid(gate.o + state.h @ param.R_o.mT)
        c = f * state.c + i * g
        return o * torch.tanh(c), c
