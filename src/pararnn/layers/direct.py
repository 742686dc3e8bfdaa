"""Calls without gradients, by a launch that is cached by the layout of the call's tensors.

What precedes a launch (records, checks, the choice of an engine, views of weights) takes several
times as long as a step itself. On a CPU the launch of a sequence projects its inputs too.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pararnn.base.cache import ABSENT, on_clear
from pararnn.engines import tuned
from pararnn.engines.arguments import Arguments, Options, TensorSize
from pararnn.engines.fused.elementwise_cpu import CpuVectors
from pararnn.engines.fused.engine import FusedEngine
from pararnn.engines.fused.launch import Launch, Template
from pararnn.engines.fused.layout import heads_of_matrices
from pararnn.engines.fused.mixing_cpu import InputStrides, MixingCpu
from pararnn.engines.signature import MAX_SIGNATURES, is_cacheable, is_plain, layout_of
from pararnn.engines.table import Choice
from pararnn.op import can_bypass_dispatcher
from pararnn.program.program import Program
from pararnn.solve import plan_solve

Tensors = Sequence[Tensor]


class DirectLaunch(NamedTuple):
    """Launch on a call's tensors and, behind these, its results of these sizes.

    Results are the `states` final states, and behind them what has no memory in common with these:
    the output, and the states in the gates' dtype. output: its index. choice, counts: those of the
    solve that it stands for.
    """

    launch: Launch
    results: list[TensorSize]
    states: int
    output: int
    choice: Choice
    counts: Tensor

    def run(self, tensors: Tensors) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Run the call. Return its output, (B, D) of a step, and the final states."""
        new = tensors[0].new_empty
        results = [new(size, dtype=dtype) for size, dtype in self.results]
        self.launch.run([*tensors, *results])
        return results[self.output], tuple(results[: self.states])


_LAUNCHES: dict[Hashable, DirectLaunch | None] = {}
"""Launches by all that they depend on; None where a call has none."""
on_clear(_LAUNCHES.clear)


def may_run_directly() -> bool:
    """Return True where no gradient is needed, and nothing but this call sees its tensors."""
    return not torch.is_grad_enabled() and can_bypass_dispatcher()


def step_launch(
    program: Program,
    pair: tuple[str, str],
    tensors: Tensors,
    arguments: Callable[..., Arguments],
    *options: Hashable,
    check: Callable[[], object] | None = None,
    lead: tuple[int, ...] = (),
    shares: bool = False,
) -> DirectLaunch | None:
    """Return the launch of a step on the plain tensors of a call, of which the first is on the
    device of all; None where there is none, as for engines in PyTorch and on a GPU.

    arguments: returns the record of the call, of these tensors and `options`, which with the
    tensors' layouts decide what it is. check: raises for tensors that do not fit, in the caller's
    words. lead: dimensions of length 1 before those of new states. shares: the output may be the
    memory of the first state. Raises as a solve, for tensors that do not fit.
    """

    def plan(likes: Tensors) -> DirectLaunch | None:
        if check is not None:
            check()
        return _plan_step(program, pair, likes, arguments(likes, *options), lead, shares)

    return _cached(program, (pair, arguments, options, lead, shares), tensors, plan)


def sequence_launch(
    program: Program, pair: tuple[str, str], tensors: Tensors, biases: int, reverse: bool
) -> DirectLaunch | None:
    """Return the launch of whole sequences on the plain tensors of a call, on the CPU; None where
    there is none, as for engines that do not project their inputs.

    tensors: x (B, T, input), the weight of its projection as `headwise_gates` takes it, a bias or
    none, initial states or none, and parameters. Raises as a solve, for tensors that do not fit.
    """

    def plan(likes: Tensors) -> DirectLaunch | None:
        return _plan_sequence(program, pair, likes, biases, reverse)

    return _cached(program, (pair, biases, reverse), tensors, plan)


def _cached(
    program: Program,
    options: Hashable,
    tensors: Tensors,
    plan: Callable[[Tensors], DirectLaunch | None],
) -> DirectLaunch | None:
    """Return the launch of calls like this one, planned on tensors like its own."""
    if not is_cacheable(tensors):
        return None
    tuning = torch.get_num_threads(), tuned.records(program.key)
    key = (program, options, tuning, *map(layout_of, tensors))
    launch: DirectLaunch | None = _LAUNCHES.get(key, ABSENT)
    if launch is ABSENT:
        if len(_LAUNCHES) >= MAX_SIGNATURES:
            _LAUNCHES.clear()
        # Of memory of its own each: a call's tensors may be views of one.
        likes = [
            torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)
            for t in tensors
        ]
        launch = _LAUNCHES[key] = plan(likes) if all(map(is_plain, tensors)) else None
    return launch


def _plan_step(
    program: Program,
    pair: tuple[str, str],
    likes: Tensors,
    args: Arguments,
    lead: tuple[int, ...],
    shares: bool,
) -> DirectLaunch | None:
    """Plan the launch of a step; see `step_launch`."""
    choice, engine = plan_solve(program, args, *pair)
    schedule = engine.find(program) if isinstance(engine, FusedEngine) else None
    reads_out = program.step.has_readout
    if reads_out or not isinstance(schedule, CpuVectors) or schedule.solver != "sequential":
        return None
    of_pass, inputs = schedule.launch(program, args)
    if of_pass.launch is None or of_pass.launch.temporaries or not all(t.numel() for t in likes):
        return None
    sources = _sources(inputs, likes)
    if sources is None:
        return None

    rows, _, channels = args.size
    results: list[TensorSize] = [((*lead, rows, channels), args.dtype) for _ in program.states]
    count, states = len(results), list[int]()
    for i in range(count):
        # At one step the sequence of states is the final one.
        if args.gates.dtype == args.dtype and (i or shares):
            states.append(i)
        else:
            states.append(len(results))
            results.append(((rows, channels), args.gates.dtype))
    first = len(likes)
    results_at: list[Source] = [(first + i, 0) for i in (*states, *range(count))]
    sources += [ABSENT_SOURCE, *results_at, ABSENT_SOURCE]  # saved values, and counts
    return _direct(of_pass.launch, sources, results, count, states[0], choice)


def _plan_sequence(
    program: Program, pair: tuple[str, str], likes: Tensors, biases: int, reverse: bool
) -> DirectLaunch | None:
    """Plan the launch of whole sequences; see `sequence_launch`."""
    x, weight, *rest = likes
    (rows, steps, inputs), gates = x.shape, len(program.gates)
    heads, width = (1, *weight.shape)[-3], weight.shape[-1]
    if heads * width != inputs or not (x.stride(2) == 1 and weight.is_contiguous()):
        return None
    channels = weight.numel() // (width * gates)
    size = (rows, steps, gates, *((heads, channels // heads) if heads > 1 else (channels,)))
    count, first = len(program.states), len(rest) - len(program.params)
    args = Arguments(
        gates=x.new_empty(size),
        bias=rest[0] if biases else None,
        fields=(),
        params=tuple(rest[first:]),
        initial=tuple(rest[biases:first]),
        sequences=rows,
        options=Options(output_only=True, reverse=reverse),
    )
    choice, engine = plan_solve(program, args, *pair)
    schedule = engine.find(program) if isinstance(engine, FusedEngine) else None
    if not isinstance(schedule, MixingCpu) or not all(t.numel() for t in likes):
        return None
    of_matrices = heads_of_matrices(args.params) or 1
    if heads not in (1, of_matrices):  # a head of the kernel would read inputs of several
        return None
    # Rows of the weight are by head and gate, or those of one projection for all heads by gate.
    of_head = channels // of_matrices * width
    strides = (width, of_head, gates * of_head) if heads > 1 else (0, channels * width, of_head)
    projection = InputStrides(width, x.stride(0), x.stride(1), *strides)
    found = schedule.launch_with_projection(program, args, projection)
    sources = None if found is None else _sources(found[1], likes)
    if found is None or sources is None:
        return None
    # Nobody reads states but the first. Behind its results, the launch takes x and the weight.
    results: list[TensorSize] = [((rows, channels), args.dtype)] * count
    results.append(((rows, steps, channels), args.dtype))
    output, at = len(likes) + count, len(likes)
    sources += [ABSENT_SOURCE, (output, 0), *[ABSENT_SOURCE] * (count - 1)]
    sources += [*[(at + i, 0) for i in range(count)], ABSENT_SOURCE, (0, 0), (1, 0)]
    return _direct(found[0], sources, results, count, count, choice)


def _direct(
    launch: Launch,
    sources: Sequence[Source],
    results: list[TensorSize],
    states: int,
    output: int,
    choice: Choice,
) -> DirectLaunch:
    """Return a launch on the tensors that its own are in, as `sources` say."""
    kernel, template, _ = launch
    counts = torch.zeros((1, 2), dtype=torch.int64)
    by_sources = Launch(kernel, _template_by(template, sources))
    return DirectLaunch(by_sources, results, states, output, choice, counts)


Source = tuple[int | None, int]
"""Index of a tensor, None for an absent one, and an offset in bytes."""
ABSENT_SOURCE: Source = (None, 0)


def _sources(tensors: Sequence[Tensor | None], likes: Tensors) -> list[Source] | None:
    """Return where all tensors are among others; None if one is a copy."""
    found = [_source(tensor, likes) for tensor in tensors]
    sources = [source for source in found if source is not None]
    return sources if len(sources) == len(found) else None


def _source(tensor: Tensor | None, likes: Tensors) -> Source | None:
    """Return where a tensor is among others; None if it is a copy."""
    if tensor is None:
        return ABSENT_SOURCE
    begin = tensor.data_ptr()
    for i, like in enumerate(likes):
        if 0 <= begin - like.data_ptr() < like.untyped_storage().nbytes():
            return i, begin - like.data_ptr()
    return None


def _template_by(template: Template, sources: Sequence[Source]) -> Template:
    """Return a template of other tensors, of which those of this one are parts."""
    arguments, addresses = template.arguments.copy(), []
    for index, tensor in template.addresses:
        source, offset = sources[tensor]
        if source is not None:
            arguments[index] += offset
            addresses.append((index, source))
    return Template(arguments, addresses)
