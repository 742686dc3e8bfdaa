"""The recurrence of Mamba-2: a decay and a write by one step size of each head."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pararnn.cells.base import Cell, Param


class Mamba2Cell(Cell):
    """Mamba-2: state h, keys by values; gates C, B (keys), x (values), and the number dt.

    :equation: ``h' = exp(-t exp(A)) h + t B x^T``, ``y = h'^T C + D x``; ``t = softplus(dt)``
    :source: Dao and Gu 2024, Transformers are SSMs (arXiv:2405.21060), the SSD layer: eq. 1 with
        a scalar for A, the step size t of each head, h transposed

    A, the logarithm of a rate, and the skip connection D are numbers of a head. B and C are of each
    head. The convolution before it and the gate behind it are the layer's. Linear in the state.
    """

    states = {"h": ("K", "V")}
    gates = {"C": "K", "B": "K", "x": "V", "dt": ""}
    params = {
        "A": Param("H", mean=1.0, std=1.0, recurrent=False),
        "D": Param("H", mean=1.0, std=0.0, recurrent=False),
    }

    def step(self, state: Any, gate: Any, param: Any) -> Tensor:
        t = F.softplus(gate.dt)
        write = (t[..., None] * gate.B)[..., :, None] * gate.x[..., None, :]
        return torch.exp(-t * torch.exp(param.A))[..., None, None] * state.h + write

    def readout(self, state: Any, gate: Any, param: Any) -> Tensor:
        return (gate.C[..., :, None] * state.h).sum(-2) + param.D[..., None] * gate.x
