"""Layers inside DreamerV3's steps: norms, and its block GRU."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pararnn.cells.base import Param


def rms_silu(x: Tensor, weight: Tensor, eps: float, axes: int = 1) -> Tensor:
    """Return x by its root mean square over the last axes, times a weight, through SiLU."""
    dims = tuple(range(-axes, 0))
    return F.silu(x * torch.rsqrt(x.square().mean(dims, keepdim=True) + eps) * weight)


def log_mixture(logits: Tensor, unimix: float) -> Tensor:
    """Return logarithms of the softmax of logits (..., N), mixed with `unimix` of 1 / N."""
    if not unimix:  # no logarithm of a probability that has become 0
        return torch.log_softmax(logits, -1)
    return torch.log((1 - unimix) * torch.softmax(logits, -1) + unimix / logits.shape[-1])


def block_gru(h: Tensor, hidden: Tensor, param: Any, eps: float, update_bias: float) -> Tensor:
    """Return the new state (..., G, K) of the old one and the hidden layer (..., G, E) before its
    norm, from which each block has its gates."""
    hidden = rms_silu(hidden, param.w, eps, axes=2)

    def gate(matrix: Tensor, bias: Tensor) -> Tensor:
        return torch.einsum("...ge,...gke->...gk", hidden, matrix) + bias

    u = torch.sigmoid(gate(param.R_u, param.b_u) + update_bias)
    r = torch.sigmoid(gate(param.R_r, param.b_r))
    return u * torch.tanh(r * gate(param.R_c, param.b_c)) + (1 - u) * h


GATE_PARAMS = {
    "w": Param("H,G,E", mean=1.0, std=0.0, recurrent=False),
    **{f"R_{name}": Param("H,G,K,E") for name in ("r", "c", "u")},
    **{f"b_{name}": Param("H,G,K", std=0.0, recurrent=False) for name in ("r", "c", "u")},
}
"""Parameters of `block_gru`."""
STATE_PARAMS = {
    "W_h": Param("H,G,K,U"),
    "b_h": Param("H,U", std=0.0, recurrent=False),
    "w_h": Param("H,U", mean=1.0, std=0.0, recurrent=False),
    "B_h": Param("H,G,U,E"),
    "B": Param("H,G,K,E"),
}
"""Parameters of what `of_state` reads."""


def of_state(h: Tensor, param: Any, eps: float) -> Tensor:
    """Return what a state (..., G, K) adds to the hidden layer: by a dense product of the whole
    state with a norm, and by that of each block."""
    dense = torch.einsum("...gk,...gku->...u", h, param.W_h) + param.b_h
    dense = rms_silu(dense, param.w_h, eps)
    by_block = torch.einsum("...gk,...gke->...ge", h, param.B)
    return by_block + torch.einsum("...u,...gue->...ge", dense, param.B_h)
