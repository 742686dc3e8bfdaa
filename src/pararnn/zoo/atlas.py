"""Atlas: a memory that learns at each step by Muon, whose steps have singular values near one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pararnn.cells.base import Cell
from pararnn.zoo.unit import unit


def newton_schulz(x: Tensor, iterations: int, coefficients: Sequence[float], eps: float) -> Tensor:
    """Return a matrix (..., K, V) over its length, its singular values moved towards 1."""
    x = x * torch.rsqrt(x.square().sum((-2, -1), keepdim=True) + eps)
    first, second, third = coefficients
    for _ in range(iterations):
        square = x @ x.mT
        x = first * x + (second * square + third * (square @ square)) @ x
    return x


class AtlasCell(Cell):
    """Atlas with a window of one token: states M (memory, keys by values), S (momentum); gates q,
    k, v, and the numbers a, e, t.

    :equation: ``S' = e S + t k (v - M^T k)^T``, ``M' = a M + N(S')``, ``y = M'^T q``;
        ``a, e, t = sigmoid(x)``, ``N(S)`` the last of ``X = S / |S|`` and then, several times,
        ``X = c_1 X + (c_2 A + c_3 A A) X`` of ``A = X X^T``
    :source: Behrouz et al. 2025, ATLAS: Learning to Optimally Memorize the Context at Test Time
        (arXiv:2505.23735), eqs. 57 and 58 of a linear memory, c = 1, M transposed; N: Jordan et al.
        2024, Muon, by the coefficients there

    Keys and queries are of length 1, as in `TitansCell`, of which this is the step by Muon.
    Config: iterations (5), coefficients (c_1, c_2, c_3). Five iterations enlarge small singular
    values, and their rounding, up to 500 times a step: runs of two backends part.
    """

    states = {"M": ("K", "V"), "S": ("K", "V")}
    gates = {"q": "K", "k": "K", "v": "V", "a": "", "e": "", "t": ""}
    config = {"iterations": 5, "coefficients": (3.4445, -4.775, 2.0315), "eps": 1e-6}

    def step(self, state: Any, gate: Any, param: Any) -> tuple[Tensor, Tensor]:
        a, e, t = (torch.sigmoid(x)[..., None, None] for x in (gate.a, gate.e, gate.t))
        k = unit(gate.k, self.eps)[..., :, None]
        surprise = gate.v[..., None, :] - (k * state.M).sum(-2, keepdim=True)
        momentum = e * state.S + t * k * surprise
        step = newton_schulz(momentum, self.iterations, self.coefficients, self.eps)
        return a * state.M + step, momentum

    def readout(self, state: Any, gate: Any, param: Any) -> Tensor:
        return (unit(gate.q, self.eps)[..., :, None] * state.M).sum(-2)
