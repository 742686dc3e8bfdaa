"""KDA, the linear attention of Kimi Linear: the gated delta rule with a decay for each key."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pararnn.cells.base import Cell
from pararnn.zoo.unit import unit


class KDACell(Cell):
    """Kimi delta attention: state S, keys by values; gates q, k, v, the vector a and the number b.

    :equation: ``S' = (I - b k k^T) diag(a) S + b k v^T``, ``y = S'^T q``; ``a, b = sigmoid(x)``
    :source: Kimi Team 2025, Kimi Linear: An Expressive, Efficient Attention Architecture
        (arXiv:2510.26692), eq. 1

    Keys and queries are of length 1, as in the paper's layer, whose own formula of the decay a is
    left to the gate. Linear in the state.
    """

    states = {"S": ("K", "V")}
    gates = {"q": "K", "k": "K", "v": "V", "a": "K", "b": ""}
    config = {"eps": 1e-6}

    def step(self, state: Any, gate: Any, param: Any) -> Tensor:
        k = unit(gate.k, self.eps)[..., :, None]
        b = torch.sigmoid(gate.b)[..., None, None]
        decayed = torch.sigmoid(gate.a)[..., :, None] * state.S
        memory = (k * decayed).sum(-2, keepdim=True)
        return decayed + b * k * (gate.v[..., None, :] - memory)

    def readout(self, state: Any, gate: Any, param: Any) -> Tensor:
        return (unit(gate.q, self.eps)[..., :, None] * state.S).sum(-2)
