"""GRU-D, for times between samples that differ and for missing values, diagonal in the state."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pararnn.cells.base import Cell, Param


class GRUDCell(Cell):
    """GRU-D, diagonal recurrence: state h; gates z (update), r (reset), c, d (decay).

    :equation: ``h' = (1 - z) g + z tanh(x_c + a_c (r g))``; ``g = exp(-max(0, x_d)) h``,
        ``z, r = sigmoid(x + a g)``
    :source: Che et al. 2018, Recurrent Neural Networks for Multivariate Time Series with Missing
        Values (arXiv:1606.01865), its model with trainable decays, its
        matrices diagonals

    x_d is the paper's W delta + b of the time gaps delta. `pararnn.DecayedInputs` makes the input:
    values, of which the missing ones are filled in, masks and gaps. Equal to BackboneGRUD of
    pypots 1.5 to 1e-6 in float32 where its recurrent matrices are diagonals and it has no bias
    inside the reset and no state among its inputs; its z is 1 - z here.
    """

    states = ("h",)
    gates = ("z", "r", "c", "d")
    params = {name: Param("D") for name in ("a_z", "a_r", "a_c")}
    structure = "diagonal"

    def step(self, state: Any, gate: Any, param: Any) -> Tensor:
        h = torch.exp(-torch.relu(gate.d)) * state.h
        z = torch.sigmoid(gate.z + param.a_z * h)
        r = torch.sigmoid(gate.r + param.a_r * h)
        return (1 - z) * h + z * torch.tanh(gate.c + param.a_c * (r * h))
