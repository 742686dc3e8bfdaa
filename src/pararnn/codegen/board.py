"""Sizes of the memory through which the segments of a Newton solve communicate on a GPU.

Kernels get these numbers as constants: see boundaries.h and sync_grid.h.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from pararnn.base.numerics import compute_dtype
from pararnn.codegen.interface import WORD
from pararnn.program.program import Program

LANES = 32


class Board(NamedTuple):
    """Layout of a segment's board, of `ends` in a grid's counters, and of `found`.

    A published value takes one 64-bit word for every 32 bits; the upper half of a word is a flag.
    """

    board_map: int
    """Offset of the segment's map (entries, shifts, sizes), in words."""
    board_group: int
    """Offset of its group's map, in words."""
    board_end: int
    """Offset of the end that Newton expects, in words."""
    board_gains: int
    """Offset of the gains, in words."""
    board_words: int
    """Length of the board, in words."""
    ends_words: int
    """Length of an end (states, sizes) in a grid's counters, in words."""
    found_a_channel: int
    """Length of a channel's record in `found` (start, end, product, status), in numbers."""
    found_numbers: int
    """Length of a lane's records in `found`, in numbers."""


def board_of(program: Program, dtype: torch.dtype, per_lane: int) -> Board:
    """Return the layout for a cell's segments; dtype is the gates'."""
    states, entries = program.num_states, program.num_states**2
    number = LANES * per_lane * words_of(dtype)
    map_words, end_words = (entries + 2 * states) * number, states * number
    ends = 2 * map_words + end_words
    offsets = (0, map_words, 2 * map_words, ends, ends + number)
    record = 2 * states + (2 * entries + states) + 1
    return Board(*offsets, 2 * end_words, record, record * per_lane)


def words_of(dtype: torch.dtype) -> int:
    """Return the words of a published value of the compute dtype."""
    return compute_dtype(dtype).itemsize // 4


def found_words(board: Board, dtype: torch.dtype) -> int:
    """Return the words of a segment's records in `found`, which have no flags."""
    return board.found_numbers * LANES * compute_dtype(dtype).itemsize // WORD
