"""mLSTM: a matrix memory with exponential gates, a normaliser and a stabiliser."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pararnn.cells.base import Cell


class MLSTMCell(Cell):
    """The xLSTM paper's mLSTM (Beck et al. 2024, eqs. 19-27), with F = sigmoid(f): the memory C,
    its normaliser n and the stabiliser m, by whose exponential both are smaller than the paper's.

    C = F C' + I k v^T, n = F n' + I k, y = sigmoid(o) C^T q / max(|n^T q|, 1), I = exp(i). Keys are
    divided by sqrt(K). The zero initial state is the paper's.
    """

    states = {"C": ("K", "V"), "n": "K", "m": ""}
    gates = {"q": "K", "k": "K", "v": "V", "i": "", "f": "", "o": "V"}

    def step(self, state: Any, gate: Any, param: Any) -> tuple[Tensor, Tensor, Tensor]:
        keep = F.logsigmoid(gate.f) + state.m
        m = torch.maximum(keep, gate.i)
        f, i = torch.exp(keep - m), torch.exp(gate.i - m)
        write = i[..., None] * gate.k / self.K**0.5
        f = f[..., None]
        c = f[..., None] * state.C + write[..., :, None] * gate.v[..., None, :]
        return c, f * state.n + write, m

    def readout(self, state: Any, gate: Any, param: Any) -> Tensor:
        norm = (state.n * gate.q).sum(-1).abs()
        norm = torch.maximum(norm, torch.exp(-state.m))[..., None]
        return torch.sigmoid(gate.o) * (gate.q[..., None, :] @ state.C).squeeze(-2) / norm
