"""Dreamer's GRU, whose gates are normalised over the channels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pararnn.cells.base import Cell, Param
from pararnn.zoo.joint_norm import joint_norm

GATES = ("r", "c", "u")


class LayerNormGRUCell(Cell):
    """Gated recurrent unit with one layer norm over all three gates: state h; gates r (reset), c
    (candidate), u (update).

    :equation: ``h' = u tanh(r v_c) + (1 - u) h``; ``r = sigmoid(v_r)``,
        ``u = sigmoid(v_u - 1)``, ``v = N(x + R h)``
    :source: Hafner et al. 2021, Mastering Atari with Discrete World Models (DreamerV2), its
        published code; the norm: Ba et al. 2016, Layer Normalization

    Config: eps, update_bias (-1). The norm N has weights w and biases b.
    """

    states = ("h",)
    gates = GATES
    params = {
        **{f"R_{name}": Param("D,D") for name in GATES},
        **{f"w_{name}": Param(mean=1.0, std=0.0, recurrent=False) for name in GATES},
        **{f"b_{name}": Param(std=0.0, recurrent=False) for name in GATES},
    }
    config = {"eps": 1e-3, "update_bias": -1.0}

    def step(self, state: Any, gate: Any, param: Any) -> Tensor:
        matrices, weights, biases = param[:3], param[3:6], param[6:9]
        sums = [x + state.h @ R.mT for x, R in zip(gate, matrices, strict=True)]
        norms = joint_norm(sums, self.eps)
        r, c, u = (v * w + b for v, w, b in zip(norms, weights, biases, strict=True))
        u = torch.sigmoid(u + self.update_bias)
        return u * torch.tanh(torch.sigmoid(r) * c) + (1 - u) * state.h
