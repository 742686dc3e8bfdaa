"""Times to compile kernels at first and to load them ever after, cell by cell.

Each row is a process of its own with an empty cache, then a second one with what the first left.
Tracing is not counted: every backend needs it. Writes results/compile.csv.

    python benchmarks/compile.py [--dtypes float32 bfloat16]
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile

from common import Record, new_parser, provenance

from pararnn.codegen.compiler import compiler_command
from pararnn.zoo import CELLS

ONE = """
import sys, time
import torch, pararnn
from pararnn.codegen.cpp import kernels_of
program = pararnn.program_of(pararnn.CELLS[sys.argv[1]](8)).of_kernels
begin = time.perf_counter()
kernels_of(program, getattr(torch, sys.argv[2]), "sequential")
print(time.perf_counter() - begin)
"""


def seconds(cell: str, dtype: str, cache: str) -> float:
    """Return the time to get a cell's kernels, in a new process."""
    environment = {**os.environ, "PARARNN_CACHE_DIR": cache}
    command = [sys.executable, "-c", ONE, cell, dtype]
    result = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return float(result.stdout)


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "float64", "bfloat16"])
    args = parser.parse_args()
    compiler = subprocess.run(
        [*compiler_command(), "--version"], check=True, capture_output=True, text=True
    ).stdout.splitlines()[0]
    record = Record(args.out / "compile.csv", {**provenance(), "compiler": compiler})
    for cell in CELLS:
        for dtype in args.dtypes:
            with tempfile.TemporaryDirectory() as cache:
                cold = seconds(cell, dtype, cache)
                warm = min(seconds(cell, dtype, cache) for _ in range(3))
            row = {"cell": cell, "dtype": dtype, "cold_s": round(cold, 2)}
            record.add(row | {"warm_ms": round(warm * 1e3, 1)})


if __name__ == "__main__":
    main()
