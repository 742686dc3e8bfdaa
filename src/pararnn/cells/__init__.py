"""Cells: the contract and the ones that come with the library, each only its step."""

from pararnn.cells.base import Cell, Param, Step
from pararnn.cells.dense_gru import DenseGRUCell
from pararnn.cells.elman import ElmanCell
from pararnn.cells.gru import GRUCell
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
}
"""Every cell of the library by its short name."""

__all__ = [
    "CELLS",
    "NONLINEARITIES",
    "Cell",
    "DenseGRUCell",
    "ElmanCell",
    "GRUCell",
    "LEMCell",
    "LRCCell",
    "LSTMCell",
    "Param",
    "SLSTMCell",
    "Step",
]
