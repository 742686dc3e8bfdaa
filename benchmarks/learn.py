"""Quality of mixers of equal size on equal tokens: bits per byte of text held out.

Every mixer (learn_models.py) learns every corpus (learn_data.py) at each of the rates for a sweep's
tokens; at the rate that was best on what is held out, it learns from new for more tokens with each
of the seeds. The order of rows depends on the seed alone. Then the recurrent layers of the models
of seed 0 are measured by every pair (learn_layers.py).

One process for each mixer and GPU compiles first, all at once; from then on each GPU runs one job
at a time. Steps follow from the mixers' speeds, so that all of it fits into --seconds: the same
for all. Rows are written as they are measured, to learn_CORPUS.csv and
learn_layers_CORPUS.csv, the speeds of all mixers to learn_speed.csv. Those of models of 150M
(--size) go to learn_150M_CORPUS.csv and so on.

    python benchmarks/learn.py english code --data runs/learn [--seconds 540] [--out FOLDER]

Trainings that learn_CORPUS.csv has already are not run again, so further mixers and longer
trainings can join it, and a run goes on that was ended. Give --steps then: those of a sweep and of
one or more final trainings. One mixer follows the other, and what does not fit into --seconds is
left out.

    python benchmarks/learn.py code --steps 114 382 --mixers m2rnn --rates 1e-3 2e-3 --seeds 1
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, add_row, new_parser, provenance, read_rows, write_csv
from learn_fleet import Fleet, Settings
from learn_models import CONFIGS, MIXERS, WIDTHS
from learn_run import Job, Row, Shape

RATES = (1e-3, 2e-3, 4e-3, 8e-3)
MARKS = {"sweep": 2, "final": 10}
"""Validations of a training."""
SHARE = 0.88
"""Of the time that is left, what trainings are planned to take: GPUs do not end at once."""


START = 5.0
"""Seconds until a training's first step."""
INTEGERS = ("seed", "B", "T", "steps", "step", "tokens")
NUMBERS = ("rate", "epochs", "bits_per_byte")
"""Columns that are compared with those of trainings read from a file."""


class Tables:
    """CSV files, one a corpus, that have each row as soon as it is known: stem_corpus.csv.

    rows: all of them, with those that the files of `corpora` have of trainings that ended.
    """

    def __init__(self, folder: Path, stem: str, shared: Row, corpora: Sequence[str] = ()) -> None:
        self.folder, self.stem, self.shared = folder, stem, shared
        self.rows, self.lock = list[Row](), threading.Lock()
        for corpus in corpora:
            path = self.path(corpus)
            old = [parse_row(row) for row in read_rows(path)] if path.exists() else []
            old_keys = finished_keys(old)
            self.rows += [row for row in old if key_of(row) in old_keys]

    def path(self, corpus: str) -> Path:
        """Return the file of a corpus."""
        return self.folder / f"{self.stem}_{corpus}.csv"

    def add(self, row: Row) -> None:
        path = self.path(row["corpus"])
        with self.lock:
            self.rows.append({**self.shared, **row})
            own = [each for each in self.rows if each["corpus"] == row["corpus"]]
            write_csv(path.with_suffix(".new"), own)
            path.with_suffix(".new").replace(path)


def parse_row(row: Mapping[str, str]) -> Row:
    """Return a row that was read, with numbers where they are compared."""
    values: Row = {name: int(row[name]) for name in INTEGERS}
    return {**row, **values, **{name: float(row[name]) for name in NUMBERS}}


def key_of(row: Row) -> tuple[Any, ...]:
    """Return what tells a training from others."""
    return tuple(row[name] for name in ("corpus", "mixer", "stage", "rate", "seed", "steps"))


def finished_keys(rows: Iterable[Row]) -> set[tuple[Any, ...]]:
    """Return the keys of trainings that reached their last step or diverged."""
    return {
        key_of(row)
        for row in rows
        if row["step"] == row["steps"] or not math.isfinite(row["bits_per_byte"])
    }


def plan_steps(
    speeds: Mapping[str, tuple[float, float]],
    seconds: float,
    runs: Mapping[str, int],
    most: Mapping[str, int],
    shape: Shape,
) -> dict[str, int]:
    """Return the steps of a stage's trainings, the same for all mixers, that fit into GPU-seconds.

    speeds: a mixer's tokens a second, and the seconds of a validation. runs, most: by
    stage, how many trainings a mixer has, and tokens of one at most. The stages' shares stay.
    """
    looks = sum(look for _, look in speeds.values()) * sum(runs[s] * MARKS[s] for s in runs)
    training = sum(1 / speed for speed, _ in speeds.values()) * sum(runs[s] * most[s] for s in runs)
    part = min(1.0, (seconds - looks) / training)
    steps = {stage: int(part * most[stage] / shape.tokens) for stage in runs}
    if min(steps.values()) < max(MARKS.values()):
        raise SystemExit(
            f"{seconds:.0f} GPU-seconds are too few: they would do for {steps} steps; give more "
            "--seconds, or fewer mixers, rates or seeds"
        )
    return steps


def steps_of(
    args: argparse.Namespace, speeds: Mapping[str, tuple[float, float]], devices: int
) -> list[int]:
    """Return the steps of sweeps and of final trainings: those given, or what fits into the time.

    Of final trainings there may be several numbers.
    """
    if args.steps is not None:
        return list(args.steps)
    gpu_seconds = (args.until - args.layers_seconds - time.time()) * SHARE * devices
    count = len(args.corpora)
    runs = {"sweep": count * len(args.rates), "final": count * args.seeds}
    most = {"sweep": args.sweep_tokens, "final": args.final_tokens}
    steps = plan_steps(speeds, gpu_seconds, runs, most, args.shape)
    print(f"{gpu_seconds:.0f} GPU-seconds left; steps: {steps}", flush=True)
    return [steps["sweep"], steps["final"]]


def best_rates(rows: Iterable[Row]) -> dict[tuple[str, str], float]:
    """Return by corpus and mixer the rate whose sweep ended with the fewest bits."""
    ends = [row for row in rows if row["stage"] == "sweep" and row["step"] == row["steps"]]
    # NaN has no place in an order; of equal ones the last stays.
    finite = [row for row in ends if math.isfinite(row["bits_per_byte"])]
    finite.sort(key=lambda row: -row["bits_per_byte"])
    return {(row["corpus"], row["mixer"]): row["rate"] for row in finite}


def best_first(rows: Iterable[Row], mixers: Sequence[str], steps: int) -> list[str]:
    """Return mixers in the order of the first seed's bits after `steps`, summed over corpora."""
    bits = dict.fromkeys(mixers, 0.0)
    for row in rows:
        if row["stage"] == "final" and row["seed"] == 0 and row["step"] == row["steps"] == steps:
            bits[row["mixer"]] = bits.get(row["mixer"], 0.0) + row["bits_per_byte"]
    return sorted(mixers, key=lambda mixer: bits[mixer])


def check_equal(rows: Iterable[Row]) -> None:
    """RuntimeError unless all mixers have read the same tokens in the same order."""
    read: dict[tuple[Any, ...], set[tuple[Any, ...]]] = {}
    for row in rows:
        key = tuple(row[name] for name in ("corpus", "stage", "seed", "steps", "step"))
        what = tuple(row[name] for name in ("tokens", "order", "B", "T"))
        read.setdefault(key, set()).add(what)
    for key, readings in read.items():
        if len(readings) > 1:
            raise RuntimeError(f"mixers have not read the same at {key}: {sorted(readings)}")


def table_of(rows: Sequence[Row]) -> str:
    """Return the ends of all trainings, a line each."""
    names = ("corpus", "stage", "mixer", "rate", "seed", "tokens", "bits_per_byte", "tokens_per_s")
    ends = [row for row in rows if row["step"] == row["steps"]]
    order = ("corpus", "stage", "mixer", "rate", "seed")
    ends.sort(key=lambda row: [row[name] for name in order])
    lines = [names, *(tuple(str(row[name]) for name in names) for row in ends)]
    return "\n".join("\t".join(line) for line in lines)


def compare(fleet: Fleet, table: Tables, layers: Tables, args: argparse.Namespace) -> None:
    """Run the comparison; `args` as in `main`, `until`: the time at which it is to end."""
    speeds = fleet.speeds(args.probe)
    for mixer, (speed, look) in speeds.items():
        print(f"{mixer}: {speed:,.0f} tokens/s, a look {look:.2f} s", flush=True)
        row = {"mixer": mixer, "B": args.shape.rows, "T": args.shape.length}
        row |= {"steps": args.probe, "tokens_per_s": round(speed), **table.shared}
        add_row(args.out / f"{table.stem}_speed.csv", row, ("mixer", "B", "T", "device"))
    sweep_steps, *final_steps = steps_of(args, speeds, len(fleet.devices))
    until = args.until - args.layers_seconds

    def fits(request: tuple[Any, ...]) -> bool:
        job: Job = request[1]
        speed, look = speeds[job.mixer]
        fine = (
            time.time() + job.steps * args.shape.tokens / speed + job.marks * look + START < until
        )
        if not fine:
            print(f"no time left for {job}", flush=True)
        return fine

    def train(jobs: Iterable[Job]) -> None:
        old_keys = finished_keys(table.rows)
        new = [job for job in jobs if key_of(job._asdict()) not in old_keys]
        if args.steps is None:
            new.sort(key=lambda job: speeds[job.mixer][0])  # the slowest first
        fleet.run([(job.mixer, ("train", job)) for job in new], table.add, fits)
        check_equal(table.rows)

    def finals(mixers: Sequence[str], seeds: Iterable[int], steps: int) -> Iterator[Job]:
        rates = best_rates(table.rows)
        for mixer, seed, corpus in itertools.product(mixers, seeds, args.corpora):
            if (corpus, mixer) in rates:
                rate = rates[corpus, mixer]
                yield Job(mixer, corpus, "final", rate, seed, steps, MARKS["final"])

    together = [fleet.mixers] if args.steps is None else [[mixer] for mixer in fleet.mixers]
    for mixers in together:
        train(
            Job(mixer, corpus, "sweep", rate, 0, sweep_steps, MARKS["sweep"])
            for mixer, corpus, rate in itertools.product(mixers, args.corpora, args.rates)
        )
        for steps in final_steps:
            train(finals(mixers, [0], steps))
    print("rates:", {" ".join(case): rate for case, rate in best_rates(table.rows).items()})
    for steps in final_steps:
        order = best_first(table.rows, fleet.mixers, steps)
        train(finals(order, range(1, args.seeds), steps))
    if args.layers_seconds > 0:
        own = [mixer for mixer in fleet.mixers if mixer in CONFIGS]
        recurrent = [mixer for mixer in own if "rnn" in (CONFIGS[mixer].mixers or ())]
        fleet.run(
            [(m, ("layers", (c, args.until))) for c in args.corpora for m in recurrent],
            layers.add,
        )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = new_parser(__doc__)
    parser.add_argument("corpora", nargs="+", help="folders in --data")
    parser.add_argument("--data", type=Path, default=Path("runs/learn"))
    parser.add_argument("--mixers", nargs="+", default=MIXERS, choices=MIXERS)
    parser.add_argument("--size", default="60M", choices=list(WIDTHS), help="of the models")
    parser.add_argument("--rates", nargs="+", type=float, default=list(RATES))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", nargs="+", type=int, help="of a sweep, and of final trainings")
    parser.add_argument("--sweep-tokens", type=int, default=6_000_000, help="at most")
    parser.add_argument("--final-tokens", type=int, default=20_000_000, help="at most")
    parser.add_argument("--rows", type=int, default=16, help="of a step")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a row")
    parser.add_argument("--seconds", type=float, default=540.0, help="that it may take")
    parser.add_argument("--layers-seconds", type=float, default=60.0, help="of these, for layers")
    parser.add_argument("--probe", type=int, default=12, help="steps that tell a mixer's speed")
    parser.add_argument("--smoke", action="store_true", help="tiny models on a CPU")
    parser.add_argument("--gpus", type=int, default=0, help="default: all")
    args = parser.parse_args(arguments)
    if args.steps is not None and len(args.steps) < 2:
        parser.error("--steps takes those of a sweep and of one or more final trainings")
    args.until, args.shape = time.time() + args.seconds, Shape(args.rows, args.length)
    if args.smoke and args.out == RESULTS:
        parser.error("--smoke measures nothing: name a folder, --out")
    count = 1 if args.smoke else args.gpus or torch.cuda.device_count()
    devices = ["cpu"] if args.smoke else [f"cuda:{index}" for index in range(count)]
    shared = provenance(devices[0])
    # Compilers of all processes at once: a share of the cores for each.
    share = max(1, (os.cpu_count() or 1) // (len(args.mixers) * count) - 1)
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(share))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    stem = "learn" if args.size == "60M" else f"learn_{args.size}"
    table = Tables(args.out, stem, shared, args.corpora)
    layers = Tables(args.out, f"{stem}_layers", shared)
    print(json.dumps(shared), flush=True)
    folders = tuple(str(args.data / name) for name in args.corpora)
    with tempfile.TemporaryDirectory() as states:
        shared_settings = (args.shape, folders, states, args.size, args.smoke)
        begin = time.time()
        fleet = Fleet(
            [Settings(m, d, *shared_settings) for m, d in itertools.product(args.mixers, devices)],
            devices,
        )
        try:
            print(f"compiled in {time.time() - begin:.0f} s", flush=True)
            compare(fleet, table, layers, args)
        finally:
            fleet.stop()
            if table.rows:
                print(table_of(table.rows), flush=True)
    if fleet.failures:
        sys.exit(f"left out: {', '.join(fleet.failures)}, see above")


if __name__ == "__main__":
    main()
