"""Recurrent layers: torch.nn.Modules with torch.nn.GRU's habits."""

from pararnn.base.tensors import States
from pararnn.layers.clip import clip_after_step
from pararnn.layers.dreamer import RSSM, DreamerGRU, Imagination, RSSMOutput
from pararnn.layers.layer_norm import LayerNormGRU, LayerNormLSTM
from pararnn.layers.missing import DecayedInputs
from pararnn.layers.paper import load_paper_weights, paper_weights
from pararnn.layers.recurrent import RecurrentLayer, SolveInfo
from pararnn.layers.rnn import SLSTM, BlockGRU, ParaGRU, ParaLSTM, ParaRNN
from pararnn.layers.torch_cells import GRUCell, LSTMCell, RNNCell
from pararnn.layers.torch_nn import GRU, LSTM, RNN
from pararnn.layers.xlstm import SLSTMLayer

__all__ = [
    "GRU",
    "LSTM",
    "RNN",
    "RSSM",
    "SLSTM",
    "BlockGRU",
    "DecayedInputs",
    "DreamerGRU",
    "GRUCell",
    "Imagination",
    "LSTMCell",
    "LayerNormGRU",
    "LayerNormLSTM",
    "ParaGRU",
    "ParaLSTM",
    "ParaRNN",
    "RNNCell",
    "RSSMOutput",
    "RecurrentLayer",
    "SLSTMLayer",
    "SolveInfo",
    "States",
    "clip_after_step",
    "load_paper_weights",
    "paper_weights",
]
