"""A call over several ranks, forward and backward, by an engine that runs each rank's span.

Each span starts from a guess: the state that the last inputs of the rank before lead to from zero.
Each end is compared with the next rank's start. A span whose start was off runs again, from
Newton's update over ranks. Backward, the adjoint does the same from the last rank to the first.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pararnn.base.numerics import FORWARD_TOLERANCE
from pararnn.codegen.emit import jumps
from pararnn.engines.arguments import Arguments, Gradients, Solution
from pararnn.engines.engine import Arriving
from pararnn.ranks.span import Span
from pararnn.ranks.subcall import Border, Rows, Subcall, slice_time, step_of
from pararnn.ranks.sweeps import is_settled, next_starts, pull_back, push_forward
from pararnn.solvers.newton import ERROR_SHARE, FIRST_STEP, GAP_ULPS

BURN_IN = 256
"""Steps of the first guess."""
CHUNK = 1 << 14
"""Steps of which a map is made at once: it takes as much memory as their gates."""


def forward(span: Span) -> Solution:
    """Solve the recurrence over all ranks; every rank gets all final states."""
    ranks, reverse = span.ranks, span.reverse
    position, last = span.border.position, ranks.size - 1
    first = span.first_carry()
    guesses = ranks.gather(_guess(span, first), reverse)
    starts = torch.cat([torch.stack(first)[None], guesses[:-1]])
    solution: Solution | None = None
    for sweep in range(ranks.size):
        if solution is None or position:
            solution = None  # before the next one is made
            subcall, solution = span.run(0, span.steps, tuple(starts[position]))
        local_ends = torch.stack(subcall.ends(solution.final))
        message = torch.stack([local_ends, _largest_states(subcall, solution.states)])
        ends, sizes = ranks.gather(message, reverse).unbind(1)
        if sweep == last or _agree(span, starts, ends, sizes):
            break
        local_map = _maps(span, tuple(starts[position]), solution.states)
        maps = None if local_map is None else ranks.gather(local_map, reverse)
        starts = next_starts(starts, ends, maps, push_forward)
    assert solution is not None
    final = span.final_of_all(subcall, solution.final, tuple(ends[-1]))
    return solution._replace(final=final)


def backward(
    span: Span,
    states: tuple[Tensor, ...],
    grad_states: Arriving,
    grad_final: Arriving,
    wanted: Sequence[str],
) -> Gradients:
    """Return this rank's gradients. Those of parameters and initial states are to be summed over
    ranks."""
    ranks, border, reverse, args = span.ranks, span.border, span.reverse, span.args
    position, last, steps = border.position, ranks.size - 1, span.steps
    arriving = torch.stack(span.grad_final(grad_final))
    ends = torch.stack([step_of(state, -1, reverse).to(args.dtype) for state in states])
    if border.continues is None:  # gradients of final states are as large as ends: one message
        message = ranks.gather(torch.stack([ends, arriving]), reverse)
        states_before, of_final = message[position - 1, 0], message[:, 1].sum(0)
    else:
        states_before = ranks.gather(ends, reverse)[position - 1]
        of_final = ranks.total(arriving)
    carry = tuple(states_before) if position else span.first_carry()
    zero = torch.zeros_like(ends)
    at_end = of_final if border.continues is None else zero

    def differentiate(stop: int, grad_end: Tensor, names: Sequence[str]) -> tuple[Gradients, Rows]:
        of_forward, finals = (carry, states), tuple(of_final)
        return span.differentiate(of_forward, grad_states, finals, stop, tuple(grad_end), names)

    burn_in = _burn_in(args)
    guess = torch.stack(
        differentiate(burn_in, at_end if position == last and burn_in == steps else zero, LEAST)[1]
    )
    sizes = [
        torch.zeros_like(h)
        if grad is None
        else slice_time(grad, 0, burn_in, reverse).abs().nan_to_num(0, 0).amax(1).to(h.dtype)
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
        local_map = _maps(span, carry, states)
        maps = None if local_map is None else ranks.gather(local_map, reverse).flip(0)
        starts = next_starts(starts, ends, maps, pull_back)
    assert result is not None
    return span.finish_gradients(result, tuple(of_final))


LEAST = ("initial",)
"""Gradients that ranks exchange."""


def _burn_in(args: Arguments) -> int:
    """Return the steps of the first guess: those requested, or the usual number."""
    request = args.options.burn_in
    return max(1, min(BURN_IN if request is None else request, args.gates.shape[1]))


def _continuing(border: Border, like: Tensor) -> Tensor:
    """Return where rows of the ranks after the first continue, bool (ranks - 1, 1, B, 1)."""
    if border.continues is None:
        return torch.ones((1, 1, 1, 1), dtype=torch.bool, device=like.device)
    return border.continues[1:, None, :, None]


def _guess(span: Span, first: Rows) -> Tensor:
    """Return the states (N, B, D) that this rank's last steps lead to from zero."""
    steps, burn_in = span.steps, _burn_in(span.args)
    carry = span.zeros() if span.border.position or burn_in < steps else first
    return span.ends(steps - burn_in, steps, carry)


def _agree(span: Span, starts: Tensor, ends: Tensor, sizes: Tensor) -> bool:
    """Return whether each rank has started from the end of the one before, and its first step
    agrees.

    Both hold to rounding, or bit for bit where a step jumps.
    """
    args, program, border = span.args, span.program, span.border
    exact = args.signature.cache((jumps, program), jumps, program, args.dtype)
    tolerance = 0.0 if exact else GAP_ULPS * torch.finfo(args.dtype).eps
    gaps, begins = (starts[1:], ends[:-1], sizes[:-1]), ~_continuing(border, starts)
    if not bool((is_settled(*gaps, tolerance) | begins).all()):
        return False
    if bool((is_settled(*gaps, 0.0) | begins).all()):
        return True
    before = max(0, border.position - 1)
    start, wanted = starts[border.position], ends[before] if border.position else starts[0]
    steps = span.ends(0, 1, tuple(start)), span.ends(0, 1, tuple(wanted))
    fits = is_settled(*steps, sizes[before], FIRST_STEP * tolerance).all()
    return not bool(span.ranks.total((~fits).to(args.dtype)))


def _largest_states(subcall: Subcall, states: Sequence[Tensor]) -> Tensor:
    """Return the largest states of a span's last steps, (N, B, D), to which tolerances are
    relative: those of the sequence that continues on the next rank."""
    args, burn_in, reverse = subcall.args, _burn_in(subcall.args), subcall.args.options.reverse
    steps = args.gates.shape[1]

    def last(values: Tensor) -> Tensor:
        return slice_time(values, steps - burn_in, steps, reverse)

    passing = torch.ones((1, burn_in), dtype=torch.bool, device=args.gates.device)
    if args.seq is not None:
        passing = last(args.seq) == step_of(args.seq, -1, reverse).unsqueeze(1)
    if args.reset is not None:
        reset = last(args.reset) if not reverse else last(args.reset).flip(1)
        number = reset.long().cumsum(1)
        since = number == number[:, -1:]
        passing = passing & (since.flip(1) if reverse else since)
    sizes = [
        last(state).abs().nan_to_num(0, 0).masked_fill(~passing.unsqueeze(-1), 0).amax(1)
        for state in states
    ]
    return torch.stack([size.to(args.dtype) for size in sizes])


def _maps(span: Span, carry: Rows, states: Sequence[Tensor]) -> Tensor | None:
    """Return the derivative of this rank's ends by the states that it continues from; None for two
    ranks, which need none. It pulls back ones, some steps at a time."""
    if span.border.size == 2:
        return None
    span = span.for_backward()
    steps, reverse, dtype = span.steps, span.reverse, span.args.dtype
    count, none = len(states), (None,) * len(states)
    rows = []
    for n in range(count):
        adjoint = tuple([torch.full_like(h, float(m == n)) for m, h in enumerate(carry)])
        for start in reversed(range(0, steps, CHUNK)):
            stop = min(start + CHUNK, steps)
            first = carry
            if start:
                first = tuple([step_of(s, start - 1, reverse).to(dtype) for s in states])
            subcall = span.subcall(start, stop, first)
            local_states = tuple(slice_time(state, start, stop, reverse) for state in states)
            inputs = (local_states, none, subcall.cotangent(adjoint), LEAST)
            result = span.engine.backward(span.program, subcall.args, *inputs)
            adjoint = subcall.of_carry(result.initial)
        rows.append(torch.stack(adjoint))
    return torch.stack(rows)
