"""A call over several ranks, pipelined: each rank solves from the end of the rank before.

Results are exact for any cell, without a guess, a comparison or a wait of the host. A rank runs its
next layer while the next rank solves this one. In a model of many layers a pass takes one solve
longer for each rank. A single layer gains nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pararnn.engines.arguments import Arguments, Gradients, Options, Solution
from pararnn.engines.engine import Arriving, Engine
from pararnn.messages.group import Ranks, find
from pararnn.program.program import ELEMENTWISE, Program
from pararnn.ranks.span import (
    differentiate_span,
    engine_of_backward,
    final_of_all,
    finish_gradients,
    first_carry,
    local_call,
)
from pararnn.ranks.subcall import Border, Rows, Subcall


def is_pipelined(program: Program, options: Options) -> bool:
    """Return whether ranks are pipelined: if nobody reads final states, for which the first ranks
    would have to wait, or if the cell's maps are too large to exchange."""
    return bool(options.context) and (options.no_final or not is_elementwise(program))


def count_carried(program: Program, args: Arguments) -> int:
    """Return the number of states that `forward` returns next to a solution; 0 if not pipelined."""
    return len(program.state_sizes(args.channels)) if is_pipelined(program, args.options) else 0


def like_carried(program: Program, args: Arguments) -> Rows:
    """Allocate the states that `forward` returns next to a solution."""
    batch, sizes = args.gates.shape[0], program.state_sizes(args.channels)
    count = count_carried(program, args)
    return tuple([args.gates.new_empty((batch, *s), dtype=args.dtype) for s in sizes[:count]])


def is_elementwise(program: Program) -> bool:
    """Return whether a span's map has one number a state and channel."""
    return program.family == ELEMENTWISE and program.structure is not None


def forward(program: Program, engine: Engine, args: Arguments) -> tuple[Solution, Rows]:
    """Solve the recurrence; return also the states that this rank's rows continue from."""
    ranks, args = find(args.options.context), local_call(program, args)
    border, reverse = Border.of(ranks, args), args.options.reverse
    carry = first_carry(args, border)
    if border.position:
        carry = _split(ranks.receive(_join(carry), reverse), carry)
    subcall = Subcall.of(args, 0, args.size[1], carry, border.at_first())
    solution = engine.forward(program, subcall.args)
    ends = subcall.ends(solution.final)
    ranks.send(_join(ends), reverse)
    final = tuple([h[: args.sequences].clone() for h in solution.final])
    if not args.options.no_final:
        at_last = _from_last(ranks, ends, reverse) if border.continues is None else ()
        final = final_of_all(ranks, args, border, subcall, solution.final, at_last)
    return solution._replace(final=final), tuple([state.clone() for state in carry])


def backward(
    program: Program,
    engine: Engine,
    args: Arguments,
    states: tuple[Tensor, ...],
    carry: Rows,
    grad_states: Arriving,
    grad_final: Arriving,
    wanted: Sequence[str],
) -> Gradients:
    """Return this rank's gradients, see `ranks.solve.backward`. carry: as `forward` returned it."""
    engine, call = engine_of_backward(program, engine, args), args
    ranks, args = find(args.options.context), local_call(program, args)
    border, reverse = Border.of(ranks, args), args.options.reverse
    zero = tuple([torch.zeros_like(h) for h in carry])
    of_final = tuple(
        torch.zeros_like(h) if grad is None else grad.to(args.dtype)
        for h, grad in zip(args.initial, grad_final, strict=True)
    )
    if not args.options.no_final:
        of_final = _split(ranks.total(_join(of_final)), of_final)
    grad_end = zero
    if border.position < ranks.size - 1:
        grad_end = _split(ranks.receive(_join(zero), not reverse), zero)
    elif border.continues is None:
        grad_end = of_final
    names = [*dict.fromkeys((*wanted, "initial"))]
    result, of_carry = differentiate_span(
        program,
        engine,
        args,
        border,
        (carry, states),
        grad_states,
        None if border.continues is None else of_final,
        args.size[1],
        grad_end,
        names,
    )
    ranks.send(_join(of_carry), not reverse)
    return finish_gradients(ranks, call, args, border, result, of_final)


def _join(rows: Sequence[Tensor]) -> Tensor:
    """Return states of any sizes as one message."""
    return torch.cat([state.flatten() for state in rows])


def _split(message: Tensor, like: Sequence[Tensor]) -> Rows:
    """Return the states of a message, of sizes as `like`."""
    flat_states = message.split([state.numel() for state in like])
    return tuple([flat.view(state.shape) for flat, state in zip(flat_states, like, strict=True)])


def _from_last(ranks: Ranks, ends: Rows, reverse: bool) -> Rows:
    """Return the ends of the last rank in the order of processing, on every rank."""
    return _split(ranks.gather(_join(ends), reverse)[-1], ends)
