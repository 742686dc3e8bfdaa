"""The paper's timing protocol: 20 warm-ups, 100 runs, the minimum; the median beside it.

On a GPU the time of a run is that between two CUDA events around it, whatever the host does in
between; on a CPU it is wall time. Nothing is waited for between runs, and no cache is emptied.
"""

from __future__ import annotations

import csv
import fcntl
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

import torch
from gpu import Call, Row, captured

WARM_UPS, RUNS, LEAST_RUNS = 20, 100, 3
LAUNCHES = ("call", "graph")
"""Ways to start a run: by calls from Python, or as one CUDA graph of them."""

Add = Callable[[Row], None]


def timed(call: Call, device: torch.device, budget: float) -> Row:
    """Minimum and median ms of a call, and the runs: as many of RUNS as `budget` ms leave.

    Where they are fewer, the warm-ups are as much fewer.
    """
    call()
    _wait(device)
    expected = min(_times(call, device, 2))
    runs = max(LEAST_RUNS, min(RUNS, int(budget / max(expected, 1e-6))))
    _times(call, device, WARM_UPS * runs // RUNS)
    times = _times(call, device, runs)
    row: Row = {"min_ms": round(min(times), 5), "median_ms": round(statistics.median(times), 5)}
    return row | {"runs": runs}


def first_seconds(call: Call, device: torch.device) -> float:
    """Return the seconds of a first call, in which code is compiled."""
    begin = time.perf_counter()
    call()
    _wait(device)
    return round(time.perf_counter() - begin, 2)


@contextmanager
def turn(path: Path | None, alone: bool) -> Iterator[None]:
    """Hold a lock on a file beside other processes that prepare, or alone among all; None: no
    lock. Who waits for a turn alone gets it once nobody prepares any more."""
    if path is None:
        yield
        return
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield


def launched(call: Call, launch: str) -> Call:
    """Return the call, or a graph of it; the graph's memory lives as long as what is returned."""
    return captured([call]).replay if launch == "graph" else call


def _times(call: Call, device: torch.device, runs: int) -> list[float]:
    """Return the ms of each run."""
    if device.type == "cpu":
        return [_by_clock(call) for _ in range(runs)]
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(runs)]
    for begin, end in marks:
        begin.record()
        call()
        end.record()
    _wait(device)
    return [begin.elapsed_time(end) for begin, end in marks]


def _by_clock(call: Call) -> float:
    begin = time.perf_counter()
    call()
    return (time.perf_counter() - begin) * 1e3


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def csv_rows(path: Path, about: Row) -> Iterator[Add]:
    """Append rows to a new file as they come, `about` first; a run that ends early leaves them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        yield _adder(file, about)


def _adder(file: TextIO, about: Row) -> Add:
    writers: list[csv.DictWriter[str]] = []

    def add(row: Row) -> None:
        row = about | row
        if not writers:
            writers.append(csv.DictWriter(file, list(row), lineterminator="\n"))
            writers[0].writeheader()
        writers[0].writerow(row)
        file.flush()

    return add
