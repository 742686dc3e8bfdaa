"""Results as Markdown, next to the paper's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from pararnn.lab.evaluation.paper import PUBLISHED, TASKS

NONE = "–"  # noqa: RUF001


def markdown(results: dict[str, Any]) -> str:
    """Return the tables of `run_evaluation`'s results."""
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    limit = results["limit"]
    parts = [
        f"# {results['model']}",
        f"{results['parameters']:,} parameters, {results['dtype']} on {results['device']}; "
        f"{versions}."
        + (f" Only the first {limit} documents and questions of each." if limit else ""),
    ]
    if results["texts"]:
        parts += ["## Texts", _texts(results["texts"])]
        parts += [f"{line}." for each in results["texts"] for line in each["left_out"]]
    if results["tasks"]:
        parts += ["## Tasks", "Accuracies in percent, ± their standard errors."]
        parts += [_tasks(results["tasks"]), *_notes(results["tasks"])]
        parts += _next_to_the_paper(results)
    return "\n\n".join(parts) + "\n"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table, its first column aligned left, the others right."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _texts(texts: list[dict[str, Any]]) -> str:
    counts = ("documents", "tokens", "bytes")
    means = ("nats_per_token", "perplexity", "bits_per_byte")
    rows = (
        [
            each["source"],
            *(f"{each[name]:,}" for name in counts),
            *(f"{each[name]:.4f}" for name in means),
        ]
        for each in texts
    )
    return table(["text", *counts, "nats/token", "perplexity", "bits/byte"], rows)


def _tasks(tasks: list[dict[str, Any]]) -> str:
    metrics = list(dict.fromkeys(name for each in tasks for name in each["metrics"]))
    rows = (
        [
            each["task"],
            NONE if each["shots"] is None else str(each["shots"]),
            f"{each['questions']:,}",
            *(_number(name, each["metrics"].get(name)) for name in metrics),
        ]
        for each in tasks
    )
    return table(["task", "shots", "questions", *metrics], rows)


def _number(metric: str, result: dict[str, float | None] | None) -> str:
    if result is None:
        return NONE
    value, error = result["value"], result["stderr"]
    if not isinstance(value, (int, float)):
        return str(value)
    scale = 100 if metric.startswith("acc") else 1
    return f"{value * scale:.2f}" + ("" if error is None else f" ± {error * scale:.2f}")


def _notes(tasks: list[dict[str, Any]]) -> list[str]:
    notes = []
    files = ", ".join(dict.fromkeys(each["file"] for each in tasks if each["file"]))
    if files:
        notes.append(f"From files: {files}; their shots are other questions of the same file.")
    cut = [f"{each['task']} ({each['truncated']:,})" for each in tasks if each["truncated"]]
    if cut:
        notes.append(f"Longer than the model's context, and cut on the left: {', '.join(cut)}.")
    return notes


def _next_to_the_paper(results: dict[str, Any]) -> list[str]:
    """Return the paper's results with ours, a column for each task of the same shots."""
    ours = {(each["task"], each["shots"]): each["metrics"] for each in results["tasks"]}
    shared = [index for index, key in enumerate(TASKS) if key in ours]
    if not shared:
        return []
    tasks = ("{} ({})".format(*TASKS[index]) for index in shared)
    head = ["model", "parameters", "perplexity", "where", *tasks]
    own = [
        [
            "this one",
            f"{results['parameters']:,}",
            NONE,
            metric,
            *(_number(metric, ours[TASKS[index]].get(metric)) for index in shared),
        ]
        for metric in ("acc", "acc_norm")
    ]
    theirs = [
        [
            f"{row.model} {row.size}",
            row.parameters,
            f"{row.perplexity:.2f}",
            row.tables,
            *(f"{row.accuracies[index]:.2f}" for index in shared),
        ]
        for row in PUBLISHED
    ]
    note = (
        "Shots are in brackets. The paper does not say whether a figure is acc or acc_norm; its "
        "perplexity is of its own validation text."
    )
    return ["## Next to the paper", note, table(head, own + theirs)]
