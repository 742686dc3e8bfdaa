"""Kernels over chunks on one GPU, next to our loop and to other libraries' chunks.

Gates in, outputs out: forward without gradients, and forward + backward with all gradients, in
bfloat16. Ours run by pararnn.solve. Times are replays of a CUDA graph, or calls where a pass cannot
be captured: a column says which. Inputs are random, and exceed the L2 cache. Each way runs in
another process, with a limit of time: one that fails has a row that says why. All compile before,
several at once; tuners of Triton choose later, when the GPU is theirs alone.

Libraries (PyPI): fla-core, mlstm-kernels, einops, mamba-ssm (MAMBA_SKIP_CUDA_BUILD=TRUE
MAMBA_FORCE_BUILD=TRUE); and flash-qla and tilelang, in a folder of their own that --tilelang names.
fla refuses backward passes of gated rules on Hopper before Triton 3.7.1, unless TileLang is there:
"fla" has this check off, for timing only, and its row says so.

Writes results/chunks_cuda.csv, a row at a time. Rows of an earlier run stay unless measured again,
so a run may be cut into parts by --only: a regular expression in "case: way", see --list.

    python benchmarks/chunks_gpu.py [--only REGEX] [--list] [--tilelang FOLDER] [--seconds N]
                                    [--limit N] [--processes N] [--budget MS] [--out FOLDER]
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from chunk_ways import (
    CASES,
    DIFFERENT,
    DTYPE,
    PAIRS,
    Case,
    Settings,
    make_cell,
    measure,
    prepare,
)
from common import add_row, new_parser, read_rows, write_csv
from gpu import add_options, facts_of
from isolated import Isolated, LostError
from markdown_tables import Row as Strings
from protocol import Row

KEYS = ("case", "way")
PASSES = ("forward", "both")
COLUMNS = ("ms", "min_ms", "runs", "launch", "over_chunks", "over_copy")
"""Of a pass."""
PREPARATION = 2.5
"""Times the limit of a measurement that a compilation may take."""

Task = tuple[Case, str]


def empty_row(case: Case, way: str) -> Row:
    row: Row = {"case": case.name, "cell": case.cell, "B": case.batch, "T": case.length}
    row |= {"H": case.heads, "K": case.size, "V": case.size, "way": way, "version": ""}
    row |= {f"{name}_{column}": "" for name in PASSES for column in COLUMNS}
    return row | {"difference": "", "note": DIFFERENT.get((case.cell, way), "")}


def bytes_moved(case: Case) -> dict[str, int]:
    """Return what our passes must read and write at least."""
    sizes = make_cell(case, "cpu").head_sizes
    assert sizes is not None
    row = case.batch * case.length * case.heads * DTYPE.itemsize
    forward = row * (sizes.width + case.size)
    return {"forward": forward, "both": 2 * forward + row * sizes.width}


def update(row: Row, news: Row) -> None:
    """Put news into a row; a note joins those before, once."""
    notes = [*filter(None, str(row["note"]).split("; ")), news.get("note", row["note"])]
    row |= news
    row["note"] = "; ".join(dict.fromkeys(filter(None, notes)))


def with_ratios(rows: Sequence[Strings]) -> list[Row]:
    """Return the rows in the order of the cases, each with its times over those of our chunks and
    over the time in which the bytes of our cell are copied."""
    order = [(case.name, way) for case in CASES for way in case.ways]
    cases = {case.name: case for case in CASES}
    chunks = {row["case"]: row for row in rows if row["way"] == "chunks"}
    results = []
    for row in sorted(rows, key=lambda row: order.index((row["case"], row["way"]))):
        news: Row = {}
        for name in PASSES:
            ms, ours = row[f"{name}_ms"], chunks.get(row["case"], row)[f"{name}_ms"]
            if ms and ours and row["case"] in chunks:
                news[f"{name}_over_chunks"] = round(float(ms) / float(ours), 2)
            if ms:
                moved = bytes_moved(cases[row["case"]])[name]
                copy_ms = moved / float(row["copy_GB_per_s"]) / 1e6
                news[f"{name}_over_copy"] = round(float(ms) / copy_ms, 2)
        results.append(row | news)
    return results


def compile_all(
    tasks: Sequence[Task],
    runners: dict[Task, Isolated],
    settings: Settings,
    limit: float,
    count: int,
) -> dict[Task, Row]:
    """Compile all by several processes, which stay; return rows without times."""
    rows = {task: empty_row(*task) for task in tasks}
    begin = time.perf_counter()

    def compile_task(task: Task) -> None:
        try:
            for news in runners[task].results(prepare, *task, settings, seconds=limit):
                update(rows[task], news)
        except LostError as error:
            update(rows[task], {"note": f"compilation: {error}"})
        seconds = time.perf_counter() - begin
        print(f"{seconds:4.0f} s: compiled {name_of(task)} {rows[task]['note']}", flush=True)

    with ThreadPoolExecutor(count) as pool:  # tuners take the longest
        list(pool.map(compile_task, sorted(tasks, key=lambda task: task[1] in PAIRS)))
    return rows


def name_of(task: Task) -> str:
    """Return a task's name for --only."""
    return f"{task[0].name}: {task[1]}"


def is_lost(row: Row) -> bool:
    """Return True for a way that fails before it runs; one that was only slow may try again."""
    return "compilation: " in row["note"] and "no end within" not in row["note"]


def run(
    tasks: Sequence[Task], settings: Settings, about: Row, path: Path, args: argparse.Namespace
) -> None:
    """Measure one way after the other, and add their rows to a file as they come."""
    begin = time.perf_counter()
    runners = {task: Isolated() for task in tasks}
    rows = compile_all(tasks, runners, settings, PREPARATION * args.limit, args.processes)
    for index, task in enumerate(tasks):
        row = rows[task]
        if time.perf_counter() - begin > args.seconds:
            print(f"{len(tasks) - index} ways left, from {name_of(task)} on", flush=True)
            break
        add_row(path, about | row, KEYS)
        try:
            if not is_lost(row):
                row["note"] = empty_row(*task)["note"]
                for news in runners[task].results(measure, *task, settings, seconds=args.limit):
                    update(row, news)
                    add_row(path, about | row, KEYS)
        except LostError as error:
            update(row, {"note": f"measurement: {error}"})
        runners[task].close()
        add_row(path, about | row, KEYS)
        write_csv(path, with_ratios(read_rows(path)))
        times = (f"{row[f'{name}_ms']} ({row[f'{name}_launch']})" for name in PASSES)
        text = f"{' / '.join(times)} ms {row['difference']} {row['note']}"
        print(f"{time.perf_counter() - begin:4.0f} s: {name_of(task):40} {text}", flush=True)
    for runner in runners.values():
        runner.close()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--only", default="", help="ways whose names match, see --list")
    parser.add_argument("--tilelang", help="folder with flash-qla and what it needs")
    add_options(parser, 120, 14)
    args = parser.parse_args(arguments)
    tasks = [(case, way) for case in CASES for way in case.ways]
    tasks = [task for task in tasks if re.search(args.only, name_of(task))]
    if args.length:
        tasks = [(case._replace(length=args.length), way) for case, way in tasks]
    if args.list:
        print(*map(name_of, tasks), sep="\n")
        return
    about, cache = facts_of(args.device, args.budget)
    settings = Settings(args.device, args.budget, cache, args.tilelang)
    run(tasks, settings, about, args.out / f"chunks_{args.device}.csv", args)


if __name__ == "__main__":
    main()
