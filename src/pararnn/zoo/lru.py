"""The linear recurrent unit: complex decays."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pararnn.cells.base import Cell, Param


class LRUCell(Cell):
    """Linear recurrent unit: a complex state as re and im, and gates of these names.

    :equation: ``h' = l h + sqrt(1 - |l|^2) x``; ``l = exp(-exp(nu) + i exp(theta))``,
        ``h = re + i im``
    :source: Orvieto et al. 2023, Resurrecting Recurrent Neural Networks, appendix A

    The layer's output is the real part, which the next projection mixes. The factor of the input
    is where the paper's begins; its own training is left to the projection, whose scale it is.
    """

    states = ("re", "im")
    gates = ("re", "im")
    params = {
        "nu": Param("D", mean=-3.5, std=1.0, recurrent=False),
        "theta": Param("D", std=1.0, recurrent=False),
    }
    structure = "block_diagonal"

    def step(self, state: Any, gate: Any, param: Any) -> tuple[Tensor, Tensor]:
        rate, angle = torch.exp(param.nu), torch.exp(param.theta)
        size, gain = torch.exp(-rate), torch.sqrt(-torch.expm1(-2 * rate))
        a, b = size * torch.cos(angle), size * torch.sin(angle)
        re = a * state.re - b * state.im + gain * gate.re
        return re, a * state.im + b * state.re + gain * gate.im
