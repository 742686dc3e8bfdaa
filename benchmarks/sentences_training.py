"""Sentences of docs/training.md and docs/tasks.md whose figures are read from the result files."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from common import RESULTS
from lm_scale import FILE, PROFILE
from markdown_tables import Row, hold, listed, one, prose, read, span

from pararnn.tasks.results import percent, read_results
from pararnn.tasks.table import PAPER, TASKS

Result = Mapping[str, Any]
NAMES = {"gru": "GRU", "lstm": "LSTM", "mamba2": "Mamba2", "transformer": "Transformer"}
LONG: dict[str, Any] = {"gpus": 2, "rows_a_gpu": 1, "T": 16384, "way": "plain", "overrides": ""}
"""What tells the steps at 7B and the longest T apart."""
PAPERS_STEPS = 1_875_000
"""The cap of the paper's trainings on synthetic tasks."""
SPENT = 0.05
"""The part of its rate below which a training's schedule counts as run to its end."""
CELLS = ("gru", "lstm")
OTHERS = ("transformer", "mamba2")


def overhead() -> str:
    """Return what the Trainer costs over a bare loop, in percent of the bare loop's time."""
    rows = read("train_step.csv")
    bare = [row for row in rows if row["path"] == "bare"]
    keys = ("recipe", "gpus", "rows_a_gpu", "T")
    both = [(row, one(rows, path="trainer", **{key: row[key] for key in keys})) for row in bare]
    costs = [100 * (float(mine["mean_ms"]) / float(loop["mean_ms"]) - 1) for loop, mine in both]
    return span(costs, ".1f", "%")


def training() -> str:
    """Return what README says of training."""
    return prose(
        "Training runs on transformers' Trainer and FSDP2, on one GPU or many by `torchrun`. A "
        f"killed run resumes bit for bit; the overhead over a bare loop is {overhead()}. Recipes, "
        "data, checkpoints and several GPUs: [Training](docs/training.md). Texts, tasks, and the "
        "paper's shots beside its tables: [Evaluation](docs/evaluation.md)."
    )


def steps() -> str:
    """Return what the table of steps says of the Trainer and of two GPUs."""
    rows = [row for row in read("train_step.csv") if row["path"] == "trainer"]
    single, double = (
        int(one(rows, recipe="gru-1b", gpus=gpus)["tokens_per_s"]) / gpus for gpus in (1, 2)
    )
    return prose(
        f"The Trainer takes {overhead()} more time than the bare loop. From one GPU to two the 1B "
        f"GRU keeps {100 * double / single:.0f}% of its tokens/s a GPU."
    )


def products() -> str:
    """Return which part of a step at 7B and the longest T matrix products are."""
    steps = {
        name: one(read(FILE), recipe=f"{name}-7b", **LONG) for name in NAMES if name != "mamba2"
    }
    kinds = {
        name: one(read(PROFILE), recipe=f"{name}-7b", **{**LONG, "class": "products"})
        for name in steps
    }
    other = float(steps["transformer"]["median_ms"])
    ratios = {name: float(row["median_ms"]) / other for name, row in steps.items()}
    busy = [float(row["busy_ms"]) / other for row in kinds.values()]
    alone = {name: float(row["alone_ms"]) / other for name, row in kinds.items()}
    rates = [
        6 * int(steps[name]["parameters"]) * LONG["rows_a_gpu"] * LONG["T"]
        / float(row["busy_ms"]) / 1e9
        for name, row in kinds.items()
    ]  # fmt: skip
    parts = listed(f"{share:.2f} ({NAMES[name]})" for name, share in alone.items())
    return prose(
        f"At 7B and T = {LONG['T']:,} a step takes {ratios['gru']:.2f} (GRU) and "
        f"{ratios['lstm']:.2f} (LSTM) of the Transformer's time. The matrix products bound it from "
        f"below: they are busy for {span(busy, '.2f')} of the Transformer's step in all three "
        f"models. For {parts} of it nothing runs beside them. While they are busy they do "
        f"{span(rates, '.0f')} TFLOP/s, six operations counted for each parameter and token."
    )


def changes(way: str, key: str) -> list[float]:
    """Return by how many percent a way to keep less changes a figure, for each model."""
    rows = [row for row in read(FILE) if not row["note"]]
    keys = ("recipe", "gpus", "rows_a_gpu", "T", "overrides")
    mine = [row for row in rows if row["way"] == way]
    plain = [one(rows, way="plain", **{key: row[key] for key in keys}) for row in mine]
    return [
        100 * (float(row[key]) / float(base[key]) - 1)
        for row, base in zip(mine, plain, strict=True)
    ]


def memory() -> str:
    """Return what the two ways to keep less cost and save."""

    def both(way: str) -> tuple[str, str]:
        saved = (-change for change in changes(way, "peak_GiB"))
        return span(changes(way, "median_ms"), ".0f", "%"), span(saved, ".0f", "%")

    gates, all_ = both("recompute_gates"), both("checkpointing")
    return prose(
        f"`model.recompute_gates=true` is nearly free: {gates[0]} more time for {gates[1]} less "
        "memory, as compiled blocks then keep no gates. Where that is not enough, take "
        f"`checkpointing=true`: {all_[0]} more time for {all_[1]} less memory."
    )


def profile() -> str:
    """Return what the trace of a step shows."""
    rows = read(PROFILE)
    nccl = [
        float(row["alone_ms"]) for row in rows if row["class"] == "NCCL" and "7b" in row["recipe"]
    ]
    steps = [float(row["median_ms"]) for row in read(FILE) if LONG.items() <= numbers(row).items()]
    idle = one(rows, recipe="gru-1b", **{"class": "idle"})
    return prose(
        f"At 7B all but {span(nccl, '.0f')} ms of NCCL's time is hidden behind other work, in "
        f"steps of {span(steps, ',.0f')} ms. At 1B idle time is the largest loss, "
        f"{float(idle['busy_ms']):.0f} ms: there the host is not ahead of the GPU, and less so "
        "while it is traced."
    )


def numbers(row: Row) -> dict[str, Any]:
    """Return a row's values, whole numbers as such."""
    return {key: int(value) if value.isdecimal() else value for key, value in row.items()}


def capped(folder: str = "table6") -> list[Result]:
    """Return the results of a folder that a limit ended."""
    return [result for result in read_results(RESULTS / "tasks" / folder) if result["capped"]]


def rate_left(result: Result) -> float:
    """Return the part of its learning rate that a training ended with, by its cosine."""
    return (1 + math.cos(math.pi * result["steps"] / result["config"]["train"]["steps"])) / 2


def name_of(result: Result) -> str:
    """Return the model and the task of a result."""
    return f"{NAMES[result['mixer']]} on {result['task']}"


def tasks_steps() -> str:
    """Return how far the capped trainings of Table 6 went, and at which rate they ended."""
    results = capped()
    ours, others = (
        max((r for r in results if r["mixer"] in mixers), key=lambda r: r["steps"])
        for mixers in (CELLS, OTHERS)
    )
    early = sorted((r for r in results if rate_left(r) > SPENT), key=rate_left)
    ended = listed(f"{name_of(result)} ({100 * rate_left(result):.0f}%)" for result in early)
    return prose(
        "Table 6's models, with far fewer steps than the paper's cap. What was solved early "
        f"ended early. What was not took up to {ours['steps']:,} steps in "
        f"{ours['seconds'] / 60:.0f} minutes on one GPU (GRU and LSTM) or {others['steps']:,} "
        f"(the Transformer, Mamba2). Of the {len(results)} capped trainings {len(early)} ended "
        f"before their learning rate had fallen. They kept this part of it: {ended}. The others "
        f"ended at {100 * SPENT:.0f}% or less."
    )


def part(result: Result) -> str:
    """Return which part of the paper's steps a training took."""
    return f"1/{PAPERS_STEPS / result['steps']:.0f}"


def tasks_order() -> str:
    """Return what the table of the paper's tasks says, and what it does not."""
    results = {(r["task"], r["mixer"]): r for r in read_results(RESULTS / "tasks" / "table6")}
    hops = sorted(
        (result for (task, _), result in results.items() if task == "2-hop"),
        key=lambda result: -result["best"],
    )
    order = listed(f"{NAMES[hop['mixer']]} {percent(hop['best'])}% ({part(hop)})" for hop in hops)
    place = list(TASKS).index("2-hop")
    papers = [PAPER[hop["mixer"]][place] for hop in hops]
    hold(papers == sorted(papers, reverse=True), "the order on 2-hop is the paper's")
    pairs = zip(hops, papers, strict=True)
    hold(all(100 * hop["best"] < other for hop, other in pairs), "each is below the paper's figure")
    mamba, other = results["parity", "mamba2"], results["parity", "transformer"]
    worst = min(results["mqar", mixer]["best"] for mixer in NAMES)
    solved = listed(NAMES[cell] for cell in CELLS if results["parity", cell]["best"] == 1)
    return prose(
        f"{solved} track parity, and Mamba2 does not, as in the paper. For Mamba2 this rests on "
        f"one training of {mamba['steps']:,} steps, which ended at {100 * rate_left(mamba):.0f}% "
        f"of its rate. MQAR is {percent(worst)}% or more for all four. On 2-hop the order is the "
        f"paper's, in brackets the part of its steps that each took: {order}. Each is below the "
        "paper's figure.",
        "Two entries are above the paper's. Our Mamba2 solves Keep-n-th, with the sinusoids that "
        f"the paper's remark asks for. The Transformer gets {percent(other['best'])}% of parity's "
        "places right.",
    )


def last_losses(results: Iterable[Result]) -> list[float]:
    """Return the training losses of all seeds at the last validation."""
    return [loss for result in results for loss in result["history"][-1][1]]


def tasks_recall() -> str:
    """Return what the harder reading of MQAR shows."""
    every = {r["mixer"]: r for r in read_results(RESULTS / "tasks" / "recall")}
    ours = [every[cell] for cell in CELLS]
    wrong = [100 * (1 - result["best"]) for result in ours]
    losses = last_losses(ours)
    return prose(
        f"GRU and LSTM make {span(wrong, '.1f', '%')} errors there after "
        f"{span([result['steps'] for result in ours], ',')} steps, though their training loss is "
        f"{span(losses, '.0e').replace('e-0', 'e-')}: they know the "
        f"{ours[0]['config']['train']['rows']:,} sequences by heart before the rule is complete. "
        "The Transformer's one layer answers with one of the two values, whichever."
    )


def ranked(results: Sequence[Result]) -> list[Result]:
    """Return results, the best first."""
    return sorted(results, key=lambda result: -at_100(result))


def at_100(result: Result) -> float:
    """Return the best seed's accuracy at the length that was trained, as the table has it."""
    return max(result["lengths"].get("100", result["accuracies"]))


def tasks_s3() -> str:
    """Return what S3 shows."""
    results = ranked(read_results(RESULTS / "tasks" / "s3"))
    ours = [result for result in results if result["mixer"] not in OTHERS]
    others = [result for result in results if result["mixer"] in OTHERS]
    first, second = ours[:2]
    at_500 = [(max(r["lengths"]["500"]), min(r["lengths"]["500"])) for r in ours if r["lengths"]]
    (dense,) = read_results(RESULTS / "tasks" / "dense")
    chance = 100 / 3

    def named(result: Result) -> str:
        mixer, layers = result["mixer"], result["config"]["model"]["layers"]
        return f"The {'sLSTM' if mixer == 'slstm' else NAMES[mixer]} of {layers} layers"

    top = others[0]
    return prose(
        f"{named(first)} learns S3 to {percent(at_100(first))}% in its best seed, "
        f"{named(second).replace('The', 'the', 1)} to {percent(at_100(second))}%. Mamba2 and the "
        f"Transformer reach {percent(at_100(top))}% at best, in {len(top['accuracies'])} seeds "
        "each. That is what nonlinearity buys. It is not yet the rule: at five times the length "
        f"the best is {percent(max(best for best, _ in at_500))}%. Seeds that do not find it stop "
        "where one knows whether the permutation is even (parity again, which leaves one guess "
        f"in three, {chance:.0f}%; at length 500 the worst seeds of the GRU and the sLSTM have "
        f"{worst_at_500(ours)}).",
        "A5 and S5, whose permutations no cell with one recurrent weight a channel has solved "
        "here, may need states that meet inside the recurrence. The dense GRU, one layer and one "
        f"seed on a CPU, reached {percent(dense['best'])}% on S3 in {dense['steps']:,} steps "
        "(`benchmarks/results/tasks/dense`), and was still rising.",
    )


def worst_at_500(results: Sequence[Result]) -> str:
    """Return what the worst seeds of those that find the rule have at length 500."""
    found = (r for r in results if r["best"] > 0.9)
    return span([100 * min(r["lengths"]["500"]) for r in found], ".0f", "%")
