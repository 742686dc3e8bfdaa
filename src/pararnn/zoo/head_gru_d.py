"""GRU-D with recurrent matrices inside heads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pararnn.cells.base import Cell, Param


class HeadGRUDCell(Cell):
    """GRU-D, the paper's with one head: state h; gates z (update), r (reset), n, d (decay).

    :equation: ``h' = (1 - z) g + z tanh(x_n + R_n (r g))``; ``g = exp(-max(0, x_d)) h``,
        ``z, r = sigmoid(x + R g)``
    :source: Che et al. 2018, Recurrent Neural Networks for Multivariate Time Series with Missing
        Values (arXiv:1606.01865), its model with trainable decays

    `GRUDCell` says what the input is. Rows of a matrix are outputs, as in weight_hh of torch.nn.
    Equal, with one head, to GRUD of clairvoyance2 0.0.2 to 1e-6 in float32.
    """

    states = ("h",)
    gates = ("z", "r", "n", "d")
    params = {name: Param("H,K,K") for name in ("R_z", "R_r", "R_n")}

    def step(self, state: Any, gate: Any, param: Any) -> Tensor:
        h = torch.exp(-torch.relu(gate.d)) * state.h
        z = torch.sigmoid(gate.z + h @ param.R_z.mT)
        r = torch.sigmoid(gate.r + h @ param.R_r.mT)
        return (1 - z) * h + z * torch.tanh(gate.n + (r * h) @ param.R_n.mT)
