"""How much the segments of a Newton solve leave for each other on a GPU.

Kernels get these numbers as constants: see boundaries.h and sync_grid.h.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from pararnn.codegen.interface import WORD
from pararnn.numerics import compute_dtype
from pararnn.program.program import Program

LANES = 32


class Board(NamedTuple):
    """A segment's board: where what it publishes is and how long it is, in words of 64 bits.

    A word has 32 bits of a number, beside a flag. In a channel's map are entries, shifts and sizes.
    Beside the board: what is published of an end in a grid's counters, and the numbers that `found`
    holds of a channel and of a lane: start, end, what is kept of the product, and a status.
    """

    board_map: int
    board_group: int
    board_end: int
    board_gains: int
    board_words: int
    ends_words: int
    found_a_channel: int
    found_numbers: int


def board_of(program: Program, dtype: torch.dtype, per_lane: int) -> Board:
    """The board of a cell's segments; dtype is the gates'."""
    states, entries = program.num_states, program.num_states**2
    number = LANES * per_lane * words_of(dtype)
    of_map, of_end, gain = (entries + 2 * states) * number, states * number, number
    places = (0, of_map, 2 * of_map, 2 * of_map + of_end, 2 * of_map + of_end + gain)
    found = 2 * states + (2 * entries + states) + 1
    return Board(*places, 2 * of_end, found, found * per_lane)


def words_of(dtype: torch.dtype) -> int:
    """The words that a published number of the compute dtype takes."""
    return compute_dtype(dtype).itemsize // 4


def found_words(board: Board, dtype: torch.dtype) -> int:
    """The words of what a segment leaves in `found`, which has no flags."""
    return board.found_numbers * LANES * compute_dtype(dtype).itemsize // WORD
