"""A rank's span of a call: its first states, its gradients, and what all ranks combine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from pararnn.base.errors import EngineError
from pararnn.engines.arguments import Arguments, Gradients
from pararnn.engines.engine import Arriving, Engine
from pararnn.engines.table import find as find_engine
from pararnn.messages.group import Ranks
from pararnn.program.program import Program
from pararnn.ranks.subcall import Border, Rows, Subcall, slice_time, step_of


def local_call(program: Program, args: Arguments) -> Arguments:
    """Return the call on this rank's steps only, with states in the compute dtype.

    Raises ValueError for one without a step.
    """
    if not args.gates.shape[1]:
        raise ValueError(
            "each rank needs a step of the sequence at least, got none: spans are those of "
            "pararnn.context_span"
        )
    args = args.with_options(context="").complete(program)
    return replace(args, initial=tuple([h.to(args.dtype) for h in args.initial]))


def engine_of_backward(program: Program, engine: Engine, args: Arguments) -> Engine:
    """Return the engine that differentiates a span: `engine`, or Newton's if autograd
    differentiates `engine`, as autograd does not see other ranks.

    Raises EngineError for a cell that Newton's engine cannot run.
    """
    if engine.has_backward:
        return engine
    newton = find_engine("newton", "torch", args.gates.device)
    assert newton is not None
    reason = newton.why_not(program)
    if reason is not None:
        raise EngineError(
            f"({engine.solver}, {engine.backend}) has no backward pass, which ranks "
            f"that share a sequence need: {reason}. Take backend='fused'"
        )
    return newton


def first_carry(args: Arguments, border: Border) -> Rows:
    """Return the states that the first rank's rows continue from: the initial states, or zeros
    where rows hold several sequences."""
    if border.continues is None:
        return args.initial
    batch = args.gates.shape[0]
    return tuple([h.new_zeros((batch, *h.shape[1:])) for h in args.initial])


def differentiate_span(
    program: Program,
    engine: Engine,
    args: Arguments,
    border: Border,
    of_forward: tuple[Rows, tuple[Tensor, ...]],
    grad_states: Arriving,
    of_final: Rows | None,
    stop: int,
    grad_end: Rows,
    names: Sequence[str],
) -> tuple[Gradients, Rows]:
    """Return the gradients of a span's steps before `stop`, and of the states it continues from.

    of_forward: the states it continues from, and the span's states. of_final: gradients of the
    final states of sequences, where rows are not sequences. grad_end: those of the states at the
    end of rows.
    """
    (carry, states), reverse, steps = of_forward, args.options.reverse, args.size[1]
    subcall = Subcall.of(args, 0, stop, carry, border.at_first())
    continues_next = border.at_last()
    if stop < steps and continues_next is not None:
        assert args.seq is not None
        continues_next = step_of(args.seq, stop, reverse) == step_of(args.seq, stop - 1, reverse)
    cotangent = subcall.cotangent(grad_end, of_final, continues_next)
    local_states = tuple(slice_time(state, 0, stop, reverse) for state in states)
    grads = tuple(
        None if grad is None else slice_time(grad, 0, stop, reverse) for grad in grad_states
    )
    result = engine.backward(program, subcall.args, local_states, grads, cotangent, names)
    return result, subcall.of_carry(result.initial)


def final_of_all(
    ranks: Ranks,
    args: Arguments,
    border: Border,
    subcall: Subcall,
    final: Sequence[Tensor],
    at_last: Rows,
) -> Rows:
    """Return the final states of all sequences. at_last: of the last rank's rows."""
    if border.continues is None:
        return tuple([state.clone() for state in at_last])
    assert subcall.seq is not None
    assert subcall.args.seq is not None
    here = subcall.ends_here(border.at_last())
    numbers, source = subcall.seq[here].long(), subcall.args.seq[here].long()
    has_step = _flags(ranks, args, numbers)
    out = []
    for state, initial in zip(final, args.initial, strict=True):
        total = torch.zeros_like(initial)
        total[numbers] = state[source]
        out.append(torch.where(_of_size(has_step, initial), ranks.total(total), initial))
    return tuple(out)


def finish_gradients(
    ranks: Ranks,
    call: Arguments,
    args: Arguments,
    border: Border,
    result: Gradients,
    of_final: Rows,
) -> Gradients:
    """Return a span's gradients in its call's dtypes, with those of the call's initial states."""
    params = tuple(g.to(p.dtype) for g, p in zip(result.params, call.params, strict=True))
    initial: Rows = ()
    if call.initial:
        initial = _grad_initial(ranks, args, border, result.initial, of_final)
        initial = tuple(g.to(h.dtype) for g, h in zip(initial, call.initial, strict=True))
    return result._replace(params=params, initial=initial)


def _flags(ranks: Ranks, args: Arguments, numbers: Tensor) -> Tensor:
    """Return the sequences, bool (S,), that any rank has among its numbers."""
    flags = torch.zeros(args.sequences, dtype=args.dtype, device=args.gates.device)
    flags[numbers] = 1
    return ranks.total(flags) > 0


def _of_size(flags: Tensor, like: Tensor) -> Tensor:
    """Return flags (S,) with the dimensions of states (S, ...)."""
    return flags.view(-1, *[1] * (like.ndim - 1))


def _grad_initial(
    ranks: Ranks, args: Arguments, border: Border, grads: Rows, of_final: Rows
) -> Rows:
    """Return this rank's summand of the gradients of initial states."""
    if border.continues is None:
        return tuple([g.clone() if border.position == 0 else torch.zeros_like(g) for g in grads])
    assert args.seq is not None
    has_step = _flags(ranks, args, args.seq[args.seq >= 0].long())
    out = []
    for grad, final in zip(grads, of_final, strict=True):
        local_grad = grad[: args.sequences].clone()
        of_absent = final.masked_fill(_of_size(has_step, final), 0)
        out.append(local_grad + of_absent if border.position == 0 else local_grad)
    return tuple(out)
