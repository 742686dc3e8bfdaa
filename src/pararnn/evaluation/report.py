"""Results as Markdown, beside the paper's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from pararnn.evaluation.paper import PUBLISHED, TASKS

NONE = "–"  # noqa: RUF001


def markdown(results: dict[str, Any]) -> str:
    """The tables of what `run_evaluation` found."""
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
        parts += _beside_the_paper(results)
    return "\n\n".join(parts) + "\n"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table: its first column to the left, the others to the right."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _texts(found: list[dict[str, Any]]) -> str:
    counts, means = ("documents", "tokens", "bytes"), ("nats_per_token", "perplexity")
    head = ["text", *counts, "nats/token", "perplexity", "bits/byte"]
    return table(
        head,
        [
            [
                each["source"],
                *(f"{each[name]:,}" for name in counts),
                *(f"{each[name]:.4f}" for name in (*means, "bits_per_byte")),
            ]
            for each in found
        ],
    )


def _tasks(found: list[dict[str, Any]]) -> str:
    metrics = list(dict.fromkeys(name for each in found for name in each["metrics"]))
    rows = [
        [
            each["task"],
            _shots(each["shots"]),
            f"{each['questions']:,}",
            *(_number(name, each["metrics"].get(name)) for name in metrics),
        ]
        for each in found
    ]
    return table(["task", "shots", "questions", *metrics], rows)


def _shots(shots: int | None) -> str:
    return NONE if shots is None else str(shots)


def _number(metric: str, found: dict[str, float | None] | None) -> str:
    if found is None:
        return NONE
    value, error = found["value"], found["stderr"]
    if not isinstance(value, (int, float)):
        return str(value)
    scale = 100 if metric.startswith("acc") else 1
    return f"{value * scale:.2f}" + ("" if error is None else f" ± {error * scale:.2f}")


def _notes(found: list[dict[str, Any]]) -> list[str]:
    notes = []
    files = [each for each in found if each["file"]]
    if files:
        names = ", ".join(dict.fromkeys(each["file"] for each in files))
        notes.append(f"From files: {names}; their shots are other questions of the same file.")
    cut = [f"{each['task']} ({each['truncated']:,})" for each in found if each["truncated"]]
    if cut:
        notes.append(f"Longer than the model's context, and cut on the left: {', '.join(cut)}.")
    return notes


def _beside_the_paper(results: dict[str, Any]) -> list[str]:
    """A column for each task that the paper asks with the same shots."""
    ours = {(each["task"], each["shots"]): each["metrics"] for each in results["tasks"]}
    shared = [index for index, key in enumerate(TASKS) if key in ours]
    if not shared:
        return []
    head = [
        "model",
        "parameters",
        "perplexity",
        "where",
        *("{} ({})".format(*TASKS[index]) for index in shared),
    ]
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
    return ["## Beside the paper", note, table(head, own + theirs)]
