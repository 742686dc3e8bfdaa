"""sLSTM: exponential gating with a normaliser, three states."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pararnn.cells.base import Cell, Param


class SLSTMCell(Cell):
    """sLSTM, diagonal recurrence: states h, c, n; gates i, f, z, o. Forget gates are sigmoids.

    :equation: ``C' = f C + exp(i) tanh(z)``, ``N' = f N + exp(i)``, ``h' = o C' / N'``;
        ``i, f, z, o``: ``x + a h``, ``f`` and ``o`` through ``sigmoid``
    :source: Beck et al. 2024, xLSTM: Extended Long Short-Term Memory, eqs. 8-14

    The cell and normaliser are held as c = C / N and n = log N. In these variables
    c' = k c + (1 - k) tanh(z) with k = sigmoid(log f + n - i): nothing can overflow, and the
    original's extra stabiliser state is not needed. The zero initial state means N = 1, C = 0.
    """

    states = ("h", "c", "n")
    gates = ("i", "f", "z", "o")
    params = {name: Param("D") for name in ("a_i", "a_f", "a_z", "a_o")}
    structure = "block_diagonal"

    def step(self, state: Any, gate: Any, param: Any) -> tuple[Tensor, Tensor, Tensor]:
        i = gate.i + param.a_i * state.h
        decay = F.logsigmoid(gate.f + param.a_f * state.h) + state.n
        k = torch.sigmoid(decay - i)
        c = k * state.c + (1 - k) * torch.tanh(gate.z + param.a_z * state.h)
        o = torch.sigmoid(gate.o + param.a_o * state.h)
        return o * c, c, torch.maximum(decay, i) + torch.log1p(torch.exp(-(decay - i).abs()))
