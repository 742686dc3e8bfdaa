"""Tables of what training and synthetic tasks have measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from common import RESULTS
from markdown_tables import figure, read, source, table

from pararnn.tasks.report import percent, read_results
from pararnn.tasks.report import table as accuracies

REMARKS = {
    "bare": "without convolution, gate and residual",
    "nopos": "without positions",
    "clip": "recurrent weights clipped to 0.9",
}
"""Folders of results: what each of the paper's three remarks changes."""


def train_step() -> str:
    """Steps of training, by the Trainer and by a bare loop."""
    rows = read("train_step.csv")
    body = [
        [
            row["recipe"],
            row["gpus"],
            f"{row['rows_a_gpu']} x {int(row['T']):,}",
            row["path"],
            f"{float(row['mean_ms']):.1f}",
            f"{float(row['min_ms']):.1f}",
            f"{int(row['tokens_per_s']):,}",
            f"{float(row['mfu_percent']):.1f}%",
            figure(row, "peak_GiB"),
        ]
        for row in rows
    ]
    head = ["recipe", "GPUs", "a GPU", "path", "ms", "minimum", "tokens/s", "MFU", "GiB a GPU"]
    commits = ", ".join(dict.fromkeys(row["commit"] for row in rows))
    text = source([rows[0] | {"commit": commits}], "train_step.csv")
    return f"Means of {rows[0]['steps']} steps, of {rows[-1]['steps']} on two GPUs {text}:\n\n" + (
        table(head, body)
    )


def tasks() -> str:
    """The paper's Table 6 and ours."""
    results = read_results(RESULTS / "tasks" / "table6")
    return f"{origin(results[0], 'tasks/table6')}:\n\n{accuracies(results)}"


def remarks() -> str:
    """The paper's three remarks: with what it recommends, and without."""
    best = {
        (result["task"], result["mixer"]): result
        for result in read_results(RESULTS / "tasks" / "table6")
    }
    body = []
    for folder, changed in REMARKS.items():
        for result in read_results(RESULTS / "tasks" / folder):
            usual = best[result["task"], result["mixer"]]
            body.append([result["task"], result["mixer"], changed, share(usual), share(result)])
    first = read_results(RESULTS / "tasks" / "bare")[0]
    head = ["task", "mixer", "changed", "as the paper has it", "changed so"]
    return f"{origin(first, 'tasks')}:\n\n{table(head, body)}"


def share(result: dict[str, Any] | Any) -> str:
    """The best seed's accuracy in percent and the steps it took, + where they were capped."""
    return f"{percent(result['best'])}{'+' * result['capped']} ({result['steps']:,} steps)"


def origin(result: Any, folder: str) -> str:
    """Where results come from."""
    versions = result["versions"]
    return (
        f"({result['device']}, PyTorch {versions['torch']}, commit {result['commit']}; "
        f"`{Path('benchmarks/results') / folder}`)"
    )


def lengths() -> str:
    """Accuracy by length, the worst and the best seed."""
    results = [
        json.loads(path.read_text(encoding="utf-8"))
        for path in sorted((RESULTS / "tasks" / "lengths").glob("*.json"))
    ]
    every = list(results[0]["lengths"])
    body = [
        [
            result["mixer"],
            f"{result['steps']:,}",
            *(f"{percent(min(found))} - {percent(max(found))}" for found in seeds_of(result)),
        ]
        for result in results
    ]
    head = ["mixer", "steps", *(f"{int(length):,}" for length in every)]
    return f"{origin(results[0], 'tasks/lengths')}:\n\n{table(head, body)}"


def seeds_of(result: Any) -> list[list[float]]:
    """Every length's accuracies, a seed each."""
    return list(result["lengths"].values())
