"""Long expressive memory: two states with learned time steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pararnn.cells.base import Cell, Param


class LEMCell(Cell):
    """Long expressive memory, diagonal recurrence: states y, z.

    :equation: ``z' = z + d1 (tanh(x_z_in + a_z y) - z)``,
        ``y' = y + d2 (tanh(x_y_in + a_y z') - y)``; ``d = dt sigmoid(x_dt + a y)``
    :source: Rusch et al. 2022, Long Expressive Memory for Sequence Modeling, eq. 3

    Config: dt, the largest time step.
    """

    states = ("y", "z")
    gates = ("dt1", "dt2", "y_in", "z_in")
    params = {name: Param("D") for name in ("a_1", "a_2", "a_y", "a_z")}
    config = {"dt": 1.0}
    structure = "block_diagonal"

    def step(self, state: Any, gate: Any, param: Any) -> tuple[Tensor, Tensor]:
        dt1 = self.dt * torch.sigmoid(gate.dt1 + param.a_1 * state.y)
        dt2 = self.dt * torch.sigmoid(gate.dt2 + param.a_2 * state.y)
        z = torch.lerp(state.z, torch.tanh(gate.z_in + param.a_z * state.y), dt1)
        y = torch.lerp(state.y, torch.tanh(gate.y_in + param.a_y * z), dt2)
        return y, z
