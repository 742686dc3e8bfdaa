"""The demo's figures: bits per byte and the time of a pass by each engine, for some cells.

Runs `pararnn demo` with its defaults for each cell and writes results/demo.csv.

    python benchmarks/demo.py [--cells gru lstm] [--steps 1000]
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from common import RESULTS, provenance, write_csv

from pararnn.base.device import default_device
from pararnn.lab.train.demo import demo_config, run_demo
from pararnn.zoo import CELLS


def row_of(result: dict[str, Any]) -> dict[str, Any]:
    """Return a run's figures; times in ms."""
    row = {
        **provenance(default_device()),
        **{name: result[name] for name in ("cell", "parameters", "steps")},
        **{f"bits_{name}": round(value, 3) for name, value in result["bits_per_byte"].items()},
        "verified": result["verified"],
    }
    for engine in result["engines"]:
        case = "{solver}_{backend}_{batch}x{length}".format(**engine)
        row |= {f"{case}_{name}": round(engine[name], 2) for name in ("forward_ms", "both_ms")}
    return row


def main() -> None:
    base = demo_config()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cells", nargs="+", default=["gru", "lstm"], choices=list(CELLS))
    parser.add_argument("--steps", type=int, default=base.steps)
    args = parser.parse_args()
    base = replace(base, steps=args.steps)
    configs = [
        replace(base, model=replace(base.model, cell=cell), out=f"runs/demo-{cell}")
        for cell in args.cells
    ]
    write_csv(RESULTS / "demo.csv", [row_of(run_demo(config)) for config in configs])


if __name__ == "__main__":
    main()
