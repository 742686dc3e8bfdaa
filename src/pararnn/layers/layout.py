"""What users hand in, as rows of steps (B, T, ...), and results as they expect them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from heapq import heappush, heapreplace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from pararnn.layers.resets import require_resets
from pararnn.sequences import Sequences, of_cu_seqlens, of_lengths
from pararnn.tensors import ArrayLike


class Layout(NamedTuple):
    """How tensors with time are laid out.

    into: the user's tensor as rows (B, T, ...). back: rows as the user has them. batched: whether
    states have a batch dimension. sequences: None where row b is sequence b.
    """

    into: Callable[[Any], Tensor]
    back: Callable[[Tensor], Any]
    batched: bool = True
    sequences: Sequences | None = None


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _swapped(tensor: Tensor) -> Tensor:
    return tensor.transpose(0, 1)


def _one_row(tensor: Tensor) -> Tensor:
    return tensor.unsqueeze(0)


def _of_one_row(tensor: Tensor) -> Tensor:
    return tensor.squeeze(0)


BATCH_FIRST = Layout(_same, _same)
TIME_FIRST = Layout(_swapped, _swapped)
UNBATCHED = Layout(_one_row, _of_one_row, batched=False)


def layout_of(
    x: Tensor | PackedSequence,
    batch_first: bool,
    lengths: ArrayLike | None = None,
    padding: str = "right",
    cu_seqlens: ArrayLike | None = None,
) -> Layout:
    """The layout of a layer's input.

    (B, T, C); (T, B, C) without `batch_first`; (T, C); or a PackedSequence. Raises ValueError where
    more than one of lengths, cu_seqlens and a PackedSequence says how long sequences are, and as
    `pararnn.sequences`.
    """
    if isinstance(x, PackedSequence):
        if lengths is not None or cu_seqlens is not None:
            raise ValueError(
                "a PackedSequence says its lengths itself: give no lengths or cu_seqlens"
            )
        return _packed(x)
    batched = BATCH_FIRST if batch_first else TIME_FIRST
    layout = UNBATCHED if x.ndim == 2 else batched
    if lengths is None and cu_seqlens is None:
        return layout
    if lengths is not None and cu_seqlens is not None:
        raise ValueError("lengths are for padded batches, cu_seqlens for packed ones: give one")
    batch, steps = layout.into(x).shape[:2]
    if cu_seqlens is not None:
        sequences = of_cu_seqlens(cu_seqlens, batch, steps, x.device)
        return layout._replace(batched=True, sequences=sequences)
    if not layout.batched:
        raise ValueError("lengths need a batch, got an unbatched input")
    assert lengths is not None
    return layout._replace(sequences=of_lengths(lengths, padding, batch, steps, x.device))


def order_of_resets(reset: Tensor | PackedSequence, layout: Layout, count: int) -> Tensor:
    """For each true step of `reset`, row by row, its number as the user lays them out: int64 (K,).

    Raises ValueError unless there are `count` of them, as `pararnn.sequences`.
    """
    given = reset.data if isinstance(reset, PackedSequence) else reset
    require_resets(given, count)
    number: Any = (given.flatten().cumsum(0) - 1).view_as(given)
    if isinstance(reset, PackedSequence):
        number = reset._replace(data=number)
    numbers = layout.into(number).flatten()
    rows = layout.into(reset).flatten()
    place = (rows.cumsum(0) - 1).where(rows, count)  # what is no reset goes to a place of its own
    return place.new_zeros(count + 1).scatter(0, place, numbers)[:count]


def _packed(x: PackedSequence) -> Layout:
    """As many sequences to a row as the longest leaves room for, so that little is padding."""
    sizes, device = x.batch_sizes, x.data.device
    numbered = partial(torch.arange, device=sizes.device)
    count, steps = (int(sizes[0]), len(sizes)) if len(sizes) else (0, 0)
    # Sizes fall: the i-th longest sequence has a step t where sizes[t] > i.
    lengths = torch.searchsorted(-sizes, -numbered(count))
    row, start = map(sizes.new_tensor, _into_rows(lengths.tolist(), steps))
    time = torch.repeat_interleave(numbered(steps), sizes)
    ends = sizes.cumsum(0)
    which = numbered(len(time)) - torch.repeat_interleave(ends - sizes, sizes)
    place = (row[which] * steps + start[which] + time).to(device, non_blocking=True)
    rows = int(row.max()) + 1 if count else 0
    numbers = which.to(device, torch.int32, non_blocking=True)
    if x.sorted_indices is not None:
        numbers = x.sorted_indices.to(torch.int32)[numbers.long()]
    seq = torch.full((rows * steps,), -1, dtype=torch.int32, device=device)
    seq = seq.index_copy(0, place, numbers).view(rows, steps)

    def into(packed: PackedSequence) -> Tensor:
        if not isinstance(packed, PackedSequence):
            raise TypeError(
                "with a PackedSequence fields and reset are PackedSequences too (or numbers), got "
                f"{type(packed).__name__}"
            )
        if not torch.equal(packed.batch_sizes, sizes):
            raise ValueError("fields and reset must be packed like the input: batch_sizes differ")
        data = packed.data
        padded = data.new_zeros(rows * steps, *data.shape[1:]).index_copy(0, place, data)
        return padded.unflatten(0, (rows, steps))

    def back(tensor: Tensor) -> PackedSequence:
        data = tensor.flatten(0, 1).index_select(0, place)
        return PackedSequence(data, sizes, x.sorted_indices, x.unsorted_indices)

    return Layout(into, back, sequences=Sequences(seq, count, checked=True))


def _into_rows(lengths: list[int], steps: int) -> tuple[list[int], list[int]]:
    """Rows and first steps of sequences, the longest first, in rows of `steps`."""
    row: list[int] = []
    start: list[int] = []
    used: list[tuple[int, int]] = []  # the emptiest row first
    for length in lengths:
        if used and used[0][0] + length <= steps:
            begin, at = used[0]
            heapreplace(used, (begin + length, at))
        else:
            begin, at = 0, len(used)
            heappush(used, (length, at))
        row.append(at)
        start.append(begin)
    return row, start
