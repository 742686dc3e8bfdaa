"""Quality of mixers of equal size on equal tokens: bits per byte of text held out.

Every mixer (learn_models.py) learns every corpus (learn_data.py) at each of the rates for a sweep's
tokens; at the rate that was best on what is held out, it learns from new for more tokens with each
of the seeds. The order of rows depends on the seed alone. Then the recurrent layers of the models
of seed 0 are measured by every pair (learn_layers.py).

One process for each mixer and GPU compiles first, all at once; from then on each GPU runs one job
at a time. Steps follow from the mixers' speeds, so that all of it fits into --seconds: the same
for all. Rows are written as they are measured, to learn_CORPUS.csv and
learn_layers_CORPUS.csv.

    python benchmarks/learn.py english code --data runs/learn [--seconds 540] [--out FOLDER]
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import math
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, new_parser, provenance
from learn_fleet import Fleet, Settings
from learn_models import CONFIGS, MODELS
from learn_run import Job, Row, Shape

RATES = (1e-3, 2e-3, 4e-3, 8e-3)
MARKS = {"sweep": 2, "final": 10}
"""Validations of a training."""
SHARE = 0.88
"""Of the time that is left, what trainings are planned to take: GPUs do not end at once."""


class Tables:
    """CSV files, one a corpus, that have each row as soon as it is known: stem_corpus.csv."""

    def __init__(self, folder: Path, stem: str, shared: Row) -> None:
        self.folder, self.stem, self.shared = folder, stem, shared
        self.rows, self.lock = list[Row](), threading.Lock()

    def add(self, row: Row) -> None:
        path = self.folder / f"{self.stem}_{row['corpus']}.csv"
        with self.lock:
            new = all(row["corpus"] != old["corpus"] for old in self.rows)
            self.rows.append(row)
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("w" if new else "a", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, [*self.shared, *row], lineterminator="\n")
                if new:
                    writer.writeheader()
                writer.writerow({**self.shared, **row})


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


def best_rates(rows: Iterable[Row]) -> dict[tuple[str, str], float]:
    """Return by corpus and mixer the rate whose sweep ended with the fewest bits."""
    ends = [row for row in rows if row["stage"] == "sweep" and row["step"] == row["steps"]]
    # NaN has no place in an order; of equal ones the last stays.
    finite = [row for row in ends if math.isfinite(row["bits_per_byte"])]
    finite.sort(key=lambda row: -row["bits_per_byte"])
    return {(row["corpus"], row["mixer"]): row["rate"] for row in finite}


def check_equal(rows: Iterable[Row]) -> None:
    """RuntimeError unless all mixers have read the same tokens in the same order."""
    read: dict[tuple[Any, ...], set[tuple[Any, ...]]] = {}
    for row in rows:
        key = tuple(row[name] for name in ("corpus", "stage", "seed", "step"))
        what = tuple(row[name] for name in ("steps", "tokens", "order", "B", "T"))
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
    gpu_seconds = (args.until - args.layers_seconds - time.time()) * SHARE * len(fleet.devices)
    count = len(args.corpora)
    runs = {"sweep": count * len(args.rates), "final": count * args.seeds}
    most = {"sweep": args.sweep_tokens, "final": args.final_tokens}
    steps = plan_steps(speeds, gpu_seconds, runs, most, args.shape)
    print(f"{gpu_seconds:.0f} GPU-seconds left; steps: {steps}", flush=True)

    def train(jobs: Iterable[Job]) -> None:
        slowest_first = sorted(jobs, key=lambda job: speeds[job.mixer][0])
        fleet.run([(j.mixer, ("train", j)) for j in slowest_first], table.add)
        check_equal(table.rows)

    cases = list(itertools.product(args.corpora, fleet.mixers))
    train(
        Job(mixer, corpus, "sweep", rate, 0, steps["sweep"], MARKS["sweep"])
        for (corpus, mixer), rate in itertools.product(cases, args.rates)
    )
    rates = best_rates(table.rows)
    print("rates:", {" ".join(case): rate for case, rate in rates.items()}, flush=True)
    train(
        Job(mixer, corpus, "final", rate, seed, steps["final"], MARKS["final"])
        for seed in range(args.seeds)
        for (corpus, mixer), rate in rates.items()
    )
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
    parser.add_argument("--mixers", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--rates", nargs="+", type=float, default=list(RATES))
    parser.add_argument("--seeds", type=int, default=3)
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
    table, layers = (Tables(args.out, stem, shared) for stem in ("learn", "learn_layers"))
    print(json.dumps(shared), flush=True)
    folders = tuple(str(args.data / name) for name in args.corpora)
    with tempfile.TemporaryDirectory() as states:
        shared_settings = (args.shape, folders, states, args.smoke)
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
