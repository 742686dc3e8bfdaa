"""The demo's figures: bits per byte and the time of a pass by each engine, for some cells.

Runs `pararnn demo` with its defaults for each cell and writes results/demo.csv.

    python benchmarks/demo.py [--cells gru lstm] [--seconds 100]
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from common import RESULTS, provenance, write_csv

from pararnn.lab.train import DemoConfig, run_demo
from pararnn.zoo import CELLS


def row_of(metrics: dict[str, Any]) -> dict[str, Any]:
    """Return a run's figures; times in ms, sizes as the demo's config names them."""
    bits = metrics["bits_per_byte"]
    row = {
        **provenance(metrics["config"]["device"]),
        "cell": metrics["config"]["cell"],
        "parameters": metrics["parameters"],
        "steps": metrics["steps"],
        "training_seconds": round(metrics["training_seconds"], 1),
        **{f"bits_{name}": round(value, 3) for name, value in bits.items()},
        "verified": metrics["verified"] and not metrics["left_out"],
    }
    for timing in metrics["timings"]:
        pair = f"{timing['solver']}_{timing['backend']}"
        shape = f"{pair}_{timing['batch']}x{timing['length']}"
        row[f"{shape}_forward_ms"] = round(timing["forward"] * 1e3, 2)
        row[f"{shape}_both_ms"] = round(timing["forward_backward"] * 1e3, 2)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cells", nargs="+", default=["gru", "lstm"], choices=list(CELLS))
    parser.add_argument("--seconds", type=float, default=DemoConfig.seconds)
    args = parser.parse_args()
    base = DemoConfig(seconds=args.seconds)
    runs = [run_demo(replace(base, cell=cell, out=f"runs/demo-{cell}")) for cell in args.cells]
    write_csv(RESULTS / "demo.csv", [row_of(metrics) for metrics in runs])


if __name__ == "__main__":
    main()
