"""The recurrence of Mamba-3: trapezoids in time, and rotations."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pararnn.cells.base import Cell, Param

STATES = {"h_re": ("K", "V"), "h_im": ("K", "V")}
PARTS = ("B_re", "B_im", "C_re", "C_im")
NUMBERS = {"x": "V", "w": "K", "dt": "", "A": "", "l": ""}
SKIP = {"D": Param("H", mean=1.0, std=0.0, recurrent=False)}


def turned(state: Any, gate: Any, before: Any, now: Any) -> tuple[Tensor, Tensor]:
    """Return the new h for inputs B^T X of the step before and of this one, complex pairs."""
    t, share = F.softplus(gate.dt)[..., None, None], torch.sigmoid(gate.l)[..., None, None]
    a, angle = torch.exp(-t * F.softplus(gate.A)[..., None, None]), t * gate.w[..., None]
    cos, sin = a * torch.cos(angle), a * torch.sin(angle)
    re, im = state.h_re + (1 - share) * t * before[0], state.h_im + (1 - share) * t * before[1]
    return cos * re - sin * im + share * t * now[0], sin * re + cos * im + share * t * now[1]


class Mamba3Cell(Cell):
    """Mamba-3 with one input and output: a complex state h, keys by values, and the last B and x.

    :equation: ``h' = a e^(i t w) (h + (1 - l) t B x^T) + l t B' x'^T``, ``y = Re(C^H h') + D x'``;
        ``t = softplus(dt)``, ``a = exp(-t softplus(A))``, ``l = sigmoid(l)``
    :source: Lahoti et al. 2026, Mamba-3: Improved Sequence Modeling using State Space Principles
        (arXiv:2603.15569), eq. 25 with the coefficients of eqs. 5 and 6, and eq. 8 for y

    K is half of the paper's state size: a key is a pair of its channels, which the angle t w turns;
    C_im is minus the paper's. Norms and biases of B and C, and the gate behind, are the layer's.
    Linear in the states.
    """

    states = {**STATES, "B_re": "K", "B_im": "K", "x": "V"}
    gates = {**dict.fromkeys(PARTS, "K"), **NUMBERS}
    params = SKIP

    def step(self, state: Any, gate: Any, param: Any) -> tuple[Tensor, ...]:
        before, now = (
            [b[..., :, None] * at.x[..., None, :] for b in (at.B_re, at.B_im)]
            for at in (state, gate)
        )
        return *turned(state, gate, before, now), gate.B_re, gate.B_im, gate.x

    def readout(self, state: Any, gate: Any, param: Any) -> Tensor:
        y = gate.C_re[..., :, None] * state.h_re + gate.C_im[..., :, None] * state.h_im
        return y.sum(-2) + param.D[..., None] * gate.x
