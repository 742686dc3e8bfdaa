"""An ODE-RNN whose state flows by GRU-ODE between samples, diagonal in the state."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pararnn.cells.base import Cell, Param


class GRUODECell(Cell):
    """ODE-RNN, its flow GRU-ODE's: state h; gates z (update), r (reset), c; field dt.

    :equation: ``h' = (1 - z) g + z tanh(x_c + a_c (r g))``; ``z, r = sigmoid(x + a g)``,
        ``g = h(dt)`` of ``dh/dt = (1 - s) (tanh(b_u + u_u (p h)) - h)``, ``h(0) = h``,
        ``s, p = sigmoid(b + u h)``, by Euler's method
    :source: Rubanova, Chen and Duvenaud 2019, Latent ODEs for Irregularly-Sampled Time Series
        (arXiv:1907.03907), algorithm 1; the flow: De Brouwer et al. 2019, GRU-ODE-Bayes
        (arXiv:1905.12374), GRU-ODE without inputs; all matrices diagonals

    The gap dt is the time since the sample before. Config: substeps, the number of Euler's steps
    over a gap. The flow keeps states within 1 while dt / substeps is at most 1. Equal to
    torch.nn.GRUCell after the Euler method of torchdiffeq 0.2.5 on ``dh/dt = GRUCell(0, h) - h``
    to 1e-12 in float64, matrices diagonal and no bias inside the resets; its z is 1 - z here in
    the update. No package with the whole cell was found to compare.
    """

    states = ("h",)
    gates = ("z", "r", "c")
    fields = ("dt",)
    params = {
        **{name: Param("D") for name in ("u_s", "u_p", "u_u", "a_z", "a_r", "a_c")},
        **{name: Param("D", std=0.02, recurrent=False) for name in ("b_s", "b_p", "b_u")},
    }
    config = {"substeps": 4}
    structure = "diagonal"

    def step(self, state: Any, gate: Any, param: Any) -> Tensor:
        h, dt = state.h, gate.dt / self.substeps
        for _ in range(self.substeps):
            s = torch.sigmoid(param.b_s + param.u_s * h)
            p = torch.sigmoid(param.b_p + param.u_p * h)
            h = h + dt * (1 - s) * (torch.tanh(param.b_u + param.u_u * (p * h)) - h)
        z = torch.sigmoid(gate.z + param.a_z * h)
        r = torch.sigmoid(gate.r + param.a_r * h)
        return (1 - z) * h + z * torch.tanh(gate.c + param.a_c * (r * h))
