"""Kernels that split time, on one GPU: against the loop's kernel and against what must move.

Sections: shapes (few channels, long sequences, small batches), hard (weights and gates that forget
slowly, or never), scan (the affine recurrence alone), grid (auto's choice against both solvers).
Writes results/parallel.csv and results/auto_cuda.csv.

    python benchmarks/parallel.py [--only shapes] [--quick] [--out FOLDER]
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence

import torch
from gpu import Row, Run, Sections, cache_bytes, replay_times, run_sections, sets_for
from kernels import Size, bytes_moved, calls_of

from pararnn import CELLS, Cell
from pararnn.cells.affine import AFFINE
from pararnn.engines.base import Arguments, totals
from pararnn.engines.fused_cuda import NEWTON, SEQUENTIAL
from pararnn.engines.table import engine_for
from pararnn.program import Program, program_of
from pararnn.solve import prepare

F32, BF16 = torch.float32, torch.bfloat16
MEDIUM, SHORT, WIDE = (8, 2048, 1024), (1, 512, 1024), (1, 2048, 2048)
NARROW, LONG, BIG = (1, 65536, 64), (1, 65536, 1024), (32, 2048, 1024)
ENGINES = {"newton": NEWTON, "sequential": SEQUENTIAL}
MOST_SETS = 40

# (cell, size, dtype, pass) -> the time to reach on an H200, ms.
AIMS: dict[tuple[str, Size, torch.dtype, str], float] = {
    ("gru", MEDIUM, F32, "forward"): 0.075,
    ("gru", MEDIUM, BF16, "forward"): 0.040,
    ("gru", MEDIUM, F32, "backward"): 0.145,
    ("gru", MEDIUM, BF16, "backward"): 0.080,
    ("gru", SHORT, F32, "forward"): 0.009,
    ("gru", WIDE, BF16, "forward"): 0.015,
    ("gru", NARROW, F32, "forward"): 0.026,
    ("gru", LONG, F32, "forward"): 0.27,
    ("gru", LONG, F32, "backward"): 0.55,
    ("lstm", LONG, F32, "forward"): 0.34,
    ("lstm", LONG, F32, "backward"): 0.61,
}
LATCH_AIMS = {(MEDIUM, F32): 0.085, (MEDIUM, BF16): 0.055, (LONG, F32): 0.285, (NARROW, F32): 0.045}
HARD: Sequence[tuple[str, float, float, bool]] = (
    # name, weights' standard deviation, bias of the update gate, latches
    ("0.2% latches", 0.3, 0.0, True),
    ("weights 1", 1.0, 0.0, False),
    ("weights 2", 2.0, 0.0, False),
    ("bias -2", 0.3, -2.0, False),
    ("bias -4", 0.3, -4.0, False),
    ("bias -6", 0.3, -6.0, False),
)
GRID = list(itertools.product((1, 2, 8, 32), (128, 512, 2048, 8192), (64, 256, 1024)))


def arguments(cell: Cell, size: Size, dtype: torch.dtype, bias: float, latch: bool) -> Arguments:
    """Inputs N(0, 1); the first gate shifted, or soon shut for 0.2% of the channels."""
    batch, length, channels = size
    gates = torch.randn(batch, length, len(cell.gates), channels, device="cuda", dtype=dtype)
    gates[:, :, 0] += bias
    if latch:
        count = max(1, round(0.002 * channels))
        shut = torch.randperm(channels, device="cuda")[:count]
        gates[:, length // 20 :, 0, shut] -= 30
    return prepare(cell, gates)


def cell_of(name: str, channels: int, std: float = 0.3) -> Cell:
    """A cell with recurrent weights of a standard deviation."""
    cell = CELLS[name](channels, device="cuda")
    with torch.no_grad():
        for parameter in cell.recurrent_parameters():
            parameter.normal_(0, std)
    return cell


@torch.no_grad()
def measured(
    program: Program, inputs: Sequence[Arguments], what: str, budget: float, few: bool = False
) -> Row:
    """Both solvers' medians in ms, and what Newton did on the first input."""
    row: Row = {}
    for name, engine in ENGINES.items():
        calls = calls_of(engine, program, inputs, what)
        # A loop of milliseconds needs no fresh inputs: it never has them in the cache.
        some = calls[: 1 if few and name == "sequential" else len(calls)]
        row[f"{name}_ms"] = round(statistics.median(replay_times(some, budget)), 5)
        if name == "newton":
            info = totals(calls[0]().info).tolist() if what == "forward" else ["", ""]  # type: ignore[attr-defined]
            row["sweeps"], row["mended"] = info
    return row


def inputs_of(
    cell: Cell, size: Size, dtype: torch.dtype, bias: float = 0.0, latch: bool = False
) -> list[Arguments]:
    """Enough inputs to exceed the cache."""
    bytes_of_one = math.prod(size) * dtype.itemsize * len(cell.gates)
    count = min(sets_for(bytes_of_one, cache_bytes()), MOST_SETS)
    return [arguments(cell, size, dtype, bias, latch) for _ in range(count)]


def about_of(section: str, what: str, size: Size, dtype: torch.dtype, step: str) -> Row:
    """The columns that say what a row is."""
    row: Row = {"section": section, "what": what, "dtype": str(dtype).split(".")[1], "pass": step}
    return row | dict(zip("BTD", size, strict=True))


def finished(row: Row, moved: int, rate: float, aim: float | str) -> Row:
    """A row with its limit, aim and ratios."""
    limit = moved / rate * 1e3
    row |= {"limit_ms": round(limit, 5), "of_limit": round(row["newton_ms"] / limit, 3)}
    row |= {"speedup": round(row["sequential_ms"] / row["newton_ms"], 2), "aim_ms": aim}
    print(", ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    return row


def shape_rows(run: Run) -> list[Row]:
    """The shapes that batch and channels do not fill a GPU with."""
    rows = []
    for (name, size, dtype, step), aim in AIMS.items():
        cell = cell_of(name, size[2])
        times = measured(
            program_of(cell), inputs_of(cell, size, dtype), step, run.graph_budget, size[1] > 9999
        )
        moved = bytes_moved(step, size, len(cell.gates), len(cell.states), dtype)
        rows.append(
            finished(about_of("shapes", name, size, dtype, step) | times, moved, run.copy_rate, aim)
        )
    return rows


def hard_rows(run: Run) -> list[Row]:
    """GRU forward where channels forget slowly, never, or expand."""
    rows = []
    for (what, std, bias, latch), (size, dtype) in itertools.product(HARD, LATCH_AIMS):
        cell = cell_of("gru", size[2], std)
        inputs = inputs_of(cell, size, dtype, bias, latch)
        times = measured(program_of(cell), inputs, "forward", run.graph_budget, size[1] > 9999)
        moved = bytes_moved("forward", size, len(cell.gates), len(cell.states), dtype)
        aim = LATCH_AIMS[size, dtype] if latch else ""
        rows.append(
            finished(
                about_of("hard", what, size, dtype, "forward") | times, moved, run.copy_rate, aim
            )
        )
    return rows


def scan_rows(run: Run) -> list[Row]:
    """The affine recurrence alone, by how fast it forgets."""
    rows = []
    for size, decay, step in itertools.product((LONG, BIG), (0.5, 0.999), ("forward", "backward")):
        batch, length, channels = size
        program = program_of(AFFINE[1](channels))
        a = decay * (1 - 0.1 * torch.rand(size, device="cuda"))
        b = torch.randn(batch, length, 1, channels, device="cuda")
        args = Arguments(b, None, (a,), (), (), batch, None, None, False)
        times = measured(program, [args], step, run.graph_budget, length > 9999)
        moved = math.prod(size) * 4 * {"forward": 3, "backward": 5}[step]
        row = about_of("scan", f"a up to {decay}", size, F32, step) | times
        rows.append(finished(row, moved, run.copy_rate, ""))
    return rows


def grid_rows(run: Run) -> list[Row]:
    """Forward and backward by both solvers, and what auto takes."""
    rows = []
    for name, size, dtype in itertools.product(("gru",), GRID, (F32, BF16)):
        cell = cell_of(name, size[2])
        program, inputs = program_of(cell), inputs_of(cell, size, dtype)[:8]
        total = dict.fromkeys(ENGINES, 0.0)
        for step in ("forward", "backward"):
            times = measured(program, inputs, step, run.graph_budget / 5)
            for solver in ENGINES:
                total[solver] += times[f"{solver}_ms"]
        device = torch.device("cuda", torch.cuda.current_device())
        auto = engine_for(program, size, dtype, device, "auto", "auto").solver
        row = about_of("grid", name, size, dtype, "both")
        row |= {f"{solver}_ms": round(ms, 5) for solver, ms in total.items()}
        row |= {"auto": auto, "auto_of_best": round(total[auto] / min(total.values()), 3)}
        rows.append(row)
    worst = sorted(rows, key=lambda row: -row["auto_of_best"])[:12]
    for row in worst:
        print(", ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    return rows


SECTIONS: Sections = {
    "shapes": (shape_rows, "parallel.csv"),
    "hard": (hard_rows, "parallel.csv"),
    "scan": (scan_rows, "parallel.csv"),
    "grid": (grid_rows, "auto_cuda.csv"),
}


if __name__ == "__main__":
    run_sections(__doc__, SECTIONS, graph_budget=300.0)
