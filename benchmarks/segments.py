"""Rule of `auto` on a GPU, from measured times: the number of segments from which time is split.

For each least number of segments, the worst ratio of what `auto` would take to the better engine,
over trained and over fresh layers, by pass and dtype. And for `adapt`: the ratio of (newton, fused)
to the loop on trained layers, by sweeps over segments. Prints tables; runs nothing.

    python benchmarks/segments.py
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable

import torch
from learn_results import CORPORA
from markdown_tables import Row, read, table

from pararnn.codegen.board import LANES
from pararnn.codegen.elementwise_cuda import most_per_lane
from pararnn.engines.split import MIN_LENGTH, useful_segments

CORES = 132
"""Multiprocessors of the GPU that the times are of."""
LEAST = (2, 4, 6, 8, 16, 32)
LATER = "auto_layers.csv"
"""File of benchmarks/auto_layers.py: trained and fresh layers, with the stage in each row."""
LEARNED = [f"learn_layers_{corpus}.csv" for corpus in CORPORA]
"""Files of benchmarks/learn_layers.py: the layers of trained language models, a row each pair."""


def segments(row: Row) -> int:
    """Into how many segments (newton, fused) cut time on a row's problem."""
    batch, steps, channels = (int(row[letter]) for letter in "BTD")
    if steps < MIN_LENGTH:
        return 1
    lanes = LANES * most_per_lane(getattr(torch, row["dtype"]))
    return useful_segments(steps, batch * -(-channels // lanes), CORES)


def all_times() -> list[Row]:
    """Return both engines' times on trained and on fresh layers, these with random gates."""
    fresh = [row for row in read("parallel.csv") if row["section"] == "shapes"]
    fresh += read("auto_cuda.csv")
    rows = [row | {"stage": "trained"} for row in read("parallel_trained.csv")]
    rows += [row | {"stage": "fresh"} for row in fresh]
    return [*rows, *model_times(), *read(LATER)]


def model_times() -> list[Row]:
    """Return both engines' times on trained language models' layers that have both, by pass."""
    by_layer: dict[tuple[str, ...], list[Row]] = defaultdict(list)
    for row in itertools.chain.from_iterable(read(name) for name in LEARNED):
        if row["backend"] == "fused":
            own = (row[k] for k in ("corpus", "mixer", "layer", "dtype", *"BTD"))
            by_layer[tuple(own)].append(row)
    pairs = [own for own in by_layer.values() if len(own) == len(SOLVERS)]
    return [
        own[0]
        | {"stage": "trained", "what": f"{own[0]['mixer']}, layer {own[0]['layer']}", "pass": step}
        | {f"{row['solver']}_ms": row[f"{step}_ms"] for row in own}
        for own in pairs
        for step in ("forward", "backward")
    ]


def both_passes(rows: Iterable[Row]) -> list[Row]:
    """Return rows of forward + backward of what has both: `auto` takes one engine for both."""
    by_problem: dict[tuple[str, ...], list[Row]] = defaultdict(list)
    for row in rows:
        by_problem[tuple(row[k] for k in ("commit", "stage", "what", "dtype", *"BTD"))].append(row)
    sums = []
    for own in by_problem.values():
        if {row["pass"] for row in own} == {"forward", "backward"}:
            times = {f"{s}_ms": str(sum(_ms(row, s) for row in own)) for s in SOLVERS}
            sums.append(own[0] | times | {"pass": "both"})
    return sums


SOLVERS = ("newton", "sequential")


def _ms(row: Row, solver: str) -> float:
    return float(row[f"{solver}_ms"])


def worst(rows: Iterable[Row], least: int) -> float:
    """Return the worst ratio to the better engine where time is cut from `least` segments on."""
    return max(
        _ms(row, auto_solver(row, least)) / min(_ms(row, solver) for solver in SOLVERS)
        for row in rows
    )


def auto_solver(row: Row, least: int) -> str:
    """Return the solver on a row's problem where time is cut from `least` segments on."""
    return "newton" if segments(row) >= least else "sequential"


def ratios() -> str:
    """Return the worst ratios, a column each least number of segments."""
    rows = all_times()
    rows += both_passes(rows)
    body = []
    cases = itertools.product(("trained", "fresh"), ("both", "forward"), ("float32", "bfloat16"))
    for case in cases:
        mine = [row for row in rows if (row["stage"], row["pass"], row["dtype"]) == case]
        body.append([*case, *(f"{worst(mine, least):.2f}" for least in LEAST)])
    return table(["layers", "pass", "dtype", *(f"from {n} segments" for n in LEAST)], body)


def sweeps() -> str:
    """(newton, fused) over the loop on trained layers, by sweeps and segments."""
    by_sweeps: dict[tuple[int, int], list[float]] = defaultdict(list)
    for row in all_times():
        if row["stage"] == "trained" and row["pass"] == "forward" and "sweeps" in row:
            ratio = _ms(row, "newton") / _ms(row, "sequential")
            by_sweeps[segments(row), int(row["sweeps"])].append(ratio)
    body = [
        [str(w), str(k), f"{k / w:.3f}", " ".join(f"{ratio:.2f}" for ratio in sorted(own))]
        for (w, k), own in sorted(by_sweeps.items())
    ]
    return table(["segments W", "sweeps k", "k / W", "time over the loop's"], body)


if __name__ == "__main__":
    print(f"{ratios()}\n\n{sweeps()}")
