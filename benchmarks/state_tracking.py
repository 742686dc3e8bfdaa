"""Word problems of S3, A5 and S5 (docs/tasks.md) by cells that mix channels inside heads, by M2RNN,
and by linear ones and attention: trained at length 100, tested up to 10,000. Writes
state_tracking.csv, state_tracking.png, and each result to tasks/tracking. Results that exist stay,
so that a run that was ended goes on, and several may share the folder.

    python benchmarks/state_tracking.py --at-once 14 [--mixers m2rnn deltanet]
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from common import new_parser, write_csv

from pararnn.base.device import default_device
from pararnn.lab.commands import task_runs
from pararnn.lab.tasks.report import length_plot
from pararnn.lab.tasks.results import Result, best, read_results
from pararnn.lab.tasks.run import TaskRun, run_all

RECIPE = (
    "--width=128",
    "--batch=64",
    "--rows=100000",
    "--weight_decay=0.1",
    "--max_norm=1",
    "--start=2",
    "--seeds=1",
    "--stop=never",
    "--every=2000",
    "--test=2000",
    "--length_rows=40",
)
LENGTHS = (100, 500, 2000, 10_000)
CELLS = ("head-gru", "head-lstm", "head-slstm")


class Group(NamedTuple):
    """Runs of all tasks with all mixers: keys of each, and a sweep."""

    tasks: Sequence[str]
    mixers: Sequence[str]
    keys: Sequence[str]
    sweep: Sequence[str]
    lengths: Sequence[int] = LENGTHS


GROUPS = (
    Group(["s5"], CELLS, ["--bare=True", "--steps=12000"], ["heads=1,2,4,8", "lr=0.003,0.01"]),
    Group(["s5"], CELLS, ["--bare=True", "--steps=12000", "--layers=2"], ["heads=2", "lr=0.01"]),
    Group(["a5"], CELLS, ["--bare=True", "--steps=8000"], ["heads=2,8", "lr=0.01"]),
    Group(["s3"], CELLS, ["--bare=True", "--steps=3000"], ["heads=2,8", "lr=0.01"]),
    Group(["s5"], ["m2rnn"], ["--bare=True", "--steps=8000"], ["heads=2,8", "lr=0.003,0.01"]),
    Group(["a5"], ["m2rnn"], ["--bare=True", "--steps=8000"], ["heads=2", "lr=0.01"]),
    Group(["s3"], ["m2rnn"], ["--bare=True", "--steps=3000"], ["heads=2", "lr=0.01"]),
    Group(
        ["s3", "a5", "s5"],
        ["deltanet", "mamba2"],
        ["--bare=False", "--steps=8000", "--layers=2"],
        ["heads=2", "lr=0.003"],
    ),
    Group(
        ["s3", "a5", "s5"],
        ["transformer"],
        ["--steps=8000", "--layers=2"],
        ["heads=2", "lr=0.003"],
        LENGTHS[:1],
    ),
)


MIXERS = tuple(dict.fromkeys(mixer for group in GROUPS for mixer in group.mixers))


def configs(device: str, mixers: Collection[str] = MIXERS) -> list[TaskRun]:
    """Return the configs of all runs of some mixers."""
    return [
        config
        for group in GROUPS
        for config in task_runs(
            group.tasks,
            [mixer for mixer in group.mixers if mixer in mixers],
            [*RECIPE, *group.keys, "--lengths", *map(str, group.lengths), "--device", device],
            group.sweep,
        )
    ]


def row_of(result: Result) -> dict[str, Any]:
    """Return a result as a row: the best seed's accuracies."""
    model, train = result["config"]["model"], result["config"]["train"]
    return {
        "task": result["task"],
        "mixer": result["mixer"],
        "layers": model["layers"],
        "head": model["width"] // model["heads"],
        "width": model["width"],
        "bare": model["bare"],
        "parameters": result["parameters"],
        **{key: train[key] for key in ("lr", "weight_decay", "batch", "seeds")},
        "steps": result["steps"],
        "seconds": result["seconds"],
        "horizon": max(result["horizons"]),
        **{str(length): best(result["lengths"].get(str(length), ())) for length in LENGTHS},
        "commit": result["commit"],
        "device": result["device"],
        **result["versions"],
    }


def rows_of(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Return results as rows, by task, mixer, layers, size of a head and rate."""
    tasks = dict.fromkeys(task for group in reversed(GROUPS) for task in group.tasks)
    orders = {"task": list(tasks), "mixer": MIXERS}

    def key(row: dict[str, Any]) -> tuple[Any, ...]:
        places = (orders[name].index(row[name]) for name in orders)
        return (*places, row["layers"], row["head"], row["lr"])

    return sorted(map(row_of, results), key=key)


def best_of_sizes(results: Sequence[Result]) -> list[Result]:
    """Return S5's results of one layer with heads of 16, and one dense head: the better rates."""
    groups: dict[tuple[str, int], list[Result]] = {}
    for result in results:
        model = result["config"]["model"]
        if (result["task"], model["layers"]) == ("s5", 1) and model["heads"] in (1, 8):
            groups.setdefault((result["mixer"], model["heads"]), []).append(result)
    return [
        max(each, key=lambda r: [best(r["lengths"][str(n)]) or 0 for n in (100, 10_000)])
        for each in groups.values()
    ]


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--device", default=default_device())
    parser.add_argument("--at-once", type=int, default=1, help="trainings side by side")
    parser.add_argument("--mixers", nargs="+", default=MIXERS, choices=MIXERS)
    args = parser.parse_args()
    folder: Path = args.out / "tasks" / "tracking"
    try:
        run_all(configs(args.device, args.mixers), folder, args.at_once)
    finally:
        results = read_results(folder)
        write_csv(args.out / "state_tracking.csv", rows_of(results))
        length_plot(best_of_sizes(results), args.out / "state_tracking.png")


if __name__ == "__main__":
    main()
