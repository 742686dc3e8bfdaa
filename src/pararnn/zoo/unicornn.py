"""The undamped independent controlled oscillatory RNN."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pararnn.cells.base import Cell, Param


class UnICORNNCell(Cell):
    """Undamped independent controlled oscillators: states y (position), z (velocity); gate x.

    :equation: ``z' = z - d (tanh(x_x + w y) + alpha y)``, ``y' = y + d z'``;
        ``d = dt sigmoid(c)``
    :source: Rusch and Mishra 2021, UnICORNN, section 2

    Config: dt, the time step; alpha, the frequency.
    """

    states = ("y", "z")
    gates = ("x",)
    params = {"w": Param("D", mean=0.5, std=0.3), "c": Param("D", std=0.1, recurrent=False)}
    config = {"dt": 0.2, "alpha": 1.0}
    structure = "block_diagonal"

    def step(self, state: Any, gate: Any, param: Any) -> tuple[Tensor, Tensor]:
        d = self.dt * torch.sigmoid(param.c)
        z = state.z - d * (torch.tanh(gate.x + param.w * state.y) + self.alpha * state.y)
        return state.y + d * z, z
