"""Convert inputs to rows of steps (B, T, ...), and results back to the input's layout."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from heapq import heappush, heapreplace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from pararnn.base.private import exporting
from pararnn.base.tensors import ArrayLike
from pararnn.layers.resets import require_resets
from pararnn.sequences import Sequences, of_cu_seqlens, of_lengths


class InputLayout(NamedTuple):
    """Layout of a user's tensors with time.

    to_rows: converts the user's tensor to rows (B, T, ...). to_user: converts rows back. has_batch:
    True if states have a batch dimension. sequences: None where row b is sequence b.
    """

    to_rows: Callable[[Any], Tensor]
    to_user: Callable[[Tensor], Any]
    has_batch: bool = True
    sequences: Sequences | None = None


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _swap(tensor: Tensor) -> Tensor:
    return tensor.transpose(0, 1)


def _to_one_row(tensor: Tensor) -> Tensor:
    return tensor.unsqueeze(0)


def _from_one_row(tensor: Tensor) -> Tensor:
    return tensor.squeeze(0)


BATCH_FIRST = InputLayout(_same, _same)
TIME_FIRST = InputLayout(_swap, _swap)
UNBATCHED = InputLayout(_to_one_row, _from_one_row, has_batch=False)


def layout_of(
    x: Tensor | PackedSequence,
    batch_first: bool,
    lengths: ArrayLike | None = None,
    padding: str = "right",
    cu_seqlens: ArrayLike | None = None,
    group: str = "",
) -> InputLayout:
    """Return the layout of a layer's input.

    (B, T, C); (T, B, C) without `batch_first`; (T, C); or a PackedSequence. group: the ranks that
    share the sequence, of whose steps together lengths and cu_seqlens are. Raises ValueError if
    more than one of lengths, cu_seqlens and a PackedSequence gives the lengths, for a
    PackedSequence of several ranks, and as `pararnn.sequences`.
    """
    if isinstance(x, PackedSequence) and group:
        raise ValueError(
            "a PackedSequence holds its steps in another order, which ranks cannot share: "
            "give padded rows and lengths, or packed rows and cu_seqlens"
        )
    if isinstance(x, PackedSequence):
        if lengths is not None or cu_seqlens is not None:
            raise ValueError(
                "a PackedSequence says its lengths itself: give no lengths or cu_seqlens"
            )
        return _layout_of_packed(x)
    layout = BATCH_FIRST if batch_first else TIME_FIRST
    if x.ndim == 2:
        layout = UNBATCHED
    if lengths is None and cu_seqlens is None:
        return layout
    if lengths is not None and cu_seqlens is not None:
        raise ValueError("lengths are for padded batches, cu_seqlens for packed ones: give one")
    batch, steps = layout.to_rows(x).shape[:2]
    if cu_seqlens is not None:
        sequences = of_cu_seqlens(cu_seqlens, batch, steps, x.device, group)
        return layout._replace(has_batch=True, sequences=sequences)
    if not layout.has_batch:
        raise ValueError("lengths need a batch, got an unbatched input")
    assert lengths is not None
    sequences = of_lengths(lengths, padding, batch, steps, x.device, group)
    return layout._replace(sequences=sequences)


def order_of_resets(reset: Tensor | PackedSequence, layout: InputLayout, count: int) -> Tensor:
    """Return the index, in the user's layout, of each true step of `reset`, row by row: int64 (K,).

    Raises ValueError for another number of them than `count`, as `pararnn.sequences`.
    """
    flags = reset.data if isinstance(reset, PackedSequence) else reset
    require_resets(flags, count)
    index: Any = (flags.flatten().cumsum(0) - 1).view_as(flags)
    if isinstance(reset, PackedSequence):
        index = reset._replace(data=index)
    of_user = layout.to_rows(index).flatten()
    rows = layout.to_rows(reset).flatten()
    of_row = (rows.cumsum(0) - 1).where(rows, count)  # steps without a reset write to the end
    return of_row.new_zeros(count + 1).scatter(0, of_row, of_user)[:count]


def _layout_of_packed(x: PackedSequence) -> InputLayout:
    """Put several sequences into a row of the longest one's steps, so that little is padding."""
    if exporting():
        raise ValueError(
            "exported programs take no PackedSequence, whose sizes are values: give padded rows "
            "and lengths"
        )
    sizes, device = x.batch_sizes, x.data.device
    arange = partial(torch.arange, device=sizes.device)
    count, steps = (int(sizes[0]), len(sizes)) if len(sizes) else (0, 0)
    # Sizes fall: the i-th longest sequence has a step t where sizes[t] > i.
    lengths = torch.searchsorted(-sizes, -arange(count))
    row, start = map(sizes.new_tensor, _into_rows(lengths.tolist(), steps))
    time = torch.repeat_interleave(arange(steps), sizes)
    ends = sizes.cumsum(0)
    sequence = arange(len(time)) - torch.repeat_interleave(ends - sizes, sizes)
    index = (row[sequence] * steps + start[sequence] + time).to(device, non_blocking=True)
    rows = int(row.max()) + 1 if count else 0
    numbers = sequence.to(device, torch.int32, non_blocking=True)
    if x.sorted_indices is not None:
        numbers = x.sorted_indices.to(torch.int32)[numbers.long()]
    seq = torch.full((rows * steps,), -1, dtype=torch.int32, device=device)
    seq = seq.index_copy(0, index, numbers).view(rows, steps)

    def to_rows(batch: PackedSequence) -> Tensor:
        if not isinstance(batch, PackedSequence):
            raise TypeError(
                "with a PackedSequence fields and reset are PackedSequences too (or numbers), got "
                f"{type(batch).__name__}"
            )
        if not torch.equal(batch.batch_sizes, sizes):
            raise ValueError("fields and reset must be packed like the input: batch_sizes differ")
        data = batch.data
        flat = data.new_zeros(rows * steps, *data.shape[1:]).index_copy(0, index, data)
        return flat.unflatten(0, (rows, steps))

    def to_user(tensor: Tensor) -> PackedSequence:
        data = tensor.flatten(0, 1).index_select(0, index)
        return PackedSequence(data, sizes, x.sorted_indices, x.unsorted_indices)

    return InputLayout(to_rows, to_user, sequences=Sequences(seq, count, valid=True))


def _into_rows(lengths: list[int], steps: int) -> tuple[list[int], list[int]]:
    """Return rows and first steps of sequences, the longest first, in rows of `steps`."""
    row: list[int] = []
    start: list[int] = []
    fill: list[tuple[int, int]] = []  # steps in use and row, the emptiest row first
    for length in lengths:
        if fill and fill[0][0] + length <= steps:
            begin, row_index = fill[0]
            heapreplace(fill, (begin + length, row_index))
        else:
            begin, row_index = 0, len(fill)
            heappush(fill, (length, row_index))
        row.append(row_index)
        start.append(begin)
    return row, start
