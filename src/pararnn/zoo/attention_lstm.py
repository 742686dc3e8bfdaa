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
        h, c = self.lstm(state, gate, param)
        weights = self.attend(h, memory.keys, param, memory)
        return h, c, self.product(weights, memory.values)

    def readout(self, state: Any, gate: Any, param: Any, memory: Any) -> Tensor:
        return state.h + self.product(state.a, param.P)

    @classmethod
    def lstm(cls, state: Any, gate: Any, param: Any) -> tuple[Tensor, Tensor]:
        """Return the new h and c."""

        def gate_of(x: Tensor, of_h: Tensor, of_a: Tensor) -> Tensor:
            return x + cls.product(state.h, of_h) + cls.product(state.a, of_a)

        i = torch.sigmoid(gate_of(gate.i, param.R_i, param.C_i))
        f = torch.sigmoid(gate_of(gate.f, param.R_f, param.C_f))
        o = torch.sigmoid(gate_of(gate.o, param.R_o, param.C_o))
        c = f * state.c + i * torch.tanh(gate_of(gate.g, param.R_g, param.C_g))
        return o * torch.tanh(c), c

    @classmethod
    def attend(cls, h: Tensor, keys: Tensor, param: Any, memory: Any) -> Tensor:
        """Return the weights (..., S) of the memory for h."""
        matches = torch.tanh(keys + cls.product(h, param.Q.mT)[..., None, :])
        return torch.softmax((matches * param.w[..., None, :]).sum(-1) + memory.mask, -1)

    @staticmethod
    def product(vector: Tensor, matrix: Tensor) -> Tensor:
        """Return a vector times a matrix."""
        return (vector[..., None, :] @ matrix).squeeze(-2)
