"""Time against the length on one GPU, as the paper's figures have it.

reduction: the affine scan of one row, diagonal and 2 x 2 blocks, by kernel and in PyTorch, to 2^22
steps. solve: a GRU and an LSTM with gates given, forward and forward + backward, by every pair and
by auto, to 2^17 steps; a pair whose call has taken LONGEST is not tried at longer ones. peers: the
diagonal reduction by accelerated-scan 0.3, where it is installed, in its own layout, time last; a
length that it refuses, or gets wrong, is left out and named. Kernels are replayed from CUDA graphs;
what reads a flag on the host is timed by do_bench, which empties the cache before each call. Writes
results/scaling.csv and .png.

    python benchmarks/scaling.py [--quick] [--out FOLDER]
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, provenance, write_csv
from gpu import Call, Row, bench_ms, left_out, replay_times
from kernels import LINEAR_SCANS
from torch import Tensor

import pararnn
from pararnn.engines.request import MODES
from pararnn.extras import require
from pararnn.program.structure import BlockDiagonal, Diagonal
from pararnn.solvers.affine_scan import affine_scan

CHANNELS = 64
REDUCTIONS = [2**power for power in range(2, 23)]
# The README of the peer shows 2^7 to 2^17. Others come last: they might end in an error of the GPU.
PEER_LENGTHS = sorted(REDUCTIONS, key=lambda length: (not 2**7 <= length <= 2**17, length))
SOLVES = [2**power for power in range(6, 18)]
LONGEST = 150.0  # ms
PAIRS = [("sequential", "fused"), *MODES.values(), ("auto", "auto")]
GRAPHS = ("scan kernel", "fused", "auto")
"""What never waits for the host, so that a graph can hold it."""


def median_of(call: Call, graph: bool, budget: float) -> float:
    """ms of one call."""
    if graph:
        return statistics.median(replay_times([call], budget))
    return bench_ms(call, budget)


def reduction_ways(states: int, length: int) -> Iterator[tuple[str, Call]]:
    """The scan by kernel and in PyTorch: one row, all states."""
    block = () if states == 1 else (states, states)
    a = 0.9 / states * torch.rand(1, length, *block, CHANNELS, device="cuda")
    b = torch.randn(1, length, *block[:1], CHANNELS, device="cuda")
    structure = Diagonal(1) if states == 1 else BlockDiagonal(states)
    jacobian, rhs = (a.unsqueeze(2), b.unsqueeze(2)) if states == 1 else (a, b)
    yield "scan kernel", lambda: pararnn.scan(a, b, backend="fused")
    yield "PyTorch", lambda: affine_scan(structure, jacobian[:, 1:], rhs)


@torch.no_grad()
def reduction_rows(budget: float) -> list[Row]:
    """Parallel reduction against the length."""
    rows = []
    for states in (1, 2):
        for length in REDUCTIONS:
            for way, call in reduction_ways(states, length):
                ms = median_of(call, way in GRAPHS, budget)
                what = "diagonal" if states == 1 else f"{states} x {states}"
                rows.append(row_of("reduction", what, way, "forward", length, ms))
    return rows


def solve_calls(cell: pararnn.Cell, gates: Tensor, how: dict[str, Any]) -> dict[str, Call]:
    """Forward without gradients, and forward + backward."""
    leaf = gates.clone().requires_grad_()
    leaves = [leaf, *cell.parameters()]

    def states_of(given: Tensor) -> Tensor:
        states, _ = pararnn.solve(cell, given, **how)
        return states if isinstance(states, Tensor) else states[0]

    cotangent = torch.randn_like(gates[:, :, 0])

    def forward() -> Tensor:
        with torch.no_grad():
            return states_of(gates)

    return {
        "forward": forward,
        "both": lambda: torch.autograd.grad(states_of(leaf), leaves, cotangent),
    }


def solve_rows(budget: float) -> list[Row]:
    """Whole solves against the length."""
    rows = []
    for name in ("gru", "lstm"):
        cell = pararnn.CELLS[name](CHANNELS, device="cuda")
        for solver, backend in PAIRS:
            way = solver if solver == backend else f"{solver}, {backend}"
            for length in SOLVES:
                gates = torch.randn(1, length, len(cell.gates), CHANNELS, device="cuda")
                calls = solve_calls(cell, gates, {"solver": solver, "backend": backend})
                times = {
                    step: median_of(call, backend in GRAPHS, budget) for step, call in calls.items()
                }
                rows += [row_of("solve", name, way, step, length, ms) for step, ms in times.items()]
                if times["both"] > LONGEST:
                    break
    return rows


@torch.no_grad()
def peer_rows(budget: float) -> list[Row]:
    """The diagonal reduction by accelerated-scan, its inputs (B, D, T)."""
    size = (1, CHANNELS, REDUCTIONS[-1])
    longest = 0.9 * torch.rand(size, device="cuda"), torch.randn(size, device="cuda")
    right = pararnn.scan(*(t.mT.contiguous() for t in longest), solver="sequential").mT
    rows = []
    for way, module in LINEAR_SCANS.items():
        try:
            scan = importlib.import_module(module).scan
        except Exception as error:  # not installed, or its kernel does not compile
            left_out(way, error)
            continue
        for length in PEER_LENGTHS:
            try:
                a, b = (t[..., :length].contiguous() for t in longest)
                torch.testing.assert_close(scan(a, b), right[..., :length], rtol=1e-4, atol=1e-4)
                ms = median_of(partial(scan, a, b), True, budget)
            except Exception as error:
                left_out(f"{way}, T = {length}", error)
                continue
            name = f"{way}, (B, D, T)"
            rows.append(row_of("reduction", "diagonal", name, "forward", length, ms))
    return sorted(rows, key=lambda row: (row["way"], row["T"]))


def row_of(section: str, what: str, way: str, step: str, length: int, ms: float) -> Row:
    """One row of scaling.csv; `step` is the pass."""
    row: Row = {"section": section, "what": what, "way": way, "pass": step}
    row |= {"B": 1, "T": length, "D": CHANNELS, "ms": round(ms, 5)}
    return row


def plot(rows: Sequence[Row], path: Path) -> None:
    """Time against the length: the scan, and forward + backward of whole solves."""
    figure = require("matplotlib.figure").Figure(figsize=(10, 8), layout="constrained")
    parts: list[tuple[str, str, str]] = [
        ("reduction", "diagonal", "forward"),
        ("reduction", "2 x 2", "forward"),
        ("solve", "gru", "both"),
        ("solve", "lstm", "both"),
    ]
    titles = {"forward": "scan, ", "both": "forward + backward, "}
    for axes, (section, what, step) in zip(figure.subplots(2, 2).flat, parts, strict=True):
        mine = [r for r in rows if (r["section"], r["what"], r["pass"]) == (section, what, step)]
        for way in dict.fromkeys(row["way"] for row in mine):
            points = [(row["T"], row["ms"]) for row in mine if row["way"] == way]
            axes.plot(*zip(*points, strict=True), marker=".", label=way)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set(title=titles[step] + what, xlabel="T", ylabel="ms")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few replays")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    about, begin = provenance("cuda"), time.perf_counter()
    torch.manual_seed(0)
    budget = 10.0 if args.quick else 100.0
    rows: list[Row] = []
    # Peers come last: an error of the GPU would end what follows.
    sections: list[Callable[[float], list[Row]]] = [reduction_rows, solve_rows, peer_rows]
    for measure in sections:
        rows += [{**about, **row} for row in measure(budget)]
        write_csv(args.out / "scaling.csv", rows)  # now: a later section may fail
        print(f"{measure.__name__}: {time.perf_counter() - begin:.0f} s", flush=True)
    plot(rows, args.out / "scaling.png")
    for row in rows:
        if row["T"] in (512, 4096, 65536, 2**22):
            print(*(row[key] for key in ("section", "what", "way", "pass", "T", "ms")), sep="  ")


if __name__ == "__main__":
    main()
