"""From the start of a process to the first result: import, first layer, first passes.

Each row is the medians over processes of their own: "cold" with an empty cache each time, "warm"
with what an earlier one left. Python's own bytecode is there in both. Importing torch is measured,
and no part of the sum. Writes results/start.csv.

    python benchmarks/start.py [--cells gru lstm] [--before COMMIT=FOLDER] [--repeats 5]

FOLDER holds the package of an earlier commit (git archive COMMIT src): its rows come first.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import new_parser, provenance, write_csv

ROOT = Path(__file__).parents[1]

ONE = """
import json, sys, time
marks = [time.perf_counter()]
def mark(): marks.append(time.perf_counter())
import torch
mark()
import pararnn
mark()
layer = pararnn.ParaRNN(pararnn.CELLS[sys.argv[1]], 8, 16)
mark()
output, _ = layer(torch.randn(2, 100, 8))
mark()
output.square().mean().backward()
mark()
print(json.dumps([after - before for before, after in zip(marks, marks[1:])]))
"""
PARTS = ("torch", "import", "layer", "forward", "backward")


def seconds(cell: str, source: Path, cache: str) -> dict[str, float]:
    """Return the seconds of each part in a new process."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(source),
        "PARARNN_CACHE_DIR": f"{cache}/kernels",
        "PYTHONDONTWRITEBYTECODE": "",
        "PYTHONPYCACHEPREFIX": f"{tempfile.gettempdir()}/pararnn-start-bytecode",
    }
    command = [sys.executable, "-c", ONE, cell]
    result = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return dict(zip(PARTS, json.loads(result.stdout), strict=True))


def median_of(times: list[dict[str, float]]) -> dict[str, float]:
    """Return the medians in ms, and the sum from `import pararnn` to the first backward's end."""
    for some in times:
        some["sum"] = sum(some[part] for part in PARTS[1:])
    return {
        f"{part}_ms": round(1e3 * statistics.median(some[part] for some in times), 1)
        for part in (*PARTS, "sum")
    }


def rows_of(cell: str, source: Path, commit: str | None, repeats: int) -> list[dict[str, Any]]:
    """Return the cold and the warm row of a cell."""
    with tempfile.TemporaryDirectory() as warm:
        seconds(cell, source, warm)  # also what bytecode there is
        times: dict[str, list[dict[str, float]]] = {"cold": [], "warm": []}
        for _ in range(repeats):
            with tempfile.TemporaryDirectory() as cold:
                times["cold"].append(seconds(cell, source, cold))
            times["warm"].append(seconds(cell, source, warm))
    of = provenance() | ({} if commit is None else {"commit": commit})
    return [
        {**of, "cell": cell, "cache": cache, "processes": repeats, **median_of(some)}
        for cache, some in times.items()
    ]


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--cells", nargs="+", default=["gru", "lstm"])
    parser.add_argument("--before", metavar="COMMIT=FOLDER", action="append", default=[])
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    sources: list[tuple[str | None, Path]] = []
    for text in args.before:
        commit, _, folder = text.partition("=")
        sources.append((commit, Path(folder).resolve()))
    sources.append((None, ROOT / "src"))
    rows = [
        row
        for cell in args.cells
        for commit, source in sources
        for row in rows_of(cell, source, commit, args.repeats)
    ]
    write_csv(args.out / "start.csv", rows)


if __name__ == "__main__":
    main()
