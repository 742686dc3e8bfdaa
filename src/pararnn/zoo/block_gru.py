"""Dreamer's block GRU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pararnn.cells.base import Cell, Param


class BlockGRUCell(Cell):
    """The recurrence of DreamerV3's sequence model (Hafner et al. 2023), blocks of its matrices as
    heads: state h; gates r (reset), c (candidate), u (update).

    r = sigmoid(gate.r + R_r h), c = tanh(r (gate.c + R_c h)), u = sigmoid(gate.u + R_u h - 1) and
    h = u c + (1 - u) h: the reset scales the whole candidate, and the update begins small. Layer
    norms stay outside of the recurrence, in what computes the gates.
    """

    states = ("h",)
    gates = ("r", "c", "u")
    params = {name: Param("H,K,K") for name in ("R_r", "R_c", "R_u")}

    def step(self, state: Any, gate: Any, param: Any) -> Tensor:
        r = torch.sigmoid(gate.r + state.h @ param.R_r.mT)
        c = torch.tanh(r * (gate.c + state.h @ param.R_c.mT))
        u = torch.sigmoid(gate.u + state.h @ param.R_u.mT - 1)
        return u * c + (1 - u) * state.h
