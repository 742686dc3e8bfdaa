"""The sequential solver: the recurrence itself, one step after the other. Exact, any cell."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pararnn.solvers.loop import Tensors, run_steps
from pararnn.solvers.system import System


def unroll(system: System) -> Tensor:
    """Return all states (B, T, N, D) by plain, differentiable PyTorch (paper, eq. rnn_seq)."""
    return torch.stack(unroll_states(system), 2)


def unroll_states(system: System) -> tuple[Tensor, ...]:
    """Return all states, (B, T, D) each, sharing no memory."""
    masks = [x for x in (system.fresh, system.start, system.padding) if x is not None]
    step, count, has_start = system.program.step, len(system.inputs), system.start is not None

    def body(
        states: Tensors, rows: Sequence[Tensor], params: Sequence[Tensor], t: int
    ) -> tuple[Tensors, Tensors]:
        inputs, masks = rows[:count], rows[count:]
        if has_start:
            fresh, start, *masks = masks
            states = tuple(
                torch.where(fresh, begin, s)
                for begin, s in zip(start.unbind(1), states, strict=True)
            )
        states = step(states, inputs, params)
        if masks:
            states = tuple(s.masked_fill(masks[0], 0) for s in states)
        return states, states

    series, initial = (*system.inputs, *masks), tuple(system.initial.unbind(1))
    _, states = run_steps(body, initial, series, system.params, system.length)
    if states:
        return states
    # Empty, but with a graph to everything that entries would depend on.
    leaves = torch.stack([x.sum() for x in (system.initial, *system.inputs, *system.params)])
    batch, num_states, channels = system.initial.shape
    return tuple([leaves.sum().expand(batch, 0, channels).clone() for _ in range(num_states)])
