"""DreamerV3's recurrent state-space model, whose posterior is sampled inside the step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pararnn.cells.base import Cell, Param
from pararnn.zoo.dreamer_blocks import (
    GATE_PARAMS,
    STATE_PARAMS,
    block_gru,
    log_mixture,
    of_state,
    rms_silu,
)


class RSSMCell(Cell):
    """RSSM of DreamerV3, driven by observations: states h (belief), G blocks of K, and z (sample),
    C variables of N classes; gates x, a block's hidden layer of E, t (U), noise. Outputs: both
    states, and the logarithms of the posterior's probabilities.

    :equation: ``h'`` as in ``dreamer-gru``, with ``B_z S(W_z z + b_z)`` added to its x;
        ``p = (1 - m) softmax(L S(W_o h' + x_t) + b_l) + m / N``, ``z'`` one-hot at the largest of
        ``log p + noise`` of each variable, its gradient that of ``p``
    :source: Hafner et al. 2023, Mastering Diverse Domains through World Models (arXiv:2301.04104),
        its published code; x is what the action adds, t what the observation does

    With the noise of Gumbel, -log(-log(u)) of uniform u, z' is a sample of p. Config: U; unimix (m,
    0.01), eps, update_bias (-1). With one head D is G K + 2 C N.
    """

    states = {"h": ("G", "K"), "z": ("C", "N")}
    gates = {"x": ("G", "E"), "t": "U", "noise": ("C", "N")}
    outputs = {"h": ("G", "K"), "z": ("C", "N"), "log_p": ("C", "N")}
    params = {
        **STATE_PARAMS,
        **GATE_PARAMS,
        "W_z": Param("H,C,N,U"),
        "b_z": Param("H,U", std=0.0, recurrent=False),
        "w_z": Param("H,U", mean=1.0, std=0.0, recurrent=False),
        "B_z": Param("H,G,U,E"),
        "W_o": Param("H,G,K,U"),
        "w_o": Param("H,U", mean=1.0, std=0.0, recurrent=False),
        "L": Param("H,C,N,U"),
        "b_l": Param("H,C,N", std=0.0, recurrent=False),
    }
    config = {"U": None, "unimix": 0.01, "eps": 1e-4, "update_bias": -1.0}

    def step(self, state: Any, gate: Any, param: Any) -> tuple[Tensor, Tensor]:
        sample = torch.einsum("...cn,...cnu->...u", state.z, param.W_z) + param.b_z
        sample = rms_silu(sample, param.w_z, self.eps)
        hidden = gate.x + of_state(state.h, param, self.eps)
        hidden = hidden + torch.einsum("...u,...gue->...ge", sample, param.B_z)
        h = block_gru(state.h, hidden, param, self.eps, self.update_bias)
        log_p = self.posterior(h, gate, param)
        noisy, p = log_p + gate.noise, torch.exp(log_p)
        z = (noisy >= noisy.amax(-1, keepdim=True)).to(p.dtype)
        return h, z + (p - p.detach())

    def posterior(self, h: Tensor, gate: Any, param: Any) -> Tensor:
        """Return the logarithms of the probabilities (..., C, N) of what a belief implies."""
        hidden = torch.einsum("...gk,...gku->...u", h, param.W_o) + gate.t
        hidden = rms_silu(hidden, param.w_o, self.eps)
        logits = torch.einsum("...u,...cnu->...cn", hidden, param.L) + param.b_l
        return log_mixture(logits, self.unimix)

    def readout(self, state: Any, gate: Any, param: Any) -> tuple[Tensor, Tensor, Tensor]:
        return state.h, state.z, self.posterior(state.h, gate, param)
