"""Chunks against the loops: the measurements behind the rank of (chunks, torch).

Forward and forward + backward of matrix cells with gates given, by chunks, by the loop in PyTorch
and by the generated loop; on a GPU by graphs, in bfloat16. Writes
results/chunks_loops_<device>.csv.

    python benchmarks/chunks.py [--device cuda] [--budget 0.5] [--quick]
"""

from __future__ import annotations

import statistics

import torch
from common import Record, new_parser, provenance
from protocol import RUNS, Call, launcher, run_times, wall_times
from torch import Tensor

import pararnn
import pararnn.zoo as zoo

CELLS = ("gated-delta", "rwkv7", "titans", "mlstm")
GRIDS = {
    "cpu": [
        (size, steps) for size in ((1, 2, 16), (4, 12, 64)) for steps in (16, 32, 64, 256, 1024)
    ],
    "cuda": [
        ((16, 12, 64), 256),
        ((16, 12, 64), 1024),
        ((1, 12, 64), 1024),
        ((1, 32, 128), 256),
        ((1, 32, 128), 2048),
    ],
}
"""(B, H, K = V) and T, by the device's type."""
PAIRS = {
    "cpu": [("chunks", "torch"), ("sequential", "torch"), ("sequential", "fused")],
    "cuda": [("chunks", "fused"), ("sequential", "fused")],
}
DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}


def measure(
    cell: pararnn.Cell, gates: Tensor, arriving: Tensor, pair: tuple[str, str], budget: float
) -> tuple[float, float]:
    """Return forward ms and forward + backward ms."""

    def solve() -> Tensor:
        output: Tensor = pararnn.solve(cell, gates, solver=pair[0], backend=pair[1])[0]
        return output

    def both() -> None:
        gates.grad = None
        solve().backward(arriving)

    def median_ms(call: Call) -> float:
        if gates.device.type == "cuda":
            return statistics.median(run_times(launcher(call, "graph"), gates.device, RUNS))
        return statistics.median(wall_times([call], budget, gates.device)[0])

    forward_ms, both_ms = median_ms(torch.no_grad()(solve)), median_ms(both)
    return forward_ms, both_ms


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--budget", type=float, default=0.5, help="seconds for one timing")
    parser.add_argument("--quick", action="store_true", help="every seventh size only")
    args = parser.parse_args()
    device = torch.device(args.device)
    grid = [(name, *sizes) for name in CELLS for sizes in GRIDS[device.type]]
    about = {**provenance(device), "threads": torch.get_num_threads()}
    record = Record(args.out / f"chunks_loops_{device.type}.csv", about)
    for name, (batch, heads, keys), steps in grid[::7] if args.quick else grid:
        torch.manual_seed(0)
        cell = zoo.MATRIX_CELLS[name](heads * keys, num_heads=heads, K=keys, device=device)
        sizes = cell.head_sizes
        assert sizes is not None
        gates = torch.randn(batch, steps, heads, sizes.width, device=device)
        gates = gates.to(DTYPES[device.type]).requires_grad_()
        arriving = torch.randn(batch, steps, *sizes.output, device=device).to(gates.dtype)
        times = {}
        for pair in PAIRS[device.type]:
            try:
                times[pair] = measure(cell, gates, arriving, pair, args.budget)
            except pararnn.EngineError as error:
                print(f"{name}: {error}")
        row = {"cell": name, "B": batch, "T": steps, "heads": heads, "K": keys}
        for pair in PAIRS[device.type]:
            label = "_".join(pair)
            for what, ms in zip(("forward", "both"), times.get(pair, (None, None)), strict=True):
                row[f"{label}_{what}_ms"] = ms if ms is None else round(ms, 3)
        record.add(row)


if __name__ == "__main__":
    main()
