"""The liquid-resistance liquid-capacitance cell, diagonal in the state, with time gaps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pararnn.cells.base import Cell, Param


class LRCCell(Cell):
    """Liquid-resistance liquid-capacitance cell: state h, field dt.

    :equation: ``h' = h + dt e (leak tanh(x_u_in + g_u s) - sigmoid(x_f_in + g_f s) h)``;
        ``e = sigmoid(x_e_in + w_e h)``, ``s = sigmoid(a h + b)``
    :source: Farsang and Grosu 2025, Scaling Up Liquid-Resistance Liquid-Capacitance Networks

    That is explicit Euler over the time gap `dt`. The conductances are a leak plus a saturating
    synapse on the state plus the input's gate; the elastance e sets the liquid capacitance; leak is
    the leak potential. The state's synapses are diagonal; the input's are the layer's projection.
    """

    states = ("h",)
    gates = ("f_in", "u_in", "e_in")
    fields = ("dt",)
    params = {
        "g_f": Param("D"),
        "g_u": Param("D"),
        "a": Param("D"),
        "b": Param("D", std=0.0, recurrent=False),
        "w_e": Param("D"),
        "leak": Param("D", mean=1.0, recurrent=False),
    }
    structure = "diagonal"

    def step(self, state: Any, gate: Any, param: Any) -> Tensor:
        synapse = torch.sigmoid(param.a * state.h + param.b)
        f = torch.sigmoid(gate.f_in + param.g_f * synapse)
        u = torch.tanh(gate.u_in + param.g_u * synapse)
        e = torch.sigmoid(gate.e_in + param.w_e * state.h)
        return state.h + gate.dt * e * (param.leak * u - f * state.h)
