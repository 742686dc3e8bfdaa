"""Sequences of a batch: packing, lengths, padding and resets."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pararnn.base.device import type_of
from pararnn.base.private import exporting_to_onnx
from pararnn.base.tensors import ArrayLike, as_integers, as_tensor
from pararnn.messages.group import start_and_total

PADDING = ("right", "left")


class Sequences(NamedTuple):
    """Rows of steps (B, T), split into sequences.

    seq: int32 (B, T), the index of each step's sequence, -1 at padding; a sequence is one run of
    steps of one row. total: number of sequences, including those without a step.

    Set by pararnn: seq is None where row b is sequence b. reset: bool (B, T), steps that start from
    the zero state. last: int64 (S,), the final piece of each sequence that resets have split.
    valid: True if the numbers need no check. lengths: int (B,), if row b is sequence b and all
    padding is to its right.
    """

    seq: Tensor | None
    total: int
    reset: Tensor | None = None
    last: Tensor | None = None
    valid: bool = False
    lengths: Tensor | None = None


def sequences_of(
    rows: Tensor,
    reset: ArrayLike | None = None,
    cu_seqlens: ArrayLike | None = None,
    sequences: Sequences | None = None,
    group: str = "",
) -> Sequences:
    """Return how rows (B, T, ...) are split, from the arguments of a call; group: as in
    `of_cu_seqlens`.

    Raises as `checked_reset`, `of_cu_seqlens` and `_check`; ValueError for both of the latter.
    """
    if cu_seqlens is not None:
        if sequences is not None:
            raise ValueError("cu_seqlens and sequences both say where sequences start: give one")
        batch, steps = rows.shape[:2]
        sequences = of_cu_seqlens(cu_seqlens, batch, steps, rows.device, group)
    elif sequences is None:
        sequences = one_a_row(rows)
    elif not sequences.valid:
        sequences = _check(sequences, rows)
    return sequences if reset is None else sequences._replace(reset=checked_reset(rows, reset))


def one_a_row(rows: Tensor) -> Sequences:
    """Return the sequences of rows (B, ...) that are a sequence each."""
    return Sequences(None, rows.shape[0], None, None, True)


def checked_reset(rows: Tensor, reset: ArrayLike, dims: int = 2) -> Tensor:
    """Return resets of gates or inputs, bool, one for each entry of their first `dims` dimensions.

    Raises TypeError for what is no tensor, list or array, ValueError for what does not fit them.
    """
    flags = as_tensor("reset", reset)
    if not isinstance(reset, Tensor):
        flags = flags.to(rows.device)
    size = tuple(rows.shape[:dims])
    if flags.dtype != torch.bool or tuple(flags.shape) != size:
        raise ValueError(f"reset must be bool {size}, got {flags.dtype} {tuple(flags.shape)}")
    if flags.device != rows.device:
        raise ValueError(f"reset is on {flags.device}, gates on {rows.device}")
    return flags


def _check(sequences: Sequences, rows: Tensor) -> Sequences:
    """Check a user's sequences for rows (B, T, ...), and return them with int32 numbers.

    Raises ValueError as `of_cu_seqlens`: for another dtype, shape or device, for numbers that are
    neither -1 nor below the total, and for a sequence of more than one run of steps.
    """
    seq, total, (batch, steps) = sequences.seq, sequences.total, rows.shape[:2]
    if not isinstance(seq, Tensor) or seq.dtype not in (torch.int32, torch.int64):
        got = seq.dtype if isinstance(seq, Tensor) else type(seq).__name__
        raise ValueError(f"sequences.seq must be an int32 or int64 tensor, got {got}")
    if tuple(seq.shape) != (batch, steps):
        raise ValueError(f"sequences.seq must be {(batch, steps)}, got {tuple(seq.shape)}")
    if seq.device != rows.device:
        raise ValueError(f"sequences.seq is on {seq.device}, the steps on {rows.device}")
    if not isinstance(total, (int, torch.SymInt)) or total < 0:
        raise ValueError(f"sequences.total must be an integer of 0 or more, got {total!r}")
    if seq.numel() and not torch.compiler.is_compiling():
        ends = torch.stack(torch.aminmax(seq))
        inside = (ends[0] >= -1) & (ends[1] < total)
        require(inside, "sequences.seq must be -1 (padding) or below the total of {}", total, ends)
        starts = (seq != F.pad(seq, (1, 0), value=-1)[:, :-1]) & (seq >= 0)
        index = seq.where(seq >= 0, total).long().flatten()
        runs = starts.new_zeros(total + 1, dtype=torch.int64)
        runs = runs.index_add(0, index, starts.long().flatten())
        one_run = "each of the {} sequences must be one run of steps of one row; runs of each"
        require((runs <= 1).all(), one_run, total, runs[:-1])
    return Sequences(seq.to(torch.int32), total, valid=True)


def of_cu_seqlens(
    starts: ArrayLike, batch: int, steps: int, device: torch.device, group: str = ""
) -> Sequences:
    """Return S sequences packed into one row: int (S + 1,), their starts and the end of the last.

    group: the ranks that share the row, of which this one has `steps`.
    A tensor, or a list or NumPy array. Raises TypeError for what is no tensor of integers,
    ValueError for wrong dtypes, shapes and devices, and for values that are not in order: on CUDA
    the values are checked on the device, without waiting for it.
    """
    cu_seqlens = as_integers("cu_seqlens", starts, None)
    if batch != 1:
        raise ValueError(f"cu_seqlens packs all sequences into one row: got B = {batch}")
    if cu_seqlens.shape[0] < 1:
        raise ValueError("cu_seqlens must hold the end of the last sequence at least, got none")
    if isinstance(starts, Tensor) and cu_seqlens.device != device:
        raise ValueError(f"cu_seqlens is on {cu_seqlens.device}, the steps on {device}")
    begin, all_steps = start_and_total(group, steps, device)
    first, last = cu_seqlens[0], cu_seqlens[-1]
    right = (cu_seqlens.diff() >= 0).all() & (first == 0) & (last <= all_steps)
    order = "cu_seqlens must start at 0, not fall, and end at {} or before"
    require(right, order, all_steps, cu_seqlens)
    cu_seqlens = cu_seqlens.to(device, non_blocking=True)
    total = cu_seqlens.shape[0] - 1  # len would fix it in exports
    position = torch.arange(begin, begin + steps, device=device, dtype=cu_seqlens.dtype)
    ends = cu_seqlens[1:].contiguous()
    if exporting_to_onnx():  # ONNX has no searchsorted
        count = ends.new_zeros(steps + 1).scatter_add(0, ends.long(), torch.ones_like(ends))
        number = count.cumsum(0)[:steps]
    else:
        number = torch.searchsorted(ends, position, right=True)
    seq = number.masked_fill(number == total, -1).to(torch.int32).unsqueeze(0)
    return Sequences(seq, total, valid=True)


def of_lengths(
    sizes: ArrayLike, padding: str, batch: int, steps: int, device: torch.device, group: str = ""
) -> Sequences:
    """Return one sequence a row, int (B,) steps long, with padding to its right or left.

    group: as in `of_cu_seqlens`. Raises as `of_cu_seqlens`; lengths are 0 to T.
    """
    if padding not in PADDING:
        raise ValueError(f"padding must be one of {PADDING}, got {padding!r}")
    lengths = as_integers("lengths", sizes, batch)
    begin, all_steps = start_and_total(group, steps, device)
    right = ((lengths >= 0) & (lengths <= all_steps)).all()
    require(right, "lengths must be 0 to {}", all_steps, lengths)
    lengths = lengths.to(device, non_blocking=True)
    ends, position = lengths.unsqueeze(1), torch.arange(begin, begin + steps, device=device)
    if padding == "left":
        return of_mask(position >= all_steps - ends)
    return of_mask(position < ends)._replace(lengths=None if group else lengths)


def of_mask(real: Tensor) -> Sequences:
    """Return one sequence a row, given its real steps, bool (B, T), one run in each row."""
    batch = real.shape[0]  # len would fix it in exports
    rows = torch.arange(batch, device=real.device, dtype=torch.int32)
    return Sequences(rows.unsqueeze(1).where(real, -1), batch, valid=True)


def latest_step(flags: Tensor, none: int) -> Tensor:
    """Return the last step up to each where bool (B, T) holds, int64; `none` before the first."""
    steps = torch.arange(flags.shape[1], device=flags.device).where(flags, none)
    if not exporting_to_onnx():
        return steps.cummax(1).values
    number = flags.long().cumsum(1)  # ONNX has no cummax
    latest = steps.new_full((flags.shape[0], flags.shape[1] + 1), none)
    return latest.scatter(1, number.where(flags, 0), steps).gather(1, number)


def require(right: Tensor, message: str, steps: int, values: Tensor) -> None:
    """Raise ValueError unless `right`; on CUDA the device asserts: reading it would wait."""
    if torch.compiler.is_compiling():
        return  # before the message is made: that would fix the number of steps
    message = message.format(steps)
    type_of(right.device).require(right, message, values)


def without_padding(x: Tensor, sequences: Sequences) -> Tensor:
    """Return x with 0 at padding: it may hold anything there, and 0 * NaN is NaN."""
    if sequences.seq is None:
        return x
    return x.masked_fill((sequences.seq < 0).unsqueeze(-1), 0)
