"""The coupled oscillatory RNN."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pararnn.cells.base import Cell, Param


class CoRNNCell(Cell):
    """Coupled oscillatory recurrent network: states y (position), z (velocity); gate x.

    :equation: ``z' = z + dt (tanh(x_x + R_y y + R_z z) - gamma y - epsilon z)``,
        ``y' = y + dt z'``
    :source: Rusch and Mishra 2021, Coupled Oscillatory RNN (coRNN), eq. 3, with damping by z

    R_y and R_z are matrices of each head; with one head it is the paper's. Config: dt, the time
    step; gamma, the frequency; epsilon, the damping.
    """

    states = ("y", "z")
    gates = ("x",)
    params = {name: Param("H,K,K") for name in ("R_y", "R_z")}
    config = {"dt": 0.05, "gamma": 2.5, "epsilon": 5.0}

    def step(self, state: Any, gate: Any, param: Any) -> tuple[Tensor, Tensor]:
        force = torch.tanh(gate.x + state.y @ param.R_y.mT + state.z @ param.R_z.mT)
        z = state.z + self.dt * (force - self.gamma * state.y - self.epsilon * state.z)
        return state.y + self.dt * z, z
