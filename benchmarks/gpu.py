"""Timing on a GPU: replays of CUDA graphs, do_bench, the copy rate, and runs in sections."""

from __future__ import annotations

import argparse
import importlib
import itertools
import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from common import RESULTS, Record, new_parser, provenance
from protocol import Call, Row, captured_graph, run_times
from torch import Tensor

MAX_REPLAYS = 4000
LONG = 20.0
"""Milliseconds of a call after which nothing of its inputs is in the cache: one set is enough."""


def replay_times(calls: Sequence[Call], budget: float) -> list[float]:
    """Return the ms of one call in each replay of a graph of all, over about `budget` ms."""
    graph, device = captured_graph(calls), torch.device("cuda")
    estimate = statistics.median(run_times(graph.replay, device, 10))
    runs = run_times(graph.replay, device, replays_within(estimate, budget))
    return [ms / len(calls) for ms in runs]


def launched_times(calls: Sequence[Call], launch: str, device: str, budget: float) -> Row:
    """Return the median and the minimum ms of calls on different inputs, and the runs, over about
    `budget` ms: of replays of a graph of all, or of calls in turn."""
    turns, place = itertools.cycle(calls), torch.device(device)
    estimate = min(run_times(lambda: next(turns)(), place, 3))
    if estimate > LONG:
        calls, turns = calls[:1], itertools.cycle(calls[:1])
    if launch == "graph":
        times = replay_times(calls, budget)
    else:
        times = run_times(lambda: next(turns)(), place, replays_within(estimate, budget))
    row: Row = {"median_ms": round(statistics.median(times), 5), "min_ms": round(min(times), 5)}
    return row | {"runs": len(times)}


def as_list(results: Tensor | Sequence[Tensor]) -> list[Tensor]:
    return [results] if isinstance(results, Tensor) else [*results]


def passes_on(
    sets: Sequence[Sequence[Tensor]], call: Callable[..., Any], weights: Sequence[Tensor]
) -> dict[str, list[Call]]:
    """Return forward without gradients, and forward + backward of inputs and weights, on each set
    of inputs."""

    @torch.no_grad()
    def forward(inputs: Sequence[Tensor]) -> list[Tensor]:
        return as_list(call(*inputs))

    cotangents = [torch.randn_like(y) for y in forward(sets[0])]

    def both(inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in inputs]  # graphs capture what they made
        results = as_list(call(*leaves))
        return torch.autograd.grad(results, [*leaves, *weights], cotangents, allow_unused=True)

    ways = {"forward": forward, "both": both}
    return {name: [partial(way, inputs) for inputs in sets] for name, way in ways.items()}


def compile_pass(call: Call) -> Row:
    """Run a pass once; return no column."""
    call()
    return {}


def replays_within(ms: float, budget: float) -> int:
    """Return the number of replays of `ms` that fill the budget, from 3 to MAX_REPLAYS."""
    return min(max(3, math.ceil(budget / max(ms, 1e-6))), MAX_REPLAYS)


def bench_ms(call: Call, budget: float) -> float:
    """triton.testing.do_bench's median, which empties the caches before every call."""
    do_bench = importlib.import_module("triton.testing").do_bench
    return float(do_bench(call, warmup=25, rep=budget, return_mode="median"))


class Run(NamedTuple):
    """Settings of all rows of a run: ms for one timing by each method, bytes copied a second.

    train_steps: of each model that a section trains.
    """

    graph_budget: float
    bench_budget: float
    copy_rate: float
    train_steps: int


def times_of(calls: Sequence[Call], run: Run, graph: bool = True) -> Row:
    """Return both times of calls that do the same on different inputs."""
    row: Row = {"do_bench_ms": round(bench_ms(calls[0], run.bench_budget), 5)}
    if graph:
        times = replay_times(calls, run.graph_budget)
        row |= {"graph_ms": round(statistics.median(times), 5), "replays": len(times)}
        row |= {"graph_min_ms": round(min(times), 5)}
    return row


def sets_for(size_in_bytes: int, cache: int) -> int:
    """Return the number of inputs that together exceed three times the cache."""
    return 3 * cache // size_in_bytes + 1


def sets_of(draw: Callable[[], Sequence[Tensor]], cache: int) -> list[Sequence[Tensor]]:
    """Return inputs drawn so often that together they exceed three times the cache."""
    sets = [draw()]
    count = sets_for(sum(x.nbytes for x in sets[0]), cache)
    return [*sets, *(draw() for _ in range(count - 1))]


def cache_bytes() -> int:
    return torch.cuda.get_device_properties(0).L2_cache_size


def copy_rate(budget: float) -> float:
    """Return the bytes read and written a second by the faster of two copies of 2 GiB."""
    x, y = torch.randn(2**29, device="cuda"), torch.empty(2**29, device="cuda")
    ways: list[Call] = [lambda: y.copy_(x), lambda: torch.mul(x, 1.0, out=y)]
    best = min(statistics.median(replay_times([way], budget)) for way in ways)
    return 2 * x.nbytes / best * 1e3


def add_options(parser: argparse.ArgumentParser, limit: float, processes: int) -> None:
    """Add the options of a benchmark whose ways run in processes of their own."""
    parser.add_argument("--list", action="store_true", help="name the ways, and end")
    parser.add_argument("--seconds", type=float, default=540, help="after which no way begins")
    parser.add_argument("--limit", type=float, default=limit, help="seconds to measure a way")
    processes = max(1, min(processes, (os.cpu_count() or 2) - 2))
    parser.add_argument("--processes", type=int, default=processes, help="that compile")
    parser.add_argument("--budget", type=float, default=500, help="ms for a timing")
    parser.add_argument("--device", default="cuda", help="cpu: to try the ways out")
    parser.add_argument("--length", type=int, help="steps, in place of the cases'")


def facts_of(device: str, budget: float) -> tuple[Row, int]:
    """Return what all rows say of a device, with the rate of a copy, and the bytes of its L2."""
    rate, cache = 1e9, 0
    if device == "cuda":
        rate, cache = copy_rate(budget), cache_bytes()
        torch.cuda.empty_cache()
    about: Row = {**provenance(device), "copy_GB_per_s": f"{rate / 1e9:.1f}"}
    print(about, flush=True)
    return about, cache


def report_missing(what: str, error: Exception) -> None:
    """Print that a peer has no row, and why."""
    text = str(error).strip().partition("\n")[0]
    print(f"peer left out: {what}: {type(error).__name__}: {text}", flush=True)


Sections = Mapping[str, tuple[Callable[[Run], Iterable[Row]], str]]
"""By name: what measures a section's rows, and the file that they are written to."""


def run_sections(
    doc: str | None, sections: Sections, graph_budget: float, train_steps: int | None = None
) -> dict[str, list[Row]]:
    """Run a benchmark in sections from the command line; `graph_budget`: ms for a timing.

    `train_steps`: the default of --train-steps, None where no section trains. Returns the rows
    of each file.
    """
    parser = new_parser(doc, out=None, help="default: the results, for a whole run only")
    parser.add_argument("--only", default="", help=f"sections by prefix: {', '.join(sections)}")
    parser.add_argument("--quick", action="store_true", help="few replays, short training")
    if train_steps is not None:
        parser.add_argument("--train-steps", type=int, help="for each model that is trained")
    parser.set_defaults(train_steps=train_steps or 0)
    args = parser.parse_args()
    chosen = [name for name in sections if name.startswith(args.only)]
    if not chosen:
        parser.error(f"--only {args.only}: no such section; there are {', '.join(sections)}")
    about, begin = provenance("cuda"), time.perf_counter()
    torch.manual_seed(0)
    budgets = (30.0, 20.0) if args.quick else (graph_budget, 200.0)
    steps = min(args.train_steps, 50) if args.quick else args.train_steps
    run = Run(*budgets, copy_rate(budgets[0]), steps)
    about["copy_GB_per_s"] = f"{run.copy_rate / 1e9:.1f}"  # read and written
    print(about, flush=True)
    out = args.out or (None if args.only or args.quick else RESULTS)
    records = {file: Record(out and out / file, about) for _, file in sections.values()}
    for section in chosen:
        measure, file = sections[section]
        for row in measure(run):
            records[file].add(row)
        print(f"{section}: {time.perf_counter() - begin:.0f} s", flush=True)
    print(f"written to {out or 'nowhere (see --out)'}")
    return {file: record.rows for file, record in records.items()}
