"""RWKV-7: a delta rule with a decay and a learning rate for each key channel."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from pararnn.cells.base import Cell


class RWKV7Cell(Cell):
    """The time mixing of RWKV-7 (Peng et al. 2025, eqs. 16 and 17), S transposed to keys by values:
    S = w S' - a c (c^T S') + k v^T with c of length 1, y = S^T r.

    The decay w = exp(-exp(-1/2) sigmoid(gate.w)) and the rate a = sigmoid(gate.a) are vectors of
    keys. The bonus of the current token and the norm are the layer's, around the recurrence.
    """

    states = {"S": ("K", "V")}
    gates = {"r": "K", "w": "K", "k": "K", "v": "V", "c": "K", "a": "K"}
    config = {"eps": 1e-6}

    def step(self, state: Any, gate: Any, param: Any) -> Tensor:
        c = gate.c * torch.rsqrt(gate.c.square().sum(-1, keepdim=True) + self.eps)
        w = torch.exp(-math.exp(-0.5) * torch.sigmoid(gate.w))[..., :, None]
        memory = c[..., None, :] @ state.S
        erase = (torch.sigmoid(gate.a) * c)[..., :, None] * memory
        return w * state.S - erase + gate.k[..., :, None] * gate.v[..., None, :]

    def readout(self, state: Any, gate: Any, param: Any) -> Tensor:
        return (gate.r[..., None, :] @ state.S).squeeze(-2)
