"""A complex RNN with a unitary diagonal recurrence and the modReLU nonlinearity."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pararnn.cells.base import Cell, Param


class ModReLUCell(Cell):
    """Unitary RNN with modReLU: a complex state as re and im, and gates of these names.

    :equation: ``h' = relu(|u| + b) u / |u|``; ``u = exp(i theta) h + x``, ``h = re + i im``
    :source: Arjovsky et al. 2016, Unitary Evolution Recurrent Neural Networks, eq. 8

    The unitary matrix is its diagonal factor: channels mix in the next projection. It forgets
    nothing: states grow with the square root of time while b is near 0, where it begins. Config:
    epsilon, which the square of the modulus is larger by, so that there is a gradient at 0.
    """

    states = ("re", "im")
    gates = ("re", "im")
    params = {
        "theta": Param("D", std=1.5, recurrent=False),
        "b": Param("D", std=0.01, recurrent=False),
    }
    config = {"epsilon": 1e-5}
    structure = "block_diagonal"

    def step(self, state: Any, gate: Any, param: Any) -> tuple[Tensor, Tensor]:
        a, b = torch.cos(param.theta), torch.sin(param.theta)
        re = gate.re + a * state.re - b * state.im
        im = gate.im + a * state.im + b * state.re
        size = torch.sqrt(re * re + im * im + self.epsilon)
        scale = torch.relu(size + param.b) / size
        return scale * re, scale * im
