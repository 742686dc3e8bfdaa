"""DreamerV3's block GRU, with the dense product of its whole state and its norms."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from pararnn.cells.base import Cell
from pararnn.zoo.dreamer_blocks import GATE_PARAMS, STATE_PARAMS, block_gru, of_state


class DreamerGRUCell(Cell):
    """DreamerV3's block GRU: state h, G blocks of K; gate x, a block's hidden layer of E.

    :equation: ``h' = u tanh(r c) + (1 - u) h``; ``r, c, u`` of ``R n + b`` by block, ``r`` and
        ``u - 1`` through ``sigmoid``, ``n = S(x + B h + B_h S(W_h h + b_h))``,
        ``S(v) = silu(w v / rms(v))``
    :source: Hafner et al. 2023, Mastering Diverse Domains through World Models (arXiv:2301.04104),
        its published code; x is what the action and the stochastic state add

    Config: U, the width of the dense product; eps, update_bias (-1). With one head D is G K.
    """

    states = {"h": ("G", "K")}
    gates = {"x": ("G", "E")}
    outputs = {"h": ("G", "K")}
    params = {**STATE_PARAMS, **GATE_PARAMS}
    config = {"U": None, "eps": 1e-4, "update_bias": -1.0}

    def step(self, state: Any, gate: Any, param: Any) -> Tensor:
        hidden = gate.x + of_state(state.h, param, self.eps)
        return block_gru(state.h, hidden, param, self.eps, self.update_bias)

    def readout(self, state: Any, gate: Any, param: Any) -> Tensor:
        return state.h
