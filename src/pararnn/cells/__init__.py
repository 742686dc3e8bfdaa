"""Cells: the contract that a step obeys, its products and parameters, and cells by name."""

from pararnn.cells.base import Cell, Param, Step
from pararnn.cells.nonlinearity import NONLINEARITIES

__all__ = ["NONLINEARITIES", "Cell", "Param", "Step"]
