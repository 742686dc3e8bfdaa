"""A call over several ranks, pipelined: each rank solves from the end of the rank before.

Results are exact for any cell, without a guess, a comparison or a wait of the host. A rank runs its
next layer while the next rank solves this one. In a model of many layers a pass takes one solve
longer for each rank. A single layer gains nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pararnn.engines.arguments import Gradients, Options, Solution
from pararnn.engines.engine import BackwardInputs
from pararnn.program.program import Program
from pararnn.ranks.span import RankSpan
from pararnn.ranks.subcall import RowStates


def is_pipelined(program: Program, options: Options) -> bool:
    """Return whether ranks are pipelined: if nobody reads final states, for which the first ranks
    would have to wait, or if the cell's maps are too large to exchange."""
    return options.no_final or program.couples_channels


def forward(span: RankSpan) -> Solution:
    """Solve the recurrence; the states that this rank's rows continue from are stored."""
    ranks, border, reverse = span.ranks, span.border, span.reverse
    carry = span.first_carry()
    if border.position:
        carry = _split(ranks.receive(_join(carry), reverse), carry)
    subcall, solution = span.run(0, span.steps, carry)
    ends = subcall.ends(solution.final)
    ranks.send(_join(ends), reverse)
    final = tuple([h[: span.args.sequences].clone() for h in solution.final])
    if not span.args.options.no_final:
        at_last: RowStates = ()
        if border.continues is None:
            at_last = _split(ranks.gather(_join(ends), reverse)[-1], ends)
        final = span.final_of_all(subcall, solution.final, at_last)
    stored = [state.clone() for state in carry]
    return solution._replace(states=(*solution.states, *stored), final=final)


def backward(span: RankSpan, inputs: BackwardInputs) -> Gradients:
    """Return this rank's gradients; `states` as `forward` has returned them."""
    ranks, border, reverse = span.ranks, span.border, span.reverse
    count = span.program.num_outputs
    states, carry = inputs.states[:count], inputs.states[count:]
    of_final = span.grad_final(inputs.grad_final)
    if not span.args.options.no_final:
        of_final = _split(ranks.total(_join(of_final)), of_final)
    grad_end = zero = span.zeros()
    if border.position < ranks.size - 1:
        grad_end = _split(ranks.receive(_join(zero), not reverse), zero)
    elif border.continues is None:
        grad_end = of_final
    names = [*dict.fromkeys((*inputs.wanted, "initial"))]
    of_forward, arriving = (carry, states), (inputs.grad_states, of_final)
    result, of_carry = span.differentiate(of_forward, *arriving, span.steps, grad_end, names)
    ranks.send(_join(of_carry), not reverse)
    return span.finish_gradients(result, of_final)


def _join(rows: Sequence[Tensor]) -> Tensor:
    """Return states of any sizes as one message."""
    return torch.cat([state.flatten() for state in rows])


def _split(message: Tensor, like: Sequence[Tensor]) -> RowStates:
    """Return the states of a message, of sizes as `like`."""
    flat_states = message.split([state.numel() for state in like])
    return tuple([flat.view(state.shape) for flat, state in zip(flat_states, like, strict=True)])
