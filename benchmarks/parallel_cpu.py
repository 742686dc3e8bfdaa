"""Time in segments on a CPU: (newton, fused) against (sequential, fused), and auto's choice.

Sections: grid (sizes, both cells) and hard (GRUs whose channels forget slowly, or never). float32,
forward without gradients, and forward + backward of everything; the solvers take turns. Writes
results/auto_cpu.csv.

    python benchmarks/parallel_cpu.py [--budget 1.0] [--threads 1 2] [--quick] [--out FOLDER]
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from common import Record, new_parser, provenance
from kernels import Size
from parallel import EASY, HARD, cell_of, hard_gates
from protocol import CPU, wall_times
from torch import Tensor

import pararnn
from pararnn.engines.arguments import totals
from pararnn.program.program import program_of
from pararnn.solve import Solved, prepare, run

SOLVERS = ("sequential", "newton")
FEW: Sequence[Size] = ((1, 65536, 8), (1, 65536, 64), (1, 2048, 64), (8, 2048, 64), (4, 512, 256))
GRID: Sequence[Size] = (*FEW, (1, 512, 64), (2, 2048, 64), (1, 2048, 256), (2, 8192, 16))
HARD_CASES = (HARD[0]._replace(name="one latch"), *HARD[1:5])
HARD_SIZES: Sequence[Size] = ((1, 65536, 64), (1, 2048, 64))


def measure(cell: pararnn.Cell, gates: Tensor, budget: float) -> dict[str, Any]:
    """Return both solvers' times of both passes, and Newton's counts."""

    def solve(solver: str) -> Solved:
        return run(program_of(cell), prepare(cell, gates), solver, "fused")

    def both(solver: str) -> object:
        return torch.autograd.grad(solve(solver).states[0], leaves, cotangent)

    leaves = [gates, *cell.parameters()]
    cotangent = torch.randn_like(solve("sequential").states[0])
    row: dict[str, Any] = {}
    for step, call in (("forward", torch.no_grad()(solve)), ("both", both)):
        times = wall_times([partial(call, solver) for solver in SOLVERS], budget)
        for solver, own in zip(SOLVERS, times, strict=True):
            row[f"{solver}_{step}_ms"] = round(statistics.median(own), 4)
    counts = totals(solve("newton").info).tolist()
    return row | dict(zip(("sweeps", "mended"), counts, strict=True))


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--budget", type=float, default=1.0, help="seconds for one timing")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, torch.get_num_threads()])
    parser.add_argument("--quick", action="store_true", help="the first sizes only")
    args = parser.parse_args()
    sizes = FEW if args.quick else GRID
    cases = [(name, size, EASY) for name in ("gru", "lstm") for size in sizes]
    cases += [("gru", size, hard) for size, hard in itertools.product(HARD_SIZES, HARD_CASES)]
    record = Record(args.out / "auto_cpu.csv", provenance())
    for threads, (name, size, hard) in itertools.product(args.threads, cases):
        torch.manual_seed(0)
        torch.set_num_threads(threads)
        cell = cell_of(name, size[2], hard.std, CPU)
        gates = hard_gates(cell, size, hard, CPU).requires_grad_()
        row = {"threads": threads, "cell": name, "what": hard.name}
        row |= dict(zip("BTD", size, strict=True)) | measure(cell, gates, args.budget)
        record.add(row | {"auto": pararnn.explain(cell, size).solver})


if __name__ == "__main__":
    main()
