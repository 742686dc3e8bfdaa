"""Cells: the contract and the ones that come with the library, each only its step."""

from pararnn.cells.base import Cell, Param, Step
from pararnn.cells.block_gru import BlockGRUCell
from pararnn.cells.dense_gru import DenseGRUCell
from pararnn.cells.elman import ElmanCell
from pararnn.cells.gru import GRUCell
from pararnn.cells.head_elman import HeadElmanCell
from pararnn.cells.head_gru import HeadGRUCell, HeadGRUResetFirstCell
from pararnn.cells.head_lstm import HeadLSTMCell
from pararnn.cells.head_slstm import HeadSLSTMCell
from pararnn.cells.lem import LEMCell
from pararnn.cells.lrc import LRCCell
from pararnn.cells.lstm import LSTMCell
from pararnn.cells.nonlinearity import NONLINEARITIES
from pararnn.cells.slstm import SLSTMCell

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
    "NONLINEARITIES",
    "BlockGRUCell",
    "Cell",
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
    "Param",
    "SLSTMCell",
    "Step",
]
