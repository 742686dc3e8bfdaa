"""Time in segments on a CPU: (newton, fused) against (sequential, fused), and what auto takes.

Sections: grid (sizes, both cells) and hard (GRUs whose channels forget slowly, or never). float32,
forward without gradients, and forward + backward of everything; the solvers take turns. Writes
results/auto_cpu.csv.

    python benchmarks/parallel_cpu.py [--budget 1.0] [--threads 1 2] [--quick] [--out FOLDER]
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, provenance, write_csv

import pararnn
from pararnn.engines.arguments import totals
from pararnn.program.program import program_of
from pararnn.solve import Solved, prepare, run

Size = tuple[int, int, int]
SOLVERS = ("sequential", "newton")
FEW: Sequence[Size] = ((1, 65536, 8), (1, 65536, 64), (1, 2048, 64), (8, 2048, 64), (4, 512, 256))
GRID: Sequence[Size] = (*FEW, (1, 512, 64), (2, 2048, 64), (1, 2048, 256), (2, 8192, 16))
HARD: Sequence[tuple[str, float, float, bool]] = (
    # name, weights' standard deviation, bias of the update gate, one latch
    ("one latch", 0.3, 0.0, True),
    ("weights 1", 1.0, 0.0, False),
    ("weights 2", 2.0, 0.0, False),
    ("bias -2", 0.3, -2.0, False),
    ("bias -4", 0.3, -4.0, False),
)
HARD_SIZES: Sequence[Size] = ((1, 65536, 64), (1, 2048, 64))


def in_turn(calls: Sequence[Callable[[], object]], budget: float) -> list[float]:
    """Each call's median in ms; together they take `budget` seconds, and 3 turns at least."""
    times: list[list[float]] = [[] for _ in calls]
    for call in calls:
        call()
    end = time.perf_counter() + budget
    while len(times[0]) < 3 or (len(times[0]) < 200 and time.perf_counter() < end):
        for own, call in zip(times, calls, strict=True):
            begin = time.perf_counter()
            call()
            own.append((time.perf_counter() - begin) * 1e3)
    return [statistics.median(own) for own in times]


def cell_of(name: str, channels: int, std: float) -> pararnn.Cell:
    """Return a cell with recurrent weights of a standard deviation."""
    cell = pararnn.CELLS[name](channels)
    with torch.no_grad():
        for parameter in cell.recurrent_parameters():
            parameter.normal_(0, std)
    return cell


def gates_of(cell: pararnn.Cell, size: Size, bias: float, latch: bool) -> torch.Tensor:
    """Gates N(0, 1); the first one shifted, or soon shut for one channel."""
    batch, length, channels = size
    gates = torch.randn(batch, length, len(cell.gates), channels)
    gates[:, :, 0] += bias
    if latch:
        gates[:, length // 20 :, 0, channels // 2] -= 30
    return gates.requires_grad_()


def measured(cell: pararnn.Cell, gates: torch.Tensor, budget: float) -> dict[str, Any]:
    """Both solvers' times of both passes, and what Newton did."""

    def solved(solver: str) -> Solved:
        return run(program_of(cell), prepare(cell, gates), solver, "fused")

    def states(solver: str) -> tuple[torch.Tensor, ...]:
        return solved(solver).states

    def backward(solver: str) -> object:
        return torch.autograd.grad(states(solver)[0], [gates, *cell.parameters()], cotangent)

    cotangent = torch.randn_like(states("sequential")[0])
    row: dict[str, Any] = {}
    with torch.no_grad():
        forward = in_turn([lambda s=s: states(s) for s in SOLVERS], budget)  # type: ignore[misc]
        info = solved("newton").info
    both = in_turn([lambda s=s: backward(s) for s in SOLVERS], budget)  # type: ignore[misc]
    for what, times in (("forward", forward), ("both", both)):
        row |= {f"{s}_{what}_ms": round(ms, 4) for s, ms in zip(SOLVERS, times, strict=True)}
    return row | dict(zip(("sweeps", "mended"), totals(info).tolist(), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", type=float, default=1.0, help="seconds for one timing")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, torch.get_num_threads()])
    parser.add_argument("--quick", action="store_true", help="the first sizes only")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    sizes = FEW if args.quick else GRID
    cases = [(name, size, "", 0.3, 0.0, False) for name in ("gru", "lstm") for size in sizes]
    cases += [("gru", size, *hard) for size, hard in itertools.product(HARD_SIZES, HARD)]
    rows = []
    for threads, (name, size, what, std, bias, latch) in itertools.product(args.threads, cases):
        torch.manual_seed(0)
        torch.set_num_threads(threads)
        cell = cell_of(name, size[2], std)
        gates = gates_of(cell, size, bias, latch)
        rows.append(
            {
                **provenance(),
                "threads": threads,
                "cell": name,
                "what": what,
                **dict(zip("BTD", size, strict=True)),
                **measured(cell, gates, args.budget),
                "auto": pararnn.explain(cell, size).solver,
            }
        )
        print(", ".join(f"{k} {v}" for k, v in list(rows[-1].items())[4:]), flush=True)
    write_csv(args.out / "auto_cpu.csv", rows)


if __name__ == "__main__":
    main()
