"""Timing of the benchmarks: wall time, CUDA events and graphs, and the paper's protocol.

The paper's: 20 warm-ups, 100 runs, the minimum, and the median in addition. On a GPU the time of a
run is that between two CUDA events around it, whatever the host does in between; on a CPU it is
wall time. Nothing is waited for between runs, and no cache is emptied.
"""

from __future__ import annotations

import ctypes
import fcntl
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

WARM_UPS, RUNS, LEAST_RUNS = 20, 100, 3
LAUNCHES = ("call", "graph")
"""Ways to start a run: by calls from Python, or as one CUDA graph of them."""
CPU = torch.device("cpu")

Call = Callable[[], object]
Calls = tuple[Call, Call]
"""A forward pass, and a forward and backward pass."""
Row = dict[str, Any]
Add = Callable[[Row], None]


class Clock:
    """Marks in a run on a device: CUDA events, or wall times on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.marks = device, list[Any]()

    def tick(self) -> None:
        if self.device.type == "cpu":
            self.marks.append(time.perf_counter())
        else:
            self.marks.append(torch.cuda.Event(enable_timing=True))
            self.marks[-1].record()

    def times(self) -> list[float]:
        """Return the ms from each mark to the next."""
        wait(self.device)
        pairs = itertools.pairwise(self.marks)
        if self.device.type == "cpu":
            return [(end - begin) * 1e3 for begin, end in pairs]
        return [begin.elapsed_time(end) for begin, end in pairs]


def wait(device: torch.device) -> None:
    """Wait until a GPU has done all that was launched."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def keep_memory() -> None:
    """Have glibc keep the memory of freed tensors for the next ones, as jemalloc does: else the
    system clears it for each, which takes as long as it likes on a shared machine."""
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        trim_threshold, mmap_max = -1, -4
        library.mallopt(trim_threshold, -1)
        library.mallopt(mmap_max, 0)


def wall_ms(
    call: Call, device: torch.device = CPU, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Return the time of a call in ms by a clock, to the end of its work on the device."""
    begin = clock()
    call()
    wait(device)
    return (clock() - begin) * 1e3


def wall_times(
    calls: Sequence[Call],
    budget: float,
    device: torch.device = CPU,
    least: int = 3,
    clock: Callable[[], float] = time.perf_counter,
) -> list[list[float]]:
    """Return the times of each call in ms, which take turns; wall times, unless by another clock.

    time.process_time: for one thread, of which others on the machine do not take time. There are at
    most 100 turns, within about `budget` seconds for all calls, and at least `least`. Two turns
    before are not timed.
    """
    for call in [*calls] * 2:
        wall_ms(call, device, clock)
    times: list[list[float]] = [[] for _ in calls]
    while len(times[0]) < least or (len(times[0]) < 100 and sum(map(sum, times)) < budget * 1e3):
        for own, call in zip(times, calls, strict=True):
            own.append(wall_ms(call, device, clock))
    return times


def call_times(call: Call, device: torch.device, calls: int, rounds: int) -> list[float]:
    """Return the ms of a call: the mean of each round, after a round that is not timed."""

    def run() -> None:
        for _ in range(calls):
            call()

    wait(device)
    return [wall_ms(run, device) / calls for _ in range(rounds + 1)][1:]


def calls_of(
    run: Callable[..., Tensor | Sequence[Tensor]],
    leaves: Sequence[Tensor],
    inputs: Sequence[Sequence[Tensor]] = ((),),
) -> Calls:
    """Return a forward pass without gradients, and a forward and backward pass by all leaves.

    inputs: the arguments of `run` in turn, which are leaves too.
    """
    turns = itertools.cycle(inputs)

    def results(own: Sequence[Tensor]) -> Sequence[Tensor]:
        result = run(*own)
        return [result] if isinstance(result, Tensor) else [*result]

    cotangents = [torch.randn_like(x) for x in results(inputs[0])]

    @torch.no_grad()
    def forward() -> None:
        run(*next(turns))

    def both() -> None:
        own = next(turns)
        torch.autograd.grad(results(own), [*own, *leaves], cotangents)

    return forward, both


def columns_of(ways: Sequence[Calls], budget: float, device: torch.device = CPU) -> list[Row]:
    """Return the times of the calls of each way, as columns; for a pass ways take turns, and have
    `budget` seconds."""
    times = [wall_times(of_pass, budget, device) for of_pass in zip(*ways, strict=True)]
    rows = []
    for i in range(len(ways)):
        row: Row = {"runs": len(times[0][i])}
        for step, of_pass in zip(("forward", "both"), times, strict=True):
            row[f"{step}_ms"] = round(statistics.median(of_pass[i]), 3)
            row[f"{step}_min_ms"] = round(min(of_pass[i]), 3)
        rows.append(row)
    return rows


def run_times(call: Call, device: torch.device, runs: int) -> list[float]:
    """Return the ms of each run, marked before and after."""
    clock = Clock(device)
    for _ in range(runs):
        clock.tick()
        call()
        clock.tick()
    return clock.times()[::2]


def captured_graph(calls: Sequence[Call]) -> torch.cuda.CUDAGraph:
    """Return a CUDA graph of all calls, in order, after three rounds of calls."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in [*calls] * 3:
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [call() for call in calls]  # or a call would write where the one before it wrote
    del results
    return graph


def protocol_times(call: Call, device: torch.device, budget: float) -> Row:
    """Return the minimum and median ms of a call, and the runs: of RUNS those that `budget` ms
    leave.

    Where they are fewer, the warm-ups are as much fewer.
    """
    call()
    wait(device)
    estimate = min(run_times(call, device, 2))
    runs = max(LEAST_RUNS, min(RUNS, int(budget / max(estimate, 1e-6))))
    run_times(call, device, WARM_UPS * runs // RUNS)
    times = run_times(call, device, runs)
    row: Row = {"min_ms": round(min(times), 5), "median_ms": round(statistics.median(times), 5)}
    return row | {"runs": runs}


def protocol_columns(
    calls: Sequence[Call], device: torch.device, budget: float, launch: str = "call"
) -> Row:
    """Return the times of a forward pass, and of both passes if given, as columns."""
    row: Row = {}
    for step, call in zip(("forward", "both"), calls, strict=False):
        times = protocol_times(launcher(call, launch), device, budget)
        row |= {f"{step}_ms": times["median_ms"], f"{step}_min_ms": times["min_ms"]}
        row[f"{step}_runs"] = times["runs"]
    return row


def first_seconds(call: Call, device: torch.device) -> float:
    """Return the seconds of a first call, in which code is compiled."""
    return round(wall_ms(call, device) / 1e3, 2)


@contextmanager
def turn(path: Path | None, exclusive: bool) -> Iterator[None]:
    """Hold a lock on a file, exclusive or shared with other processes that prepare; None: no lock.

    An exclusive turn waits until no process prepares.
    """
    if path is None:
        yield
        return
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH)
        yield


def launcher(call: Call, launch: str) -> Call:
    """Return the call, or a graph of it; the graph's memory lives as long as the result."""
    return captured_graph([call]).replay if launch == "graph" else call
