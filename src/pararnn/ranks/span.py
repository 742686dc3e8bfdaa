"""A rank's span of a call: its first states, its gradients, and what all ranks combine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from pararnn.base.errors import EngineError
from pararnn.engines import newton_torch
from pararnn.engines.arguments import Arguments, Gradients, Solution
from pararnn.engines.engine import BackwardInputs, Engine, Incoming
from pararnn.messages.group import Ranks, find, require_step
from pararnn.program.program import Program
from pararnn.ranks.subcall import RankBorder, RowStates, Subcall, slice_time, step_of


class RankSpan(NamedTuple):
    """This rank's steps of a call, and the engine that runs them.

    call: as all ranks have it. args: of this rank's steps only, with states in the compute dtype.
    """

    program: Program
    engine: Engine
    call: Arguments
    args: Arguments
    ranks: Ranks
    border: RankBorder

    @classmethod
    def of(cls, program: Program, engine: Engine, call: Arguments) -> RankSpan:
        """Return a call's span. Raises ValueError for one without a step."""
        require_step(call.gates.shape[1])
        args, ranks = call.with_options(context="").complete(program), find(call.options.context)
        args = replace(args, initial=tuple([h.to(args.dtype) for h in args.initial]))
        return cls(program, engine, call, args, ranks, RankBorder.of(ranks, args))

    @property
    def steps(self) -> int:
        """T."""
        return self.args.size[1]

    @property
    def reverse(self) -> bool:
        """True if time runs from the last rank to the first."""
        return self.args.options.reverse

    def zeros(self) -> RowStates:
        """Return states of all rows, zero."""
        batch = self.args.gates.shape[0]
        return tuple([h.new_zeros((batch, *h.shape[1:])) for h in self.args.initial])

    def first_carry(self) -> RowStates:
        """Return the states that the first rank's rows continue from: the initial states, or zeros
        where rows hold several sequences."""
        return self.args.initial if self.border.continues is None else self.zeros()

    def subcall(self, start: int, stop: int, carry: RowStates) -> Subcall:
        """Return the call on a slice of the span, whose rows continue from `carry`."""
        return Subcall.of(self.args, start, stop, carry, self.border.at_first())

    def run(self, start: int, stop: int, carry: RowStates) -> tuple[Subcall, Solution]:
        """Solve a slice of the span, whose rows continue from `carry`."""
        subcall = self.subcall(start, stop, carry)
        return subcall, self.engine.forward(self.program, subcall.args)

    def ends(self, start: int, stop: int, carry: RowStates) -> Tensor:
        """Return the states (N, B, D) at the end of such a slice."""
        subcall, solution = self.run(start, stop, carry)
        return torch.stack(subcall.ends(solution.final))

    def for_backward(self) -> RankSpan:
        """Return the span with the engine that differentiates it: Newton's if autograd
        differentiates the one that runs it, as autograd does not see other ranks.

        Raises EngineError for a cell that Newton's engine cannot run.
        """
        engine = self.engine
        if engine.has_backward:
            return self
        reason = newton_torch.ENGINE.why_not(self.program)
        if reason is not None:
            raise EngineError(
                f"({engine.solver}, {engine.backend}) has no backward pass, which ranks "
                f"that share a sequence need: {reason}. Take backend='fused'"
            )
        return self._replace(engine=newton_torch.ENGINE)

    def grad_final(self, grads: Incoming) -> RowStates:
        """Return the gradients of final states that arrive at this rank."""
        return tuple(
            torch.zeros_like(h) if grad is None else grad.to(self.args.dtype)
            for h, grad in zip(self.args.initial, grads, strict=True)
        )

    def differentiate(
        self,
        of_forward: tuple[RowStates, tuple[Tensor, ...]],
        grad_states: Incoming,
        of_final: RowStates,
        stop: int,
        grad_end: RowStates,
        names: Sequence[str],
    ) -> tuple[Gradients, RowStates]:
        """Return the gradients of the steps before `stop`, and of the states they continue from.

        of_forward: the states that the span continues from, and its states. of_final: gradients of
        the final states, which count where rows are not sequences. grad_end: those of the states
        at the end of rows.
        """
        (carry, states), args, reverse = of_forward, self.args, self.reverse
        subcall = self.subcall(0, stop, carry)
        continues_next = self.border.at_last()
        if stop < self.steps and args.seq is not None:
            ends = step_of(args.seq, stop - 1, reverse)
            continues_next = step_of(args.seq, stop, reverse) == ends
        cotangent = subcall.cotangent(grad_end, of_final, continues_next)
        local_states = tuple(slice_time(state, 0, stop, reverse) for state in states)
        grads = tuple(
            None if grad is None else slice_time(grad, 0, stop, reverse) for grad in grad_states
        )
        inputs = BackwardInputs(local_states, grads, cotangent, names)
        result = self.engine.backward(self.program, subcall.args, inputs)
        return result, subcall.of_carry(result.initial)

    def final_of_all(
        self, subcall: Subcall, final: Sequence[Tensor], at_last: RowStates
    ) -> RowStates:
        """Return the final states of all sequences. at_last: of the last rank's rows."""
        if self.border.continues is None:
            return tuple([state.clone() for state in at_last])
        assert subcall.seq is not None
        assert subcall.args.seq is not None
        here = subcall.ends_here(self.border.at_last())
        numbers, source = subcall.seq[here].long(), subcall.args.seq[here].long()
        has_step = self._flags(numbers)
        out = []
        for state, initial in zip(final, self.args.initial, strict=True):
            total = torch.zeros_like(initial)
            total[numbers] = state[source]
            totals = self.ranks.total(total)
            out.append(torch.where(_of_size(has_step, initial), totals, initial))
        return tuple(out)

    def finish_gradients(self, result: Gradients, of_final: RowStates) -> Gradients:
        """Return the span's gradients in its call's dtypes, with those of the call's initial
        states: this rank's summand."""
        call = self.call
        params = tuple(g.to(p.dtype) for g, p in zip(result.params, call.params, strict=True))
        initial: RowStates = ()
        if call.initial:
            pairs = zip(self._grad_initial(result.initial, of_final), call.initial, strict=True)
            initial = tuple(g.to(h.dtype) for g, h in pairs)
        return result._replace(params=params, initial=initial)

    def _grad_initial(self, grads: RowStates, of_final: RowStates) -> RowStates:
        is_first, args = self.border.position == 0, self.args
        if self.border.continues is None:
            return tuple([g.clone() if is_first else torch.zeros_like(g) for g in grads])
        assert args.seq is not None
        has_step = self._flags(args.seq[args.seq >= 0].long())
        out = []
        for grad, final in zip(grads, of_final, strict=True):
            local_grad = grad[: args.sequences].clone()
            of_absent = final.masked_fill(_of_size(has_step, final), 0)
            out.append(local_grad + of_absent if is_first else local_grad)
        return tuple(out)

    def _flags(self, numbers: Tensor) -> Tensor:
        """Return the sequences, bool (S,), that any rank has among its numbers."""
        args = self.args
        flags = torch.zeros(args.sequences, dtype=args.dtype, device=args.gates.device)
        flags[numbers] = 1
        return self.ranks.total(flags) > 0


def _of_size(flags: Tensor, like: Tensor) -> Tensor:
    """Return flags (S,) with the dimensions of states (S, ...)."""
    return flags.view(-1, *[1] * (like.ndim - 1))
