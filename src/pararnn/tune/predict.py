"""Prediction of `explain`: how fast a layer forgets, Newton's sweeps, and the fastest pair."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from pararnn.base.errors import ConvergenceWarning
from pararnn.base.numerics import FORWARD_TOLERANCE
from pararnn.engines import newton_torch
from pararnn.engines.arguments import Arguments, Solution, totals
from pararnn.engines.engine import Engine
from pararnn.engines.forward_time import in_order
from pararnn.engines.table import find
from pararnn.engines.tangents import tangent_call
from pararnn.engines.tuned import Workload
from pararnn.program.coupling import APART
from pararnn.program.program import Program, program_by_key
from pararnn.solve import run_engine
from pararnn.solvers.newton import ERROR_SHARE, MAX_SWEEPS
from pararnn.tune.candidates import engines_for, jacobian_entries
from pararnn.tune.timing import least_seconds

SHORTEST = 64
"""Least steps of a sequence to predict for."""
SHARE, LEAST, MOST = 4, 256, 1024
"""A prediction runs one step in SHARE, at least LEAST and at most MOST of them."""
SHORT, APART_BY, HOPELESS = 4, 4, 8.0
"""Least steps that are timed, the ratio of two lengths, and that of the expected time to the best
pair's above which longer ones are not."""
PROBE_ENTRIES, PROBE_STEPS = 2**20, 128
"""Entries of Jacobians of a run that only counts Newton's updates, and steps of one without."""
ROWS, WINDOW, STRETCH = 4, 256, 16
"""Rows and steps of which the exponent is the mean, the first quarter left out; and steps after
which tangents are scaled to length 1."""
BUDGET = 0.04
"""Seconds in which a short call is timed again."""

WHOLE = ("scan", "torch")
"""Backends on which Newton's updates are of the whole sequence."""

Pair = tuple[str, str]
States = tuple[Tensor, ...]


@dataclass(frozen=True)
class Prediction:
    """Prediction of `explain` for a layer and its input; prints as a few lines.

    exponent: the largest Lyapunov exponent in nats a step, the mean growth of the logarithm of a
    small change of the state; below 0 the layer forgets its start, nan where states are not finite.
    expanding: share of the columns (channels of elementwise cells, else rows) whose exponent is
    above 0. sweeps: updates of Newton over the whole sequence, which it would take where no pair
    has it. converges: whether these suffice within the solver's limit, or the loop finishes some
    columns. times: milliseconds of a call at full size by pair, fastest first. backward: whether
    they include the backward pass. steps: those that the prediction ran.
    """

    exponent: float
    expanding: float
    sweeps: int
    converges: bool
    times: dict[Pair, float]
    backward: bool
    steps: int

    @property
    def pair(self) -> Pair:
        """(solver, backend) of the least time."""
        return next(iter(self.times))

    def __str__(self) -> str:
        passes = "forward + backward" if self.backward else "forward"
        whither = "it expands" if self.exponent > 0 else "it contracts"
        if math.isnan(self.exponent):
            whither = "states are not finite"
        newton = f"takes {self.sweeps} sweeps"
        if not self.converges:
            newton = f"does not converge within {MAX_SWEEPS} sweeps, and the loop finishes the rest"
        share = f"{self.expanding:.0%} of the columns expand"
        rows = [f"({', '.join(pair)}) {ms:.3g} ms" for pair, ms in self.times.items()]
        return "\n".join(
            [
                f"  predicted by {self.steps} steps:",
                f"    largest Lyapunov exponent {self.exponent:.3g} nats a step: {whither}, "
                f"{share}",
                f"    Newton over the whole sequence {newton}",
                f"    {passes}: {', '.join(rows)}",
            ]
        )


class Sample(NamedTuple):
    """A call on some steps: seconds forward and backward, Newton's updates and what they left."""

    steps: int
    forward: float
    backward: float
    sweeps: int
    mended: int


def steps_for(length: int) -> int:
    """Return the steps that a prediction for sequences of a length runs.

    Raises ValueError for a length below SHORTEST.
    """
    if length < SHORTEST:
        raise ValueError(
            f"a prediction needs sequences of {SHORTEST} steps or more, got {length}: shorter ones "
            "run in the time that it takes; measure them by pararnn.autotune"
        )
    return min(length, MOST, max(LEAST, length // SHARE))


def predict(
    workload: Workload, args: Arguments, solver: str, backend: str, backward: bool
) -> Prediction:
    """Predict a call of a workload.

    args: the call's first steps, `steps_for` of them. solver, backend: a request. Raises
    EngineError where it cannot run.
    """
    program = program_by_key(workload.key)
    args = args.map(Tensor.detach)
    by_column = exponents(program, args)
    exponent = float(by_column.max())
    runs = [
        Run(engine, workload, args, backward, exponent)
        for engine in engines_for(workload, solver, backend)
    ]
    with _without_warnings():
        _time(runs, _lengths(args.size[1]))
    whole = (run.samples for run in runs if run.is_whole and len(run.samples) > 1)
    counts = next((x for x in whole if x[-1].steps == args.size[1]), [])
    times = {run.pair: run.expected() for run in runs}
    length = workload.size[1]
    counts = counts[-2:] or _probe(program, args)
    expected = round(sweeps_at(length, counts, exponent))
    converges = not counts[-1].mended and expected <= MAX_SWEEPS
    return Prediction(
        exponent,
        float((by_column > 0).double().mean()),
        expected if converges else MAX_SWEEPS,
        converges,
        {pair: 1e3 * times[pair] for pair in sorted(times, key=times.__getitem__)},
        backward,
        args.size[1],
    )


@torch.no_grad()
def exponents(program: Program, args: Arguments) -> Tensor:
    """Return the largest Lyapunov exponent of each column, in nats a step: (D,) float64 for
    elementwise cells, (1,) for others.

    A tangent of the states is solved beside them by the derived cell (see `tangent_of`), and scaled
    to length 1 now and then (Benettin et al. 1980). Means over rows, as rows are samples of the
    same inputs; nan where states are not finite, -inf where a change vanishes altogether.
    """
    args = part_of(program, args, ROWS, WINDOW).map(_wide)
    gates, *fields = (in_order(x, args.options.reverse) for x in (args.gates, *args.fields))
    args = replace(args.with_options(reverse=False), initial=args.start(program))
    states = args.initial
    tangents = draws = _draws(states)
    growth, counted = torch.zeros((), dtype=torch.float64, device=gates.device), 0
    for begin in range(0, gates.shape[1], STRETCH):
        stretch = slice(begin, begin + STRETCH)
        fields_of = tuple(field[:, stretch] for field in fields)
        part = replace(args, gates=gates[:, stretch], fields=fields_of)
        states, tangents = _advance(program, part, states, tangents)
        length = _length(program, tangents)
        # Where a state starts without an effect, such as that of h * h at 0, another one counts.
        tangents = tuple(
            torch.where(_by_column(length > 0, u), u / _by_column(length, u), draw)
            for u, draw in zip(tangents, draws, strict=True)
        )
        if begin >= gates.shape[1] // 4:
            growth, counted = growth + length.log(), counted + part.gates.shape[1]
    return growth.mean(0) / counted


def _advance(program: Program, args: Arguments, states: States, tangents: States) -> list[States]:
    """Return the last states of some steps from others, and their tangents."""
    args = replace(args, initial=states)
    direction = replace(args.map(lambda _: None), initial=tangents)  # type: ignore[arg-type,return-value]
    call = tangent_call(program, ("sequential", "torch"), args, direction)
    engine = find(*call.pair, args.gates.device)
    assert engine is not None
    final = engine.forward(call.program, call.args.complete(call.program)).final
    return [final[: program.num_states], final[program.num_states :]]


def _wide(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def _length(program: Program, tangents: Sequence[Tensor]) -> Tensor:
    """Return the length of the tangents of each column, (B, D) or (B, 1)."""
    if program.coupling is APART:
        return torch.linalg.vector_norm(torch.stack(tuple(tangents)), dim=0)
    flat = torch.cat([tangent.flatten(1) for tangent in tangents], 1)
    return torch.linalg.vector_norm(flat, dim=1, keepdim=True)


def _draws(states: Sequence[Tensor]) -> States:
    """Return random directions, the same at every call."""
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(h.shape, generator=generator, dtype=h.dtype).to(h) for h in states)


def _by_column(column: Tensor, state: Tensor) -> Tensor:
    return column.view(*column.shape, *(1,) * (state.ndim - column.ndim))


def part_of(program: Program, args: Arguments, rows: int, steps: int) -> Arguments:
    """Return the first rows and steps, in the order of processing, of a call without sequences and
    initial states."""
    count, length = len(program.params), args.size[1]
    first = max(0, length - steps) if args.options.reverse else 0
    part = slice(None, rows), slice(first, first + steps)
    return replace(
        args,
        gates=args.gates[part],
        fields=tuple(field[part] for field in args.fields),
        params=(*args.params[:count], *(memory[:rows] for memory in args.params[count:])),
        sequences=min(rows, args.sequences),
    )


def sweeps_at(steps: int, samples: Sequence[Sample], exponent: float) -> float:
    """Return the sweeps to expect on `steps`, of samples on fewer.

    Where dynamics contract they grow by the logarithm of T, as the largest of more numbers does;
    where they expand, by a power of T, T itself at most.
    """
    (n, _, _, few, _), (m, _, _, many, _) = samples[-2:]
    if many <= few or steps <= m:
        return float(many)
    if exponent < 0:
        return many + (many - few) * math.log(steps / m, m / n)
    return many * (steps / m) ** min(1.0, math.log(many / max(1, few), m / n))


def _seconds_at(steps: int, samples: Sequence[Sample], exponent: float | None) -> float:
    """Return the seconds to expect on `steps`; exponent: of a pair whose time grows by sweeps."""
    samples, sweeps = samples[-2:], [0, 0]
    expected = 0.0
    if exponent is not None:
        sweeps = [sample.sweeps for sample in samples]
        expected = min(MAX_SWEEPS, sweeps_at(steps, samples, exponent))
    lengths = [sample.steps for sample in samples]
    # A solve evaluates all steps once more than it updates them.
    one = [s.forward / (1 + count) for s, count in zip(samples, sweeps, strict=True)]
    backward = [sample.backward for sample in samples]
    return (1 + expected) * _line(steps, lengths, one) + _line(steps, lengths, backward)


def _line(x: float, places: Sequence[int], values: Sequence[float]) -> float:
    """Return the value at x of a line through two points that rises, and from no less than 0."""
    (first, last), (low, high) = places, values
    slope = (high - low) / (last - first)
    return high + (x - last) * min(max(slope, 0.0), high / last)


def _lengths(longest: int) -> list[int]:
    """Return the numbers of steps to time, in ascending order."""
    lengths = [longest]
    while lengths[0] >= APART_BY * SHORT:
        lengths.insert(0, lengths[0] // APART_BY)
    return lengths


class Run:
    """Runs of an engine on more and more steps, in the segments that the whole length is cut into.

    samples: one for each length, in ascending order.
    """

    def __init__(
        self, engine: Engine, workload: Workload, args: Arguments, backward: bool, exponent: float
    ) -> None:
        self.engine, self.program = engine, program_by_key(workload.key)
        self.length, self.backward = workload.size[1], backward
        self.pair = engine.solver, engine.backend
        self.is_whole = engine.solver == "newton" and engine.backend in WHOLE
        self.exponent = exponent if self.is_whole else None
        if engine.cuts_time:
            plan = engine.plan_split(self.program, workload, args.split)
            args = args.with_options(segments=plan.segments, burn_in=plan.burn_in)
        self.args, self.samples = args, list[Sample]()

    def call(self, steps: int) -> Call:
        part = part_of(self.program, self.args, self.args.size[0], steps)
        return Call(self.program, self.engine, part, self.backward)

    def time(self, steps: int) -> None:
        call = self.call(steps)
        if not self.samples:
            for phase in call.phases:  # traces, and builds what it needs
                phase()
        seconds = least_seconds(call.phases, self.args.gates.device, BUDGET)
        forward, backward = (*seconds, 0.0)[:2]
        counts = totals(call.solution.info).tolist()
        self.samples.append(Sample(steps, forward, backward, *counts))

    def expected(self) -> float:
        """Return the seconds to expect at full length."""
        return _seconds_at(self.length, self.samples, self.exponent)


def _time(runs: Sequence[Run], lengths: Sequence[int]) -> None:
    """Time runs on each length in turn, without those that are hopeless by the shorter ones."""
    for count, steps in enumerate(lengths):
        if count > 1:
            least = min(run.expected() for run in runs)
            runs = [run for run in runs if run.expected() <= HOPELESS * least]
        for run in runs:
            run.time(steps)


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Keep the runs of a prediction from warning of what the prediction says."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        yield


class Call:
    """Call of an engine, and the backward pass of random cotangents, as phases to run in turn.

    solution: of the last forward pass.
    """

    solution: Solution

    def __init__(self, program: Program, engine: Engine, args: Arguments, backward: bool) -> None:
        self.program, self.engine, self.differentiates = program, engine, backward
        self.phases = [self.forward, self.backward] if backward else [self.forward]
        self.args = args.map(
            lambda t: t.detach().requires_grad_(backward and t.is_floating_point())
        )
        self.grads: States = ()

    def forward(self) -> None:
        with torch.set_grad_enabled(self.differentiates):
            self.solution = run_engine(self.program, self.engine, self.args)

    def backward(self) -> None:
        """Differentiate what a layer reads of the solution."""
        every = self.program.keeps_states and not self.args.options.output_only
        read = self.solution.states if every else self.solution.states[:1]
        self.grads = self.grads or _draws(read)
        leaves = [leaf for leaf in self.args.leaves() if leaf.requires_grad]
        torch.autograd.grad(read, leaves, self.grads, allow_unused=True)


def _probe(program: Program, args: Arguments) -> list[Sample]:
    """Count Newton's updates on two lengths of few rows."""
    engine, rows, longest = newton_torch.ENGINE, ROWS, args.size[1]
    entries = jacobian_entries(program, (1, 1, program.workload_size(args.size)[2]))
    if engine.why_not(program) is not None or longest * entries > PROBE_ENTRIES:
        return _count_by_loop(program, args)
    samples = []
    with _without_warnings():
        for steps in (longest // APART_BY, longest):
            call = Call(program, engine, part_of(program, args, rows, steps), False)
            call.forward()
            samples.append(Sample(steps, 0.0, 0.0, *totals(call.solution.info).tolist()))
    return samples


@torch.no_grad()
def _count_by_loop(program: Program, args: Arguments) -> list[Sample]:
    """Count Newton's updates without a Jacobian, which would be huge: an update is a loop over
    h' = f(p) + Df(p) (h - p) at the iterate p, whose product the tangents' cell computes.

    Steps before the first one that an update moves are settled.
    """
    args = part_of(program, args, ROWS, PROBE_STEPS)
    gates, *fields = (in_order(x, args.options.reverse) for x in (args.gates, *args.fields))
    args, length = args.with_options(reverse=False), gates.shape[1]
    steps = [
        replace(args, gates=gates[:, part], fields=tuple(field[:, part] for field in fields))
        for part in (slice(t, t + 1) for t in range(length))
    ]
    zero = args.start(program)
    none = tuple(map(torch.zeros_like, zero))
    iterate = [_advance(program, step, zero, none)[0] for step in steps]
    tolerance, settled = ERROR_SHARE * FORWARD_TOLERANCE[args.dtype], 0
    lengths = [length // APART_BY, length]
    counts = dict.fromkeys(lengths, MAX_SWEEPS)
    for sweep in range(MAX_SWEEPS + 1):
        previous, change = iterate[settled - 1] if settled else zero, none
        moved = length
        for t in range(settled, length):
            values = _advance(program, steps[t], previous, change)
            states = tuple(value + along for value, along in zip(*values, strict=True))
            previous, iterate[t] = iterate[t], states
            change = tuple(h - p for h, p in zip(states, previous, strict=True))
            if moved == length and not _is_small(change, states, tolerance):
                moved = t
        for end in lengths:
            counts[end] = min(counts[end], sweep if moved >= end else MAX_SWEEPS)
        settled = moved
        if settled == length:
            break
    return [Sample(n, 0.0, 0.0, counts[n], int(n > settled)) for n in lengths]


def _is_small(change: States, states: States, tolerance: float) -> bool:
    """Check that each state has changed by no more than a share of its largest entry."""
    return all(
        bool(u.abs().amax() <= tolerance * h.abs().amax())
        for u, h in zip(change, states, strict=True)
    )
