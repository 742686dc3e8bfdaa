"""Published cells, one file each, only their steps; each names its paper and equation."""

from pararnn.cells import Cell
from pararnn.zoo.atlas import AtlasCell
from pararnn.zoo.atlas_window import AtlasWindowCell
from pararnn.zoo.attention_lstm import AttentionLSTMCell
from pararnn.zoo.block_gru import BlockGRUCell
from pararnn.zoo.cfc import CfCCell
from pararnn.zoo.comba import CombaCell
from pararnn.zoo.cornn import CoRNNCell
from pararnn.zoo.dense_gru import DenseGRUCell
from pararnn.zoo.dreamer_gru import DreamerGRUCell
from pararnn.zoo.elman import ElmanCell
from pararnn.zoo.gated_delta import GatedDeltaCell
from pararnn.zoo.gated_delta_product import GatedDeltaProductCell
from pararnn.zoo.gru import GRUCell
from pararnn.zoo.gru_d import GRUDCell
from pararnn.zoo.gru_ode import GRUODECell
from pararnn.zoo.head_elman import HeadElmanCell
from pararnn.zoo.head_gru import HeadGRUCell
from pararnn.zoo.head_gru_d import HeadGRUDCell
from pararnn.zoo.head_gru_reset_first import HeadGRUResetFirstCell
from pararnn.zoo.head_lstm import HeadLSTMCell
from pararnn.zoo.head_slstm import HeadSLSTMCell
from pararnn.zoo.hopfield import HopfieldCell
from pararnn.zoo.indrnn import IndRNNCell
from pararnn.zoo.kda import KDACell
from pararnn.zoo.layer_norm_gru import LayerNormGRUCell
from pararnn.zoo.layer_norm_lstm import LayerNormLSTMCell
from pararnn.zoo.lem import LEMCell
from pararnn.zoo.lif import LIFCell
from pararnn.zoo.location_attention_lstm import LocationAttentionLSTMCell
from pararnn.zoo.lrc import LRCCell
from pararnn.zoo.lru import LRUCell
from pararnn.zoo.lstm import LSTMCell
from pararnn.zoo.m2rnn import M2RNNCell
from pararnn.zoo.mamba2 import Mamba2Cell
from pararnn.zoo.mamba3 import Mamba3Cell
from pararnn.zoo.mamba3_mimo import Mamba3MIMOCell
from pararnn.zoo.min_gru import MinGRUCell
from pararnn.zoo.min_lstm import MinLSTMCell
from pararnn.zoo.mlstm import MLSTMCell
from pararnn.zoo.modrelu import ModReLUCell
from pararnn.zoo.projected_lstm import ProjectedLSTMCell
from pararnn.zoo.rg_lru import RGLRUCell
from pararnn.zoo.rssm import RSSMCell
from pararnn.zoo.rwkv7 import RWKV7Cell
from pararnn.zoo.slstm import SLSTMCell
from pararnn.zoo.titans import TitansCell
from pararnn.zoo.ttt_linear import TTTLinearCell
from pararnn.zoo.unicornn import UnICORNNCell

CELLS: dict[str, type[Cell]] = {
    "gru": GRUCell,
    "lstm": LSTMCell,
    "elman": ElmanCell,
    "lem": LEMCell,
    "slstm": SLSTMCell,
    "lrc": LRCCell,
    "dense-gru": DenseGRUCell,
    "head-gru": HeadGRUCell,
    "head-gru-reset-first": HeadGRUResetFirstCell,
    "head-lstm": HeadLSTMCell,
    "head-elman": HeadElmanCell,
    "head-slstm": HeadSLSTMCell,
    "block-gru": BlockGRUCell,
    "layer-norm-lstm": LayerNormLSTMCell,
    "layer-norm-gru": LayerNormGRUCell,
    "min-gru": MinGRUCell,
    "min-lstm": MinLSTMCell,
    "lru": LRUCell,
    "rg-lru": RGLRUCell,
    "indrnn": IndRNNCell,
    "modrelu": ModReLUCell,
    "cornn": CoRNNCell,
    "unicornn": UnICORNNCell,
    "cfc": CfCCell,
    "lif": LIFCell,
    "gru-d": GRUDCell,
    "head-gru-d": HeadGRUDCell,
    "gru-ode": GRUODECell,
}
"""Every cell of the library whose states are vectors of channels, by its short name."""

MATRIX_CELLS: dict[str, type[Cell]] = {
    "m2rnn": M2RNNCell,
    "gated-delta": GatedDeltaCell,
    "rwkv7": RWKV7Cell,
    "mlstm": MLSTMCell,
    "hopfield": HopfieldCell,
    "titans": TitansCell,
    "atlas": AtlasCell,
    "atlas-window": AtlasWindowCell,
    "kda": KDACell,
    "gated-delta-product": GatedDeltaProductCell,
    "comba": CombaCell,
    "mamba2": Mamba2Cell,
    "mamba3": Mamba3Cell,
    "mamba3-mimo": Mamba3MIMOCell,
    "projected-lstm": ProjectedLSTMCell,
    "ttt-linear": TTTLinearCell,
}
"""Cells whose states are matrices of heads, by their short names."""

WORLD_CELLS: dict[str, type[Cell]] = {"dreamer-gru": DreamerGRUCell, "rssm": RSSMCell}
"""Cells of world models, whose outputs are matrices too: their layers choose the axes."""
MEMORY_CELLS: dict[str, type[Cell]] = {
    "attention-lstm": AttentionLSTMCell,
    "location-attention-lstm": LocationAttentionLSTMCell,
}
"""Matrix cells that read a memory of the sequence, which a call passes, by their short names."""

__all__ = [
    "CELLS",
    "MATRIX_CELLS",
    "MEMORY_CELLS",
    "WORLD_CELLS",
    "AtlasCell",
    "AtlasWindowCell",
    "AttentionLSTMCell",
    "BlockGRUCell",
    "CfCCell",
    "CoRNNCell",
    "CombaCell",
    "DenseGRUCell",
    "DreamerGRUCell",
    "ElmanCell",
    "GRUCell",
    "GRUDCell",
    "GRUODECell",
    "GatedDeltaCell",
    "GatedDeltaProductCell",
    "HeadElmanCell",
    "HeadGRUCell",
    "HeadGRUDCell",
    "HeadGRUResetFirstCell",
    "HeadLSTMCell",
    "HeadSLSTMCell",
    "HopfieldCell",
    "IndRNNCell",
    "KDACell",
    "LEMCell",
    "LIFCell",
    "LRCCell",
    "LRUCell",
    "LSTMCell",
    "LayerNormGRUCell",
    "LayerNormLSTMCell",
    "LocationAttentionLSTMCell",
    "M2RNNCell",
    "MLSTMCell",
    "Mamba2Cell",
    "Mamba3Cell",
    "Mamba3MIMOCell",
    "MinGRUCell",
    "MinLSTMCell",
    "ModReLUCell",
    "ProjectedLSTMCell",
    "RGLRUCell",
    "RSSMCell",
    "RWKV7Cell",
    "SLSTMCell",
    "TTTLinearCell",
    "TitansCell",
    "UnICORNNCell",
]
