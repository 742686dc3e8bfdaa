"""Boundaries of the sequences in rows of steps, in the order of processing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Boundaries:
    """Boundary masks of sequences; seq (B, T): their numbers.

    begins, last, padding: bool (B, T); the first step of a sequence, unless it starts from zero,
    its last step, and steps of no sequence.
    """

    seq: Tensor
    begins: Tensor
    last: Tensor
    padding: Tensor

    @classmethod
    def of(cls, seq: Tensor, reset: Tensor | None) -> Boundaries:
        """Compare the numbers of sequences, -1 at padding, with those of the steps next to them;
        steps of `reset` start from zero."""
        edge = seq.new_full((seq.shape[0], 1), -2)
        padding = seq < 0
        begins = (seq != torch.cat([edge, seq[:, :-1]], 1)) & ~padding
        last = (seq != torch.cat([seq[:, 1:], edge], 1)) & ~padding
        return cls(seq, begins if reset is None else begins & ~reset, last, padding)

    def initial(self, states: Tensor) -> Tensor:
        """Return the states of sequences (S, ...) at their steps, (B, T or 1, ...)."""
        if states.shape[0] > 0:  # len() would be a constant in compiled code
            return states[self.seq.clamp(min=0).long()]
        return states.new_zeros((self.seq.shape[0], 1, *states.shape[1:]))

    def first_start(self, states: Tensor) -> Tensor:
        """Return what the first real step starts from, (1, ...), of the states of sequences
        (S, ...), detached and finite: it is in the step's domain. Ones where there is none."""
        if states.shape[0] == 0 or not self.seq.numel():
            return states.new_ones((1, *states.shape[1:]))
        first = first_real(self.padding)
        row = self.seq.flatten().index_select(0, first).clamp(min=0).long()
        begins = self.begins.flatten().index_select(0, first)
        start = states.detach().index_select(0, row).nan_to_num(0, 0, 0)
        start = start.masked_fill(~begins.view(-1, *[1] * (start.ndim - 1)), 0)
        return start.masked_fill(self.padding.all(), 1)


def first_real(padding: Tensor) -> Tensor:
    """Return the index (1,) of the first step that is no padding (B, T), 0 where all are."""
    return (~padding).flatten().to(torch.uint8).argmax(0, keepdim=True)


def final_states(
    initial: Sequence[Tensor], boundaries: Boundaries | None, states: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Return the last state of each sequence, (S, ...) for each of the states (B, T, ...), sharing
    no memory. An empty sequence's is its initial state. boundaries: None if row b is sequence b.
    """
    pairs = [(h.to(s.dtype), s) for h, s in zip(initial, states, strict=True)]
    if boundaries is None:
        # Without a step they still depend on all that the states depend on.
        return tuple([s[:, -1].clone() if s.shape[1] else h + s.sum(1) for h, s in pairs])
    ids = boundaries.seq[boundaries.last].long()
    return tuple([h.index_put((ids,), s[boundaries.last]) for h, s in pairs])
