"""The independently recurrent neural network."""

from __future__ import annotations

from pararnn.cells.base import Param
from pararnn.zoo.elman import ElmanCell


class IndRNNCell(ElmanCell):
    """Independently recurrent neural network: state h, gate h_in.

    :equation: ``h' = relu(x_h_in + a_h h)``
    :source: Li et al. 2018, Independently Recurrent Neural Network (IndRNN), section 3

    Its weights begin around 1/2: most inputs are forgotten slowly, and no channel grows.
    """

    params = {"a_h": Param("D", mean=0.5, std=0.1)}
    config = {"state_nonlinearity": "relu"}
