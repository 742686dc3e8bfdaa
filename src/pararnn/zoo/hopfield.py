"""Hopfield: retrieval by softmax from patterns that the recurrence stores itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pararnn.cells.base import Cell, Param


class HopfieldCell(Cell):
    """Modern Hopfield network of K patterns, the rows of M: state M; gates x (stored), q, b.

    :equation: ``y = softmax(M' q)^T M'``; ``M' = M + sigmoid(b) p (x - M)``,
        ``p = softmax(M x + P)``
    :source: Ramsauer et al. 2021, Hopfield Networks is All You Need, eq. 3; storing is ours

    Each step stores x in the patterns that it is near to. P, an offset for each pattern, tells them
    apart at the start.
    """

    states = {"M": ("K", "V")}
    gates = {"x": "V", "q": "V", "b": ""}
    params = {"P": Param("H,K", std=1.0, recurrent=False)}

    def step(self, state: Any, gate: Any, param: Any) -> Tensor:
        x = gate.x[..., None, :]
        match = torch.softmax((state.M * x).sum(-1) + param.P, -1)
        rate = (torch.sigmoid(gate.b)[..., None] * match)[..., :, None]
        return state.M + rate * (x - state.M)

    def readout(self, state: Any, gate: Any, param: Any) -> Tensor:
        match = torch.softmax((state.M @ gate.q[..., :, None]).squeeze(-1), -1)
        return (match[..., None, :] @ state.M).squeeze(-2)
