"""Chunks against the loops: the measurements behind the rank of (chunks, torch).

Forward and forward + backward of matrix cells with gates given, by chunks, by the loop in PyTorch
and by the generated loop. Writes results/chunks_<device>.csv and prints the ratios.

    python benchmarks/chunks.py [--device cuda] [--budget 0.5] [--quick]
"""

from __future__ import annotations

import statistics

import torch
from common import new_parser, provenance, write_csv
from protocol import wall_times
from torch import Tensor

import pararnn
import pararnn.zoo as zoo

CELLS = ("gated-delta", "rwkv7", "titans", "mlstm")
SIZES = [(1, 2, 16), (4, 12, 64)]
LENGTHS = (16, 32, 64, 256, 1024)
PAIRS = [("chunks", "torch"), ("sequential", "torch"), ("sequential", "fused")]


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

    forward_ms, both_ms = (
        statistics.median(wall_times([call], budget, gates.device, least=3)[0])
        for call in (torch.no_grad()(solve), both)
    )
    return forward_ms, both_ms


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--budget", type=float, default=0.5, help="seconds for one timing")
    parser.add_argument("--quick", action="store_true", help="every seventh size only")
    args = parser.parse_args()
    device = torch.device(args.device)
    grid = [(name, size, steps) for name in CELLS for size in SIZES for steps in LENGTHS]
    rows = []
    for name, (batch, heads, keys), steps in grid[::7] if args.quick else grid:
        torch.manual_seed(0)
        cell = zoo.MATRIX_CELLS[name](heads * keys, num_heads=heads, K=keys, device=device)
        sizes = cell.head_sizes
        assert sizes is not None
        gates = torch.randn(batch, steps, heads, sizes.width, device=device, requires_grad=True)
        arriving = torch.randn(batch, steps, *sizes.output, device=device)
        times = {pair: measure(cell, gates, arriving, pair, args.budget) for pair in PAIRS}
        row = {
            **provenance(device),
            "threads": torch.get_num_threads(),
            "cell": name,
            "B": batch,
            "T": steps,
            "heads": heads,
            "K": keys,
        }
        for pair, (forward_ms, both_ms) in times.items():
            label = "_".join(pair)
            row |= {f"{label}_forward_ms": round(forward_ms, 3)}
            row |= {f"{label}_both_ms": round(both_ms, 3)}
        rows.append(row)
        ours, *loops = times.values()
        ratios = [f"{a / b:.2f} / {c / d:.2f}" for (a, c) in loops for (b, d) in [ours]]
        print(
            f"{name:12} B {batch} T {steps:5} heads {heads:2} K {keys:3}: {ours[0]:.2f} / "
            f"{ours[1]:.2f} ms; loop in PyTorch {ratios[0]}, generated loop {ratios[1]} of it",
            flush=True,
        )
    write_csv(args.out / f"chunks_{device.type}.csv", rows)


if __name__ == "__main__":
    main()
