"""Which sequence every step belongs to: all that solvers know of packing, lengths and padding."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pararnn.device import type_of
from pararnn.tensors import Given, as_integers

PADDING = ("right", "left")


class Sequences(NamedTuple):
    """Rows of steps, cut into sequences.

    seq: int32 (B, T), the sequence of each step, -1 for padding; a sequence is one run of steps of
    one row. total: how many sequences there are, those without a step included.
    """

    seq: Tensor
    total: int


class KnownSequences(NamedTuple):
    """Sequences that `check_sequences` takes as they are: their numbers are of our own making."""

    seq: Tensor
    total: int


def check_sequences(
    given: Sequences | KnownSequences, batch: int, steps: int, device: torch.device
) -> Sequences:
    """Check sequences of the user's own for rows (B, T), and return them with int32 numbers.

    Raises ValueError as `of_cu_seqlens`: for another dtype, shape or device, for numbers that are
    neither -1 nor below the total, and for a sequence of more than one run of steps.
    """
    seq, total = given
    if isinstance(given, KnownSequences):
        return Sequences(seq, total)
    if not isinstance(seq, Tensor) or seq.dtype not in (torch.int32, torch.int64):
        got = seq.dtype if isinstance(seq, Tensor) else type(seq).__name__
        raise ValueError(f"sequences.seq must be an int32 or int64 tensor, got {got}")
    if tuple(seq.shape) != (batch, steps):
        raise ValueError(f"sequences.seq must be {(batch, steps)}, got {tuple(seq.shape)}")
    if seq.device != device:
        raise ValueError(f"sequences.seq is on {seq.device}, the steps on {device}")
    if not isinstance(total, (int, torch.SymInt)) or total < 0:
        raise ValueError(f"sequences.total must be an integer of 0 or more, got {total!r}")
    if seq.numel() and not torch.compiler.is_compiling():
        ends = torch.stack(torch.aminmax(seq))
        inside = (ends[0] >= -1) & (ends[1] < total)
        require(inside, "sequences.seq must be -1 (padding) or below the total of {}", total, ends)
        starts = (seq != F.pad(seq, (1, 0), value=-1)[:, :-1]) & (seq >= 0)
        place = seq.where(seq >= 0, total).long().flatten()
        runs = starts.new_zeros(total + 1, dtype=torch.int64)
        runs = runs.index_add(0, place, starts.long().flatten())
        alone = "each of the {} sequences must be one run of steps of one row; runs of each"
        require((runs <= 1).all(), alone, total, runs[:-1])
    return Sequences(seq.to(torch.int32), total)


def of_cu_seqlens(given: Given, batch: int, steps: int, device: torch.device) -> Sequences:
    """S sequences packed into one row: int (S + 1,), their starts and the end of the last.

    A tensor, or a list or NumPy array. Raises TypeError for what is no tensor of integers,
    ValueError for wrong dtypes, shapes and devices, and for values that are not in order: on CUDA
    the values are checked on the device, without waiting for it.
    """
    cu_seqlens = as_integers("cu_seqlens", given, None)
    if batch != 1:
        raise ValueError(f"cu_seqlens packs all sequences into one row: got B = {batch}")
    if cu_seqlens.shape[0] < 1:
        raise ValueError("cu_seqlens must hold the end of the last sequence at least, got none")
    if isinstance(given, Tensor) and cu_seqlens.device != device:
        raise ValueError(f"cu_seqlens is on {cu_seqlens.device}, the steps on {device}")
    first, last = cu_seqlens[0], cu_seqlens[-1]
    right = (cu_seqlens.diff() >= 0).all() & (first == 0) & (last <= steps)
    order = "cu_seqlens must start at 0, not fall, and end at {} or before"
    require(right, order, steps, cu_seqlens)
    cu_seqlens = cu_seqlens.to(device, non_blocking=True)
    total = cu_seqlens.shape[0] - 1  # len would fix it in exports
    position = torch.arange(steps, device=device, dtype=cu_seqlens.dtype)
    number = torch.searchsorted(cu_seqlens[1:].contiguous(), position, right=True)
    return Sequences(number.masked_fill(number == total, -1).to(torch.int32).unsqueeze(0), total)


def of_lengths(
    given: Given, padding: str, batch: int, steps: int, device: torch.device
) -> Sequences:
    """One sequence a row, int (B,) steps long, with padding to its right or left.

    Raises as `of_cu_seqlens`; lengths are 0 to T.
    """
    if padding not in PADDING:
        raise ValueError(f"padding must be one of {PADDING}, got {padding!r}")
    lengths = as_integers("lengths", given, batch)
    right = ((lengths >= 0) & (lengths <= steps)).all()
    require(right, "lengths must be 0 to {}", steps, lengths)
    lengths = lengths.to(device, non_blocking=True).unsqueeze(1)
    position = torch.arange(steps, device=device)
    real = position < lengths if padding == "right" else position >= steps - lengths
    rows = torch.arange(batch, device=device, dtype=torch.int32).unsqueeze(1)
    return Sequences(rows.where(real, -1), batch)


class Restarts(NamedTuple):
    """Rows cut at resets too: the S sequences that there were, each up to its first reset, then one
    from each reset, in the order of processing.

    last: int64 (S,), the piece that each of the S sequences ends with.
    """

    sequences: Sequences
    last: Tensor


def of_resets(reset: Tensor, count: int, sequences: Sequences | None, reverse: bool) -> Restarts:
    """Sequences cut at the `count` true steps of `reset`, bool (B, T), row by row.

    Raises ValueError as `of_cu_seqlens` for another number of resets.
    """
    require_resets(reset, count)
    batch, steps = reset.shape
    if sequences is None:
        total, seq = batch, torch.arange(batch, device=reset.device).unsqueeze(1).expand_as(reset)
    else:
        total, seq = sequences.total, sequences.seq.long()
    pieces = torch.arange(total + 1, device=reset.device)  # the last one is for padding
    if not steps:
        return Restarts(Sequences(seq.to(torch.int32), total + count), pieces[:total])
    number = (reset.flatten().cumsum(0) - 1).view_as(reset)
    time = torch.arange(steps, device=reset.device).expand_as(reset)
    if reverse:
        number = count - 1 - number
        nearest = time.where(reset, steps).flip(1).cummin(1).values.flip(1)
    else:
        nearest = time.where(reset, -1).cummax(1).values
    at = nearest.clamp(0, steps - 1)
    restarted = (at == nearest) & (seq.gather(1, at) == seq) & (seq >= 0)
    # Compiled code does not count resets: more than there are states may not name one beyond.
    piece = (total + number.gather(1, at)).clamp(max=total + count - 1)
    cut = piece.where(restarted, seq)
    ends = pieces.scatter_reduce(0, seq.where(seq >= 0, total).flatten(), cut.flatten(), "amax")
    return Restarts(Sequences(cut.to(torch.int32), total + count), ends[:total])


def require_resets(reset: Tensor, count: int) -> None:
    """Raise ValueError, as `require`, unless `reset` is true at `count` steps."""
    if reset.dtype != torch.bool:
        raise ValueError(f"reset must be bool, got {reset.dtype}")
    found = reset.sum()
    must = "reset must be true at {0} steps, as reset_states hold {0} states, one a step"
    require(found == count, must, count, found)


def require(right: Tensor, message: str, steps: int, values: Tensor) -> None:
    """Raise ValueError unless `right`; on CUDA the device asserts: reading it would wait."""
    if torch.compiler.is_compiling():
        return  # before the message is made: that would fix the number of steps
    message = message.format(steps)
    type_of(right.device).require(right, message, values)
