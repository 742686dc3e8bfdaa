"""Titans: a memory that learns at each step, with momentum, to give a value for a key."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pararnn.cells.base import Cell
from pararnn.zoo.unit import unit


class TitansCell(Cell):
    """Titans: states M (memory, keys by values), S (momentum); gates q, k, v, and numbers a, e, t.

    :equation: ``S' = e S + t k (v - M^T k)^T``, ``M' = (1 - a) M + S'``, ``y = M'^T q``;
        ``a, e, t = sigmoid(x)``
    :source: Behrouz, Zhong and Mirrokni 2024, Titans: Learning to Memorize at Test Time, the
        linear memory with momentum and forgetting, M transposed

    A step of gradient descent on half the squared error of ``M^T k``. Keys and queries are of
    length 1, as in the paper's layer. Linear in the states.
    """

    states = {"M": ("K", "V"), "S": ("K", "V")}
    gates = {"q": "K", "k": "K", "v": "V", "a": "", "e": "", "t": ""}
    config = {"eps": 1e-6}

    def step(self, state: Any, gate: Any, param: Any) -> tuple[Tensor, Tensor]:
        a, e, t = (torch.sigmoid(x)[..., None, None] for x in (gate.a, gate.e, gate.t))
        k = unit(gate.k, self.eps)[..., :, None]
        surprise = gate.v[..., None, :] - (k * state.M).sum(-2, keepdim=True)
        momentum = e * state.S + t * k * surprise
        return (1 - a) * state.M + momentum, momentum

    def readout(self, state: Any, gate: Any, param: Any) -> Tensor:
        return (unit(gate.q, self.eps)[..., :, None] * state.M).sum(-2)
