"""The minimal GRU, whose gates read the input alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pararnn.cells.base import Cell


class MinGRUCell(Cell):
    """Minimal gated recurrent unit: state h; gates z (update), c (candidate).

    :equation: ``h' = (1 - z) h + z x_c``; ``z = sigmoid(x_z)``
    :source: Feng et al. 2024, Were RNNs All We Needed?, section 3.1

    It is linear in the state: Newton's method needs one update, and `pararnn.scan` runs it too.
    """

    states = ("h",)
    gates = ("z", "c")
    structure = "diagonal"

    def step(self, state: Any, gate: Any, param: Any) -> Tensor:
        return torch.lerp(state.h, gate.c, torch.sigmoid(gate.z))
