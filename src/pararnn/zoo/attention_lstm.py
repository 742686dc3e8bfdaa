"""The attention LSTM of Tacotron 2: additive attention over a memory, fed back to the gates."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pararnn.cells.base import Cell, Param

GATES = ("i", "f", "g", "o")


class AttentionLSTMCell(Cell):
    """Long short-term memory that attends to a sequence at each step: states h, c (V), a (E); gates
    i, f, g, o (V); memory keys (S, K), values (S, E), mask (S), 0 or -inf.

    :equation: ``c' = f c + i tanh(x_g + R_g h + C_g a)``, ``h' = o tanh(c')``,
        ``a' = sum_s softmax_s(w tanh(keys_s + Q h') + mask_s) values_s``, ``y = h' + P a'``;
        ``i, f, o = sigmoid(x + R h + C a)``
    :source: Shen et al. 2018, Natural TTS Synthesis by Conditioning WaveNet on Mel Spectrogram
        Predictions, without location features; the attention of Bahdanau, Cho and Bengio 2015
    """

    states = {"h": "V", "c": "V", "a": "E"}
    gates = dict.fromkeys(GATES, "V")
    params = {
        **{f"R_{name}": Param("H,V,V") for name in GATES},
        **{f"C_{name}": Param("H,E,V") for name in GATES},
        "Q": Param("H,K,V"),
        "w": Param("H,K"),
        "P": Param("H,E,V"),
    }
    memory = {"keys": ("S", "K"), "values": ("S", "E"), "mask": "S"}

    def step(self, state: Any, gate: Any, param: Any, memory: Any) -> tuple[Tensor, ...]:
        def gate_of(name: str) -> Tensor:
            of_h, of_a = getattr(param, f"R_{name}"), getattr(param, f"C_{name}")
            return getattr(gate, name) + _product(state.h, of_h) + _product(state.a, of_a)

        i, f, o = (torch.sigmoid(gate_of(name)) for name in ("i", "f", "o"))
        c = f * state.c + i * torch.tanh(gate_of("g"))
        h = o * torch.tanh(c)
        matches = torch.tanh(memory.keys + _product(h, param.Q.mT)[..., None, :])
        energies = (matches * param.w[..., None, :]).sum(-1) + memory.mask
        return h, c, _product(torch.softmax(energies, -1), memory.values)

    def readout(self, state: Any, gate: Any, param: Any, memory: Any) -> Tensor:
        return state.h + _product(state.a, param.P)


def _product(vector: Tensor, matrix: Tensor) -> Tensor:
    return (vector[..., None, :] @ matrix).squeeze(-2)
