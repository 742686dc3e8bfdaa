"""Comba: the delta rule as closed-loop control, with feedback of the state and of the output."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pararnn.cells.base import Cell, Param
from pararnn.zoo.unit import unit


class CombaCell(Cell):
    """Comba: state S, keys by values; gates q, k, v, and the numbers a, b.

    :equation: ``S' = a S - c b k k^T S + b k v^T``, ``y = S'^T (q - d k)``;
        ``a, b = sigmoid(x)``, ``c = sigmoid(p_c)``, ``d = p_d``
    :source: Hu et al. 2025, Comba: Improving Bilinear RNNs with Closed-loop Control
        (arXiv:2506.02475), the recurrence with a scalar plus a matrix of rank one, S transposed

    The feedback c of the state and d of the output are parameters of a head. Keys and queries are
    of length 1. Linear in the state. Equal to fused_recurrent_comba of fla-core 0.6.0 to 1e-6 in
    float32, states and outputs, for unit keys k, p = c k and queries ``q - d k``. That package's
    naive_recurrent_comba reads ``k^T (a S)``, after the decay. With use_qk_l2norm_in_kernel, as in
    its layer, p and ``q - d p`` of raw keys are of length 1: c is then 1 in the state.
    """

    states = {"S": ("K", "V")}
    gates = {"q": "K", "k": "K", "v": "V", "a": "", "b": ""}
    params = {"c": Param("H", std=1.0, recurrent=False), "d": Param("H", std=0.02, recurrent=False)}
    config = {"eps": 1e-6}

    def step(self, state: Any, gate: Any, param: Any) -> Tensor:
        a, b, c = (torch.sigmoid(x)[..., None, None] for x in (gate.a, gate.b, param.c))
        k = unit(gate.k, self.eps)[..., :, None]
        memory = (k * state.S).sum(-2, keepdim=True)
        return a * state.S + b * k * (gate.v[..., None, :] - c * memory)

    def readout(self, state: Any, gate: Any, param: Any) -> Tensor:
        q, k = unit(gate.q, self.eps), unit(gate.k, self.eps)
        return ((q - param.d[..., None] * k)[..., :, None] * state.S).sum(-2)
