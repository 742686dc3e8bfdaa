"""One problem in forward time: the recurrence, its inputs and its boundaries, in the compute dtype."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pararnn.program import Program, assemble_jacobian, expand_entry


@dataclass(frozen=True)
class System:
    """h_l = f(prev_l, x_l) for l = 0 .. T-1, with prev_l = h_{l-1} except at boundaries.

    inputs: gates (biases added) and fields, each (B, T, D). params: (D,) or as the cell shapes
    them. initial: the states before step 0, (B, N, D). fresh (B, T): steps that start from `start`
    (B, T, N, D) instead of h_{l-1}. padding (B, T): steps whose state is zero.
    """

    program: Program
    inputs: tuple[Tensor, ...]
    params: tuple[Tensor, ...]
    initial: Tensor
    fresh: Tensor | None = None
    start: Tensor | None = None
    padding: Tensor | None = None

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
        shifted = torch.cat([self.initial.unsqueeze(1), states[:, :-1]], 1)
        if self.fresh is None or self.start is None:
            return shifted
        return torch.where(self.fresh[..., None, None], self.start, shifted)

    def advance(self, previous: Tensor) -> Tensor:
        """f(prev_l, x_l) for all l, (B, T, N, D)."""
        out = self._run("step", previous)
        return self._stack(out, previous)

    def linearise(self, previous: Tensor) -> tuple[Tensor, Tensor]:
        """f(prev_l, x_l) and d h_l / d h_{l-1}, zero at boundaries, for all l."""
        structure = self.program.structure
        assert structure is not None
        out = self._run("jacobian", previous)
        size = (*previous.shape[:2], previous.shape[3])
        jacobian = assemble_jacobian(self.program.step, structure, out, size)
        cut = self._cut()
        if cut is not None:
            where = cut.reshape(*cut.shape, *[1] * (jacobian.ndim - 2))
            jacobian = jacobian.masked_fill(where, 0)
        return self._stack(out[: self.program.num_states], previous), jacobian

    def pull_back(
        self, previous: Tensor, cotangent: Tensor
    ) -> tuple[Tensor, tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Gradients of prev (B, T, N, D), of the inputs (B, T, D) and of the params, summed."""
        if self.padding is not None:
            cotangent = cotangent.masked_fill(self.padding[..., None, None], 0)
        grads = self._run("vjp", previous, cotangent)
        states, size = self.program.num_states, self.inputs[0].shape
        rows = states + len(self.inputs)
        per_step = [expand_entry(g, cotangent, self._rows(size)).reshape(size) for g in grads[:rows]]
        summed = tuple(
            expand_entry(g, cotangent, self._rows(size)).reshape(size).sum((0, 1))
            if not self.program.couples_channels
            else expand_entry(g, cotangent, tuple(p.shape))
            for g, p in zip(grads[rows:], self.params, strict=True)
        )
        return torch.stack(per_step[:states], 2), tuple(per_step[states:]), summed

    def columns(self, mask: Tensor) -> System:
        """The part of the system in which `mask` holds: see `split_columns`.

        Elementwise: mask (B, D), the result has one batch row a column and one channel.
        Coupled channels: mask (B,), the result has the rows that it names.
        """
        if self.program.couples_channels:
            return replace(
                self,
                inputs=tuple(x[mask] for x in self.inputs),
                initial=self.initial[mask],
                fresh=None if self.fresh is None else self.fresh[mask],
                start=None if self.start is None else self.start[mask],
                padding=None if self.padding is None else self.padding[mask],
            )
        batch, channel = mask.nonzero(as_tuple=True)
        return replace(
            self,
            inputs=tuple(x[batch, :, channel].unsqueeze(-1) for x in self.inputs),
            params=tuple(p[channel].unsqueeze(-1) for p in self.params),
            initial=self.initial[batch, :, channel].unsqueeze(-1),
            fresh=None if self.fresh is None else self.fresh[batch],
            start=None if self.start is None else self.start[batch, :, :, channel].unsqueeze(-1),
            padding=None if self.padding is None else self.padding[batch],
        )

    def _cut(self) -> Tensor | None:
        if self.fresh is None or self.padding is None:
            return self.fresh if self.padding is None else self.padding
        return self.fresh | self.padding

    def _rows(self, size: torch.Size) -> tuple[int, ...]:
        """Coupled programs run on rows (B*T, D), elementwise ones on any leading sizes."""
        if self.program.couples_channels:
            return (size[0] * size[1], size[2])
        return tuple(size)

    def _run(self, which: str, previous: Tensor, *cotangent: Tensor) -> tuple[object, ...]:
        graph = getattr(self.program.graphs[self.dtype], which)
        rows = self._rows(self.inputs[0].shape)
        states = [s.reshape(rows) for s in previous.unbind(2)]
        pulled = [c.reshape(rows) for t in cotangent for c in t.unbind(2)]
        return graph(*states, *(x.reshape(rows) for x in self.inputs), *self.params, *pulled)

    def _stack(self, new: tuple[object, ...], like: Tensor) -> Tensor:
        size = self.inputs[0].shape
        rows = self._rows(size)
        states = torch.stack([expand_entry(s, like, rows).reshape(size) for s in new], 2)
        if self.padding is None:
            return states
        return states.masked_fill(self.padding[..., None, None], 0)


def column_mask(per_entry: Tensor, couples_channels: bool) -> Tensor:
    """Reduce a mask (B, T, N, D) to columns, by `any`: (B, D), or (B,) where channels are coupled."""
    return per_entry.flatten(1).any(1) if couples_channels else per_entry.any(2).any(1)


def put_columns(whole: Tensor, mask: Tensor, part: Tensor) -> Tensor:
    """`whole` (B, T, N, D) with the columns of `mask` replaced by a `System.columns` result."""
    out = whole.clone()
    if mask.ndim == 1:
        out[mask] = part
    else:
        batch, channel = mask.nonzero(as_tuple=True)
        out[batch, :, :, channel] = part.squeeze(-1)
    return out
