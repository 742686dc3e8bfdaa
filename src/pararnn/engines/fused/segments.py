"""Schedule of matrix cells with independent entries: segments of time as rows of a batch.

The loop's kernels run all segments at once, each from a guess of the states before it, and carry
along the derivatives of its last states by its first. Newton's method then moves the guesses, until
each segment begins where the one before it ends. The backward pass is linear: one pass over
segments gives the gradients of their outputs by the states before them, and another one all others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pararnn.base.device import type_of
from pararnn.base.numerics import compute_dtype
from pararnn.engines import shooting
from pararnn.engines.arguments import Arguments, Gradients, Solution
from pararnn.engines.engine import BackwardInputs
from pararnn.engines.forward_time import in_order
from pararnn.engines.fused.matrix import MatrixSchedule
from pararnn.engines.fused.schedule import Schedule
from pararnn.engines.rule import Rank, Size, rank_of_matrix_segments
from pararnn.engines.shooting import Segments, States, gap_ulps, shoot, update
from pararnn.engines.split import NO_REQUEST, Split, SplitRequest, useful_segments
from pararnn.engines.tuned import Workload
from pararnn.program.entries import entries_of, why_no_tangents, with_adjoints, with_jacobians
from pararnn.program.matrix import CHECKPOINT
from pararnn.program.program import Program
from pararnn.solvers.entry_maps import Jacobian, pull_back
from pararnn.solvers.heads import expand_mask


class Cut(NamedTuple):
    """The steps of a call in `segments` pieces of `size`, and how many remain."""

    segments: int
    size: int
    remainder: int


class MatrixSegments(Segments):
    """Segments of a matrix cell's call as rows of a batch.

    rows: without initial states. solution: of the last run.
    """

    solution: Solution

    def __init__(self, program: Program, rows: Arguments, cut: Cut, loop: MatrixSchedule) -> None:
        self.program, self.rows, self.cut, self.loop = program, rows, cut, loop
        self.entries, self.ulps = entries_of(program), gap_ulps(program, rows)
        self.fresh: Tensor | None = None  # (B, S), segments within which states start from zero
        if rows.reset is not None:
            self.fresh = _by_segment((rows.reset.any(1),), cut, rows)[0]

    def run(self, begins: States) -> tuple[States, States]:
        call = replace(self.rows, initial=_as_rows(begins, self.cut, self.rows))
        self.solution = self.loop.forward(self.program, call)
        ends = _by_segment(self.solution.final, self.cut, self.rows)
        (memory,) = _by_segment(self.solution.states[1:], self.cut, self.rows)
        states = self.program.step.head.split_states(memory)
        return ends, _sizes(begins, states, ends, self.fresh)

    def linearise(
        self, begins: States, grad_output: Tensor | None = None
    ) -> tuple[States, Jacobian, States]:
        """Return the ends of all segments, their derivatives by `begins`, and the gradients by
        these of outputs with gradients (B S, size, H, V), if passed."""
        rows, entries, count = self.rows, self.entries, len(begins)
        tangents, initial = with_jacobians(self.program, rows.dtype), [*begins]
        initial += [torch.full_like(begins[i], float(i == j)) for i, j in entries.pairs]
        if grad_output is not None:
            tangents = with_adjoints(self.program, rows.dtype)
            rows = _with_gate(self.program, rows, grad_output)
            initial += map(torch.zeros_like, begins)
        call = replace(rows, initial=_as_rows(initial, self.cut, rows))
        final = _by_segment(self.loop.forward(tangents, call).final, self.cut, rows)
        ends, derivatives = final[:count], final[count : count + len(entries.pairs)]
        return (
            ends,
            dict(zip(entries.pairs, derivatives, strict=True)),
            final[count + len(derivatives) :],
        )

    def maps(self, begins: States) -> Jacobian:
        return self.linearise(begins)[1]

    def first_steps(self, begins: States, ends: States) -> tuple[States, States]:
        """Return the states after first steps, see `Segments.first_steps`; both in one launch."""
        rows, cut = self.rows, self.cut
        first = slice(-1, None) if rows.options.reverse else slice(1)
        starts = [
            torch.cat([torch.cat([begin[:, :1], x], 1) for x in (begin, end)])
            for begin, end in zip(begins, ends, strict=True)
        ]
        others = {"initial": _as_rows(starts, cut, rows), "sequences": 2 * len(rows.gates)}
        call = _of_steps(rows, lambda x: torch.cat([x[:, first]] * 2), **others)
        final = _by_segment(self.loop.forward(self.program, call).final, cut, rows)
        from_begin, from_end = zip(*(x[:, 1:].chunk(2) for x in final), strict=True)
        return from_begin, from_end


def programs_of_passes(program: Program, dtype: torch.dtype) -> tuple[Program, Program, Program]:
    """Return the programs whose kernels segments of a matrix cell run."""
    wide = compute_dtype(dtype)
    return program, with_jacobians(program, wide), with_adjoints(program, wide)


class SegmentsOfTime(Schedule):
    """Schedule of matrix cells with independent entries, by that of the loop."""

    cuts_time = True

    def __init__(self, loop: MatrixSchedule, info_rows: int = 1) -> None:
        self.loop, self.family, self.info_rows = loop, loop.family, info_rows

    def why_not(self, program: Program) -> str | None:
        return why_no_tangents(program)

    def build(self, program: Program, dtype: torch.dtype, compiles: bool = True) -> None:
        for of_pass in programs_of_passes(program, dtype):
            self.loop.build(of_pass, dtype, compiles)

    def rank(self, program: Program, workload: Workload) -> tuple[Rank, str]:
        """Rank it above the loop for enough concurrent segments of a long time."""
        (_, size, _, device, _), cores = workload, self.loop.cores_of_rank(workload.device)
        segments = self._split(program, size, cores, NO_REQUEST).segments if cores else 1
        return rank_of_matrix_segments(segments, size[1], device)

    def plan_split(self, program: Program, workload: Workload, request: SplitRequest) -> Split:
        cores = self.loop.cores(workload.device)
        return self._split(program, workload.size, cores, request)

    def _split(self, program: Program, size: Size, cores: int, request: SplitRequest) -> Split:
        """Return a split into pieces of whole checkpoints, the last of which may be shorter.

        Without a request it has as many as keep all cores busy with the heads of all rows.
        """
        (batch, length, _), sizes = size, program.step.head
        limits = batch * sizes.heads, cores, self.loop.min_size
        segments = request.segments or useful_segments(length, *limits)
        steps = CHECKPOINT * max(1, -(-length // (CHECKPOINT * segments)))
        return Split(max(1, -(-length // steps)), steps, 0)

    def _cut(self, program: Program, args: Arguments) -> Cut | None:
        """Return the pieces of a call; None for one that runs step by step.

        So do few steps, packed sequences, and a call while a CUDA graph is captured: the host must
        see whether segments agree.
        """
        length, cores = args.gates.shape[1], self.loop.cores(args.gates.device)
        size = self._split(program, args.size, cores, args.split).size
        segments = length // size
        if segments < 2 or args.seq is not None or type_of(args.gates.device).capturing():
            return None
        return Cut(segments, size, length - segments * size)

    def forward(self, program: Program, args: Arguments) -> Solution:
        """Run the forward pass; the loop runs all rows where segments of any do not agree."""
        cut = self._cut(program, args)
        info = args.gates.new_zeros((self.info_rows, 2), dtype=torch.int64)
        if cut is None:
            return self.loop.forward(program, args)._replace(info=info)
        main, tail = _split_call(args, cut)
        segments = MatrixSegments(program, _rows(main, cut), cut, self.loop)
        guess = _guess(main.start(program), cut)
        ends, maps, _ = segments.linearise(guess)
        borders = segments.borders(guess, ends, ())
        shot = shoot(segments, update(segments, guess, borders, borders.gaps(), maps), maps)
        if shot is None:
            info[0, 0], info[0, 1] = shooting.MAX_SWEEPS, args.gates.shape[0]
            return self.loop.forward(program, args)._replace(info=info)
        begins, sweeps = shot
        solution, ends = segments.solution, _by_segment(segments.solution.final, cut, args)
        output, memory = solution.states
        checkpoints = _by_segment((memory,), cut, args)[0]
        sizes = program.step.head
        # Kernels need not write the states before a sequence.
        checkpoints[:, :, 0].copy_(sizes.join_states(begins))
        states = [output.unflatten(0, (-1, cut.segments)), checkpoints]
        states = [x.flatten(1, 2).contiguous() for x in states]
        final = tuple(end[:, -1].contiguous() for end in ends)
        if tail is not None:
            last = self.loop.forward(program, replace(tail, initial=final))
            last.states[1][:, 0].copy_(sizes.join_states(final))
            turn = args.options.reverse
            pairs = zip(states, last.states, (turn, False), strict=True)
            states = [torch.cat([b, a] if first else [a, b], 1) for a, b, first in pairs]
            final = last.final
        info[0, 0] = sweeps
        return Solution(tuple(states), final, info)

    def backward(self, program: Program, args: Arguments, inputs: BackwardInputs) -> Gradients:
        """Run the backward pass; step by step where products of derivatives overflow."""
        states, grad_states, grad_final, wanted = inputs
        cut, by_steps = self._cut(program, args), partial(self.loop.backward, program)
        if cut is None:
            return by_steps(args, inputs)
        main, tail = _split_call(args, cut)
        names = [*wanted, *({"initial"} - {*wanted})]
        (output, memory), grad_output = states, grad_states[0]
        chunks = cut.segments * cut.size // CHECKPOINT
        last: Gradients | None = None
        slices = _slices(args, cut)
        if tail is not None:
            initial = program.step.head.split_states(memory[:, chunks])
            of_tail = BackwardInputs(
                (output[:, slices[1]], memory[:, chunks:]),
                (None if grad_output is None else grad_output[:, slices[1]],),
                grad_final,
                names,
            )
            last = by_steps(replace(tail, initial=initial), of_tail)
            grad_final = last.initial
            memory = memory[:, :chunks]
        if grad_output is not None:
            grad_output = grad_output[:, slices[0]].reshape(-1, cut.size, *grad_output.shape[2:])
        by_segment = memory.unflatten(1, (cut.segments, -1))
        inner = program.step.head.split_states(by_segment[:, 1:, 0])
        pairs = zip(args.start(program), inner, strict=True)
        begins = tuple(torch.cat([x.to(y.dtype).unsqueeze(1), y], 1) for x, y in pairs)
        segments = MatrixSegments(program, _rows(main, cut), cut, self.loop)
        rows = replace(segments.rows, initial=_as_rows(begins, cut, args))
        sizes = args.state_sizes(program)
        batch = args.gates.shape[0]
        ends = tuple(
            memory.new_zeros((batch, *size)) if grad is None else grad.to(memory.dtype)
            for size, grad in zip(sizes, grad_final, strict=True)
        )
        of_rows = (output, *_as_rows((by_segment,), cut, args)), (grad_output,)
        if args.reset is None:
            _, maps, by_begin = segments.linearise(begins, grad_output)
        else:  # a reset would also zero the tangents
            _, maps, _ = segments.linearise(begins)
            none = (None,) * len(begins)
            alone = by_steps(rows, BackwardInputs(*of_rows, none, ["initial"]))
            by_begin = _by_segment(alone.initial, cut, args)
        # Of the states after a segment: of the next one's outputs, and of what comes later.
        terms = [
            torch.cat([x[:, 1:], end.unsqueeze(1)], 1)
            for x, end in zip(by_begin or map(torch.zeros_like, begins), ends, strict=True)
        ]
        next_maps = {pair: x.roll(-1, 1) for pair, x in maps.items()}  # nothing is after the last
        by_end = pull_back(segments.entries, next_maps, terms)
        if not all(bool(x.isfinite().all()) for x in by_end):
            return by_steps(args, inputs)
        of_rows_end = _as_rows(by_end, cut, args)
        grads = by_steps(rows, BackwardInputs(*of_rows, of_rows_end, names))
        starts = tuple(grad[:, 0] for grad in _by_segment(grads.initial, cut, args))
        return _together(args, cut, grads, last, starts, wanted)


def _slices(args: Arguments, cut: Cut) -> tuple[slice, slice]:
    """Return the steps in segments, and the others, in the caller's order."""
    if args.options.reverse:
        return slice(cut.remainder, None), slice(None, cut.remainder)
    end = cut.segments * cut.size
    return slice(None, end), slice(end, None)


def _of_steps(args: Arguments, function: Callable[[Tensor], Tensor], **others: Any) -> Arguments:
    """Return a call with a function of its gates and resets."""
    reset = None if args.reset is None else function(args.reset)
    return replace(args, gates=function(args.gates), reset=reset, **others)


def _split_call(args: Arguments, cut: Cut) -> tuple[Arguments, Arguments | None]:
    """Return the call on the steps in segments, and on the others."""
    main, tail = (_of_steps(args, itemgetter((slice(None), x))) for x in _slices(args, cut))
    return main, tail if cut.remainder else None


def _rows(args: Arguments, cut: Cut) -> Arguments:
    """Return a call whose rows are segments, without initial states."""
    sequences = args.gates.shape[0] * cut.segments

    def rows(x: Tensor) -> Tensor:
        return x.reshape(sequences, cut.size, *x.shape[2:])

    return _of_steps(args, rows, initial=(), sequences=sequences)


def _by_segment(tensors: Sequence[Tensor], cut: Cut, args: Arguments) -> States:
    """Return tensors of rows, (B S, ...), in the order of processing, (B, S, ...)."""
    reverse, size = args.options.reverse, (-1, cut.segments)
    return tuple(in_order(x.unflatten(0, size), reverse) for x in tensors)


def _as_rows(tensors: Sequence[Tensor], cut: Cut, args: Arguments) -> States:
    """Return what `_by_segment` was given: the inverse."""
    reverse = args.options.reverse
    return tuple(in_order(x, reverse).flatten(0, 1).contiguous() for x in tensors)


def _guess(start: Sequence[Tensor], cut: Cut) -> States:
    """Return the initial states, and zero before other segments, (B, S, H, ...)."""
    others = [x.new_zeros((len(x), cut.segments - 1, *x.shape[1:])) for x in start]
    return tuple(torch.cat([x.unsqueeze(1), y], 1) for x, y in zip(start, others, strict=True))


def _sizes(guess: States, inner: States, ends: States, fresh: Tensor | None) -> States:
    """Return each entry's largest value in a segment, (B, S - 1, H, ...), of all but the last.

    The contract allows the largest one so far; of one segment it is no larger, and excuses nothing
    that a spike long before would. inner: states at checkpoints, (B, S, chunks, H, ...). Where
    states start from zero within a segment, its end alone counts.
    """
    sizes = []
    for begin, within, end in zip(guess, inner, ends, strict=True):
        last = end.abs()
        size = torch.maximum(begin.abs(), last)
        if within.shape[2] > 1:  # the first one is not written
            largest = torch.linalg.vector_norm(within[:, :, 1:], torch.inf, 2)
            size = torch.where(largest.isfinite(), size.maximum(largest), size)
        if fresh is not None:
            size = torch.where(expand_mask(fresh, size), last, size)
        sizes.append(size[:, :-1])
    return tuple(sizes)


def _with_gate(program: Program, rows: Arguments, grad_output: Tensor) -> Arguments:
    """Return rows with one more gate, the gradients of outputs (B S, size, H, V)."""
    sizes = program.step.head
    gates = torch.cat([sizes.by_head(rows.gates), grad_output.to(rows.gates.dtype)], -1)
    bias = rows.bias
    if bias is not None:
        by_head = bias.unflatten(-1, (sizes.heads, sizes.width))
        bias = torch.nn.functional.pad(by_head, (0, sizes.output[1])).flatten(-2)
    return replace(rows, gates=gates.unsqueeze(2), bias=bias)


def _together(
    args: Arguments,
    cut: Cut,
    grads: Gradients,
    last: Gradients | None,
    starts: States,
    wanted: Sequence[str],
) -> Gradients:
    """Return the gradients of a call, of those of its segments and of the other steps."""
    gates = torch.empty_like(args.gates)
    main, tail = _slices(args, cut)
    gates[:, main] = grads.gates.reshape(gates[:, main].shape)
    bias, params = grads.bias, grads.params
    if last is not None:
        gates[:, tail] = last.gates
        bias = None if bias is None or last.bias is None else bias + last.bias
        params = tuple(a + b for a, b in zip(params, last.params, strict=True))
    wants = args.initial if "initial" in wanted else ()
    casts = zip(starts[: len(wants)], wants, strict=True)
    return grads._replace(
        gates=gates,
        bias=bias,
        params=params,
        initial=tuple(x.to(h.dtype).contiguous() for x, h in casts),
    )
