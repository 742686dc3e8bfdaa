"""One step without gradients, by a launch that is cached by the layout of the call's tensors.

What precedes a launch (records, checks, the choice of an engine, views of weights) takes several
times as long as the step itself.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pararnn.base.cache import ABSENT, on_clear
from pararnn.engines import tuned
from pararnn.engines.arguments import Arguments, TensorSize
from pararnn.engines.fused.elementwise_cpu import CpuVectors
from pararnn.engines.fused.engine import FusedEngine
from pararnn.engines.fused.launch import Launch, Template
from pararnn.engines.signature import MAX_SIGNATURES, is_cacheable, is_plain, layout_of
from pararnn.engines.table import Choice
from pararnn.op import can_bypass_dispatcher
from pararnn.program.program import Program
from pararnn.solve import plan_solve

Tensors = Sequence[Tensor]


class StepLaunch(NamedTuple):
    """Launch of a step on a call's tensors and, behind these, its results of these sizes.

    Results are the `states` new states, and behind them what has no memory in common with these:
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
        """Run the step. Return its output (B, D) and the new states."""
        new = tensors[0].new_empty
        results = [new(size, dtype=dtype) for size, dtype in self.results]
        self.launch.run([*tensors, *results])
        return results[self.output], tuple(results[: self.states])


_LAUNCHES: dict[Hashable, StepLaunch | None] = {}
"""Launches by all that they depend on; None where a step has none."""
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
) -> StepLaunch | None:
    """Return the launch of a step on the plain tensors of a call, of which the first is on the
    device of all; None where there is none, as for engines in PyTorch and on a GPU.

    arguments: returns the record of the call, of these tensors and `options`, which with the
    tensors' layouts decide what it is. check: raises for tensors that do not fit, in the caller's
    words. lead: dimensions of length 1 before those of new states. shares: the output may be the
    memory of the first state. Raises as a solve, for tensors that do not fit.
    """
    if not is_cacheable(tensors):
        return None
    tuning = torch.get_num_threads(), tuned.records(program.key)
    key = (program, pair, arguments, options, lead, shares, tuning, *map(layout_of, tensors))
    step: StepLaunch | None = _LAUNCHES.get(key, ABSENT)
    if step is ABSENT:
        if len(_LAUNCHES) >= MAX_SIGNATURES:
            _LAUNCHES.clear()
        if check is not None:
            check()
        # Of memory of its own each: a call's tensors may be views of one.
        likes = [
            torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)
            for t in tensors
        ]
        step = _LAUNCHES[key] = (
            _plan(program, pair, likes, arguments(likes, *options), lead, shares)
            if all(map(is_plain, tensors))
            else None
        )
    return step


def _plan(
    program: Program,
    pair: tuple[str, str],
    likes: Tensors,
    args: Arguments,
    lead: tuple[int, ...],
    shares: bool,
) -> StepLaunch | None:
    """Plan the launch of a step; see `step_launch`."""
    choice, engine = plan_solve(program, args, *pair)
    schedule = engine.find(program) if isinstance(engine, FusedEngine) else None
    reads_out = program.step.has_readout
    if reads_out or not isinstance(schedule, CpuVectors) or schedule.solver != "sequential":
        return None
    of_pass, inputs = schedule.launch(program, args)
    if of_pass.launch is None or of_pass.launch.temporaries or not all(t.numel() for t in likes):
        return None
    found = [_source(tensor, likes) for tensor in inputs]
    sources = [source for source in found if source is not None]
    if len(sources) < len(found):
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
    kernel, template, _ = of_pass.launch
    launch = Launch(kernel, _template_by(template, sources))
    counts = torch.zeros((1, 2), dtype=torch.int64, device=args.gates.device)
    return StepLaunch(launch, results, count, states[0], choice, counts)


Source = tuple[int | None, int]
"""Index of a tensor, None for an absent one, and an offset in bytes."""
ABSENT_SOURCE: Source = (None, 0)


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
