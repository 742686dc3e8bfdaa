"""M2RNN: a matrix state with a nonlinear transition."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pararnn.cells.base import Cell, Param


class M2RNNCell(Cell):
    """Matrix-to-matrix RNN: state H, keys by values; gates k, q, v, and the number f.

    :equation: ``H' = f H + (1 - f) tanh(H W + k v^T)``, ``y = H'^T q``; ``f = sigmoid(x_f)``
    :source: M2RNN 2026, its transition

    f near 1 remembers.
    """

    states = {"H": ("K", "V")}
    gates = {"k": "K", "q": "K", "v": "V", "f": ""}
    params = {"W": Param("H,V,V")}

    def step(self, state: Any, gate: Any, param: Any) -> Tensor:
        new = torch.tanh(state.H @ param.W + gate.k[..., :, None] * gate.v[..., None, :])
        f = torch.sigmoid(gate.f)[..., None, None]
        return f * state.H + (1 - f) * new

    def readout(self, state: Any, gate: Any, param: Any) -> Tensor:
        return (gate.q[..., None, :] @ state.H).squeeze(-2)
