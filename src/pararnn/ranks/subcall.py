"""A slice of time as a separate call, whose rows continue from given states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from pararnn.engines.arguments import Arguments
from pararnn.messages.group import Ranks

RowStates = tuple[Tensor, ...]
"""States, or gradients of them, of all rows: (B, D) each."""


def slice_time(x: Tensor, start: int, stop: int, reverse: bool) -> Tensor:
    """Return the steps (B, T, ...) from `start` to `stop` in the order of processing."""
    if reverse:
        start, stop = x.shape[1] - stop, x.shape[1] - start
    return x if (start, stop) == (0, x.shape[1]) else x[:, start:stop]


def step_of(x: Tensor, step: int, reverse: bool) -> Tensor:
    """Return a step of x (B, T, ...) in the order of processing; -1 is the last one."""
    return x[:, -1 - step if reverse else step]


class RankBorder(NamedTuple):
    """Sequences at the borders of ranks, in the order of processing.

    continues: bool (ranks, B), True where a rank's row continues that of the rank before; None
    where row b is sequence b on all of them.
    """

    continues: Tensor | None
    position: int
    size: int

    @classmethod
    def of(cls, ranks: Ranks, args: Arguments) -> RankBorder:
        """Compare the numbers of sequences at the ends of all ranks' rows."""
        reverse = args.options.reverse
        position = ranks.position(reverse)
        if args.seq is None:
            return cls(None, position, ranks.size)
        ends = torch.stack([step_of(args.seq, 0, reverse), step_of(args.seq, -1, reverse)])
        first, last = ranks.gather(ends, reverse).unbind(1)
        continues = torch.zeros_like(first, dtype=torch.bool)
        continues[1:] = (first[1:] == last[:-1]) & (first[1:] >= 0)
        return cls(continues, position, ranks.size)

    def at_first(self) -> Tensor | None:
        """Return whether this rank's rows continue those of the rank before, bool (B,)."""
        return None if self.continues is None else self.continues[self.position]

    def at_last(self) -> Tensor | None:
        """Return whether the next rank continues this rank's rows, bool (B,)."""
        if self.continues is None:
            return None
        if self.position + 1 < self.size:
            return self.continues[self.position + 1]
        return torch.zeros_like(self.continues[0])


class Subcall(NamedTuple):
    """A call on a slice of time.

    Where rows hold sequences, S of them, sequence S + b is the first steps of row b that continue
    an earlier slice. seq: the original numbers, in the order of memory. sequences: S.
    """

    args: Arguments
    seq: Tensor | None
    sequences: int

    @classmethod
    def of(
        cls, args: Arguments, start: int, stop: int, carry: RowStates, continues: Tensor | None
    ) -> Subcall:
        """Cut a call, complete and within its rank, so that rows continue from `carry`.

        continues: bool (B,), as in `RankBorder.at_first`, for a slice from the first step on.
        """
        reverse = args.options.reverse
        steps, seq = args.gates.shape[1], args.seq
        if start and seq is not None:
            first = step_of(seq, start, reverse)
            continues = (first == step_of(seq, start - 1, reverse)) & (first >= 0)
        if (start, stop) != (0, steps):

            def cut(x: Tensor) -> Tensor:
                return slice_time(x, start, stop, reverse)

            seq = None if seq is None else cut(seq)
            args = replace(
                args,
                gates=cut(args.gates),
                fields=tuple(map(cut, args.fields)),
                reset=None if args.reset is None else cut(args.reset),
            )
        if seq is None:
            return cls(replace(args, initial=carry), None, 0)
        assert continues is not None
        total, rows = args.sequences, torch.arange(len(seq), device=seq.device).unsqueeze(1)
        run = (seq == step_of(seq, 0, reverse).unsqueeze(1)) & continues.unsqueeze(1)
        numbers = torch.where(run, total + rows, seq).to(torch.int32)
        initial = tuple([torch.cat(both) for both in zip(args.initial, carry, strict=True)])
        args = replace(args, seq=numbers, sequences=total + len(seq), initial=initial)
        return cls(args, seq, total)

    def last(self) -> Tensor:
        """Return the sequence that each row ends in, (B,); any at padding, which nothing
        continues and whose incoming gradient is zero."""
        assert self.args.seq is not None
        return step_of(self.args.seq, -1, self.args.options.reverse).clamp(min=0).long()

    def ends(self, final: Sequence[Tensor]) -> RowStates:
        """Return the state at each row's last step, see `last`."""
        return tuple(final) if self.seq is None else tuple([h[self.last()] for h in final])

    def ends_here(self, continues_next: Tensor | None) -> Tensor:
        """Return the steps that end a sequence, bool (B, T).

        continues_next: as in `RankBorder.at_last`.
        """
        assert self.args.seq is not None
        assert continues_next is not None
        seq, reverse = self.args.seq, self.args.options.reverse
        ends = torch.ones_like(seq, dtype=torch.bool)
        inner = seq[:, 1:] != seq[:, :-1]
        if reverse:
            ends[:, 1:], ends[:, 0] = inner, ~continues_next
        else:
            ends[:, :-1], ends[:, -1] = inner, ~continues_next
        return ends & (seq >= 0)

    def cotangent(
        self,
        at_ends: RowStates,
        of_final: RowStates | None = None,
        continues_next: Tensor | None = None,
    ) -> RowStates:
        """Return gradients of the final states: those at the ends of rows, and of sequences (S, D)
        that end in this slice. `continues_next` belongs to the latter."""
        if self.seq is None:
            return at_ends
        out = []
        for n, grad in enumerate(at_ends):
            total = grad.new_zeros((self.args.sequences, *grad.shape[1:]))
            if of_final is not None:
                ends = self.ends_here(continues_next)
                assert self.args.seq is not None
                total[self.args.seq[ends].long()] = of_final[n][self.seq[ends].long()]
            out.append(total.index_add(0, self.last(), grad))
        return tuple(out)

    def of_carry(self, initial: Sequence[Tensor]) -> RowStates:
        """Return the entries of initial states, or of their gradients, that rows continue from."""
        return tuple([state[self.sequences :] for state in initial])
