"""Recurrences that mix channels inside heads on one GPU, next to what others take for the same.

Each cell at heads of 16 to 256 channels in a width of 768, and at one dense head of 512 and of 768;
1,024 steps; forward without gradients, and forward + backward with all gradients. Ways: `kernels`
(pararnn.solve on gates), `layer` (with its projection), `loop` (the step in PyTorch), each replayed
as a CUDA graph; by calls `cudnn` (torch.nn, with its projection) and flashrnn (PyPI; its CUDA
backends need nvcc, and minutes to compile a size). Inputs are drawn anew and exceed the cache.

Writes results/mixing.csv and mixing.png. Rows of an earlier run stay unless measured again, so a
run may be cut into parts by --only: a regular expression in the name of a case, such as
"kernels-lstm-64-B16-bfloat16". Kernels are compiled before, by several processes.

    python benchmarks/mixing.py [--only REGEX] [--list] [--quick] [--processes N] [--out FOLDER]
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import os
import re
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
from common import add_row, new_parser, provenance, read_rows, write_csv
from gpu import cache_bytes, copy_rate, replay_times, replays_within, report_missing, sets_for
from markdown_tables import Row as Strings
from pictures import caption, draw, new_figure
from protocol import Call, Row, run_times
from tables_mixing import title_of
from torch import Tensor, nn

import pararnn

CELLS: dict[str, type[pararnn.Cell]] = {
    "lstm": pararnn.HeadLSTMCell,
    "gru": pararnn.HeadGRUCell,
    "slstm": pararnn.HeadSLSTMCell,
}
LAYERS: dict[str, Callable[..., nn.Module]] = {"lstm": pararnn.LSTM, "gru": pararnn.GRU}
CUDNN: dict[str, Callable[..., nn.Module]] = {"lstm": nn.LSTM, "gru": nn.GRU}
FLASHRNN_SIZES = {"lstm": (4, 2), "gru": (3, 1), "slstm": (4, 4)}
"""Gates and states of flashrnn's functions."""
DEVICE = "cuda"
LENGTH, WIDTH = 1024, 768
HEADS = (16, 32, 64, 128, 256, 512, 768)
BATCHES = (1, 16, 64, 256)
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
BUDGET, QUICK_BUDGET = 500.0, 50.0
"""Milliseconds for the runs of a timing."""
SECONDS = {"kernels": 3, "layer": 4, "cudnn": 4, "loop": 20, "flashrnn-triton": 15}
"""Seconds that a case takes, about; a minute for one that nvcc compiles."""
COMPILATION = 15
"""Seconds of a process for the kernels of a size, about."""
KEYS = ("way", "cell", "head", "B", "T", "dtype", "pass")


class Case(NamedTuple):
    """One size of a cell, and what runs it."""

    way: str
    cell: str
    head: int
    batch: int
    dtype: str = "bfloat16"
    length: int = LENGTH

    @property
    def width(self) -> int:
        """Channels."""
        return 512 if self.head == 512 else WIDTH

    @property
    def heads(self) -> int:
        """Heads."""
        return self.width // self.head

    @property
    def name(self) -> str:
        """Name for --only."""
        return f"{self.way}-{self.cell}-{self.head}-B{self.batch}-{self.dtype}"


class Way(NamedTuple):
    """A differentiable function: call(*inputs), the sizes of its inputs, and its weights."""

    call: Callable[..., Tensor]
    sizes: Sequence[Sequence[int]]
    weights: Sequence[Tensor] = ()


def all_cases() -> list[Case]:
    """Return the cases in the order of their measurement: peers that may fail last."""
    cases = [Case("kernels", *size) for size in itertools.product(CELLS, HEADS, BATCHES)]
    cases += [Case("kernels", cell, 64, b, "float32") for cell in CELLS for b in BATCHES]
    cases += [Case("layer", cell, head, 16) for cell in LAYERS for head in (64, 512, 768)]
    sizes = itertools.product(CUDNN, (512, 768), BATCHES, ("float16", "bfloat16"))
    cases += [Case("cudnn", *size) for size in sizes]
    cases += [Case("loop", cell, 64, 16) for cell in CELLS]
    sizes_of_triton = itertools.product(CELLS, (16, 32, 64), BATCHES)
    cases += [Case("flashrnn-triton", *size) for size in sizes_of_triton]
    for backend in ("cuda_fused", "cuda"):
        cases += [Case(f"flashrnn-{backend}", "lstm", head, 16) for head in (64, 128, 256)]
    return cases


def way_of(case: Case) -> Way:
    """Return what runs a case. Raises ImportError for a peer that is not installed."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"device": DEVICE, "dtype": DTYPES[case.dtype]}
    if case.way in ("kernels", "loop"):
        backend = "fused" if case.way == "kernels" else "torch"
        return _solving(case, backend, options)
    size = (case.batch, case.length, case.width)
    if case.way.startswith("flashrnn"):
        return _flashrnn(case, options)
    if case.way == "layer":
        layer = LAYERS[case.cell](
            case.width, case.width, num_heads=case.heads, batch_first=True, **options
        )
    else:
        layer = CUDNN[case.cell](case.width, case.width, batch_first=True, **options)
    return Way(lambda x: layer(x)[0], [size], [*layer.parameters()])


def _solving(case: Case, backend: str, options: dict[str, Any]) -> Way:
    cell = CELLS[case.cell](case.width, num_heads=case.heads, **options)

    def call(gates: Tensor) -> Tensor:
        states, _ = pararnn.solve(cell, gates, solver="sequential", backend=backend)
        return states if isinstance(states, Tensor) else states[0]

    size = (case.batch, case.length, len(cell.gates), case.width)
    return Way(call, [size], [*cell.parameters()])


def _flashrnn(case: Case, options: dict[str, Any]) -> Way:
    function = importlib.import_module("flashrnn").flashrnn
    gates, states = FLASHRNN_SIZES[case.cell]
    matrices = torch.randn(gates, case.heads, case.head, case.head, **options) * case.head**-0.5
    biases = torch.zeros(gates, case.heads, case.head, **options)
    initial = torch.zeros(states, case.batch, 1, case.heads, case.head, **options)
    weights = [matrices.requires_grad_(), biases.requires_grad_()]
    backend = case.way.removeprefix("flashrnn-")

    def call(gates: Tensor) -> Tensor:
        results, _ = function(gates, *weights, states=initial, function=case.cell, backend=backend)
        output: Tensor = results[0]
        return output

    return Way(call, [(case.batch, case.length, gates, case.heads, case.head)], weights)


def passes(case: Case, way: Way, cache: int) -> Iterator[tuple[str, list[Call]]]:
    """Yield forward without gradients, and forward + backward, on inputs that exceed the cache."""
    dtype = DTYPES[case.dtype]
    one = sum(torch.Size(size).numel() for size in way.sizes) * dtype.itemsize
    draws = [
        [torch.randn(size, device=DEVICE, dtype=dtype) for size in way.sizes]
        for _ in range(sets_for(one, cache))
    ]

    @torch.no_grad()
    def forward(inputs: Sequence[Tensor]) -> Tensor:
        return way.call(*inputs)

    cotangent = torch.randn_like(forward(draws[0]))

    def both(inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        leaves = [t.detach().requires_grad_() for t in inputs]  # graphs capture what they made
        return torch.autograd.grad(way.call(*leaves), [*leaves, *way.weights], cotangent)

    yield "forward", [partial(forward, inputs) for inputs in draws]
    yield "both", [partial(both, inputs) for inputs in draws]


def times_of(calls: Sequence[Call], by_graph: bool, budget: float) -> Row:
    """Return the median and the minimum of a call, and the runs: replays of a graph, or calls."""
    if by_graph:
        times = replay_times(calls, budget)
    else:
        device = torch.device(DEVICE)
        estimate = min(run_times(calls[0], device, 3))
        turns = itertools.cycle(calls)
        times = run_times(lambda: next(turns)(), device, replays_within(estimate, budget))
    row: Row = {"median_ms": round(statistics.median(times), 5), "min_ms": round(min(times), 5)}
    return row | {"runs": len(times), "timing": "graph" if by_graph else "calls"}


def bytes_moved(case: Case, what: str) -> int:
    """Return the bytes that a pass must read and write, without matrices."""
    cell = CELLS[case.cell]
    gates, states = len(cell.gates), len(cell.states)
    forward, backward = gates + states, 2 * gates + states + 1
    tensors = forward if what == "forward" else forward + backward
    numbers = case.batch * case.length * case.width
    return numbers * DTYPES[case.dtype].itemsize * tensors


def rows_of(case: Case, budget: float, rate: float, cache: int) -> Iterator[Row]:
    """Yield a row for each pass. `rate`: bytes that are copied a second."""
    own = ("kernels", "layer", "loop")
    for what, calls in passes(case, way_of(case), cache):
        times = times_of(calls, case.way in own, budget)
        limit = bytes_moved(case, what) / rate * 1e3
        size: Row = {"head": case.head, "heads": case.heads, "B": case.batch, "T": case.length}
        yield {
            "way": case.way,
            "cell": case.cell,
            **size,
            "D": case.width,
            "dtype": case.dtype,
            "pass": what,
            **times,
            "ns_per_step": round(times["median_ms"] * 1e6 / case.length, 1),
            "limit_ms": round(limit, 5),
            "over_limit": round(times["median_ms"] / limit, 2),
            "over_kernels": "",
        }


def with_ratios(rows: Sequence[Strings]) -> list[Row]:
    """Return the rows, each with its time over that of our kernels in the same dtype.

    float16 of peers is over our bfloat16.
    """

    def key(row: Strings, dtype: str) -> tuple[str, ...]:
        return (*(row[k] for k in ("cell", "head", "B", "T", "pass")), dtype)

    kernels = {key(r, r["dtype"]): float(r["median_ms"]) for r in rows if r["way"] == "kernels"}
    results: list[Row] = []
    for row in rows:
        dtype = "bfloat16" if row["dtype"] == "float16" else row["dtype"]
        own = kernels.get(key(row, dtype))
        ratio = "" if own is None else round(float(row["median_ms"]) / own, 2)
        results.append({**row, "over_kernels": ratio})
    return results


def compile_case(case: Case) -> None:
    """Run a short case, so that its kernels are in the cache; errors are the measurement's."""
    try:
        for _, calls in passes(case._replace(length=16), way_of(case), cache=0):
            calls[0]()
        torch.cuda.synchronize()
    except Exception as error:
        report_missing(f"compilation of {case.name}", error)


def compile_all(cases: Sequence[Case], processes: int) -> None:
    """Compile the kernels of cases by several processes, sizes of a variant one after the other."""
    own = [case for case in cases if case.way in ("kernels", "layer")]
    first = [case for case in own if case.batch == min(c.batch for c in own)]
    last = [case for case in own if case.batch == max(c.batch for c in own) and case not in first]
    others = [case for case in own if case not in first and case not in last]
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        for cases_at_once in (first, last, others):
            list(pool.map(compile_case, cases_at_once))


def expected_seconds(cases: Sequence[Case], processes: int) -> float:
    """Return about how long a run takes: timings, and compilations by several processes."""
    sizes = {(c.cell, c.head, c.dtype, c.batch > 16) for c in cases if c.way == "kernels"}
    timings = sum(SECONDS.get(case.way, 60) for case in cases)
    return timings + COMPILATION * len(sizes) / processes


def picture(rows: Sequence[Strings], path: Path, batch: int = 16) -> None:
    """Draw the times over the size of heads, a panel a cell and pass."""
    rows_of_batch = [
        row for row in rows if row["B"] == str(batch) and row["way"] not in ("layer", "loop")
    ]
    steps = {"forward": "forward", "both": "forward + backward"}
    figure = new_figure(4.0 * len(CELLS), 7.0)
    panels = figure.subplots(len(steps), len(CELLS), squeeze=False)
    for line, (step, title) in zip(panels, steps.items(), strict=True):
        for axes, cell in zip(line, CELLS, strict=True):
            curves: dict[str, list[tuple[int, float]]] = {}
            for row in rows_of_batch:
                if (row["cell"], row["pass"]) == (cell, step):
                    point = (int(row["head"]), float(row["median_ms"]))
                    curves.setdefault(title_of(row), []).append(point)
            if curves:
                draw(axes, curves, "channels of a head", "ms")
                axes.set_ylim(auto=True)
                axes.set_yscale("log")
            axes.set_title(f"{cell.upper()}, {title}")
    size = f"B = {batch}, T = {LENGTH:,}, width {WIDTH} (512 where the head is)"
    caption(figure, rows_of_batch, size)
    figure.savefig(path, dpi=150)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = new_parser(__doc__)
    parser.add_argument("--only", default="", help="cases whose names match, see --list")
    parser.add_argument("--list", action="store_true", help="name the cases, and end")
    parser.add_argument("--quick", action="store_true", help="few runs a timing")
    processes = max(1, min(15, (os.cpu_count() or 2) - 1))
    parser.add_argument("--processes", type=int, default=processes, help="that compile kernels")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    args = parser().parse_args(arguments)
    cases = [case for case in all_cases() if re.search(args.only, case.name)]
    seconds = expected_seconds(cases, args.processes)
    print(f"{len(cases)} cases, about {seconds:.0f} s", flush=True)
    if args.list or not cases:
        print(*(case.name for case in cases), sep="\n")
        return
    begin, path, budget = time.perf_counter(), args.out / "mixing.csv", BUDGET
    if args.quick:
        budget = QUICK_BUDGET
    compile_all(cases, args.processes)
    print(f"compiled: {time.perf_counter() - begin:.0f} s", flush=True)
    cache, rate = cache_bytes(), copy_rate(budget)
    about: Row = provenance(DEVICE) | {"copy_GB_per_s": f"{rate / 1e9:.1f}"}  # read and written
    for case in cases:
        try:
            for row in rows_of(case, budget, rate, cache):
                add_row(path, about | row, KEYS)
                figures = f"{row['median_ms']:.4g} ms (minimum {row['min_ms']:.4g})"
                print(f"{case.name:42} {row['pass']:8} {figures}", flush=True)
        except Exception as error:
            report_missing(case.name, error)
        torch.cuda.empty_cache()
    if path.exists():
        write_csv(path, with_ratios(read_rows(path)))
        picture(read_rows(path), path.with_suffix(".png"))
    print(f"written to {path}: {time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()
