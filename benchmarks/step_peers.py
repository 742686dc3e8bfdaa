"""Recurrences of many kinds on one GPU, next to peers that run the same step.

LSTMs with a projection, with norms and with small heads, matrix states, DreamerV3's GRU and RSSM,
attention inside the step, and elementwise cells: forward without gradients, and forward + backward
of inputs and weights. Peers (PyPI): flashrnn, torchrl 0.14, spikingjelly, mlstm-kernels, and
torch.nn with loops of it. What Triton 3.6 does not compile of them, or not within
minutes, peer_repairs.py repairs.

A pass is started by calls from Python, then as one CUDA graph; the graph's time stays where there
is one. Inputs are drawn anew and exceed the L2 cache. limit_ms is the time to copy inputs and
outputs, at the rate of a copy in the same run. difference: between a peer's outputs (forward) or
gradients of inputs (both) and ours, over the norm of ours, on the measured inputs.

Each way runs in another process with a limit of time, and prepares its kernels before, several at
once. One that fails has rows that say why. Writes results/step_peers_cuda.csv, a row at a time.
Rows of an earlier run stay unless measured again, so a run may be cut into parts by --cases and
--ways, regular expressions in their names, see --list.

    python benchmarks/step_peers.py [--cases REGEX] [--ways REGEX] [--list] [--out FOLDER]
                                    [--seconds N] [--limit N] [--preparation N] [--processes N]
                                    [--budget MS] [--device cpu --length N]
"""

from __future__ import annotations

import argparse
import os
import re
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from common import add_row, new_parser, read_rows, write_csv
from gpu import (
    add_options,
    as_list,
    compile_pass,
    facts_of,
    launched_times,
    passes_on,
    sets_of,
)
from isolated import Isolated, LostError, reason_of
from markdown_tables import Row as Strings
from mixing_ways import DTYPES
from protocol import Call, Row
from step_peer_ways import (
    CASES,
    KINDS,
    OURS,
    Case,
    Tensors,
    Way,
    draw,
    make_way,
    numbers_of,
)
from torch import Tensor
from triton_tuning import Tuning

PASSES = ("forward", "both")
KEYS = ("case", "way", "pass")
FIGURES = ("median_ms", "min_ms", "runs", "launch", "limit_ms", "over_copy", "over_ours")
TUNED = ("torchrl",)
"""Packages whose kernels have tuners."""
THREADS = 12
"""That compile what a tuner may take."""
SLOW = re.compile("torchrl|flashrnn, cuda|compiled")
"""Ways that begin to compile first."""
TELLING = ("assertion", "error")
"""Words of a crash's output that tell why, the better ones first."""

Task = tuple[Case, str]


class Settings(NamedTuple):
    """Facts that all ways share: device, ms for a timing, bytes of L2, folder of error outputs."""

    device: str
    budget: float
    cache: int
    logs: Path


def name_of(task: Task) -> str:
    """Return a task's name, as a file may have it."""
    return re.sub("[^a-z0-9]+", "-", f"{task[0].name}-{task[1]}", flags=re.IGNORECASE)


def empty_row(case: Case, way: str, what: str) -> Row:
    row: Row = {"case": case.name, "kind": case.kind, "B": case.batch, "T": case.length}
    row |= {"D": case.width, "heads": case.heads, "dtype": case.dtype, "way": way, "pass": what}
    row |= {"version": "", **dict.fromkeys(FIGURES, "")}
    return row | {"difference": "", "note": "", "error": ""}


def bytes_moved(case: Case, what: str) -> int:
    """Return the bytes of inputs and outputs that a pass must read and write, without weights."""
    inputs, outputs = numbers_of(case)
    numbers = inputs + outputs if what == "forward" else 3 * inputs + 2 * outputs
    return numbers * DTYPES[case.dtype].itemsize


def passes_of(way: Way, draws: Sequence[Tensors]) -> dict[str, list[Call]]:
    """Return the calls of both passes, one for each set of inputs."""
    return passes_on([way.inputs(inputs) for inputs in draws], way.call, way.weights)


def times_of(calls: Sequence[Call], launch: str, settings: Settings) -> Row:
    """Return the times of a pass, and how it is started."""
    return launched_times(calls, launch, settings.device, settings.budget) | {"launch": launch}


def values_of(way: Way, inputs: Tensors) -> dict[str, list[Tensor]]:
    """Return the first output of a way as ours has it, and the gradients of inputs, in float64."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    output = as_list(way.call(*way.inputs(leaves)))[0]
    assert way.output is not None
    output = way.output(output).double()
    torch.manual_seed(1)
    cotangent = torch.randn(output.shape, dtype=torch.float64).to(output.device)
    grads = torch.autograd.grad(output, leaves, cotangent)
    return {"forward": [output.detach()], "both": [grad.double() for grad in grads]}


def differences(case: Case, way: Way, device: str) -> dict[str, float]:
    """Return by pass the largest distance of a peer's values to ours, over the norm of ours."""
    inputs = draw(case, device)
    ours = values_of(make_way(case, OURS, device), inputs)
    theirs = values_of(way, inputs)
    return {
        what: max(
            float((a - b).norm() / b.norm()) for a, b in zip(theirs[what], ours[what], strict=True)
        )
        for what in PASSES
    }


def enter(task: Task, settings: Settings) -> None:
    """Let a process write its errors to a file of the task."""
    settings.logs.mkdir(exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    os.dup2(os.open(settings.logs / name_of(task), flags), 2)
    torch.compiler.reset()


def prepare(case: Case, name: str, settings: Settings) -> Iterator[Row]:
    """Compile a way's kernels by a run of both passes; yield what failed, which `measure` tries
    again, as the other pass may run."""
    enter((case, name), settings)
    tuning = Tuning(TUNED, THREADS) if name.startswith(TUNED) else None
    way = make_way(case, name, settings.device)
    for what, calls in passes_of(way, [draw(case, settings.device)]).items():
        yield from attempt(what, "preparation", partial(compile_pass, calls[0]))
    if tuning is not None:
        tuning.wait()
    if settings.device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def measure(case: Case, name: str, settings: Settings) -> Iterator[Row]:
    """Yield what becomes known of a way's rows: columns, with the pass that they are of."""
    enter((case, name), settings)
    device = settings.device
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        way = make_way(case, name, device)
        yield from about_both(version=way.version, note=way.note)
        passes = passes_of(way, sets_of(partial(draw, case, device), settings.cache))
        launches = [launch for launch in way.launches if launch == "call" or device == "cuda"]
        for launch in launches:
            for what, calls in passes.items():
                timing = partial(times_of, calls, launch, settings)
                yield from attempt(what, f"by {launch}", timing)
            if launch == launches[0] and way.output is not None and name != OURS:
                yield from compared(case, way, device)
        notes = [*filter(None, [way.note]), *notes_of(caught)]
        yield from about_both(note="; ".join(notes))
    if device == "cuda":
        torch.cuda.empty_cache()


def about_both(**columns: str) -> Iterator[Row]:
    """Yield columns of both passes."""
    yield from ({"pass": what, **columns} for what in PASSES)


def notes_of(caught: Sequence[warnings.WarningMessage]) -> list[str]:
    """Return what our warnings say, once each."""
    ours = [w for w in caught if w.category.__module__.partition(".")[0] == "pararnn"]
    return [*dict.fromkeys(str(w.message).splitlines()[0][:200] for w in ours)]


def attempt(what: str, task: str, call: Callable[[], Row]) -> Iterator[Row]:
    """Yield the columns of a pass that a task finds, or why it finds none."""
    try:
        yield {"pass": what, **call()}
    except Exception as error:
        yield {"pass": what, "error": f"{task}: {reason_of(error)}"}


def compared(case: Case, way: Way, device: str) -> Iterator[Row]:
    """Yield the differences of both passes, or why there are none."""
    try:
        for what, value in differences(case, way, device).items():
            yield {"pass": what, "difference": f"{value:.2g}"}
    except Exception as error:
        yield from about_both(error=f"comparison: {reason_of(error)}")


def with_ratios(rows: Sequence[Strings]) -> list[Row]:
    """Return the rows in the order of the cases, with their times over ours and over a copy."""
    order = {(case.name, way): None for case in CASES for way in KINDS[case.kind].ways}
    places = {key: place for place, key in enumerate(order)}
    ours = {(row["case"], row["pass"]): row["median_ms"] for row in rows if row["way"] == OURS}
    results: list[Row] = []
    for row in sorted(rows, key=lambda row: places.get((row["case"], row["way"]), len(places))):
        news: Row = {"over_copy": "", "over_ours": ""}
        if ms := row["median_ms"]:
            news["over_copy"] = round(float(ms) / float(row["limit_ms"]), 2)
            if base := ours.get((row["case"], row["pass"])):
                news["over_ours"] = round(float(ms) / float(base), 2)
        results.append(row | news)
    return results


def error_of(error: LostError, task: Task, settings: Settings) -> str:
    """Return why a way was lost; of a process that crashed, what its output says."""
    path = settings.logs / name_of(task)
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    telling = [line.strip()[:200] for word in TELLING for line in lines if word in line.lower()]
    crashed = "ended with code" in str(error)
    return f"{error}: {telling[0]}" if crashed and telling else str(error)


def prepare_all(
    tasks: Sequence[Task], settings: Settings, args: argparse.Namespace
) -> dict[Task, str]:
    """Prepare ways by several processes; return those that failed, and why."""
    begin, lost = time.perf_counter(), dict[Task, str]()

    def prepare_task(task: Task) -> None:
        runner = Isolated()
        try:
            list(runner.results(prepare, *task, settings, seconds=args.preparation))
        except LostError as error:
            lost[task] = error_of(error, task, settings)
        runner.close()
        seconds = time.perf_counter() - begin
        print(f"{seconds:4.0f} s: prepared {name_of(task)} {lost.get(task, '')}", flush=True)

    with ThreadPoolExecutor(args.processes) as pool:
        list(pool.map(prepare_task, sorted(tasks, key=lambda task: not SLOW.search(task[1]))))
    return lost


def run(
    tasks: Sequence[Task], settings: Settings, about: Row, path: Path, args: argparse.Namespace
) -> None:
    """Measure one way after the other, and add their rows to a file as they come."""
    begin, rate = time.perf_counter(), float(about["copy_GB_per_s"]) * 1e6
    lost = prepare_all(tasks, settings, args)
    runner = Isolated()
    for index, task in enumerate(tasks):
        if time.perf_counter() - begin > args.seconds:
            print(f"{len(tasks) - index} ways left, from {name_of(task)} on", flush=True)
            break
        rows = {what: about | empty_row(*task, what) for what in PASSES}
        for what, row in rows.items():
            row["limit_ms"] = round(bytes_moved(task[0], what) / rate, 5)
        try:
            if task in lost and "no end within" not in lost[task]:
                raise LostError(f"preparation: {lost[task]}")
            for news in runner.results(measure, *task, settings, seconds=args.limit):
                rows[news["pass"]] |= news
                if "error" not in news:
                    add_row(path, rows[news["pass"]], KEYS)
        except LostError as error:
            reason = error_of(error, task, settings)
            for row in rows.values():
                row["error"] = row["error"] or reason
        for row in rows.values():
            add_row(path, row, KEYS)
        if any(row["error"] for row in rows.values()):
            runner.close()  # an error of CUDA stays with its process
        write_csv(path, with_ratios(read_rows(path)))
        times = " / ".join(f"{row['median_ms']} ({row['launch']})" for row in rows.values())
        text = f"{times} ms {rows['both']['difference']} {rows['both']['error']}"
        print(f"{time.perf_counter() - begin:4.0f} s: {name_of(task):44} {text}", flush=True)
    runner.close()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--cases", default="", help="cases whose names match, see --list")
    parser.add_argument("--ways", default="", help="ways whose names match")
    parser.add_argument("--preparation", type=float, default=420, help="seconds to prepare a way")
    add_options(parser, 100, 12)
    args = parser.parse_args(arguments)
    cases = [case for case in CASES if re.search(args.cases, case.name)]
    if args.length:
        cases = [case._replace(length=args.length) for case in cases]
    tasks = [(case, way) for case in cases for way in KINDS[case.kind].ways]
    tasks = [task for task in tasks if re.search(args.ways, task[1])]
    if args.list:
        print(*(f"{case.name}: {way}" for case, way in tasks), sep="\n")
        return
    about, cache = facts_of(args.device, args.budget)
    with tempfile.TemporaryDirectory() as folder:
        settings = Settings(args.device, args.budget, cache, Path(folder))
        run(tasks, settings, about, args.out / f"step_peers_{args.device}.csv", args)


if __name__ == "__main__":
    main()
