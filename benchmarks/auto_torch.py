"""Newton against the loop on the torch backend: the measurements behind `solver="auto"`.

Forward and forward + backward (of a sum) with gates given, at initialisation, by both solvers.
Writes results/auto_torch_<device>.csv and prints how far `auto` is from the better of the two.

    python benchmarks/auto_torch.py [--device cuda] [--budget 0.5] [--quick]
"""

from __future__ import annotations

import statistics

import torch
from common import Record, new_parser, provenance
from protocol import wall_times
from torch import Tensor

import pararnn
from pararnn.engines.arguments import totals
from pararnn.engines.table import choose
from pararnn.program.program import program_of
from pararnn.solve import Solved, prepare, run

CELLS = ("gru", "lstm", "slstm")
SIZES = {
    "cpu": [(1, 64), (1, 256), (4, 64), (8, 64), (4, 256), (8, 256)],
    "cuda": [(1, 64), (1, 1024), (8, 256), (8, 1024), (32, 1024)],
}
LENGTHS = (16, 32, 64, 128, 512, 2048)
DENSE_SIZES = [(1, 4), (1, 16), (1, 64), (8, 4), (8, 16)]
DENSE_LENGTHS = (64, 512, 2048)


def measure(
    cell: pararnn.Cell, gates: Tensor, solver: str, budget: float
) -> tuple[float, float, int]:
    """Return forward ms, forward + backward ms, and sweeps."""

    def solve() -> Solved:
        return run(program_of(cell), prepare(cell, gates), solver, "torch")

    def both() -> None:
        solve().states[0].sum().backward()
        gates.grad = None

    sweeps = int(totals(solve().info)[0])
    forward_ms, both_ms = (
        statistics.median(wall_times([call], budget, gates.device, least=1)[0])
        for call in (torch.no_grad()(solve), both)
    )
    return forward_ms, both_ms, sweeps


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--budget", type=float, default=0.5, help="seconds for one timing")
    parser.add_argument("--quick", action="store_true", help="every seventh size only")
    args = parser.parse_args()
    device = torch.device(args.device)
    grid = [(c, b, t, d) for c in CELLS for b, d in SIZES[device.type] for t in LENGTHS]
    grid += [("dense-gru", b, t, d) for b, d in DENSE_SIZES for t in DENSE_LENGTHS]
    if args.quick:
        grid = grid[::7]
    about = {**provenance(device), "threads": torch.get_num_threads()}
    record, ratios = Record(args.out / f"auto_torch_{device.type}.csv", about), []
    for name, batch, length, channels in grid:
        torch.manual_seed(0)
        cell = pararnn.CELLS[name](channels, device=device)
        size = (batch, length, len(cell.gates), channels)
        gates = torch.randn(size, device=device, requires_grad=True)
        loop = measure(cell, gates, "sequential", args.budget)
        newton = measure(cell, gates, "newton", args.budget)
        program = pararnn.program_of(cell)
        size_of = (batch, length, channels)
        auto = choose(program, size_of, gates.dtype, device, "auto", "torch").engine().solver
        ratio = (newton if auto == "newton" else loop)[1] / min(loop[1], newton[1])
        ratios.append(ratio)
        row = {
            "cell": name,
            "B": batch,
            "T": length,
            "D": channels,
            "sequential_forward_ms": round(loop[0], 3),
            "newton_forward_ms": round(newton[0], 3),
            "sequential_both_ms": round(loop[1], 3),
            "newton_both_ms": round(newton[1], 3),
            "newton_sweeps": newton[2],
            "auto": auto,
            "auto_over_best_both": round(ratio, 3),
        }
        record.add(row)
    print(f"auto over best: median {statistics.median(ratios):.2f}, worst {max(ratios):.2f}")


if __name__ == "__main__":
    main()
