"""The attention LSTM of Tacotron 2 with its location features, by which attention moves on."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from pararnn.cells.base import Param
from pararnn.cells.windows import windows
from pararnn.zoo.attention_lstm import AttentionLSTMCell


class LocationAttentionLSTMCell(AttentionLSTMCell):
    """`AttentionLSTMCell` that sees where it has attended: a state more, past (S), the sum of all
    weights so far.

    :equation: ``a' = sum_s p_s values_s``, ``past' = past + p``,
        ``p = softmax_s(w tanh(keys_s + Q h' + U f_s) + mask_s)``,
        ``f_s = sum_j F_j past_(s + j - (J - 1) / 2)``; the rest as in ``attention-lstm``
    :source: Chorowski et al. 2015, Attention-Based Models for Speech Recognition
        (arXiv:1506.07503), its location features; Shen et al. 2018, Natural TTS Synthesis by
        Conditioning WaveNet on Mel Spectrogram Predictions, of the sum of weights

    Config: C filters (32) of length J (31), as in the second paper.
    """

    states = {**AttentionLSTMCell.states, "past": "S"}
    params = {**AttentionLSTMCell.params, "F": Param("H,J,C"), "U": Param("H,C,K")}
    config = {"J": 31, "C": 32}

    def step(self, state: Any, gate: Any, param: Any, memory: Any) -> tuple[Tensor, ...]:
        h, c = self.lstm(state, gate, param)
        features = windows(state.past, self.J) @ param.F @ param.U
        weights = self.attend(h, memory.keys + features, param, memory)
        return h, c, self.product(weights, memory.values), state.past + weights
