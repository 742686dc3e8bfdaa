"""The loop over time of matrix cells, in plain differentiable PyTorch: exact, any such step."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pararnn.program.program import Program
from pararnn.solvers.loop import Tensors, run_steps


@dataclass(frozen=True)
class Marks:
    """Ends of sequences in the order of processing; seq (B, T) holds their numbers.

    begins, last, padding: bool (B, T); the first step of a sequence, unless it starts from zero,
    the last step of one, and steps of none.
    """

    seq: Tensor
    begins: Tensor
    last: Tensor
    padding: Tensor


@dataclass(frozen=True)
class HeadSystem:
    """One problem of a matrix cell in the order of processing and the compute dtype.

    gates: (B, T, H, W), bias added. initial: (S, H, ...) a state. zero: bool (B, T), steps that
    start from zero, resets and padding.
    """

    program: Program
    gates: Tensor
    params: Sequence[Tensor]
    initial: tuple[Tensor, ...]
    zero: Tensor | None = None
    marks: Marks | None = None


def unroll_heads(system: HeadSystem) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return the outputs (B, T, H, V), and the final states, as the initial ones (S, H, ...).

    No state but the running one is kept, unless autograd keeps it.
    """
    program, gates, initial, marks = system.program, system.gates, system.initial, system.marks
    sizes, step, count = program.head_sizes, program.step, len(initial)
    assert sizes is not None
    batch, length = gates.shape[:2]
    states = final = initial
    begins: Container[int] | None = ()
    ends: Container[int] | None = ()
    series = [gates] if system.zero is None else [gates, system.zero]
    if marks is not None:
        states = tuple([h.new_zeros(batch, *h.shape[1:]) for h in initial])
        if initial[0].shape[0]:
            begins, ends = _steps_with(marks.begins), _steps_with(marks.last)
        series += [marks.begins, marks.last, marks.seq]

    def body(
        carry: Tensors, rows: Sequence[Tensor], params: Sequence[Tensor], t: int
    ) -> tuple[Tensors, Tensors]:
        states, final = carry[:count], carry[count:]
        gates, *zero = rows if marks is None else rows[:-3]
        if zero:
            states = tuple([_where(zero[0], torch.zeros_like(s), s) for s in states])
        if marks is not None and (begins is None or t in begins):
            row = rows[-1].clamp(min=0).long()
            starts = [h[row] for h in params[len(params) - count :]]
            states = tuple([_where(rows[-3], h, s) for h, s in zip(starts, states, strict=True)])
        inputs = sizes.split(gates)
        params = params[: len(system.params)]
        states = step(states, inputs, params)
        output = states[0]
        if step.has_readout:
            output = step.call("readout", states, inputs, params)
        if marks is not None and (ends is None or t in ends):
            row = torch.where(rows[-2], rows[-1], final[0].shape[0]).long()
            final = tuple([_put(h, row, s) for h, s in zip(final, states, strict=True)])
        return (*states, *final), (output,)

    carry = states if marks is None else (*states, *final)
    carry, outputs = run_steps(body, carry, series, (*system.params, *initial), length)
    # Steps may give their arguments back, or one tensor twice.
    final = tuple([h.clone() for h in carry[-count:]])
    if not outputs:
        # Empty, but with a graph to all that entries would depend on.
        leaves = torch.stack([x.sum() for x in (gates, *system.params, *initial)]).sum()
        return leaves.expand(batch, 0, *sizes.output).clone(), final
    (output,) = outputs
    if marks is not None:
        output = output.masked_fill(marks.padding[..., None, None], 0)
    return output, final


def _where(mask: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """Choose rows (B, ...) by a mask (B,)."""
    return torch.where(expand_mask(mask, old), new, old)


def expand_mask(mask: Tensor, like: Tensor) -> Tensor:
    """Return a mask (B, ...) with the dimensions of a tensor."""
    return mask.view(*mask.shape, *[1] * (like.ndim - mask.ndim))


def _put(final: Tensor, row: Tensor, states: Tensor) -> Tensor:
    """Return the final states with those of some rows; a row number S is none."""
    room = torch.cat([final, final.new_zeros(1, *final.shape[1:])])
    return room.index_put((row,), states)[:-1]


def _steps_with(mask: Tensor) -> Container[int] | None:
    """Return the steps at which a mask (B, T) holds; None where nobody may look."""
    if torch.compiler.is_compiling():
        return None
    return {t for t, some in enumerate(mask.any(0).tolist()) if some}
