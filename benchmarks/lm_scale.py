"""Training on 1 to 8 GPUs of a host, by `pararnn train` under torchrun: steps, scaling, memory.

    python benchmarks/lm_scale.py                                  # all, on the GPUs that there are
    python benchmarks/lm_scale.py --only gru transformer --scales 7b --lengths 2048 --sections sizes
    python benchmarks/lm_scale.py --sections scaling --gpus 1 2 --seconds 900 --missing
    python benchmarks/lm_scale.py --plot

Sections: `sizes`, the paper's models of 2.9B and 7B at T = 2,048 and 16,384 on the most GPUs;
`scaling`, 1B on each number of GPUs, with as many tokens a GPU; `memory`, GRU and LSTM of 2.9B and
7B that keep all, that compute blocks again (checkpointing=true), that compute gates again
(model.recompute_gates=true); `lost`, see `lm_lost.py`. Where a model of `sizes` does not fit, the
others of these ways follow.

Every case is a run of its own: FSDP2, compiled blocks, AdamW, tokens read from the disk, without
validations, checks and checkpoints. Times are its log's: each of its rows is the mean of `--every`
steps; median and minimum are over these, those of the warm-up left out. Memory: the most that was
allocated on the first GPU. MFU: the log's, 6 x parameters x tokens, attention's products over time
left out. What is learned is generated text in bytes; vocabularies stay the paper's.

--profile: rank 0 of every case traces one step more, see `step_profile.py`, into
lm_scale_profile.csv. --seconds: no case begins later, and one that runs then is ended. A row is
written as soon as it is measured; `note` has those that do not fit into memory. Other failures are
printed, have no row, and end the program with code 1: Mamba2 without mamba-ssm, see `mamba2.py`.
key=value: overrides for all cases.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, cast

import lm_lost
import torch
from common import RESULTS, Record, read_rows
from lm_command import parser_of, record_of
from lm_launch import NEVER, PARAMETERS, TOO_LARGE, TRACE, launch, message_of, write_corpus
from pictures import Curves, caption, draw, new_figure
from step_profile import breakdown, kernels_of

from pararnn.lab.train.log import LOG
from pararnn.lab.train.log import read_rows as read_log

FILE, PROFILE = "lm_scale.csv", "lm_scale_profile.csv"
ARCHITECTURES = ("gru", "transformer", "lstm", "mamba2")
SCALES = ("7b", "2.9b")
SCALING = "1b"
LENGTHS = (2_048, 16_384)
WAYS = {
    "plain": [],
    "checkpointing": ["--checkpointing=True"],
    "recompute_gates": ["--model.recompute_gates=True"],
}
"""Overrides that save memory; the last is for recurrent models of ours."""
SECTIONS = ("sizes", "scaling", "memory", "lost")
KEYS = ("device", "recipe", "gpus", "rows_a_gpu", "T", "way", "overrides")
"""Columns that identify a case."""
FIGURES = ("log_rows", "median_ms", "min_ms", "tokens_per_s", "mfu_percent", "peak_GiB")
NOTE = "out of memory"
CORPUS = 4 << 20
"""Bytes of the text that is learned."""


class Case(NamedTuple):
    """A run that is measured."""

    recipe: str
    gpus: int
    rows: int
    length: int
    way: str = "plain"


def ways_of(recipe: str) -> list[str]:
    """Return the ways to keep less that a model has."""
    gates = recipe.startswith(("gru", "lstm", "tiny"))
    return [way for way in WAYS if way != "plain" and (gates or way != "recompute_gates")]


def cases(args: argparse.Namespace) -> list[Case]:
    """Return the requested cases once; tokens of a GPU are the same at every length."""
    most = max(args.gpus)
    every: list[Case] = []

    def add(recipe: str, gpus: int, length: int, way: str = "plain") -> None:
        every.append(Case(recipe, gpus, max(args.tokens // length, 1), length, way))

    for section in args.sections:
        for scale in args.scales:
            for length in args.lengths:
                for recipe in recipes_of(args, scale):
                    if section == "sizes":
                        add(recipe, most, length)
                    elif section == "memory" and "recompute_gates" in ways_of(recipe):
                        for way in WAYS:
                            add(recipe, most, length, way)
        if section == "scaling":
            for recipe in recipes_of(args, SCALING):
                for gpus in args.gpus:
                    add(recipe, gpus, args.lengths[0])
    return list(dict.fromkeys(every))


def recipes_of(args: argparse.Namespace, scale: str) -> list[str]:
    """Return a scale's recipes of the requested architectures."""
    every = ["tiny", "mamba2-tiny"] if args.smoke else [f"{a}-{scale}" for a in ARCHITECTURES]
    return [recipe for recipe in every if recipe.startswith(tuple(args.only))]


def overrides_of(case: Case, folder: Path, args: argparse.Namespace) -> list[str]:
    """Return a case's arguments for `pararnn train`, without the folder of its run."""
    return [
        f"--data.train={folder / 'corpus.txt'}",
        "--data.drop=",
        "--data.tokens=None",
        "--data.tokenizer=bytes",
        "--data.holdout=0.1",
        f"--data.cache={folder / 'tokens'}",
        f"--data.sequence_length={case.length}",
        f"--batch={case.rows * case.gpus}",
        f"--device_batch={case.rows}",
        f"--steps={args.warmup + args.steps + 10}",
        f"--log_every={args.every}",
        f"--save_every={NEVER}",
        f"--valid_every={NEVER}",
        "--verify_every=0",
        "--report_to=none",
        *WAYS[case.way],
        *(f"--{text}" for text in args.overrides),
    ]


def measure(case: Case, folder: Path, args: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """Return a case's row, and its profile's under "profile"; RuntimeError if it fails."""
    about = dict(zip(("recipe", "gpus", "rows_a_gpu", "T", "way"), case, strict=True))
    about["overrides"] = " ".join(args.overrides)
    with tempfile.TemporaryDirectory(dir=folder) as name:
        out, last = Path(name), args.warmup + args.steps
        command = ["train", case.recipe, *overrides_of(case, folder, args), f"--out={out}"]
        run_end = launch(command, case.gpus, out / "output", seconds, last, args.profile)
        parameters = out / PARAMETERS
        about["parameters"] = parameters.read_text() if parameters.exists() else ""
        if (out / TOO_LARGE).exists():
            return {**about, **dict.fromkeys(FIGURES, ""), "note": NOTE}
        if run_end.code != 0:
            raise RuntimeError(message_of(run_end))
        log = read_log(out / LOG)
        log_rows = [row for row in log if "loss" in row and args.warmup < row["step"] <= last]
        row = figures(log_rows, case.rows * case.gpus * case.length)
        profile = breakdown(kernels_of(out / TRACE)) if args.profile else []
    return {**about, **row, "note": "", "profile": profile}


def figures(log: Sequence[dict[str, Any]], tokens: int) -> dict[str, Any]:
    """Return the figures of a log's rows, of steps of a number of tokens."""
    times = [tokens / row["tokens_per_second"] * 1e3 for row in log]
    shares = [row["mfu"] for row in log if "mfu" in row]
    memory = [row["memory_gib"] for row in log if "memory_gib" in row]
    values = (
        len(log),
        round(median(times), 2),
        round(min(times), 2),
        round(tokens / median(times) * 1e3),
        round(100 * median(shares), 2) if shares else "",
        round(max(memory), 2) if memory else "",
    )
    return dict(zip(FIGURES, values, strict=True))


def run_cases(args: argparse.Namespace, folder: Path, end: float) -> list[str]:
    """Measure all cases; what failed or was left out, in words."""
    record, queue = record_of(args, FILE, KEYS), cases(args)
    failures: list[str] = []
    profile_path = record.path and record.path.with_name(PROFILE)
    profiles = Record(profile_path, record.shared, (*KEYS, "class"))
    there = args.missing and record.path is not None and record.path.exists()
    rows = read_rows(cast(Path, record.path)) if there else []
    notes = {tuple(row[key] for key in KEYS): row["note"] for row in rows}
    for case in queue:  # which grows
        keys = (record.shared["device"], *map(str, case), " ".join(args.overrides))
        remaining = end - time.monotonic()
        if keys not in notes and remaining <= 0:
            failures.append(f"{case}: left out, the time is over")
            continue
        if keys not in notes:
            print(f"{case}, {remaining:.0f} s left", file=sys.stderr, flush=True)
            try:
                row = measure(case, folder, args, min(remaining, args.case_seconds))
            except RuntimeError as error:
                print(error, file=sys.stderr, flush=True)
                failures.append(f"{case}: {str(error).splitlines()[0]}")
                continue
            profile = row.pop("profile", [])
            record.add(row)
            for part in profile:
                profiles.add({key: row[key] for key in KEYS if key in row} | part)
            notes[keys] = row["note"]
        if notes[keys] and case.way == "plain":
            more = (case._replace(way=way) for way in ways_of(case.recipe))
            queue += [each for each in more if each not in queue]
    record.end()
    return failures


def plot(path: Path) -> None:
    """Draw a result file, next to it: scaling at 1B, and steps of the sizes by T.

    No picture where nothing of these was measured at two points.
    """
    rows = [row for row in read_rows(path) if not row["note"] and row["way"] == "plain"]
    panels = {SCALING: (by_gpus(rows), "GPUs", "tokens/s a GPU")}
    panels |= {scale: (by_length(rows, scale), "T", "ms a step") for scale in sorted(SCALES)}
    drawable = {
        scale: panel
        for scale, panel in panels.items()
        if any(len(points) > 1 for points in panel[0].values())
    }
    if not drawable:
        return
    figure = new_figure(5 * len(drawable), 4.4)
    every = figure.subplots(1, len(drawable), squeeze=False)[0]
    for axes, (scale, panel) in zip(every, drawable.items(), strict=True):
        draw(axes, *panel)
        mine = [row for row in rows if row["recipe"].endswith(f"-{scale}")]
        axes.set_title(f"{scale.upper()}, {sizes_of(mine)}", fontsize="medium")
    caption(figure, rows, "a training step with AdamW and FSDP2, bfloat16")
    figure.savefig(path.with_suffix(".png"), dpi=150)


def sizes_of(rows: Sequence[dict[str, str]]) -> str:
    """Return the rows and lengths on a GPU, and the numbers of GPUs."""
    sizes = dict.fromkeys(f"{row['rows_a_gpu']} x {int(row['T']):,}" for row in rows)
    gpus = sorted({int(row["gpus"]) for row in rows})
    return f"{' and '.join(sizes)} tokens a GPU on {' and '.join(map(str, gpus))} GPUs"


def by_gpus(rows: Iterable[dict[str, str]]) -> Curves:
    """Return the tokens/s of a GPU at 1B, by the number of GPUs."""
    curves: Curves = {}
    for row in rows:
        if row["recipe"].endswith(f"-{SCALING}"):
            gpus = int(row["gpus"])
            curves.setdefault(row["recipe"], []).append((gpus, int(row["tokens_per_s"]) / gpus))
    return curves


def by_length(rows: Iterable[dict[str, str]], scale: str) -> Curves:
    """Return the ms of a size's step by T, on the most GPUs that have it."""
    mine = [row for row in rows if row["recipe"].endswith(f"-{scale}")]
    most = max((int(row["gpus"]) for row in mine), default=0)
    curves: Curves = {}
    for row in mine:
        if int(row["gpus"]) == most:
            curves.setdefault(row["recipe"], []).append((int(row["T"]), float(row["median_ms"])))
    return curves


def gpus_here(smoke: bool) -> list[int]:
    """1, 2, 4, 8 as far as there are GPUs; processes of a CPU are two."""
    count = 2 if smoke else torch.cuda.device_count()
    return [number for number in (1, 2, 4, 8) if number <= count]


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the command line, with what is smaller for a CPU."""
    parser = parser_of(__doc__)
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value")
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--scales", nargs="+", choices=SCALES, default=list(SCALES))
    parser.add_argument("--lengths", type=int, nargs="+", help="scaling takes the first")
    parser.add_argument("--gpus", type=int, nargs="+", help="default: 1, 2, 4, 8 as there are")
    parser.add_argument("--tokens", type=int, help="of a GPU in a step; default: 16,384")
    parser.add_argument("--warmup", type=int, default=10, help="steps that are not timed")
    parser.add_argument("--steps", type=int, default=30, help="steps that are timed")
    parser.add_argument("--every", type=int, default=5, help="steps of a row of the log")
    parser.add_argument("--seconds", type=float, default=NEVER, help="for all cases together")
    parser.add_argument("--case-seconds", type=float, default=900, help="for a case")
    parser.add_argument("--missing", action="store_true", help="only what has no row yet")
    parser.add_argument("--profile", action="store_true", help="trace a step of every case")
    parser.add_argument("--plot", action="store_true", help="draw what was measured")
    args = parser.parse_intermixed_args(argv)
    if args.warmup % args.every or args.steps % args.every or not args.warmup:
        parser.error(
            f"--warmup and --steps must be multiples of --every, got {args.warmup}, {args.steps} "
            f"and {args.every}"
        )
    here = gpus_here(args.smoke)
    args.gpus = sorted(args.gpus or here)
    if not args.plot and (not args.gpus or max(args.gpus) > max(here, default=0)):
        parser.error(f"--gpus must be at most the {max(here, default=0)} here, got {args.gpus}")
    args.lengths = args.lengths or ([32, 64] if args.smoke else list(LENGTHS))
    args.tokens = args.tokens or (128 if args.smoke else LENGTHS[-1])
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    path = (args.out or RESULTS) / FILE
    if args.plot:
        plot(path)
        return
    end = time.monotonic() + args.seconds
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_corpus(folder / "corpus.txt", CORPUS // (16 if args.smoke else 1))
        failures = run_cases(args, folder, end) if set(args.sections) - {"lost"} else []
        if "lost" in args.sections:
            recipe = "tiny" if args.smoke else lm_lost.RECIPE
            record = record_of(args, lm_lost.FILE, lm_lost.KEYS)
            run = partial(lm_lost.rows, recipe, args.gpus, folder, end)
            try:
                for row in run(args.overrides):
                    record.add(row)
            except RuntimeError as error:
                print(error, file=sys.stderr, flush=True)
                failures.append(f"lost: {str(error).splitlines()[0]}")
    if path.exists() and not args.smoke:
        if importlib.util.find_spec("matplotlib") is None:
            print("no picture: matplotlib is not installed; draw it elsewhere by --plot")
        else:
            plot(path)
    if failures:
        sys.exit("without a row:\n" + "\n".join(failures))


if __name__ == "__main__":
    main()
