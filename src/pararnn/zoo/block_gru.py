"""A GRU in blocks, with the gates of DreamerV3's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pararnn.cells.base import Cell, Param


class BlockGRUCell(Cell):
    """Gates of DreamerV3's block GRU, blocks as heads: state h; gates r (reset), c, u (update).

    :equation: ``h' = (1 - u) h + u tanh(r (x_c + R_c h))``;
        ``r = sigmoid(x_r + R_r h)``, ``u = sigmoid(x_u + R_u h - 1)``
    :source: Hafner et al. 2023, Mastering Diverse Domains through World Models, its published code:
        the gates, without the dense product over all blocks and the norms before them

    The reset scales the whole candidate, and the update begins small. It is not Dreamer's layer,
    where a hidden layer with norms computes the gates at each step from all inputs, the block's
    state and a dense product over the whole state, which couples blocks. Here a block reads only
    its state, and in a layer its slice of the input.
    """

    states = ("h",)
    gates = ("r", "c", "u")
    params = {name: Param("H,K,K") for name in ("R_r", "R_c", "R_u")}

    def step(self, state: Any, gate: Any, param: Any) -> Tensor:
        r = torch.sigmoid(gate.r + state.h @ param.R_r.mT)
        c = torch.tanh(r * (gate.c + state.h @ param.R_c.mT))
        u = torch.sigmoid(gate.u + state.h @ param.R_u.mT - 1)
        return u * c + (1 - u) * state.h
