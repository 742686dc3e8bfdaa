"""A GRU with full recurrent matrices: the dense case."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pararnn.cells.base import Cell, Param


class DenseGRUCell(Cell):
    """Gated recurrent unit with full matrices: state h; gates z (update), r (reset), c.

    :equation: ``h' = (1 - z) h + z tanh(x_c + A_c (r h))``; ``z, r = sigmoid(x + A h)``
    :source: Danieli et al. 2025, ParaRNN, eq. GRU, after Cho et al. 2014

    All channels mix, as one head. Kernels solve it step after step; Newton, on the torch backend
    only, composes dense Jacobians, D^3 a step.
    """

    states = ("h",)
    gates = ("z", "r", "c")
    params = {name: Param("D,D") for name in ("A_z", "A_r", "A_c")}
    structure = "dense"

    def step(self, state: Any, gate: Any, param: Any) -> Tensor:
        z = torch.sigmoid(gate.z + state.h @ param.A_z.mT)
        r = torch.sigmoid(gate.r + state.h @ param.A_r.mT)
        c = torch.tanh(gate.c + (state.h * r) @ param.A_c.mT)
        return (1 - z) * state.h + z * c
