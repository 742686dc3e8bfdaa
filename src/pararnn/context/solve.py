"""A call over several ranks, forward and backward, by an engine that runs each rank's span.

Each span starts from a guess: what the last inputs of the rank before lead to from zero. Ends are
compared with the starts of the ranks behind, and spans whose start was off run again, from Newton's
update over ranks. Backward, the adjoint does the same from the last rank to the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from pararnn.context.group import Ranks, find
from pararnn.context.piece import Border, Piece, Rows, slice_time, step_of
from pararnn.context.sweeps import is_settled, next_starts, pull_back, push_forward
from pararnn.engines.arguments import Arguments, Gradients, Solution
from pararnn.engines.engine import Arriving, Engine
from pararnn.engines.table import find as find_engine
from pararnn.numerics import FORWARD_TOLERANCE
from pararnn.program.program import Program
from pararnn.solvers.newton import DEFECT_ULPS, ERROR_SHARE

BURN_IN = 256
"""Steps of the first guess. Within a rank a burn-in competes with its segment, here it does not."""
CHUNK = 1 << 14
"""Steps of which a map is made at once: it takes as much memory as their gates."""


def forward(program: Program, engine: Engine, args: Arguments) -> Solution:
    """Solve the recurrence over all ranks; every rank gets all final states."""
    ranks, args = find(args.options.context), _own_part(program, args)
    border, reverse = Border.of(ranks, args), args.options.reverse
    position, last = border.position, ranks.size - 1
    first = _first_carry(args, border)
    message = ranks.gather(torch.stack(_guess(program, engine, args, border, first)), reverse)
    guesses, sizes = message.unbind(1)
    starts = torch.cat([torch.stack(first)[None], guesses[:-1]])
    continuing = _continuing(border, guesses)
    solution: Solution | None = None
    for sweep in range(ranks.size):
        piece = Piece.of(args, 0, args.size[1], tuple(starts[position]), border.at_first())
        if solution is None or position:
            solution = None  # before the next one is made
            solution = engine.forward(program, piece.args)
        ends = ranks.gather(torch.stack(piece.ends(solution.final)), reverse)
        tolerance = DEFECT_ULPS * torch.finfo(args.dtype).eps
        agree = is_settled(starts[1:], ends[:-1], sizes[:-1], tolerance) | ~continuing
        if sweep == last or bool(agree.all()):
            break
        own = _maps(program, engine, args, border, tuple(starts[position]), solution.states)
        maps = None if own is None else ranks.gather(own, reverse)
        starts = next_starts(starts, ends, maps, push_forward)
    assert solution is not None
    final = _final(ranks, args, border, piece, solution.final, ends)
    return solution._replace(final=tuple([state.clone() for state in final]))


def backward(
    program: Program,
    engine: Engine,
    args: Arguments,
    states: tuple[Tensor, ...],
    grad_states: Arriving,
    grad_final: Arriving,
    wanted: Sequence[str],
) -> Gradients:
    """Return this rank's part of the gradients: those of parameters and initial states are sums
    over ranks."""
    if not engine.has_backward:  # autograd differentiates it, but not across ranks
        engine = _newton(args.gates.device)
    ranks, call = find(args.options.context), args
    args = _own_part(program, args)
    border, reverse = Border.of(ranks, args), args.options.reverse
    position, last, steps = border.position, ranks.size - 1, args.size[1]
    arriving = tuple(
        torch.zeros_like(h) if grad is None else grad.to(args.dtype)
        for h, grad in zip(args.initial, grad_final, strict=True)
    )
    ends = torch.stack([step_of(state, -1, reverse).to(args.dtype) for state in states])
    if border.continues is None:  # gradients of final states are as large as ends: one message
        message = ranks.gather(torch.stack([ends, torch.stack(arriving)]), reverse)
        states_before, of_final = message[position - 1, 0], message[:, 1].sum(0)
    else:
        states_before = ranks.gather(ends, reverse)[position - 1]
        of_final = ranks.total(torch.stack(arriving))
    carry = tuple(states_before) if position else _first_carry(args, border)
    zero = torch.zeros_like(ends)
    at_end = of_final if border.continues is None else zero
    finals = None if border.continues is None else tuple(of_final)

    def differentiate(stop: int, grad_end: Tensor, names: Sequence[str]) -> tuple[Gradients, Rows]:
        piece = Piece.of(args, 0, stop, carry, border.at_first())
        goes_on = border.at_last()
        if stop < steps and goes_on is not None:
            assert args.seq is not None
            goes_on = step_of(args.seq, stop, reverse) == step_of(args.seq, stop - 1, reverse)
        cotangent = piece.cotangent(tuple(grad_end), finals, goes_on)
        parts = tuple(slice_time(state, 0, stop, reverse) for state in states)
        grads = tuple(
            None if grad is None else slice_time(grad, 0, stop, reverse) for grad in grad_states
        )
        result = engine.backward(program, piece.args, parts, grads, cotangent, names)
        return result, piece.of_carry(result.initial)

    burn_in = _burn_in(args)
    guess = torch.stack(
        differentiate(burn_in, at_end if position == last and burn_in == steps else zero, LEAST)[1]
    )
    sizes = [
        torch.zeros_like(h)
        if grad is None
        else slice_time(grad, 0, burn_in, reverse).abs().amax(1).to(h.dtype)
        for h, grad in zip(zero, grad_states, strict=True)
    ]
    guesses, scales = ranks.gather(torch.stack([guess, torch.stack(sizes)]), reverse).unbind(1)
    # From the last rank to the first, as the adjoint runs.
    starts = torch.cat([at_end[None], guesses[1:].flip(0)])
    scales, continuing = scales.flip(0), _continuing(border, guesses).flip(0)
    names = [*dict.fromkeys((*wanted, *LEAST))]
    result: Gradients | None = None
    for sweep in range(ranks.size):
        if result is None or position != last:
            result = None  # before the next one is made
            result, carry_grads = differentiate(steps, starts[last - position], names)
        ends = ranks.gather(torch.stack(carry_grads), reverse).flip(0)
        tolerance = ERROR_SHARE * FORWARD_TOLERANCE[args.dtype]
        agree = is_settled(starts[1:], ends[:-1], scales[:-1], tolerance) | ~continuing
        if sweep == last or bool(agree.all()):
            break
        own = _maps(program, engine, args, border, carry, states)
        maps = None if own is None else ranks.gather(own, reverse).flip(0)
        starts = next_starts(starts, ends, maps, pull_back)
    assert result is not None
    params = tuple(g.to(p.dtype) for g, p in zip(result.params, call.params, strict=True))
    initial: tuple[Tensor, ...] = ()
    if call.initial:
        initial = _grad_initial(ranks, args, border, result.initial, of_final)
        initial = tuple(g.to(h.dtype) for g, h in zip(initial, call.initial, strict=True))
    return result._replace(params=params, initial=initial)


LEAST = ("initial",)
"""Gradients that ranks exchange."""


def _newton(device: torch.device) -> Engine:
    engine = find_engine("newton", "torch", device)
    assert engine is not None
    return engine


def _own_part(program: Program, args: Arguments) -> Arguments:
    """Return the call of this rank alone, its states in the compute dtype.

    Raises ValueError for one without a step.
    """
    if not args.gates.shape[1]:
        raise ValueError(
            "each rank needs a step of the sequence at least, got none: spans are those of "
            "pararnn.context_span"
        )
    args = args.with_options(context="").complete(program)
    return replace(args, initial=tuple([h.to(args.dtype) for h in args.initial]))


def _burn_in(args: Arguments) -> int:
    """Return the steps of the first guess: those requested, or the usual number."""
    request = args.options.burn_in
    return max(1, min(BURN_IN if request is None else request, args.gates.shape[1]))


def _first_carry(args: Arguments, border: Border) -> Rows:
    """Return the states that the first rank's rows go on from: its initial ones, as rows go on from
    nothing where sequences begin."""
    if border.continues is None:
        return args.initial
    batch = args.gates.shape[0]
    return tuple([h.new_zeros((batch, *h.shape[1:])) for h in args.initial])


def _continuing(border: Border, like: Tensor) -> Tensor:
    """Return where the ranks behind the first one go on, bool (ranks - 1, 1, B, 1)."""
    if border.continues is None:
        return torch.ones((1, 1, 1, 1), dtype=torch.bool, device=like.device)
    return border.continues[1:, None, :, None]


def _guess(
    program: Program, engine: Engine, args: Arguments, border: Border, first: Rows
) -> tuple[Tensor, Tensor]:
    """Return where this rank's last steps lead from zero, (N, B, D), and the largest states on the
    way, to which tolerances are relative."""
    steps, burn_in, reverse = args.gates.shape[1], _burn_in(args), args.options.reverse
    carry = first
    if border.position or burn_in < steps:
        batch = args.gates.shape[0]
        carry = tuple([h.new_zeros((batch, *h.shape[1:])) for h in args.initial])
    piece = Piece.of(args, steps - burn_in, steps, carry, border.at_first())
    solution = engine.forward(program, piece.args)
    passing = torch.ones((1, burn_in), dtype=torch.bool, device=args.gates.device)
    if piece.args.seq is not None:
        passing = piece.args.seq == step_of(piece.args.seq, -1, reverse).unsqueeze(1)
    if piece.args.reset is not None:
        reset = piece.args.reset if not reverse else piece.args.reset.flip(1)
        number = reset.long().cumsum(1)
        since = number == number[:, -1:]
        passing = passing & (since.flip(1) if reverse else since)
    sizes = [
        state.abs().nan_to_num(0, 0).masked_fill(~passing.unsqueeze(-1), 0).amax(1).to(args.dtype)
        for state in solution.states
    ]
    return torch.stack(piece.ends(solution.final)), torch.stack(sizes)


def _maps(
    program: Program,
    engine: Engine,
    args: Arguments,
    border: Border,
    carry: Rows,
    states: Sequence[Tensor],
) -> Tensor | None:
    """Return the derivative of this rank's ends by the states that it goes on from; None for two
    ranks, which need none. It is made by pulling back ones, some steps at a time."""
    if border.size == 2:
        return None
    if not engine.has_backward:
        engine = _newton(args.gates.device)
    steps, reverse = args.gates.shape[1], args.options.reverse
    count, none = len(states), (None,) * len(states)
    rows = []
    for n in range(count):
        adjoint = tuple([torch.full_like(h, float(m == n)) for m, h in enumerate(carry)])
        for start in reversed(range(0, steps, CHUNK)):
            stop = min(start + CHUNK, steps)
            first = carry
            if start:
                first = tuple([step_of(s, start - 1, reverse).to(args.dtype) for s in states])
            piece = Piece.of(args, start, stop, first, border.at_first())
            parts = tuple(slice_time(state, start, stop, reverse) for state in states)
            cotangent = piece.cotangent(adjoint)
            result = engine.backward(program, piece.args, parts, none, cotangent, LEAST)
            adjoint = piece.of_carry(result.initial)
        rows.append(torch.stack(adjoint))
    return torch.stack(rows)


def _final(
    ranks: Ranks,
    args: Arguments,
    border: Border,
    piece: Piece,
    final: Sequence[Tensor],
    ends: Tensor,
) -> Rows:
    """Return the final states of all sequences. ends: of all ranks' rows."""
    if border.continues is None:
        return tuple(ends[-1])
    assert piece.seq is not None
    assert piece.args.seq is not None
    here = piece.ends_here(border.at_last())
    numbers, source = piece.seq[here].long(), piece.args.seq[here].long()
    has_step = _flags(ranks, args.initial[0], numbers)
    out = []
    for own, initial in zip(final, args.initial, strict=True):
        total = torch.zeros_like(initial)
        total[numbers] = own[source]
        out.append(torch.where(has_step, ranks.total(total), initial))
    return tuple(out)


def _flags(ranks: Ranks, like: Tensor, numbers: Tensor) -> Tensor:
    """Return the sequences (S, 1) that any rank has among its numbers."""
    own = like.new_zeros((like.shape[0], *[1] * (like.ndim - 1)))
    own[numbers] = 1
    return ranks.total(own) > 0


def _grad_initial(
    ranks: Ranks, args: Arguments, border: Border, grads: Rows, of_final: Tensor
) -> Rows:
    """Return this rank's part of the gradients of initial states."""
    if border.continues is None:
        return tuple([g.clone() if border.position == 0 else torch.zeros_like(g) for g in grads])
    assert args.seq is not None
    has_step = _flags(ranks, args.initial[0], args.seq[args.seq >= 0].long())
    out = []
    for grad, final in zip(grads, of_final, strict=True):
        own = grad[: args.sequences].clone()
        out.append(own + final.masked_fill(has_step, 0) if border.position == 0 else own)
    return tuple(out)
