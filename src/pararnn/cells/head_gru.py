"""GRUs with recurrent matrices inside heads: the reset after the product, or before it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pararnn.cells.base import Cell, Param


class HeadGRUCell(Cell):
    """Gated recurrent unit that resets after the product, as torch.nn.GRU with one head: state h;
    gates r (reset), z (update), n (candidate); n = tanh(gate.n + r (R_n h + b_n)).

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


class HeadGRUResetFirstCell(Cell):
    """Gated recurrent unit that resets before the product (Cho et al. 2014), as Keras has it with
    `reset_after=False`: state h; gates z (update), r (reset), n (candidate).

    n = tanh(gate.n + R_n (r h)): the second product reads the result of the first, so that a step
    takes two exchanges between channels. z near 1 remembers.
    """

    states = ("h",)
    gates = ("z", "r", "n")
    params = {name: Param("H,K,K") for name in ("R_z", "R_r", "R_n")}

    def step(self, state: Any, gate: Any, param: Any) -> Tensor:
        z = torch.sigmoid(gate.z + state.h @ param.R_z.mT)
        r = torch.sigmoid(gate.r + state.h @ param.R_r.mT)
        n = torch.tanh(gate.n + (r * state.h) @ param.R_n.mT)
        return (1 - z) * n + z * state.h
