"""The minimal LSTM, whose gates read the input alone."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pararnn.cells.base import Cell


class MinLSTMCell(Cell):
    """Minimal long short-term memory: state h; gates f (forget), i (input), c (candidate).

    :equation: ``h' = (f h + i x_c) / (f + i)``; ``f, i = sigmoid(x)``
    :source: Feng et al. 2024, Were RNNs All We Needed?, section 3.2

    The share f / (f + i) is computed from logarithms, so that no gate makes it 0 / 0.
    """

    states = ("h",)
    gates = ("f", "i", "c")
    structure = "diagonal"

    def step(self, state: Any, gate: Any, param: Any) -> Tensor:
        keep = torch.sigmoid(F.logsigmoid(gate.f) - F.logsigmoid(gate.i))
        return torch.lerp(gate.c, state.h, keep)
