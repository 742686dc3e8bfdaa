"""Quality of mixers of equal size on equal tokens: bits per byte of projects held out, and probes.

Jobs are lines of files: a size of models (learn_models.py), tokens, rates, seeds, and mixers (or
`all`), of which each trains at each rate with each seed. The rate `rule` is the one that `rate_of`
(learn_scaling.py) computes from the trainings so far. Every training has a schedule of its own
length, and reads the first tokens of the corpus (learn_data.py) in an order that depends on the
seed alone.

    4M 80M 0.002,0.004,0.008 0 transformer gru
    4M 80M rule 0 all

Some processes for each card compile at once, and one of a card trains at a time. The trained models
answer probes (learn_probes.py): bits by kind of text, by place in a document, and recall. Rows are
written as they come, to learn_programs.csv and learn_programs_probes.csv in --out: curves, each
with its loss over tokens and seconds, and probes. What failed is a row, with the reason. Trainings
that ended are not run again, so a run goes on that was cut; others join the files.

    python benchmarks/learn.py --jobs benchmarks/learn_4M.txt --packs FOLDER --data runs/learn \
        --out benchmarks/results [--seconds 540] [--states FOLDER]

--packs: packs of tokens (learn_packs.py), which are unpacked into --data first.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, new_parser, provenance, read_rows, write_csv
from learn_fleet import Queue, Settings, run
from learn_models import MIXERS, SIZES
from learn_packs import unpack
from learn_run import Job, Row, Shape
from learn_scaling import TRAINING, rate_of

MARKS = 12
"""Validations of a training."""
UNITS = {"k": 10**3, "M": 10**6, "G": 10**9}
TABLES = {"curves": "learn_{}.csv", "probes": "learn_{}_probes.csv"}
"""Files of the tables that processes send rows of, by the corpus."""


class Tables:
    """The files of rows, each written as soon as it comes. shared: what all rows have.

    Raises SystemExit for files that other programs wrote.
    """

    def __init__(self, folder: Path, corpus: str, shared: Row) -> None:
        self.shared, self.lock = shared, threading.Lock()
        self.paths = {name: folder / file.format(corpus) for name, file in TABLES.items()}
        self.rows: dict[str, list[dict[str, Any]]] = {
            name: list(read_rows(path)) if path.exists() else []
            for name, path in self.paths.items()
        }
        if any("size" not in row for rows in self.rows.values() for row in rows):
            raise SystemExit(f"{folder} has rows of {corpus} without a size: name another --out")

    @property
    def curves(self) -> list[dict[str, Any]]:
        """Rows of trainings."""
        return self.rows["curves"]

    def add(self, name: str, row: Row) -> None:
        """Add a row to a table and write its file."""
        with self.lock:
            rows = self.rows[name]
            rows.append({key: str(value) for key, value in {**self.shared, **row}.items()})
            columns = dict.fromkeys(key for each in rows for key in each)
            path = self.paths[name]
            whole = [{key: each.get(key, "") for key in columns} for each in rows]
            write_csv(path.with_suffix(".new"), whole)
            path.with_suffix(".new").replace(path)

    def forget(self, lines: Sequence[Sequence[Job]]) -> None:
        """Drop the rows of trainings that did not end, but what failed and is not tried again."""
        ended = ended_keys(self.curves)
        again = {job[:2] for line in lines for job in line}

        def stays(row: Mapping[str, Any]) -> bool:
            failed = bool(row.get("failure")) and (row["mixer"], row["size"]) not in again
            return key_of(row) in ended or failed

        self.rows = {name: list(filter(stays, rows)) for name, rows in self.rows.items()}


def key_of(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what tells a training from others, as text that a file gives back."""
    return tuple(f"{float(row[k]):g}" if k == "rate" else str(row[k]) for k in TRAINING)


def ended_keys(rows: Iterable[Mapping[str, Any]]) -> set[tuple[str, ...]]:
    """Return the keys of trainings that reached their last step or diverged."""
    ends = (row for row in rows if row.get("step") and row["step"] == row["steps"])
    diverged = (r for r in rows if r.get("step") and not math.isfinite(float(r["bits_per_byte"])))
    return {key_of(row) for row in itertools.chain(ends, diverged)}


def number(text: str) -> int:
    """Return a number of tokens such as 80M."""
    return round(float(text[:-1]) * UNITS[text[-1]]) if text[-1] in UNITS else int(text)


def jobs_of(text: str, shape: Shape) -> list[list[Job]]:
    """Return the jobs of each line; see the module's docstring. Raises SystemExit for others."""
    lines = []
    for line in text.splitlines():
        words = line.partition("#")[0].split()
        if not words:
            continue
        size, tokens, rates, seeds, *mixers = words
        names = MIXERS if mixers == ["all"] else mixers
        unknown = [name for name in names if name not in MIXERS]
        if size not in SIZES or unknown or not names:
            raise SystemExit(
                f"{line!r}: a line is SIZE TOKENS RATES SEEDS MIXER..., sizes are "
                f"{', '.join(SIZES)}, mixers are all or some of {', '.join(MIXERS)}"
            )
        numbers = [0.0 if rate == "rule" else float(rate) for rate in rates.split(",")]
        steps = max(1, number(tokens) // shape.tokens)
        cases = itertools.product(names, numbers, map(int, seeds.split(",")))
        lines.append([Job(m, size, r, s, steps, min(MARKS, steps)) for m, r, s in cases])
    return lines


def check_equal(rows: Iterable[Mapping[str, Any]]) -> None:
    """RuntimeError unless all mixers have read the same tokens in the same order."""
    read: dict[tuple[Any, ...], set[tuple[Any, ...]]] = {}
    for row in rows:
        if row.get("order"):
            key = tuple(str(row[name]) for name in ("corpus", "seed", "steps", "step", "B", "T"))
            read.setdefault(key, set()).add((str(row["tokens"]), row["order"]))
    for key, readings in read.items():
        if len(readings) > 1:
            raise RuntimeError(f"mixers have not read the same at {key}: {sorted(readings)}")


def to_do(lines: Sequence[Sequence[Job]], rows: Sequence[Mapping[str, Any]]) -> list[list[Job]]:
    """Return the jobs without those that ended, and without a second one of the same."""
    known = ended_keys(rows)

    def new(job: Job) -> bool:
        rate = job.rate or rate_of(rows, job.mixer, job.size) or 0.0
        keys = {key_of(job._asdict()), key_of(job._replace(rate=rate)._asdict())}
        found = not keys.isdisjoint(known)
        known.add(key_of(job._asdict()))
        return not found

    return [[job for job in line if new(job)] for line in lines]


def new_rate(rows: Sequence[Mapping[str, Any]], job: Job) -> float | None:
    """Return the rate of a job by the rule; None where there is none, or such a training ended."""
    rate = rate_of(rows, job.mixer, job.size)
    if rate is None:
        print(f"no rates to choose from for {job}", flush=True)
        return None
    ended = key_of(job._replace(rate=rate)._asdict()) in ended_keys(rows)
    return None if ended else rate


def table_of(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return the ends of all trainings, a line each."""
    names = (*TRAINING, "tokens", "bits_per_byte", "seconds", "tokens_per_s", "failure")
    ends = [row for row in rows if row.get("step") == row["steps"] or row.get("failure")]
    ends.sort(key=lambda row: [str(row[name]) for name in TRAINING])
    return "\n".join("\t".join(str(row.get(name, "")) for name in names) for row in ends)


def settings_of(args: argparse.Namespace, devices: Sequence[str], turns: Path) -> list[Settings]:
    """Return the settings of all processes, those of a card not one after the other."""
    states = None if args.states is None else str(args.states)
    every = []
    for process, device in itertools.product(range(args.processes), devices):
        file = turns / f"{device.replace(':', '')}-{process % args.together}"
        where = (str(args.data / args.corpus), states, str(file))
        every.append(Settings(device, args.shape, *where, args.smoke, args.until))
    return every


def main(arguments: Sequence[str] | None = None) -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--jobs", nargs="+", type=Path, required=True, help="files of lines")
    parser.add_argument("--corpus", default="programs", help="a folder in --data")
    parser.add_argument("--data", type=Path, default=Path("runs/learn"))
    parser.add_argument("--packs", type=Path, help="folder of packs, unpacked into --data")
    parser.add_argument("--rows", type=int, default=64, help="of a step")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a row")
    parser.add_argument("--seconds", type=float, default=540.0, help="that it may take")
    parser.add_argument("--processes", type=int, default=4, help="of each card")
    parser.add_argument("--together", type=int, default=1, help="of them, those that train at once")
    parser.add_argument("--states", type=Path, help="folder for the weights of trained models")
    parser.add_argument("--smoke", action="store_true", help="tiny models on a CPU")
    parser.add_argument("--cards", type=int, default=0, help="default: all")
    args = parser.parse_args(arguments)
    args.until, args.shape = time.time() + args.seconds, Shape(args.rows, args.length)
    if args.smoke and args.out == RESULTS:
        parser.error("--smoke measures nothing: name a folder, --out")
    count = 1 if args.smoke else args.cards or torch.cuda.device_count()
    devices = ["cpu"] if args.smoke else [f"cuda:{index}" for index in range(count)]
    if args.packs is not None:
        unpack(args.packs, args.data / args.corpus)
    if args.states is not None:
        args.states.mkdir(parents=True, exist_ok=True)
    # Compilers of all processes at once: a share of the cores for each.
    threads = max(1, (os.cpu_count() or 1) // (args.processes * count))
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(threads))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    shared = provenance(devices[0])
    print(json.dumps(shared), f"{time.time() - args.until + args.seconds:.0f} s", flush=True)
    tables = Tables(args.out, args.corpus, shared)
    lines = jobs_of("\n".join(path.read_text() for path in args.jobs), args.shape)
    lines = to_do(lines, tables.curves)
    tables.forget(lines)
    queue = Queue(lines, lambda job: new_rate(tables.curves, job))
    with tempfile.TemporaryDirectory() as turns:
        run(settings_of(args, devices, Path(turns)), queue, tables.add)
    print(table_of(tables.curves), flush=True)
    left = [job for _, job in queue.waiting]
    print(f"{time.time() - args.until + args.seconds:.0f} s; no time left for: {left}", flush=True)
    check_equal(tables.curves)
    # Threads may still wait for processes that were killed in the middle of a job.
    os._exit(0) if not args.smoke else None


if __name__ == "__main__":
    main()
