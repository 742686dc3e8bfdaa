"""Gated DeltaProduct: several steps of the delta rule for each token, here two."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pararnn.cells.base import Cell
from pararnn.zoo.unit import unit


class GatedDeltaProductCell(Cell):
    """Gated DeltaProduct of two factors: state S, keys by values; gates q, k, v, b and k2, v2, b2
    of the factors, and the number a.

    :equation: ``P = a S + b k (v - a S^T k)^T``, ``S' = P + b2 k2 (v2 - P^T k2)^T``,
        ``y = S'^T q``; ``a = sigmoid(x)``, ``b, b2 = 2 sigmoid(x)``
    :source: Siems et al. 2025, DeltaProduct: Improving State-Tracking in Linear RNNs via
        Householder Products (arXiv:2502.10297), the gated form with two Householder products

    Keys and queries are of length 1, as in the paper's layer: each factor may reflect. Linear in
    the state.
    """

    states = {"S": ("K", "V")}
    gates = {"q": "K", "k": "K", "v": "V", "k2": "K", "v2": "V", "a": "", "b": "", "b2": ""}
    config = {"eps": 1e-6}

    def step(self, state: Any, gate: Any, param: Any) -> Tensor:
        new = torch.sigmoid(gate.a)[..., None, None] * state.S
        for k, v, b in ((gate.k, gate.v, gate.b), (gate.k2, gate.v2, gate.b2)):
            k = unit(k, self.eps)[..., :, None]
            error = v[..., None, :] - (k * new).sum(-2, keepdim=True)
            new = new + 2 * torch.sigmoid(b)[..., None, None] * k * error
        return new

    def readout(self, state: Any, gate: Any, param: Any) -> Tensor:
        return (unit(gate.q, self.eps)[..., :, None] * state.S).sum(-2)
