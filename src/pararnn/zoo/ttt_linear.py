"""TTT-Linear: a memory that learns at each step by gradient descent through a layer norm."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pararnn.cells.base import Cell, Param


class TTTLinearCell(Cell):
    """TTT-Linear: state W, keys by values, what was learned; gates q, k, v, s, and the number e.

    :equation: ``W' = W - e k d^T``, ``y = LN((W_0 + W')^T q) + s``; ``e = rate sigmoid(x_e) / K``,
        ``d`` the gradient of ``|LN(z) - v|^2 / 2`` by ``z = (W_0 + W)^T k``,
        ``LN(z) = w (z - mean(z)) / sqrt(var(z) + eps) + b``
    :source: Sun et al. 2024, Learning to (Learn at Test Time): RNNs with Expressive Hidden States
        (arXiv:2407.04620), TTT-Linear with a gradient step for each token, W transposed

    The paper's error is that of ``k + LN(z)`` from v, and its output adds q: the gate v is its
    v - k, and s its q, as an axis V is not K. ``W_0`` is learned, and the zero state is at it.
    """

    states = {"W": ("K", "V")}
    gates = {"q": "K", "k": "K", "v": "V", "s": "V", "e": ""}
    params = {
        "W_0": Param("H,K,V", recurrent=False),
        "w": Param("H,V", std=0.02, mean=1.0, recurrent=False),
        "b": Param("H,V", std=0.02, recurrent=False),
    }
    config = {"rate": 1.0, "eps": 1e-6}

    def step(self, state: Any, gate: Any, param: Any) -> Tensor:
        k = gate.k[..., :, None]
        z = (k * (param.W_0 + state.W)).sum(-2)
        scale = torch.rsqrt(z.var(-1, correction=0, keepdim=True) + self.eps)
        x = (z - z.mean(-1, keepdim=True)) * scale
        g = param.w * (param.w * x + param.b - gate.v)
        d = scale * (g - g.mean(-1, keepdim=True) - x * (g * x).mean(-1, keepdim=True))
        rate = self.rate * torch.sigmoid(gate.e)[..., None, None] / self.K
        return state.W - rate * k * d[..., None, :]

    def readout(self, state: Any, gate: Any, param: Any) -> Tensor:
        z = (gate.q[..., :, None] * (param.W_0 + state.W)).sum(-2)
        return param.w * F.layer_norm(z, z.shape[-1:], eps=self.eps) + param.b + gate.s
