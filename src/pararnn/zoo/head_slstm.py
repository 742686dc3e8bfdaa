"""sLSTM with recurrent matrices inside heads, as the xLSTM paper has it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pararnn.cells.base import Cell, Param


class HeadSLSTMCell(Cell):
    """sLSTM with a matrix a gate and head: states h, c, n; gates i, f, z, o.

    :equation: ``C' = f C + exp(i) tanh(z)``, ``N' = f N + exp(i)``, ``h' = o C' / N'``;
        ``i, f, z, o``: ``x + R h``, ``f`` and ``o`` through ``sigmoid``
    :source: Beck et al. 2024, xLSTM: Extended Long Short-Term Memory, eqs. 8-14

    Cell, normaliser and stabiliser are held as in `SLSTMCell`: c is the ratio of the first two, n
    the logarithm of the normaliser. Nothing can overflow. The zero initial state means a normaliser
    of 1, minus infinity in n one of 0.
    """

    states = ("h", "c", "n")
    gates = ("i", "f", "z", "o")
    params = {name: Param("H,K,K") for name in ("R_i", "R_f", "R_z", "R_o")}

    def step(self, state: Any, gate: Any, param: Any) -> tuple[Tensor, Tensor, Tensor]:
        i = gate.i + state.h @ param.R_i.mT
        decay = F.logsigmoid(gate.f + state.h @ param.R_f.mT) + state.n
        k = torch.sigmoid(decay - i)
        c = k * state.c + (1 - k) * torch.tanh(gate.z + state.h @ param.R_z.mT)
        o = torch.sigmoid(gate.o + state.h @ param.R_o.mT)
        return o * c, c, torch.maximum(decay, i) + torch.log1p(torch.exp(-(decay - i).abs()))
