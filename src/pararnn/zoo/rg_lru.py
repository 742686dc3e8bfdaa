"""Griffin's real-gated linear recurrent unit, with gates that read the state too."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pararnn.cells.base import Cell, Param


class RGLRUCell(Cell):
    """Real-gated recurrent unit: state h; gates r (recurrence), i (input), x.

    :equation: ``h' = d h + sqrt(1 - d^2) i x_x``;
        ``d = sigmoid(decay)^(c r)``, ``r, i = sigmoid(x + a h)``
    :source: De et al. 2024, Griffin, eqs. 1-4, of which weights a_r, a_i of 0 are the RG-LRU

    Weights of the state make it nonlinear, which the paper's is not. Config: c.
    """

    states = ("h",)
    gates = ("r", "i", "x")
    params = {
        "a_r": Param("D"),
        "a_i": Param("D"),
        "decay": Param("D", mean=6.0, std=1.0, recurrent=False),
    }
    config = {"c": 8.0}
    structure = "diagonal"

    def step(self, state: Any, gate: Any, param: Any) -> Tensor:
        r = torch.sigmoid(gate.r + param.a_r * state.h)
        i = torch.sigmoid(gate.i + param.a_i * state.h)
        log = self.c * r * F.logsigmoid(param.decay)
        gain = torch.sqrt(torch.clamp(-torch.expm1(2 * log), min=1e-12))  # a root's slope at 0
        return torch.exp(log) * state.h + gain * i * gate.x
