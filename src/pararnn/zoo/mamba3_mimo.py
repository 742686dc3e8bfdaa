"""The recurrence of Mamba-3 with several inputs and outputs a head."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from pararnn.cells.base import Cell, Param
from pararnn.zoo.mamba3 import NUMBERS, PARTS, SKIP, STATES, turned


class Mamba3MIMOCell(Cell):
    """Mamba-3 of rank R: the states and gates of `Mamba3Cell`, B and C with an axis R more, and the
    gate z.

    :equation: ``h' = a e^(i t w) (h + (1 - l) t B^T X) + l t B'^T X'``, ``X_r = W_x,r x``,
        ``y = sum_r W_o,r silu(W_z,r z) (Re(C_r^H h') + D X'_r)``; ``t``, ``a``, ``l`` as in
        ``mamba3``
    :source: Lahoti et al. 2026, Mamba-3: Improved Sequence Modeling using State Space Principles
        (arXiv:2603.15569), eqs. 12-14 and appendix C, with the recurrence of eq. 25

    Products with W are by value. Config: R (4, at least 2: one is `Mamba3Cell`). Linear in the
    states.
    """

    states = {**STATES, "B_re": ("R", "K"), "B_im": ("R", "K"), "x": "V"}
    gates = {**dict.fromkeys(PARTS, ("R", "K")), **NUMBERS, "z": "V"}
    params = {
        **{f"W_{name}": Param("H,R,V", mean=1.0, std=0.1, recurrent=False) for name in "xzo"},
        **SKIP,
    }
    config = {"R": 4}

    def step(self, state: Any, gate: Any, param: Any) -> tuple[Tensor, ...]:
        before, now = (
            [(b[..., None] * (param.W_x * at.x[..., None, :])[..., None, :]).sum(-3) for b in parts]
            for at, parts in ((state, (state.B_re, state.B_im)), (gate, (gate.B_re, gate.B_im)))
        )
        return *turned(state, gate, before, now), gate.B_re, gate.B_im, gate.x

    def readout(self, state: Any, gate: Any, param: Any) -> Tensor:
        re, im = state.h_re[..., None, :, :], state.h_im[..., None, :, :]
        y = (gate.C_re[..., None] * re + gate.C_im[..., None] * im).sum(-2)
        y = y + param.D[..., None, None] * param.W_x * gate.x[..., None, :]
        return (param.W_o * F.silu(param.W_z * gate.z[..., None, :]) * y).sum(-2)
