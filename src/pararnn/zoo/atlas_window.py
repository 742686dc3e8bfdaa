"""Atlas: a memory that learns at each step from the last tokens, by Muon."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pararnn.cells.base import Cell
from pararnn.zoo.atlas import newton_schulz
from pararnn.zoo.unit import unit


class AtlasWindowCell(Cell):
    """Atlas with a window of C tokens: `AtlasCell` that remembers the last keys and values, with a
    rate t (C) for each of them, the newest last.

    :equation: ``S' = e S + sum_i t_i k_i (v_i - M^T k_i)^T`` over the last C tokens,
        ``M' = a M + N(S')``, ``y = M'^T q``; the rest as in ``atlas``
    :source: Behrouz et al. 2025, ATLAS: Learning to Optimally Memorize the Context at Test Time
        (arXiv:2505.23735), eqs. 57 and 58 of a linear memory, M transposed

    Before a sequence lie keys of zeros, which teach nothing. Config: C (4, at least 2), iterations
    and coefficients as in `AtlasCell`.
    """

    states = {"M": ("K", "V"), "S": ("K", "V"), "keys": ("C", "K"), "values": ("C", "V")}
    gates = {"q": "K", "k": "K", "v": "V", "a": "", "e": "", "t": "C"}
    config = {"C": 4, "iterations": 5, "coefficients": (3.4445, -4.775, 2.0315), "eps": 1e-6}

    def step(self, state: Any, gate: Any, param: Any) -> tuple[Tensor, ...]:
        a, e, t = (torch.sigmoid(x)[..., None] for x in (gate.a, gate.e, gate.t))
        keys = _with_newest(state.keys, unit(gate.k, self.eps))
        values = _with_newest(state.values, gate.v)
        momentum = e[..., None] * state.S + (t * keys).mT @ (values - keys @ state.M)
        step = newton_schulz(momentum, self.iterations, self.coefficients, self.eps)
        return a[..., None] * state.M + step, momentum, keys, values

    def readout(self, state: Any, gate: Any, param: Any) -> Tensor:
        return (unit(gate.q, self.eps)[..., :, None] * state.M).sum(-2)


def _with_newest(last: Tensor, newest: Tensor) -> Tensor:
    """Return rows (..., C, N) without the oldest, and with the newest behind them."""
    return torch.select_scatter(F.pad(last.mT, (-1, 1)).mT, newest, -2, -1)
