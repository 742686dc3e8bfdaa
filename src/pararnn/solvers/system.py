"""One problem in forward time: recurrence, inputs and boundaries, in the compute dtype."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pararnn.derive import expand_entry, linearise
from pararnn.program import Program


@dataclass(frozen=True)
class System:
    """h_l = f(prev_l, x_l) for l = 0 .. T-1, with prev_l = h_{l-1} except at boundaries.

    inputs: gates (biases added) and fields, each (B, T, D). params: (D,) or as the cell shapes
    them. initial: the states before step 0, (B, N, D). fresh (B, T, 1 or D): steps that start from
    `start` (B, T, N, D) instead of h_{l-1}. padding (B, T, 1 or D): steps whose state is zero; they
    are among the fresh ones, so that nothing passes them.
    by_hand: linearise by the Jacobian that the class writes itself, if it does.
    """

    program: Program
    inputs: tuple[Tensor, ...]
    params: tuple[Tensor, ...]
    initial: Tensor
    fresh: Tensor | None = None
    start: Tensor | None = None
    padding: Tensor | None = None
    by_hand: bool = False

    @property
    def length(self) -> int:
        """T, the number of steps."""
        return self.inputs[0].shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """The compute dtype."""
        return self.initial.dtype

    def previous(self, states: Tensor) -> Tensor:
        """prev_l for all l, (B, T, N, D), given the states (B, T, N, D)."""
        shifted = torch.cat([self.initial.unsqueeze(1), states], 1)[:, : self.length]
        if self.fresh is None or self.start is None:
            return shifted
        return torch.where(self.fresh.unsqueeze(2), self.start, shifted)

    def sizes(self, states: Tensor) -> Tensor:
        """The largest finite |state| so far of each channel's sequence, (B, T, N, D).

        It has the states' own units, and is what a tolerance on them is relative to. A step that
        starts afresh begins another count, with what it starts from.
        """
        both = torch.maximum(
            states.abs().nan_to_num(0, 0), self.previous(states).abs().nan_to_num(0, 0)
        )
        if self.fresh is None:
            return both.cummax(1).values if self.length else both
        apart, reach = self.fresh.unsqueeze(2).expand_as(both), 1
        while reach < self.length:  # by doubling: a count of its own for each sequence
            further = torch.maximum(both[:, reach:], both[:, :-reach])
            both = torch.cat(
                [both[:, :reach], further.where(~apart[:, reach:], both[:, reach:])], 1
            )
            apart = torch.cat([apart[:, :reach], apart[:, reach:] | apart[:, :-reach]], 1)
            reach *= 2
        return both

    def advance(self, previous: Tensor) -> Tensor:
        """f(prev_l, x_l) for all l, (B, T, N, D)."""
        out = self._run("step", previous)
        return self._stack(out, previous)

    def linearise(self, previous: Tensor) -> tuple[Tensor, Tensor]:
        """f(prev_l, x_l) and d h_l / d h_{l-1}, zero at boundaries, for all l."""
        structure = self.program.structure
        assert structure is not None
        graphs = self.program.graphs[self.dtype]
        tensors = self._tensors(previous)
        new, jacobian = linearise(self.program.step, structure, graphs, tensors, self.by_hand)
        if structure.couples_channels:
            jacobian = jacobian.unflatten(0, previous.shape[:2])
        if self.fresh is not None:
            batch, steps, width = self.fresh.shape
            where = self.fresh.reshape(batch, steps, *[1] * (jacobian.ndim - 3), width)
            jacobian = jacobian.masked_fill(where, 0)
        return self._stack(new, previous), jacobian

    def pull_back(
        self, previous: Tensor, cotangent: Tensor, with_params: bool = True
    ) -> tuple[Tensor, tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Gradients of prev (B, T, N, D), of the inputs (B, T, D) and, if wanted, of the params,
        summed."""
        if self.padding is not None:
            cotangent = cotangent.masked_fill(self.padding.unsqueeze(2), 0)
        grads = self._run("vjp", previous, cotangent)
        states, size = self.program.num_states, self.inputs[0].shape
        rows = states + len(self.inputs)

        def at_steps(grad: object) -> Tensor:
            full = expand_entry(grad, cotangent, self._rows(size)).reshape(size)
            return full if self.padding is None else full.masked_fill(self.padding, 0)

        per_step = [at_steps(g) for g in grads[:rows]]
        summed = tuple(
            expand_entry(g, cotangent, tuple(p.shape))
            if self.program.couples_channels
            else at_steps(g).sum((0, 1))
            for g, p in zip(grads[rows:], self.params, strict=True)
            if with_params
        )
        return torch.stack(per_step[:states], 2), tuple(per_step[states:]), summed

    def at(self, step: int) -> System:
        """The system of one step alone; the state before it is not its own to know."""

        def cut(x: Tensor | None) -> Tensor | None:
            return None if x is None else x[:, step : step + 1]

        return replace(
            self,
            inputs=tuple(x[:, step : step + 1] for x in self.inputs),
            fresh=cut(self.fresh),
            start=cut(self.start),
            padding=cut(self.padding),
        )

    def columns(self, mask: Tensor) -> System:
        """The part of the system in the columns that `mask` names: see `take_columns`."""
        if self.program.couples_channels:
            params = self.params
        else:
            channel = mask.nonzero(as_tuple=True)[1]
            params = tuple(p[channel] for p in self.params)
        size = (*self.inputs[0].shape[:2], self.initial.shape[-1])

        def take(masks: Tensor | None) -> Tensor | None:
            if masks is None:
                return None
            full = masks if self.program.couples_channels else masks.expand(size)
            return take_columns(full, mask)

        return replace(
            self,
            inputs=tuple(take_columns(x, mask) for x in self.inputs),
            params=params,
            initial=take_columns(self.initial, mask),
            fresh=take(self.fresh),
            start=None if self.start is None else take_columns(self.start, mask),
            padding=take(self.padding),
        )

    def _rows(self, size: torch.Size) -> tuple[int, ...]:
        """Coupled programs run on rows (B*T, D), elementwise ones on any leading sizes."""
        if self.program.couples_channels:
            return (size[0] * size[1], size[2])
        return tuple(size)

    def _tensors(self, previous: Tensor) -> list[Tensor]:
        """The flat arguments of the program's graphs."""
        rows = self._rows(self.inputs[0].shape)
        states = [s.reshape(rows) for s in previous.unbind(2)]
        return [*states, *(x.reshape(rows) for x in self.inputs), *self.params]

    def _run(self, which: str, previous: Tensor, *cotangent: Tensor) -> tuple[object, ...]:
        graph = getattr(self.program.graphs[self.dtype], which)
        rows = self._rows(self.inputs[0].shape)
        pulled = [c.reshape(rows) for t in cotangent for c in t.unbind(2)]
        return graph(*self._tensors(previous), *pulled)

    def _stack(self, new: Sequence[object], like: Tensor) -> Tensor:
        size = self.inputs[0].shape
        rows = self._rows(size)
        states = torch.stack([expand_entry(s, like, rows).reshape(size) for s in new], 2)
        if self.padding is None:
            return states
        return states.masked_fill(self.padding.unsqueeze(2), 0)


def column_mask(per_entry: Tensor, couples_channels: bool) -> Tensor:
    """A mask (B, T, N, D) by columns, any of each: (B, D), or (B,) if channels are coupled.

    A column is what solves on its own: a channel of a batch row, or a whole row.
    """
    return per_entry.flatten(1).any(1) if couples_channels else per_entry.any(2).any(1)


def take_columns(whole: Tensor, mask: Tensor) -> Tensor:
    """The columns of `whole` (B, ..., D) in which `mask` holds.

    For a mask (B, D) they are the n channels of a single row, (1, ..., n); for (B,), the n rows.
    """
    if mask.ndim == 1:
        return whole[mask]
    batch, channel = mask.nonzero(as_tuple=True)
    return whole[batch, ..., channel].movedim(0, -1).unsqueeze(0).contiguous()


def put_columns(whole: Tensor, mask: Tensor, part: Tensor) -> Tensor:
    """`whole` (B, ..., D) with the columns of `mask` replaced by `part` (see `take_columns`)."""
    out = whole.clone()
    if mask.ndim == 1:
        out[mask] = part
    else:
        batch, channel = mask.nonzero(as_tuple=True)
        out[batch, ..., channel] = part.squeeze(0).movedim(-1, 0)
    return out
