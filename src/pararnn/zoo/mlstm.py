"""mLSTM: a matrix memory with exponential gates, a normaliser and a stabiliser."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pararnn.cells.base import Cell


class MLSTMCell(Cell):
    """mLSTM: states C (memory), n (normaliser), m (stabiliser); gates q, k, v, i, f, o.

    :equation: ``C' = f C + exp(i) k v^T``, ``n' = f n + exp(i) k``,
        ``y = o C'^T q / max(abs(n'^T q), 1)``; ``f, o = sigmoid(x)``
    :source: Beck et al. 2024, xLSTM: Extended Long Short-Term Memory, eqs. 19-27

    Memory and normaliser are smaller than the paper's by the stabiliser's exponential. Keys are
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
        one = torch.exp(torch.clamp(-state.m, max=80.0))  # more would overflow
        norm = torch.maximum(norm, one)[..., None]
        return torch.sigmoid(gate.o) * (gate.q[..., None, :] @ state.C).squeeze(-2) / norm
