"""Kernels that split time, on one GPU: against the loop's kernel and against what must move.

Sections: shapes (few channels, long sequences, small batches), hard (weights and gates that forget
slowly, or never), trained (the layers of trained language models, on held-out text), scan (the
affine recurrence alone), grid (auto's choice against both solvers). Writes results/parallel.csv,
results/parallel_trained.csv and results/auto_cuda.csv.

    python benchmarks/parallel.py [--only shapes] [--quick] [--train-seconds 60] [--out FOLDER]
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from gpu import Run, Sections, cache_bytes, replay_times, run_sections, sets_for
from kernels import Size, bytes_moved, calls_of
from protocol import Row
from torch import Tensor
from trained import WINDOW, part_of, solves_of, steps_to_merge, train_on_library

from pararnn import CELLS, Cell
from pararnn.cells.affine import AFFINE
from pararnn.engines.arguments import Arguments, totals
from pararnn.engines.fused.cuda import NEWTON, SEQUENTIAL
from pararnn.engines.table import choose
from pararnn.lab.tasks import random_windows
from pararnn.lab.train.demo import demo_config
from pararnn.lm import LanguageModel
from pararnn.program.program import Program, program_of
from pararnn.solve import prepare

F32, BF16 = torch.float32, torch.bfloat16
MEDIUM, SHORT, WIDE = (8, 2048, 1024), (1, 512, 1024), (1, 2048, 2048)
FEWER = (4, 2048, 1024)
NARROW, LONG, BIG = (1, 65536, 64), (1, 65536, 1024), (32, 2048, 1024)
ENGINES = {"newton": NEWTON, "sequential": SEQUENTIAL}
MOST_SETS = 40

SHAPES: tuple[tuple[str, Size, torch.dtype, str], ...] = (
    ("gru", MEDIUM, F32, "forward"),
    ("gru", MEDIUM, BF16, "forward"),
    ("gru", MEDIUM, F32, "backward"),
    ("gru", MEDIUM, BF16, "backward"),
    ("gru", SHORT, F32, "forward"),
    ("gru", WIDE, BF16, "forward"),
    ("gru", NARROW, F32, "forward"),
    ("gru", LONG, F32, "forward"),
    ("gru", LONG, F32, "backward"),
    ("lstm", LONG, F32, "forward"),
    ("lstm", LONG, F32, "backward"),
)
"""Cell, size, dtype and pass of the rows that few channels or a small batch make hard."""


class Hard(NamedTuple):
    """A GRU that is hard to split: weights' deviation, bias of the update gate, latches or none."""

    name: str
    std: float
    bias: float
    latch: bool


HARD = (
    Hard("0.2% latches", 0.3, 0.0, True),
    Hard("weights 1", 1.0, 0.0, False),
    Hard("weights 2", 2.0, 0.0, False),
    Hard("bias -2", 0.3, -2.0, False),
    Hard("bias -4", 0.3, -4.0, False),
    Hard("bias -6", 0.3, -6.0, False),
)
EASY = Hard("", 0.3, 0.0, False)
SPLIT = list(itertools.product((MEDIUM, LONG, NARROW), (F32, BF16)))
"""Sizes and dtypes at which it matters how fast channels forget."""
TRAINED_SPLIT = [*SPLIT, (FEWER, F32), (FEWER, BF16)]
DEMO = demo_config()
TRAINED = replace(
    DEMO,
    model=replace(DEMO.model, hidden_size=LONG[2], intermediate_size=2 * LONG[2]),
    data=replace(DEMO.data, sequence_length=513),
    optimiser=replace(DEMO.optimiser, learning_rate=2e-3),
    batch=32,
    device_batch=32,
    save_every=10**9,
)
TILE = NARROW[2]
GRID = list(itertools.product((1, 2, 8, 32), (128, 512, 2048, 8192), (64, 256, 1024)))


def hard_gates(
    cell: Cell, size: Size, hard: Hard, device: torch.device | str, dtype: torch.dtype = F32
) -> Tensor:
    """Return gates N(0, 1); the first is shifted, or shut for 0.2% of the channels."""
    batch, length, channels = size
    gates = torch.randn(batch, length, len(cell.gates), channels, device=device, dtype=dtype)
    gates[:, :, 0] += hard.bias
    if hard.latch:
        count = max(1, round(0.002 * channels))
        shut = torch.randperm(channels, device=device)[:count]
        gates[:, length // 20 :, 0, shut] -= 30
    return gates


def cell_of(name: str, channels: int, std: float, device: torch.device | str = "cuda") -> Cell:
    """Return a cell with recurrent weights of a standard deviation."""
    cell = CELLS[name](channels, device=device)
    with torch.no_grad():
        for parameter in cell.recurrent_parameters():
            parameter.normal_(0, std)
    return cell


@torch.no_grad()
def measure(
    program: Program, inputs: Sequence[Arguments], what: str, budget: float, few: bool = False
) -> Row:
    """Return both solvers' medians in ms, and Newton's counts on the first input."""
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


def inputs_of(cell: Cell, size: Size, dtype: torch.dtype, hard: Hard = EASY) -> list[Arguments]:
    """Return enough inputs to exceed the cache."""
    gates = (hard_gates(cell, size, hard, "cuda", dtype) for _ in range(sets_of(cell, size, dtype)))
    return [prepare(cell, each) for each in gates]


def sets_of(cell: Cell, size: Size, dtype: torch.dtype) -> int:
    """Return the number of inputs that exceed the cache."""
    bytes_of_one = math.prod(size) * dtype.itemsize * len(cell.gates)
    return min(sets_for(bytes_of_one, cache_bytes()), MOST_SETS)


def about_of(section: str, what: str, size: Size, dtype: torch.dtype, step: str) -> Row:
    """Return the columns that name a row's case."""
    row: Row = {"section": section, "what": what, "dtype": str(dtype).split(".")[1], "pass": step}
    return row | dict(zip("BTD", size, strict=True))


def row_of(
    run: Run,
    program: Program,
    inputs: Sequence[Arguments],
    case: tuple[str, str, Size, torch.dtype, str],
    in_bytes: int | None = None,
) -> Row:
    """Measure a case, see `about_of`: its times, their limit, and ratios.

    in_bytes: that must move; by default those of a pass over the cell's gates and states.
    """
    _, _, size, dtype, step = case
    times = measure(program, inputs, step, run.graph_budget, size[1] > 9999)
    if in_bytes is None:
        in_bytes = bytes_moved(step, size, inputs[0].gates.shape[2], program.num_states, dtype)
    row, limit = about_of(*case) | times, in_bytes / run.copy_rate * 1e3
    row |= {"limit_ms": round(limit, 5), "of_limit": round(row["newton_ms"] / limit, 3)}
    return row | {"speedup": round(row["sequential_ms"] / row["newton_ms"], 2)}


def shape_rows(run: Run) -> Iterator[Row]:
    """Yield the shapes that batch and channels do not fill a GPU with."""
    for name, size, dtype, step in SHAPES:
        cell = cell_of(name, size[2], EASY.std)
        case = ("shapes", name, size, dtype, step)
        yield row_of(run, program_of(cell), inputs_of(cell, size, dtype), case)


def hard_rows(run: Run) -> Iterator[Row]:
    """GRU forward where channels forget slowly, never, or expand."""
    for hard, (size, dtype) in itertools.product(HARD, SPLIT):
        cell = cell_of("gru", size[2], hard.std)
        case = ("hard", hard.name, size, dtype, "forward")
        yield row_of(run, program_of(cell), inputs_of(cell, size, dtype, hard), case)


def trained_rows(run: Run) -> Iterator[Row]:
    """Yield each layer of trained language models on held-out text, and its channels' memory."""
    torch.set_float32_matmul_precision("high")  # more training in the same time
    for name in ("gru", "lstm"):
        config = replace(TRAINED, model=replace(TRAINED.model, cell=name), steps=run.train_steps)
        model, corpus, training = train_on_library(config)
        about: Row = {"width": config.model.hidden_size, **training}
        for index in range(len(model.recurrent_layers())):
            yield from layer_rows(run, model, name, index, corpus.valid, about)


def layer_rows(
    run: Run, model: LanguageModel, name: str, index: int, text: Tensor, about: Row
) -> Iterator[Row]:
    """Yield one layer at all sizes; the narrow one is the tile of its slowest channel."""
    cell = model.recurrent_layers()[index].cell
    generator = torch.Generator().manual_seed(index)

    def inputs(size: Size, dtype: torch.dtype, count: int, channels: slice) -> list[Arguments]:
        windows = random_windows(text, count * size[0], size[1], generator)[:, :-1]
        device = model.lm_head.weight.device
        read = (solves_of(model, tokens.to(device)) for tokens in windows.split(size[0]))
        return [part_of(solves[index], channels, dtype) for solves in read]

    [args] = inputs(LONG, F32, 1, slice(None))
    steps = steps_to_merge(cell, args).double()
    del args
    about = about | {
        "latches": round(float((steps == WINDOW).sum(1).double().mean()), 2),
        "merge_median": int(steps.median()),
        "merge_p99": round(float(steps.quantile(0.99))),
        "slowest_channel": int(steps.mean(0).argmax()),
    }
    print(about, flush=True)
    begin = about["slowest_channel"] // TILE * TILE
    for size, dtype in TRAINED_SPLIT:
        channels = slice(begin, begin + TILE) if size == NARROW else slice(None)
        some = inputs(size, dtype, sets_of(cell, size, dtype), channels)
        for step in ("forward", "backward"):
            case = ("trained", f"{name}, layer {index + 1}", size, dtype, step)
            yield row_of(run, program_of(cell), some, case) | about


def scan_rows(run: Run) -> Iterator[Row]:
    """Yield the affine recurrence alone, by how fast it forgets."""
    for size, decay, step in itertools.product((LONG, BIG), (0.5, 0.999), ("forward", "backward")):
        batch, length, channels = size
        program = program_of(AFFINE[1](channels))
        a = decay * (1 - 0.1 * torch.rand(size, device="cuda"))
        b = torch.randn(batch, length, 1, channels, device="cuda")
        args = Arguments(b, None, (a,), (), (), batch)
        in_bytes = math.prod(size) * 4 * {"forward": 3, "backward": 5}[step]
        case = ("scan", f"a up to {decay}", size, F32, step)
        yield row_of(run, program, [args], case, in_bytes)


def grid_rows(run: Run) -> Iterator[Row]:
    """Yield forward and backward by both solvers, and auto's choice; print the worst again."""
    rows = []
    for name, size, dtype in itertools.product(("gru",), GRID, (F32, BF16)):
        cell = cell_of(name, size[2], EASY.std)
        program, inputs = program_of(cell), inputs_of(cell, size, dtype)[:8]
        total = dict.fromkeys(ENGINES, 0.0)
        for step in ("forward", "backward"):
            times = measure(program, inputs, step, run.graph_budget / 5)
            for solver in ENGINES:
                total[solver] += times[f"{solver}_ms"]
        device = torch.device("cuda", torch.cuda.current_device())
        auto = choose(program, size, dtype, device, "auto", "auto").engine().solver
        row = about_of("grid", name, size, dtype, "both")
        row |= {f"{solver}_ms": round(ms, 5) for solver, ms in total.items()}
        row |= {"auto": auto, "auto_of_best": round(total[auto] / min(total.values()), 3)}
        rows.append(row)
        yield row
    for row in sorted(rows, key=lambda row: -row["auto_of_best"])[:12]:
        print("worst:", ", ".join(f"{key} {value}" for key, value in row.items()), flush=True)


SECTIONS: Sections = {
    "shapes": (shape_rows, "parallel.csv"),
    "hard": (hard_rows, "parallel.csv"),
    "trained": (trained_rows, "parallel_trained.csv"),
    "scan": (scan_rows, "parallel.csv"),
    "grid": (grid_rows, "auto_cuda.csv"),
}


if __name__ == "__main__":
    run_sections(__doc__, SECTIONS, graph_budget=300.0, train_steps=700)
