"""Recurrences that mix channels inside heads on one GPU, next to what others take for the same.

Each cell at heads of 16 to 256 channels in a width of 768, and at one dense head of 512 and of 768;
1,024 steps; forward without gradients, and forward + backward with all gradients. Ways:

    kernels         pararnn.solve on gates, replayed as a CUDA graph, as the next three are
    layer           with its projection; layer-resets with 1% of steps that start anew
    projection      the layer's projection alone
    loop            the step in PyTorch
    cudnn           torch.nn, with its projection, by calls, as the next two are
    torchrl-triton  torchrl's modules with resets and their projection (PyPI); its published case is
                    the block GRU at T = 512, with a dense product and norms in its step
    flashrnn-...    flashrnn's backends (PyPI); cuda and cuda_fused need nvcc, and minutes a size

Inputs are drawn anew and exceed the cache. Each case runs in another process, with a limit of time:
one that fails has rows that say why. Kernels are compiled before, by several processes.

Writes results/mixing.csv and mixing.png, a row at a time. Rows of an earlier run stay unless
measured again, so a run may be cut into parts by --only: a regular expression in the name of a
case, such as "kernels-lstm-64-B16-bfloat16". --merge puts rows of other files in, and runs nothing.

    python benchmarks/mixing.py [--only REGEX] [--list] [--quick] [--processes N] [--out FOLDER]
                                [--seconds N] [--device cpu --length N] [--merge FILE ...]
"""

from __future__ import annotations

import argparse
import os
import queue
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
from common import add_row, new_parser, provenance, read_rows, write_csv
from gpu import cache_bytes, copy_rate, launched_times
from isolated import Isolated, LostError
from markdown_tables import PASSES
from markdown_tables import Row as Strings
from mixing_ways import CELLS, COMPARED, DTYPES, LENGTH, WIDTH, Case, all_cases, passes
from pictures import caption, draw, legend_below, new_figure, scale_ms
from protocol import Row
from tables_mixing import NAMES, is_measured, title_of

BUDGET, QUICK_BUDGET = 500.0, 50.0
"""Milliseconds for the runs of a timing."""
SECONDS = {"kernels": 3, "layer": 4, "projection": 3, "cudnn": 4, "loop": 20, "torchrl": 6}
"""Seconds that a case takes, about, by the first word of its way; 8 for others."""
COMPILATION, NVCC = 15, 120
"""Seconds of a process for the kernels of a size, about, and for those that nvcc compiles."""
SLACK = 60
"""Seconds that a case may take in addition to ten times what it should."""
FRACTION = 0.75
"""Fraction of a limit of time that compilation may use."""
REPLAYED = ("kernels", "layer", "projection", "loop")
"""First words of the ways that are replayed as a graph."""
KEYS = ("way", "cell", "head", "B", "T", "dtype", "pass")
NOT_DRAWN = ("layer", "projection", "loop")


class Settings(NamedTuple):
    """Facts that all rows of a run share: device, ms for a timing, bytes copied a second, L2."""

    device: str
    budget: float
    rate: float
    cache: int


def bytes_moved(case: Case, what: str) -> int:
    """Return the bytes that a pass must read and write, without matrices."""
    cell = CELLS[case.cell]
    gates, states = len(cell.gates), len(cell.states)
    forward, backward = gates + states, 2 * gates + states + 1
    tensors = forward if what == "forward" else forward + backward
    numbers = case.batch * case.length * case.width
    return numbers * DTYPES[case.dtype].itemsize * tensors


def row_of(case: Case, what: str, times: Row, limit: float, reason: str = "") -> Row:
    """Return a row; `times` are empty and there is a reason where a pass has not been measured."""
    median = times.get("median_ms")
    size: Row = {"head": case.head, "heads": case.heads, "B": case.batch, "T": case.length}
    names = ("median_ms", "min_ms", "runs", "timing")
    return {
        "way": case.way,
        "cell": case.cell,
        **size,
        "D": case.width,
        "dtype": case.dtype,
        "pass": what,
        **{name: times.get(name, "") for name in names},
        "ns_per_step": "" if median is None else round(median * 1e6 / case.length, 1),
        "limit_ms": round(limit, 5),
        "over_limit": "" if median is None else round(median / limit, 2),
        "over_kernels": "",
        "apart_over_kernels": "",
        "missing": reason,
    }


def rows_of(case: Case, settings: Settings) -> Iterator[Row]:
    """Yield a row for each pass."""
    launch = "graph" if settings.device == "cuda" and case.way.startswith(REPLAYED) else "calls"
    for what, calls in passes(case, settings.device, settings.cache):
        limit = bytes_moved(case, what) / settings.rate * 1e3
        times = launched_times(calls, launch, settings.device, settings.budget)
        yield row_of(case, what, times | {"timing": launch}, limit)
    if settings.device == "cuda":
        torch.cuda.empty_cache()


def short_runs(case: Case, settings: Settings) -> Iterator[None]:
    """Run a short case, so that its kernels are in the cache."""
    for _, calls in passes(case._replace(length=16), settings.device, cache=0):
        calls[0]()
    if settings.device == "cuda":
        torch.cuda.synchronize()
    yield from ()


def with_ratios(rows: Sequence[Strings]) -> list[Row]:
    """Return the rows, each with its time over that of our kernels in the same dtype.

    float16 of peers is over our bfloat16. Those of layers have in addition what they take apart
    from their projection, over our kernels.
    """

    def key(row: Strings, dtype: str) -> tuple[str, ...]:
        return (*(row[k] for k in ("cell", "head", "B", "T", "pass")), dtype)

    complete = [row for row in rows if is_measured(row)]
    times: Mapping[str, dict[tuple[str, ...], float]] = {
        way: {key(r, r["dtype"]): float(r["median_ms"]) for r in complete if r["way"] == way}
        for way in ("kernels", "projection")
    }
    results: list[Row] = []
    for row in rows:
        dtype = "bfloat16" if row["dtype"] == "float16" else row["dtype"]
        kernels = times["kernels"].get(key(row, dtype))
        projection = times["projection"].get(key(row, dtype))
        ratio: Row = {"over_kernels": "", "apart_over_kernels": ""}
        if is_measured(row) and kernels is not None:
            median = float(row["median_ms"])
            ratio["over_kernels"] = round(median / kernels, 2)
            if row["way"] == "layer" and projection is not None:
                ratio["apart_over_kernels"] = round((median - projection) / kernels, 2)
        results.append({**row, **ratio})
    return results


def in_order(rows: Sequence[Strings]) -> list[Strings]:
    """Return the rows in the order of the cases, as one run would write them."""
    order = {case.name: index for index, case in enumerate(all_cases())}
    name = "{way}-{cell}-{head}-B{B}-{dtype}"
    return sorted(rows, key=lambda row: order.get(name.format(**row), len(order)))


def needs_nvcc(case: Case) -> bool:
    """Return True for what nvcc compiles."""
    return case.way.startswith("flashrnn-cuda")


def needs_compilation(case: Case) -> bool:
    """Return True for kernels that are compiled before: ours, and others' that are slow to."""
    return case.way.startswith(("kernels", "layer", "torchrl", "flashrnn"))


def compile_all(
    cases: Sequence[Case], processes: int, settings: Settings, end: float
) -> dict[Case, LostError]:
    """Compile the kernels of cases by several processes; return the cases that failed, and why.

    Of ours, sizes of a variant are compiled one after the other. end: the time.perf_counter() that
    leaves time to measure.
    """
    own = [case for case in cases if case.way.startswith(("kernels", "layer"))]
    first = [case for case in own if case.batch == min(c.batch for c in own)]
    last = [case for case in own if case.batch == max(c.batch for c in own) and case not in first]
    others = [case for case in own if case not in first and case not in last]
    peers = [case for case in cases if needs_compilation(case) and case not in own]
    lost: dict[Case, LostError] = {}
    runners: queue.Queue[Isolated] = queue.Queue()
    for _ in range(processes):
        runners.put(Isolated())

    def compile_case(case: Case) -> None:
        runner = runners.get()
        limit = 4 * NVCC if needs_nvcc(case) else SLACK + 10 * COMPILATION
        seconds = min(limit, max(0.0, end - time.perf_counter()))
        try:
            list(runner.results(short_runs, case, settings, seconds=seconds))
        except LostError as error:
            lost[case] = LostError(f"compilation: {error}")
        finally:
            runners.put(runner)

    with ThreadPoolExecutor(processes) as pool:
        for cases_at_once in (first, last, sorted(others + peers, key=needs_nvcc, reverse=True)):
            list(pool.map(compile_case, cases_at_once))
    while not runners.empty():
        runners.get().close()
    return lost


def seconds_of(case: Case) -> float:
    """Return about how long a case takes, compiled."""
    return SECONDS.get(case.way.partition("-")[0], 8)


def expected_seconds(cases: Sequence[Case], processes: int) -> float:
    """Return about how long a run takes: timings, and compilations by several processes."""
    with_kernels = [case for case in cases if needs_compilation(case)]
    sizes = {(c.way, c.cell, c.head, c.dtype, c.batch > 16) for c in with_kernels}
    by_nvcc = sum(needs_nvcc(case) for case in cases)
    compilation = COMPILATION * (len(sizes) - by_nvcc) + NVCC * by_nvcc
    return sum(map(seconds_of, cases)) + compilation / processes


def measure(
    cases: Sequence[Case], settings: Settings, path: Path, args: argparse.Namespace
) -> None:
    """Measure cases one after the other, and add their rows to a file as they come."""
    begin = time.perf_counter()
    about: Row = provenance(settings.device)
    about["copy_GB_per_s"] = f"{settings.rate / 1e9:.1f}"  # read and written
    end = begin + FRACTION * args.seconds
    lost = compile_all(cases, args.processes, settings, end)
    print(f"compiled: {time.perf_counter() - begin:.0f} s", flush=True)
    runner = Isolated()
    for index, case in enumerate(cases):
        if time.perf_counter() - begin > args.seconds:
            print(f"{len(cases) - index} cases left, from {case.name} on", flush=True)
            break
        steps = list(PASSES)
        try:
            if case in lost:
                raise lost[case]
            seconds = SLACK + 10 * seconds_of(case)
            for row in runner.results(rows_of, case, settings, seconds=seconds):
                add_row(path, about | row, KEYS)
                steps.remove(row["pass"])
                figures = f"{row['median_ms']:.4g} ms (minimum {row['min_ms']:.4g})"
                print(f"{case.name:42} {row['pass']:8} {figures}", flush=True)
        except LostError as error:
            print(f"{case.name:42} missing: {error}", flush=True)
            for step in steps:
                limit = bytes_moved(case, step) / settings.rate * 1e3
                add_row(path, about | row_of(case, step, {}, limit, str(error)), KEYS)
    runner.close()


def picture(rows: Sequence[Strings], path: Path, batch: int = 16) -> None:
    """Draw the times over the size of heads, a panel a cell and pass."""
    rows_of_batch = [
        row
        for row in rows
        if is_measured(row)
        and (row["B"], row["cell"] in COMPARED) == (str(batch), True)
        and not row["way"].startswith(NOT_DRAWN)
    ]
    figure = new_figure(4.0 * len(COMPARED), 7.0)
    panels = figure.subplots(len(PASSES), len(COMPARED), squeeze=False)
    names = list(map(title_of, rows_of_batch))
    for line, (step, title) in zip(panels, PASSES.items(), strict=True):
        for axes, cell in zip(line, COMPARED, strict=True):
            curves: dict[str, list[tuple[int, float]]] = {}
            for row in rows_of_batch:
                if (row["cell"], row["pass"]) == (cell, step):
                    point = (int(row["head"]), float(row["median_ms"]))
                    curves.setdefault(title_of(row), []).append(point)
            if curves:
                draw(axes, curves, "channels of a head", "ms", names=names)
                axes.set_ylim(auto=True)
                scale_ms(axes)
            axes.set_title(f"{NAMES[cell]}, {title}")
    size = f"B = {batch}, T = {LENGTH:,}, width {WIDTH} (512 where the head is)"
    caption(figure, rows_of_batch, size)
    legend_below(figure, columns=4)
    figure.savefig(path, dpi=150)


def parser() -> argparse.ArgumentParser:
    parser = new_parser(__doc__)
    parser.add_argument("--only", default="", help="cases whose names match, see --list")
    parser.add_argument("--list", action="store_true", help="name the cases, and end")
    parser.add_argument("--quick", action="store_true", help="few runs a timing")
    processes = max(1, min(15, (os.cpu_count() or 2) - 1))
    parser.add_argument("--processes", type=int, default=processes, help="that compile kernels")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="after which no case begins"
    )
    parser.add_argument("--device", default="cuda", help="cpu: to try the cases out")
    parser.add_argument("--length", type=int, help="steps, in place of the cases'")
    parser.add_argument("--merge", type=Path, nargs="+", default=(), help="files of rows to add")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    args = parser().parse_args(arguments)
    begin, path = time.perf_counter(), args.out / "mixing.csv"
    cases = [case for case in all_cases() if re.search(args.only, case.name)]
    if args.length:
        cases = [case._replace(length=args.length) for case in cases]
    if args.merge:
        for row in (row for file in args.merge for row in read_rows(file)):
            add_row(path, row, KEYS)
    else:
        seconds = expected_seconds(cases, args.processes)
        print(f"{len(cases)} cases, about {seconds:.0f} s", flush=True)
        if args.list or not cases:
            print(*(case.name for case in cases), sep="\n")
            return
        budget = QUICK_BUDGET if args.quick else BUDGET
        on_gpu = args.device == "cuda"
        rate, cache = (copy_rate(budget), cache_bytes()) if on_gpu else (1e9, 0)
        measure(cases, Settings(args.device, budget, rate, cache), path, args)
    if path.exists():
        write_csv(path, with_ratios(in_order(read_rows(path))))
        picture(read_rows(path), path.with_suffix(".png"))
    print(f"written to {path}: {time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()
