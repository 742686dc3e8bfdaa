"""A GRU with recurrent matrices inside heads, its reset before the product."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pararnn.cells.base import Cell, Param


class HeadGRUResetFirstCell(Cell):
    """Gated recurrent unit that resets before the product, as Keras has it with
    `reset_after=False`: state h; gates z (update), r (reset), n (candidate).

    :equation: ``h' = (1 - z) tanh(x_n + R_n (r h)) + z h``; ``z, r = sigmoid(x + R h)``
    :source: Cho et al. 2014, Learning Phrase Representations, eqs. 5-8

    The second product reads the result of the first, so that a step takes two exchanges between
    channels. z near 1 remembers.
    """

    states = ("h",)
    gates = ("z", "r", "n")
    params = {name: Param("H,K,K") for name in ("R_z", "R_r", "R_n")}

    def step(self, state: Any, gate: Any, param: Any) -> Tensor:
        z = torch.sigmoid(gate.z + state.h @ param.R_z.mT)
        r = torch.sigmoid(gate.r + state.h @ param.R_r.mT)
        n = torch.tanh(gate.n + (r * state.h) @ param.R_n.mT)
        return (1 - z) * n + z * state.h
