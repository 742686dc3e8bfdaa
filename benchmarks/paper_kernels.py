"""The paper's kernel figures in its own protocol (Figures 1 and 2, Appendix B), on one device.

reduction: the linear recurrence against the length, diagonal and 2 x 2 blocks: the kernel,
PyTorch compiled, accelerated-scan, Mamba's selective scan. solve: a cell applied to x, input
projection included, forward and forward + backward of the paper's loss sum(h^2): kernels, Newton
with the paper's 3 updates, loops compiled by step and as a whole, a simplified Mamba, torch.nn.
split: (newton, fused) over segments and burn-ins, which are what its chunks are, for weights that
forget and for ones that hardly do.

A way is started by its calls from Python, and, where it never waits for the host, as a CUDA graph.
Writes results/paper_<section>.csv row by row, each picture from its file alone.

    python benchmarks/paper_kernels.py [--only solve] [--quick] [--out FOLDER] [--plot-only]

Processes with --turns FILE compile side by side and time one after the other; their files are put
together by their lines.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import cpu
import torch
from common import Record, new_parser, provenance
from gpu import report_missing
from paper_plots import PLOTS
from paper_ways import Way, reduction_ways, solve_ways
from protocol import (
    LAUNCHES,
    Add,
    Call,
    Row,
    first_seconds,
    launcher,
    protocol_times,
    turn,
)
from torch import Tensor

import pararnn
from pararnn.engines.arguments import totals
from pararnn.engines.request import using
from pararnn.engines.split import SplitRequest
from pararnn.engines.table import choose
from pararnn.program.program import program_of
from pararnn.solve import prepare, run

SHIFTS = {
    "gru": {"forgets": 0.0, "hardly forgets": -4.0},
    "lstm": {"forgets": 0.0, "hardly forgets": 4.0},
}
"""By cell, what its first gate is shifted by: the update gate shut, the forget gate open."""
CELLS = tuple(SHIFTS)
PASSES = ("forward", "both")


@dataclass(frozen=True)
class Settings:
    """Sizes, ms for a timing, cells, and ways of a run by the beginnings of their names.

    longest: ms of a call after which no longer length is tried. turns: the file by which processes
    that share the device take turns.
    """

    device: torch.device
    channels: int = 64
    reductions: Sequence[int] = tuple(2**n for n in (2, 4, 6, 8, 9, 10, 11, 12, 14, 16, 18, 20, 22))
    solves: Sequence[int] = tuple(2**n for n in (0, 3, 6, 9, 11, 13, 15, 17))
    split_length: int = 65536
    segments: Sequence[int | None] = (None, 4, 16, 64, 128, 256, 512, 1024)
    burn_ins: Sequence[int | None] = (None, 0, 16, 32, 48, 96)
    budget: float = 150.0
    longest: float = 150.0
    cells: Sequence[str] = CELLS
    ways: Sequence[str] = ("",)
    turns: Path | None = None

    def wants(self, way: str) -> bool:
        """Return True if a way is measured."""
        return way.startswith(tuple(self.ways))


def case_of(settings: Settings, what: str, way: str, step: str, length: int) -> Row:
    """Return the columns that name a row's case; `step` is the pass."""
    row: Row = {"what": what, "way": way, "pass": step}
    return row | {"B": 1, "T": length, "D": settings.channels}


def measure(settings: Settings, way: Way, calls: Sequence[tuple[Row, Call]], add: Add) -> float:
    """Add a row for each call and launch; return the ms of the longest call from Python.

    The calls have been made once.
    """
    longest = 0.0
    launches = LAUNCHES if way.graph and settings.device.type == "cuda" else LAUNCHES[:1]
    with turn(settings.turns, exclusive=True):
        for (row, call), launch in itertools.product(calls, launches):
            times = protocol_times(launcher(call, launch), settings.device, settings.budget)
            add({**row, "launch": launch, **times})
            longest = max(longest, times["min_ms"])
    return longest


def reduction(settings: Settings, add: Add) -> None:
    """Measure the linear recurrence against the length."""
    for what, length in itertools.product(("diagonal", "2 x 2"), settings.reductions):
        for way in reduction_ways(what, length, settings.channels, settings.device):
            if not settings.wants(way.name):
                continue
            row = case_of(settings, what, way.name, "forward", length)
            with torch.no_grad():
                _try(way, f"{what}, T = {length}", partial(_reduce, settings, way, row, add))


def _reduce(settings: Settings, way: Way, row: Row, add: Add) -> float:
    with turn(settings.turns, exclusive=False):
        torch.compiler.reset()
        call = way.make()
        row |= {"first_s": first_seconds(call, settings.device)}
        assert way.result is not None
        torch.testing.assert_close(call(), way.result, rtol=1e-3, atol=1e-3)
    return measure(settings, way, [(row, call)], add)


def passes(solve: Callable[[Tensor], Tensor], x: Tensor, weights: Sequence[Tensor]) -> list[Call]:
    """Return forward without gradients, and forward + backward of the paper's loss, sum(h^2)."""
    leaf = x.clone().requires_grad_()

    @torch.no_grad()
    def forward() -> Tensor:
        return solve(x)

    def both() -> tuple[Tensor, ...]:
        return torch.autograd.grad(solve(leaf).square().sum(), [leaf, *weights])

    return [forward, both]


def solve(settings: Settings, add: Add) -> None:
    """Measure cells applied to sequences, against the length."""
    for name in (*settings.cells, "mamba"):  # the peer last: an error of the GPU would end the rest
        torch.manual_seed(0)
        for way in solve_ways(name, settings.channels, settings.device):
            if not settings.wants(way.name):
                continue
            for length in settings.solves:
                if length > way.longest:
                    break
                call = partial(_solve, settings, name, way, length, add)
                ms = _try(way, f"{name}, T = {length}", call)
                if ms is None or ms > settings.longest:
                    break


def _solve(settings: Settings, name: str, way: Way, length: int, add: Add) -> float:
    """Measure both passes of a way; return the longer one's ms."""
    calls: list[tuple[Row, Call]] = []
    with turn(settings.turns, exclusive=False):
        torch.compiler.reset()
        x = torch.randn(1, length, settings.channels, device=settings.device)
        solve = way.make()
        for step, call in zip(PASSES, passes(solve, x, way.weights), strict=True):
            row = case_of(settings, name, way.name, step, length)
            calls.append((row | {"first_s": first_seconds(call, settings.device)}, call))
        if way.reference is not None:
            right = passes(way.reference, x, way.weights)
            for (_, call), reference in zip(calls, right, strict=True):
                torch.testing.assert_close(call(), reference(), rtol=2e-3, atol=1e-3)
    return measure(settings, way, calls, add)


def _try(way: Way, where: str, call: Callable[[], float]) -> float | None:
    """Return a way's measurement; None, with a message, for a peer's that fails."""
    try:
        return call()
    except Exception as error:
        if not way.peer:
            raise
        report_missing(f"{way.name}, {where}", error)
        return None


def split(settings: Settings, add: Add) -> None:
    """Measure (newton, fused) by segments and burn-in, and the loop's kernel."""
    for name in settings.cells:
        torch.manual_seed(0)
        for case, shift in SHIFTS[name].items():
            cell = pararnn.CELLS[name](settings.channels, device=settings.device)
            size = (1, settings.split_length, len(cell.gates), settings.channels)
            gates = torch.randn(size, device=settings.device)
            gates[:, :, 0] += shift
            _split(settings, cell, gates, f"{name}, {case}", ("sequential", "fused"), None, add)
            for request in itertools.product(settings.segments, settings.burn_ins):
                _split(settings, cell, gates, f"{name}, {case}", ("newton", "fused"), request, add)


def _split(
    settings: Settings,
    cell: pararnn.Cell,
    gates: Tensor,
    what: str,
    pair: tuple[str, str],
    parts: tuple[int | None, int | None] | None,
    add: Add,
) -> None:
    """Measure a pair; `parts`: requested segments and burn-in, None for the loop's kernel."""
    program, args = program_of(cell), prepare(cell, gates)
    request = SplitRequest.check(*(parts or (None, None)))
    way = Way(", ".join(pair), graph=True)
    row: Row = {"segments": "", "burn_in": "", "size": "", "sweeps": "", "mended": ""}
    row |= {"asked": "", "asked_burn_in": ""}
    if parts is not None:
        choice = choose(program, args.size, gates.dtype, gates.device, *pair)
        engine = choice.engine()
        assert engine.cuts_time
        plan = engine.plan_split(program, choice.workload, request)
        with torch.no_grad():
            info = run(program, args.with_options(**request._asdict()), *pair).info
        row |= {"segments": plan.segments, "burn_in": plan.burn_in, "size": plan.size}
        row |= dict(zip(("sweeps", "mended"), totals(info).tolist(), strict=True))
        row |= {"asked": request.segments or "rule"}
        row |= {"asked_burn_in": "rule" if request.burn_in is None else request.burn_in}

    states = cpu.pair(cell, *pair)
    calls = zip(PASSES, passes(states, gates, [*cell.parameters()]), strict=True)
    about = [
        (case_of(settings, what, way.name, step, gates.shape[1]) | row, call)
        for step, call in calls
    ]
    with using(segments=request.segments, burn_in=request.burn_in):
        measure(settings, way, about, add)


SECTIONS: dict[str, Callable[[Settings, Add], None]] = {
    "reduction": reduction,
    "split": split,
    "solve": solve,
}


def quick(settings: Settings) -> Settings:
    """Return settings that take every path once, at small sizes."""
    return replace(
        settings,
        reductions=(64, 256),
        solves=(1, 16),
        split_length=4096,
        segments=(None, 8),
        burn_ins=(None, 16),
        budget=5.0,
        longest=20.0,
    )


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", default="", help=f"sections by prefix: {', '.join(SECTIONS)}")
    parser.add_argument("--ways", nargs="+", default=("",), help="by what their names begin with")
    parser.add_argument("--lengths", type=int, nargs="+", help="of reduction and solve")
    parser.add_argument("--cells", nargs="+", default=CELLS, choices=CELLS)
    parser.add_argument("--budget", type=float, default=150.0, help="ms for a timing")
    parser.add_argument("--quick", action="store_true", help="every path once, at small sizes")
    parser.add_argument("--turns", type=Path, help="a file: processes that name it take turns")
    parser.add_argument("--plot-only", action="store_true", help="the pictures of what --out holds")
    parser.add_argument("--no-plot", action="store_true", help="no pictures")
    options = parser.parse_args()
    chosen = [name for name in SECTIONS if name.startswith(options.only)]
    if not chosen:
        parser.error(f"--only {options.only}: no such section; there are {', '.join(SECTIONS)}")
    settings = Settings(
        torch.device(options.device),
        budget=options.budget,
        cells=options.cells,
        ways=options.ways,
        turns=options.turns,
    )
    settings = quick(settings) if options.quick else settings
    if options.lengths:
        settings = replace(settings, reductions=options.lengths, solves=options.lengths)
    about, begin = provenance(settings.device), time.perf_counter()
    for name in chosen:
        path = options.out / f"paper_{name}.csv"
        if not options.plot_only:
            torch.manual_seed(0)
            SECTIONS[name](settings, Record(path, about).add)
            print(f"{name}: {time.perf_counter() - begin:.0f} s", flush=True)
        if not options.no_plot:
            PLOTS[name](path, path.with_suffix(".png"))


if __name__ == "__main__":
    main()
