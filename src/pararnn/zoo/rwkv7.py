"""RWKV-7: a delta rule with a decay and a learning rate for each key channel."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from pararnn.cells.base import Cell
from pararnn.zoo.unit import unit


class RWKV7Cell(Cell):
    """The time mixing of RWKV-7: state S, keys by values; gates r, w, k, v, c, a of each head.

    :equation: ``S' = w S - a c (c^T S) + k v^T``, ``y = S'^T r``; ``a = sigmoid(x_a)``,
        ``w = exp(-exp(-1/2) sigmoid(x_w))``, ``c`` of length 1
    :source: Peng et al. 2025, RWKV-7 "Goose", eqs. 16 and 17, S transposed

    The decay w and the rate a are vectors of keys. The bonus of the current token and the norm are
    the layer's, around the recurrence.
    """

    states = {"S": ("K", "V")}
    gates = {"r": "K", "w": "K", "k": "K", "v": "V", "c": "K", "a": "K"}
    config = {"eps": 1e-6}

    def step(self, state: Any, gate: Any, param: Any) -> Tensor:
        c = unit(gate.c, self.eps)
        w = torch.exp(-math.exp(-0.5) * torch.sigmoid(gate.w))[..., :, None]
        memory = c[..., None, :] @ state.S
        erase = (torch.sigmoid(gate.a) * c)[..., :, None] * memory
        return w * state.S - erase + gate.k[..., :, None] * gate.v[..., None, :]

    def readout(self, state: Any, gate: Any, param: Any) -> Tensor:
        return (gate.r[..., None, :] @ state.S).squeeze(-2)
