"""A GRU with recurrent matrices inside heads, its reset after the product."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pararnn.cells.base import Cell, Param


class HeadGRUCell(Cell):
    """Gated recurrent unit that resets after the product, as torch.nn.GRU with one head: state h;
    gates r (reset), z (update), n (candidate).

    :equation: ``h' = (1 - z) tanh(x_n + r (R_n h + b_n)) + z h``; ``r, z = sigmoid(x + R h)``
    :source: Cho et al. 2014, Learning Phrase Representations, as torch.nn.GRU has it

    Rows of a matrix are outputs, as in weight_hh of torch.nn. z near 1 remembers.
    """

    states = ("h",)
    gates = ("r", "z", "n")
    params = {
        **{name: Param("H,K,K") for name in ("R_r", "R_z", "R_n")},
        "b_n": Param("D", std=0.0, recurrent=False),
    }

    def step(self, state: Any, gate: Any, param: Any) -> Tensor:
        r = torch.sigmoid(gate.r + state.h @ param.R_r.mT)
        z = torch.sigmoid(gate.z + state.h @ param.R_z.mT)
        n = torch.tanh(gate.n + r * (state.h @ param.R_n.mT + param.b_n))
        return (1 - z) * n + z * state.h
