"""Published cells, one file each, only their steps; each names its paper and equation."""

from pararnn.cells import Cell
from pararnn.zoo.block_gru import BlockGRUCell
from pararnn.zoo.dense_gru import DenseGRUCell
from pararnn.zoo.elman import ElmanCell
from pararnn.zoo.gru import GRUCell
from pararnn.zoo.head_elman import HeadElmanCell
from pararnn.zoo.head_gru import HeadGRUCell
from pararnn.zoo.head_gru_reset_first import HeadGRUResetFirstCell
from pararnn.zoo.head_lstm import HeadLSTMCell
from pararnn.zoo.head_slstm import HeadSLSTMCell
from pararnn.zoo.lem import LEMCell
from pararnn.zoo.lrc import LRCCell
from pararnn.zoo.lstm import LSTMCell
from pararnn.zoo.slstm import SLSTMCell

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
}
"""Every cell of the library by its short name."""

__all__ = [
    "CELLS",
    "BlockGRUCell",
    "DenseGRUCell",
    "ElmanCell",
    "GRUCell",
    "HeadElmanCell",
    "HeadGRUCell",
    "HeadGRUResetFirstCell",
    "HeadLSTMCell",
    "HeadSLSTMCell",
    "LEMCell",
    "LRCCell",
    "LSTMCell",
    "SLSTMCell",
]
