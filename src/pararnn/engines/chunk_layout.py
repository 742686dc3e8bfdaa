"""Layout of sequences in chunks of steps: each begins with a chunk, the longest ones come first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pararnn.engines.arguments import Arguments
from pararnn.engines.forward_time import in_order
from pararnn.solvers.boundaries import Boundaries


class Span(NamedTuple):
    """Positions in time from `first` to before `last`, and their chunks.

    sizes: how many sequences have a chunk at each. slot: where the memory has the states before
    it, one for each sequence; None for the initial ones.
    """

    first: int
    last: int
    chunks: slice
    sizes: Sequence[int]
    slot: int | None


@dataclass(frozen=True)
class Chunks:
    """Chunks of `steps` steps of all sequences, in the order of processing.

    length: T. sizes: how many sequences have a chunk at each position in time. order: the sequences
    by falling length, as the chunks of a position are; None for rows (B, T) as they are. rows,
    times: the indices of the steps of all chunks, (N, steps); behind a sequence's end those of its
    last step. real: bool (N, steps), whether a step is not behind the end.
    """

    steps: int
    length: int
    reverse: bool
    sizes: Sequence[int]
    order: Tensor | None
    rows: Tensor | None
    times: Tensor | None
    real: Tensor | None

    def spans(self, most: int) -> list[Span]:
        """Return spans of at most `most` chunks, but of one position at least."""
        spans: list[Span] = []
        first, begin, slot = 0, 0, 0
        while first < len(self.sizes) and self.sizes[first]:
            last, count = first + 1, self.sizes[first]
            while last < len(self.sizes) and count + self.sizes[last] <= most:
                count += self.sizes[last]
                last += 1
            chunks, sizes = slice(begin, begin + count), self.sizes[first:last]
            spans.append(Span(first, last, chunks, sizes, slot if first else None))
            slot += sizes[0] if first else 0
            first, begin = last, begin + count
        return spans

    def in_order(self, states: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return states (S, ...) of sequences in the order of chunks."""
        order = self.order
        return tuple(states) if order is None else tuple([s[order] for s in states])

    def by_sequence(self, states: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return states in the order of chunks by the numbers of their sequences."""
        order = self.order
        if order is None:
            return tuple(states)
        return tuple([torch.empty_like(s).index_copy_(0, order, s) for s in states])

    def take(self, out: Tensor, series: Tensor, span: Span) -> None:
        """Copy the steps of a span of a series (B, T, ...) to `out`, (N, steps, ...)."""
        if self.rows is not None and self.times is not None:
            out.copy_(series[self.rows[span.chunks], self.times[span.chunks]])
            return
        some = self._rows(series, span)
        if self.reverse:
            some = some.flip(1)
        missing = len(span.sizes) * self.steps - some.shape[1]
        if missing:
            fill = some[:, -1:].expand(-1, missing, *some.shape[2:])
            some = torch.cat([some, fill], 1)
        by_position = out.unflatten(0, (len(span.sizes), -1))
        by_position.copy_(some.unflatten(1, (-1, self.steps)).transpose(0, 1))

    def put(self, series: Tensor, chunks: Tensor, span: Span) -> None:
        """Copy chunks (N, steps, ...) to the steps of a span of a series (B, T, ...)."""
        if self.rows is not None and self.times is not None and self.real is not None:
            rows, times, real = (x[span.chunks] for x in (self.rows, self.times, self.real))
            series[rows[real], times[real]] = chunks[real].to(series.dtype)
            return
        target = self._rows(series, span)
        some = chunks.unflatten(0, (len(span.sizes), -1)).transpose(0, 1)
        if target.shape[1] == len(span.sizes) * self.steps and not self.reverse:
            target.unflatten(1, (-1, self.steps)).copy_(some)
            return
        some = some.flatten(1, 2)[:, : target.shape[1]]
        target.copy_(some.flip(1) if self.reverse else some)

    def _rows(self, series: Tensor, span: Span) -> Tensor:
        """Return the steps of a span of rows that are sequences."""
        begin, end = span.first * self.steps, min(span.last * self.steps, self.length)
        if self.reverse:
            begin, end = self.length - end, self.length - begin
        return series[:, begin:end]


def chunks_of(args: Arguments, steps: int) -> Chunks:
    """Return the chunks of a call's sequences."""
    (batch, length), reverse = args.gates.shape[:2], args.options.reverse
    device = args.gates.device
    if args.seq is None:
        positions = (length + steps - 1) // steps
        real = None
        if length % steps:
            real = torch.arange(positions * steps, device=device) < length
            real = real.view(-1, 1, steps).expand(-1, batch, -1).flatten(0, 1)
        return Chunks(steps, length, reverse, [batch] * positions, None, None, None, real)
    seq = in_order(args.seq, reverse).long()
    first_row, first_time = Boundaries.of(seq, None).begins.nonzero().unbind(1)
    numbers = seq[first_row, first_time]
    row, start = (
        seq.new_zeros(args.sequences).index_copy(0, numbers, x) for x in (first_row, first_time)
    )
    lengths = torch.bincount(seq[seq >= 0], minlength=args.sequences)
    order = lengths.argsort(descending=True, stable=True)
    row, start, lengths = row[order], start[order], lengths[order]
    longest = int(lengths[0]) if len(lengths) else 0
    begins = torch.arange(0, longest, steps, device=device)
    position, which = (lengths > begins.unsqueeze(1)).nonzero().unbind(1)
    time = begins[position].unsqueeze(1) + torch.arange(steps, device=device)
    last = lengths[which].unsqueeze(1) - 1
    times = start[which].unsqueeze(1) + torch.minimum(time, last)
    times = length - 1 - times if reverse else times
    rows = row[which].unsqueeze(1).expand_as(times)
    sizes = (lengths > begins.unsqueeze(1)).sum(1).tolist()
    return Chunks(steps, length, reverse, sizes, order, rows, times, time <= last)
