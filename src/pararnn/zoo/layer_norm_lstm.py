"""An LSTM whose gates and memory are normalised over the channels."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pararnn.cells.base import Cell, Param
from pararnn.zoo.joint_norm import joint_norm

GATES = ("i", "f", "g", "o")


class LayerNormLSTMCell(Cell):
    """Long short-term memory with layer norms over all four gates and over c: states h, c; gates i,
    f, g, o.

    :equation: ``c' = N_c(f c + i tanh(u_g))``, ``h' = o tanh(c')``; ``i, f, o = sigmoid(u)``,
        ``u = x + N(R h)``
    :source: Ba et al. 2016, Layer Normalization, as PyTorch's TorchScript example has it; c' is
        carried with its norm

    Config: norm_of_sum, True for ``u = N(x + R h)``, as torchaudio's RNN-T has it; eps. A norm N
    has weights w and biases b.
    """

    states = ("h", "c")
    gates = GATES
    params = {
        **{f"R_{name}": Param("D,D") for name in GATES},
        **{f"w_{name}": Param(mean=1.0, std=0.0, recurrent=False) for name in GATES},
        **{f"b_{name}": Param(std=0.0, recurrent=False) for name in GATES},
        "w_c": Param(mean=1.0, std=0.0, recurrent=False),
        "b_c": Param(std=0.0, recurrent=False),
    }
    config = {"norm_of_sum": False, "eps": 1e-5}

    def step(self, state: Any, gate: Any, param: Any) -> tuple[Tensor, Tensor]:
        matrices, weights, biases = param[:4], param[4:8], param[8:12]
        u = [state.h @ R.mT for R in matrices]
        if self.norm_of_sum:
            u = [product + x for product, x in zip(u, gate, strict=True)]
        u = joint_norm(u, self.eps)
        u = [v * w + b for v, w, b in zip(u, weights, biases, strict=True)]
        if not self.norm_of_sum:
            u = [v + x for v, x in zip(u, gate, strict=True)]
        i, f, o = (torch.sigmoid(u[n]) for n in (0, 1, 3))
        c = f * state.c + i * torch.tanh(u[2])
        c = F.layer_norm(c, c.shape[-1:], eps=self.eps) * param.w_c + param.b_c
        return o * torch.tanh(c), c
