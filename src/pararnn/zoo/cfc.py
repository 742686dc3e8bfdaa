"""The closed-form continuous-time cell, diagonal in the state, with time gaps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pararnn.cells.base import Cell, Param


class CfCCell(Cell):
    """Closed-form continuous-time cell: state h; gates f (rate), g and k (its limits); field dt.

    :equation: ``h' = s tanh(x_g + a_g h) + (1 - s) tanh(x_k + a_k h)``;
        ``s = sigmoid(-(x_f + a_f h) dt)``
    :source: Hasani et al. 2022, Closed-form Continuous-time Neural Networks, the gated solution

    The three networks of the paper are one layer each: the projection, and weights by channel.
    """

    states = ("h",)
    gates = ("f", "g", "k")
    fields = ("dt",)
    params = {name: Param("D") for name in ("a_f", "a_g", "a_k")}
    structure = "diagonal"

    def step(self, state: Any, gate: Any, param: Any) -> Tensor:
        s = torch.sigmoid(-(gate.f + param.a_f * state.h) * gate.dt)
        first = torch.tanh(gate.g + param.a_g * state.h)
        return s * first + (1 - s) * torch.tanh(gate.k + param.a_k * state.h)
