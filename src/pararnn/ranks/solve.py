"""A call over several ranks, forward and backward: each rank's span is a segment of `shoot`.

Each span starts from a guess: the state that the last inputs of the rank before lead to from zero.
Each end is compared with the next rank's start. A span whose start was off runs again, from
Newton's update over ranks. Backward, the adjoint does the same from the last rank to the first.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pararnn.base.numerics import FORWARD_TOLERANCE
from pararnn.engines.arguments import Arguments, Gradients, Solution
from pararnn.engines.engine import BackwardInputs, Incoming
from pararnn.engines.shooting import Segments, States, gap_ulps, shoot
from pararnn.program.entries import Entries, Pair
from pararnn.ranks import pipeline
from pararnn.ranks.span import RankSpan
from pararnn.ranks.subcall import RowStates, Subcall, slice_time, step_of
from pararnn.solvers.entry_maps import Jacobian
from pararnn.solvers.newton import ERROR_SHARE

BURN_IN = 256
"""Steps of the first guess."""
CHUNK = 1 << 14
"""Steps of which a map is made at once: it takes as much memory as their gates."""
LEAST = ("initial",)
"""Gradients that ranks exchange."""


def forward(span: RankSpan) -> Solution:
    """Solve the recurrence over all ranks; every rank gets all final states."""
    spans, guess = StateSpans(span), _guess(span)
    first = torch.stack(span.first_carry())
    begins = [torch.cat([h[:, None], g[:, :-1]], 1) for h, g in zip(first, guess, strict=True)]
    if shoot(spans, tuple(begins)) is None:
        in_turn = pipeline.forward(span)
        return in_turn._replace(states=in_turn.states[: span.program.num_outputs])
    solution, at_last = spans.solution, tuple(end[:, -1] for end in spans.ends)
    assert solution is not None
    return solution._replace(final=span.final_of_all(spans.subcall, solution.final, at_last))


def backward(span: RankSpan, inputs: BackwardInputs) -> Gradients:
    """Return this rank's gradients. Those of parameters and initial states are to be summed over
    ranks."""
    ranks, border, args = span.ranks, span.border, span.args
    arriving = torch.stack(span.grad_final(inputs.grad_final))
    ends = torch.stack([step_of(x, -1, span.reverse).to(args.dtype) for x in inputs.states])
    if border.continues is None:  # gradients of final states are as large as ends: one message
        message = ranks.gather(torch.stack([ends, arriving]), span.reverse)
        states_before, of_final = message[border.position - 1, 0], message[:, 1].sum(0)
    else:
        states_before = ranks.gather(ends, span.reverse)[border.position - 1]
        of_final = ranks.total(arriving)
    carry = tuple(states_before) if border.position else span.first_carry()
    names = [*dict.fromkeys((*inputs.wanted, *LEAST))]
    spans = GradientSpans(span, (carry, inputs.states), inputs.grad_states, of_final, names)
    if shoot(spans, spans.guess()) is None:
        return pipeline.backward(span, inputs._replace(states=(*inputs.states, *carry)))
    assert spans.gradients is not None
    return span.finish_gradients(spans.gradients, tuple(of_final))


class Spans(Segments):
    """Spans of all ranks, of which this rank runs one; all ranks have all borders."""

    def __init__(self, span: RankSpan) -> None:
        self.span, count = span, len(span.args.initial)
        self.entries = Entries((("channel",),) * count, _pairs(count))
        if span.border.continues is not None:
            self.continues = span.border.continues[1:].T.unsqueeze(-1)


class StateSpans(Spans):
    """Spans of a solve.

    subcall, solution: of this rank's last run. ends: of all ranks' last runs.
    """

    subcall: Subcall
    solution: Solution | None = None
    ends: States

    def __init__(self, span: RankSpan) -> None:
        super().__init__(span)
        self.ulps = gap_ulps(span.program, span.args)

    def run(self, begins: States) -> tuple[States, States]:
        """Run the span, see `Segments.run`; that of the first rank once."""
        span = self.span
        if span.border.position or self.solution is None:
            self.solution = None  # before the next one is made
            self.subcall, self.solution = span.run(0, span.steps, _local(span, begins))
        ends = torch.stack(self.subcall.ends(self.solution.final))
        self.ends, sizes = _gather(span, ends, _largest_states(self.subcall, self.solution.states))
        pairs = zip(sizes, self.ends, strict=True)
        return self.ends, tuple(torch.maximum(x, end.abs())[:, :-1] for x, end in pairs)

    def maps(self, begins: States) -> Jacobian:
        """Return the derivatives of ends, see `Segments.maps`."""
        assert self.solution is not None
        return _maps(self.span, _local(self.span, begins), self.solution.states)

    def first_steps(self, begins: States, ends: States) -> tuple[States, States]:
        """Return the states after first steps, see `Segments.first_steps`."""
        span, before = self.span, max(0, self.span.border.position - 1)
        steps = [span.ends(0, 1, tuple(x[:, before] for x in starts)) for starts in (begins, ends)]
        from_begin, from_end = _gather(span, *steps)
        return tuple(x[:, 1:] for x in from_begin), tuple(x[:, 1:] for x in from_end)


class GradientSpans(Spans):
    """Spans of a backward pass: begins are gradients of the states that spans end with, ends those
    of the states that they continue from.

    gradients: of this rank's last run.
    """

    runs_back = True
    gradients: Gradients | None = None
    grad_carry: RowStates
    scales: States

    def __init__(
        self,
        span: RankSpan,
        of_forward: tuple[RowStates, tuple[Tensor, ...]],
        grad_states: Incoming,
        of_final: Tensor,
        names: Sequence[str],
    ) -> None:
        super().__init__(span)
        self.of_forward, self.grad_states = of_forward, grad_states
        self.of_final, self.names = of_final, names
        dtype = span.args.dtype
        self.ulps = ERROR_SHARE * FORWARD_TOLERANCE[dtype] / torch.finfo(dtype).eps

    def guess(self) -> States:
        """Return the gradients that the first steps of the next rank's span make."""
        span, burn_in = self.span, _burn_in(self.span.args)
        zero = torch.zeros_like(torch.stack(self.of_forward[0]))
        at_end = self.of_final if span.border.continues is None else zero
        is_end = span.border.position == span.border.size - 1 and burn_in == span.steps
        guess = self._differentiate(burn_in, tuple(at_end if is_end else zero), LEAST)[1]
        sizes = [
            torch.zeros_like(h)
            if grad is None
            else slice_time(grad, 0, burn_in, span.reverse).abs().nan_to_num(0, 0).amax(1)
            for h, grad in zip(zero, self.grad_states, strict=True)
        ]
        scales = torch.stack([size.to(zero.dtype) for size in sizes])
        guesses, self.scales = _gather(span, torch.stack(guess), scales)
        pairs = zip(guesses, at_end, strict=True)
        return tuple(torch.cat([x[:, 1:], end[:, None]], 1) for x, end in pairs)

    def run(self, begins: States) -> tuple[States, States]:
        """Differentiate the span, see `Segments.run`; that of the last rank once."""
        span, border = self.span, self.span.border
        if border.position != border.size - 1 or self.gradients is None:
            self.gradients = None  # before the next one is made
            grad_end = _local(span, begins)
            self.gradients, self.grad_carry = self._differentiate(span.steps, grad_end, self.names)
        (ends,) = _gather(span, torch.stack(self.grad_carry))
        pairs = zip(self.scales, ends, strict=True)
        return ends, tuple(torch.maximum(x, end.abs())[:, 1:] for x, end in pairs)

    def maps(self, begins: States) -> Jacobian:
        """Return the derivatives of the spans' ends, see `Segments.maps`."""
        return _maps(self.span, *self.of_forward)

    def _differentiate(
        self, stop: int, grad_end: RowStates, names: Sequence[str]
    ) -> tuple[Gradients, RowStates]:
        arriving = self.grad_states, tuple(self.of_final)
        return self.span.differentiate(self.of_forward, *arriving, stop, grad_end, names)


def _pairs(count: int) -> tuple[Pair, ...]:
    """Return all pairs of states, as `_map` has them."""
    return tuple((i, j) for i in range(count) for j in range(count))


def _local(span: RankSpan, states: States) -> RowStates:
    """Return this rank's states of those of all ranks."""
    return tuple(x[:, span.border.position] for x in states)


def _gather(span: RankSpan, *values: Tensor) -> list[States]:
    """Return all ranks' values (N, B, D) as states (B, ranks, D), by one message."""
    messages = span.ranks.gather(torch.stack(values), span.reverse)
    return [tuple(x.movedim(0, 2)) for x in messages.unbind(1)]


def _burn_in(args: Arguments) -> int:
    """Return the steps of the first guess: those requested, or the usual number."""
    request = args.options.burn_in
    return max(1, min(BURN_IN if request is None else request, args.gates.shape[1]))


def _guess(span: RankSpan) -> States:
    """Return the states that each rank's last steps lead to from zero."""
    steps, burn_in = span.steps, _burn_in(span.args)
    carry = span.zeros() if span.border.position or burn_in < steps else span.first_carry()
    return _gather(span, span.ends(steps - burn_in, steps, carry))[0]


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


def _maps(span: RankSpan, carry: RowStates, states: Sequence[Tensor]) -> Jacobian:
    """Return the derivatives of all ranks' ends by the states that they continue from; none for two
    ranks, which need none."""
    if span.border.size == 2:
        return {}
    (maps,) = _gather(span, _map(span.for_backward(), carry, states).flatten(0, 1))
    return dict(zip(_pairs(len(carry)), maps, strict=True))


def _map(span: RankSpan, carry: RowStates, states: Sequence[Tensor]) -> Tensor:
    """Return the derivative (N, N, B, D) of this rank's ends by the states that it continues from.
    It pulls back ones, some steps at a time."""
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
            inputs = BackwardInputs(local_states, none, subcall.cotangent(adjoint), LEAST)
            result = span.engine.backward(span.program, subcall.args, inputs)
            adjoint = subcall.of_carry(result.initial)
        rows.append(torch.stack(adjoint))
    return torch.stack(rows)
