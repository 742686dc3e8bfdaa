"""The loop over time of matrix cells, in plain differentiable PyTorch: exact, any such step."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pararnn.program.program import Program
from pararnn.solvers.boundaries import Boundaries
from pararnn.solvers.loop import Tensors, run_steps


@dataclass(frozen=True)
class HeadSystem:
    """One problem of a matrix cell in the order of processing and the compute dtype.

    gates: (B, T, H, W), bias added. params: with the memories, (S, H, ...) each for S sequences.
    initial: (S, H, ...) a state. zero: bool (B, T), steps that start from zero, resets and padding.
    at_padding: what padding starts from instead, (1, H, ...) a state, with boundaries: zero may not
    be in the step's domain, and 0 times its gradient is NaN there.
    """

    program: Program
    gates: Tensor
    params: Sequence[Tensor]
    initial: tuple[Tensor, ...]
    zero: Tensor | None = None
    boundaries: Boundaries | None = None
    at_padding: tuple[Tensor, ...] = ()


def unroll_heads(system: HeadSystem) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return the outputs (B, T, H, V), and the final states, as the initial ones (S, H, ...).

    Only the current state is kept, unless autograd saves others.
    """
    program, gates, initial = system.program, system.gates, system.initial
    boundaries, sizes = system.boundaries, program.step.head
    system_params, of_cell = [*system.params], len(program.params)
    step, count = program.step, len(initial)
    batch, length = gates.shape[:2]
    states = final = initial
    begins: Container[int] | None = ()
    ends: Container[int] | None = ()
    padded: Container[int] | None = ()
    series = [gates] if system.zero is None else [gates, system.zero]
    if boundaries is not None:
        states = tuple([h.new_zeros(batch, *h.shape[1:]) for h in initial])
        if initial[0].shape[0]:
            begins, ends = _steps_with(boundaries.begins), _steps_with(boundaries.last)
        padded = _steps_with(boundaries.padding)
        series += [boundaries.begins, boundaries.last, boundaries.seq]
        if not initial[0].shape[0]:  # all steps are padding, which reads no memory
            empty = [m.new_zeros(1, *m.shape[1:]) for m in system_params[of_cell:]]
            system_params[of_cell:] = empty

    def body(
        carry: Tensors, rows: Sequence[Tensor], params: Sequence[Tensor], t: int
    ) -> tuple[Tensors, Tensors]:
        states, final = carry[:count], carry[count:]
        gates, *zero = rows if boundaries is None else rows[:-3]
        if zero:
            states = tuple([select(zero[0], torch.zeros_like(s), s) for s in states])
        if boundaries is not None and (begins is None or t in begins):
            row = rows[-1].clamp(min=0).long()
            starts = [h[row] for h in params[len(params) - count :]]
            states = tuple([select(rows[-3], h, s) for h, s in zip(starts, states, strict=True)])
        if boundaries is not None and (padded is None or t in padded):
            pairs = zip(params[len(system_params) :], states, strict=False)
            states = tuple([select(rows[-1] < 0, h, s) for h, s in pairs])
        inputs = sizes.split(gates)
        params = params[: len(system_params)]
        if boundaries is not None and program.memory:
            row = rows[-1].clamp(min=0).long()
            params = (*params[:of_cell], *[memory[row] for memory in params[of_cell:]])
        states = step(states, inputs, params)
        output = step.output_of(states, inputs, params)
        if boundaries is not None and (ends is None or t in ends):
            row = torch.where(rows[-2], rows[-1], final[0].shape[0]).long()
            final = tuple([_put(h, row, s) for h, s in zip(final, states, strict=True)])
        return (*states, *final), (output,)

    carry = states if boundaries is None else (*states, *final)
    of_body = (*system_params, *system.at_padding, *initial)
    carry, outputs = run_steps(body, carry, series, of_body, length)
    # Steps may return their arguments, or one tensor twice.
    final = tuple([h.clone() for h in carry[-count:]])
    if not outputs:
        # Empty, but with a graph to all that entries would depend on.
        leaves = torch.stack([x.sum() for x in (gates, *system.params, *initial)]).sum()
        return leaves.expand(batch, 0, *sizes.output).clone(), final
    (output,) = outputs
    if boundaries is not None:
        output = output.masked_fill(boundaries.padding[..., None, None], 0)
    return output, final


def select(mask: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """Choose rows (B, ...) by a mask (B,)."""
    return torch.where(expand_mask(mask, old), new, old)


def expand_mask(mask: Tensor, like: Tensor) -> Tensor:
    """Return a mask (B, ...) with the dimensions of a tensor."""
    return mask.view(*mask.shape, *[1] * (like.ndim - mask.ndim))


def _put(final: Tensor, row: Tensor, states: Tensor) -> Tensor:
    """Return the final states with those of sequences `row` replaced; number S is no sequence."""
    padded = torch.cat([final, final.new_zeros(1, *final.shape[1:])])
    return padded.index_put((row,), states)[:-1]


def _steps_with(mask: Tensor) -> Container[int] | None:
    """Return the steps at which a mask (B, T) holds, None in compiled regions."""
    if torch.compiler.is_compiling():
        return None
    return {t for t, is_any in enumerate(mask.any(0).tolist()) if is_any}
