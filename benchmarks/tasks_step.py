"""Time of a training step of a synthetic task (docs/tasks.md) on a GPU: as calls, as a CUDA graph,
and as a graph of compiled code. Three seeds, Table 6's models. Writes rows of tasks_step.csv.

    python benchmarks/tasks_step.py [--tasks mqar] [--mixers lstm]
"""

from __future__ import annotations

import itertools
import time
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from common import add_row, new_parser, provenance
from protocol import call_times

from pararnn.lab.tasks.folded import make_folded
from pararnn.lab.tasks.run import paper_run
from pararnn.lab.tasks.training import Stepper

TASKS, MIXERS = ("2-hop", "mqar"), ("gru", "lstm")
WAYS: dict[str, dict[str, Any]] = {
    "calls": {"graph": False},
    "graph": {},
    "compiled": {"compile": True},
}
REPETITIONS, SECONDS = 5, 0.5


def measure(task: str, mixer: str, way: str) -> dict[str, Any]:
    """Time steps: medians and minima over repetitions of half a second."""
    device = torch.device("cuda")
    paper = paper_run(task, mixer)
    config = replace(paper, train=replace(paper.train, steps=100_000, **WAYS[way]), device="cuda")
    begin = time.perf_counter()
    model = make_folded(config.task, config.model, range(config.train.seeds), device)
    stepper = Stepper(model, config.task, config.train)
    setup = time.perf_counter() - begin
    (estimate,) = call_times(stepper, device, 20, 1)
    count = max(20, int(1e3 * SECONDS / estimate))
    times = call_times(stepper, device, count, REPETITIONS)
    return {
        "task": task,
        "mixer": mixer,
        "way": way,
        "seeds": config.train.seeds,
        "batch": config.train.batch,
        "median_ms": f"{median(times):.4f}",
        "min_ms": f"{min(times):.4f}",
        "steps": REPETITIONS * count,
        "setup_s": f"{setup:.1f}",
        **provenance(device),
    }


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--tasks", nargs="+", default=TASKS, choices=TASKS)
    parser.add_argument("--mixers", nargs="+", default=MIXERS, choices=MIXERS)
    args = parser.parse_args()
    for task, mixer, way in itertools.product(args.tasks, args.mixers, WAYS):
        row = measure(task, mixer, way)
        print(row, flush=True)
        add_row(args.out / "tasks_step.csv", row, ("task", "mixer", "way"))


if __name__ == "__main__":
    main()
