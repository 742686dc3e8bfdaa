"""Layout of sequences in chunks of steps: each begins with a chunk, the longest ones come first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pararnn.engines.arguments import Arguments
from pararnn.engines.forward_time import in_order


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

    def tile(self, first: int, last: int) -> slice:
        """Return the chunks of the positions from `first` to before `last`."""
        return slice(sum(self.sizes[:first]), sum(self.sizes[:last]))

    def take(self, out: Tensor, series: Tensor, first: int, last: int) -> Tensor:
        """Copy the steps of some positions of a series (B, T, ...) to `out`, (N, steps, ...)."""
        if self.rows is not None and self.times is not None:
            at = self.tile(first, last)
            return out.copy_(series[self.rows[at], self.times[at]])
        some = self._rows(series, first, last)
        if self.reverse:
            some = some.flip(1)
        missing = (last - first) * self.steps - some.shape[1]
        if missing:
            fill = some[:, -1:].expand(-1, missing, *some.shape[2:])
            some = torch.cat([some, fill], 1)
        by_position = out.unflatten(0, (last - first, -1))
        by_position.copy_(some.unflatten(1, (-1, self.steps)).transpose(0, 1))
        return out

    def put(self, series: Tensor, chunks: Tensor, first: int, last: int) -> None:
        """Copy chunks (N, steps, ...) to the steps of some positions of a series (B, T, ...)."""
        if self.rows is not None and self.times is not None and self.real is not None:
            at = self.tile(first, last)
            real = self.real[at]
            series[self.rows[at][real], self.times[at][real]] = chunks[real].to(series.dtype)
            return
        target = self._rows(series, first, last)
        some = chunks.unflatten(0, (last - first, -1)).transpose(0, 1)
        if target.shape[1] == (last - first) * self.steps and not self.reverse:
            target.unflatten(1, (-1, self.steps)).copy_(some)
            return
        some = some.flatten(1, 2)[:, : target.shape[1]]
        target.copy_(some.flip(1) if self.reverse else some)

    def is_real(self, first: int, last: int) -> Tensor | None:
        """Return `real` of some positions, None if all steps are."""
        if self.real is not None:
            return self.real[self.tile(first, last)]
        return None

    def _rows(self, series: Tensor, first: int, last: int) -> Tensor:
        """Return the steps of some positions of rows that are sequences."""
        begin, end = first * self.steps, min(last * self.steps, self.length)
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
    before = torch.cat([seq.new_full((batch, 1), -1), seq[:, :-1]], 1)
    first_row, first_time = ((seq != before) & (seq >= 0)).nonzero().unbind(1)
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
