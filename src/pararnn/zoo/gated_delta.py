"""Gated DeltaNet: a memory that erases what it held under a key before it writes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pararnn.cells.base import Cell
from pararnn.zoo.unit import unit


class GatedDeltaCell(Cell):
    """Gated DeltaNet: state S, keys by values; gates q, k, v, and the numbers a, b.

    :equation: ``S' = a (S - b k k^T S) + b k v^T``, ``y = S'^T q``; ``a, b = sigmoid(x)``
    :source: Yang, Kautz and Hatamizadeh 2024, Gated Delta Networks, eq. 10, S transposed

    Keys and queries are of length 1, as in the paper's layer. Linear in the state.
    """

    states = {"S": ("K", "V")}
    gates = {"q": "K", "k": "K", "v": "V", "a": "", "b": ""}
    config = {"eps": 1e-6}

    def step(self, state: Any, gate: Any, param: Any) -> Tensor:
        a, b = (torch.sigmoid(x)[..., None, None] for x in (gate.a, gate.b))
        k = unit(gate.k, self.eps)[..., :, None]
        memory = (k * state.S).sum(-2, keepdim=True)
        return a * (state.S - b * k * memory) + b * k * gate.v[..., None, :]

    def readout(self, state: Any, gate: Any, param: Any) -> Tensor:
        return (unit(gate.q, self.eps)[..., :, None] * state.S).sum(-2)
