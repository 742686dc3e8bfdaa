"""Tables of what training and synthetic tasks have measured."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import RESULTS
from markdown_tables import figure, read, source, table

from pararnn.tasks.report import table as accuracies
from pararnn.tasks.results import percent, read_results, row_of

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
    text = source(rows, "train_step.csv", several=True)
    return f"Means of {rows[0]['steps']} steps, of {rows[-1]['steps']} on two GPUs {text}:\n\n" + (
        table(head, body)
    )


def tasks() -> str:
    """The paper's Table 6 and ours."""
    return shares_of("table6")


def words() -> str:
    """The word problems of three groups, by layers."""
    return shares_of("words")


def recall() -> str:
    """MQAR in its harder reading."""
    return shares_of("recall")


def shares_of(folder: str) -> str:
    """A folder's accuracies, tasks by mixers, and the steps of those that most were given."""
    results = read_results(RESULTS / "tasks" / folder)
    most = max(results, key=lambda result: result["steps"])
    return (
        f"{origin(results, f'tasks/{folder}')}:\n\n{accuracies(results)} The most steps that one "
        f"took: {most['steps']:,} ({most['task']}, {most['mixer']})."
    )


def remarks() -> str:
    """The paper's three remarks: with what it recommends, and without."""
    best = {
        (result["task"], result["mixer"]): result
        for result in read_results(RESULTS / "tasks" / "table6")
    }
    body = []
    for folder, changed in REMARKS.items():
        for result in read_results(RESULTS / "tasks" / folder):
            usual = until(best[result["task"], result["mixer"]], result["steps"])
            body.append([result["task"], result["mixer"], changed, share(usual), share(result)])
    results = [each for folder in REMARKS for each in read_results(RESULTS / "tasks" / folder)]
    head = ["task", "mixer", "changed", "as the paper has it", "changed so"]
    return f"{origin(results, 'tasks')}:\n\n{table(head, body)}"


def until(result: Any, steps: int) -> Any:
    """A result, or what its validations had found by so many steps, if it took more."""
    if result["steps"] <= steps:
        return result
    found = [each for each in result["history"] if each[0] <= steps]
    best = max(max(accuracies) for _, _, accuracies in found)
    return result | {"best": best, "steps": found[-1][0], "capped": True}


def share(result: dict[str, Any] | Any) -> str:
    """The best seed's accuracy in percent and the steps it took, + where they were capped."""
    return f"{percent(result['best'])}{'+' * result['capped']} ({result['steps']:,} steps)"


def origin(results: Sequence[Any], folder: str) -> str:
    """Where results come from."""
    places = dict.fromkeys(
        f"{each['device']}, PyTorch {each['versions']['torch']}, commit {each['commit']}"
        for each in results
    )
    return f"({'; '.join(places)}; `{Path('benchmarks/results') / folder}`)"


def lengths(folder: str) -> str:
    """A folder's accuracy by length, the worst and the best seed."""
    results = [
        json.loads(path.read_text(encoding="utf-8"))
        for path in sorted((RESULTS / "tasks" / folder).glob("*.json"))
    ]
    for result in results:  # whose positions are learned is tested at its own length only
        result["lengths"] = result["lengths"] or {str(at_length(result)): result["accuracies"]}
    every = list(dict.fromkeys(length for result in results for length in result["lengths"]))
    body = [
        [
            row_of(result),
            f"{result['steps']:,}",
            *(spread(result["lengths"].get(length)) for length in every),
        ]
        for result in results
    ]
    head = ["mixer", "steps", *(f"{int(length):,}" for length in every)]
    return f"{origin(results, f'tasks/{folder}')}:\n\n{table(head, body)}"


def at_length(result: dict[str, Any]) -> int:
    """The length that a result's model was trained at."""
    return int(result["config"]["task"]["length"])


def spread(found: Sequence[float] | None) -> str:
    """From the worst to the best seed, in percent."""
    return "-" if found is None else f"{percent(min(found))} - {percent(max(found))}"
