"""Results side by side: a Markdown table beside the paper's, and pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pararnn.atomic import write_text
from pararnn.extras import require
from pararnn.palette import looks
from pararnn.records import read_json
from pararnn.tasks.base import need
from pararnn.tasks.table import PAPER, TASKS

Result = Mapping[str, Any]


def read_results(folder: Path) -> list[Result]:
    """The results of a folder, in the order of their names; ValueError where there are none."""
    found = [read_json(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    need(bool(found), f"{folder} holds no results: pararnn tasks run NAME --out {folder}")
    return found


def row_of(result: Result) -> str:
    """What a result's row is called: the mixer, and its layers if there are several."""
    layers = result["config"]["model"]["layers"]
    return result["mixer"] + (f", {layers} layers" if layers > 1 else "")


def table(results: Sequence[Result]) -> str:
    """Markdown: the best seed's accuracy in percent, in brackets the paper's; + for capped runs."""
    rows, columns, cells = _grid(results)
    paper = dict(zip(list(TASKS)[:5], zip(*PAPER.values(), strict=True), strict=True))
    lines = ["| | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for row in rows:
        shown = []
        for column in columns:
            result = cells.get((row, column))
            text = "" if result is None else _marked(result)
            if row in PAPER and column in paper:
                text += f" ({paper[column][list(PAPER).index(row)]})"
            shown.append(text.strip())
        lines.append("| " + " | ".join([row, *shown]) + " |")
    chances = {result["task"]: result["chance"] for result in results}
    lines.append("| chance | " + " | ".join(percent(chances[column]) for column in columns) + " |")
    note = (
        "Accuracy in percent of the best seed, in brackets the paper's; + where training was "
        "capped: it ended before a seed was right throughout and before the paper's last step."
    )
    return "\n".join([*lines, "", note])


def _marked(result: Result) -> str:
    """The best accuracy of a result, with a + where its training was capped."""
    best = result["best"]
    return percent(best) + "+" * (result["capped"] and best is not None)


def percent(share: float | None) -> str:
    """Rounded down to a tenth: only what has no error is 100; None is of seeds that diverged."""
    if share is None:
        return "diverged"
    return "100" if share == 1 else f"{int(share * 1000) / 10:g}"


def _grid(
    results: Sequence[Result],
) -> tuple[list[str], list[str], dict[tuple[str, str], Result]]:
    cells = {(row_of(result), result["task"]): result for result in results}
    known = {name: index for index, name in enumerate([*PAPER, *TASKS])}
    order = lambda name: (known.get(name, len(known)), name)  # noqa: E731
    mixers = {row_of(result): result["mixer"] for result in results}
    rows = sorted(mixers, key=lambda row: (order(mixers[row]), row))
    return rows, sorted({column for _, column in cells}, key=order), cells


def heat_map(results: Sequence[Result], path: Path) -> None:
    """Best accuracies as a PNG, tasks by mixers; MissingExtra without matplotlib."""
    rows, columns, cells = _grid(results)
    size = (3.5 + 1.1 * len(columns), 1.5 + 0.5 * len(rows))
    figure = require("matplotlib.figure").Figure(figsize=size, layout="constrained")
    axes = figure.add_subplot()
    nothing = float("nan")
    known = {place: each["best"] for place, each in cells.items() if each["best"] is not None}
    shares = [[100 * known.get((row, name), nothing) for name in columns] for row in rows]
    image = axes.imshow(shares, vmin=0, vmax=100, cmap="viridis", aspect="auto")
    axes.set_xticks(range(len(columns)), columns, rotation=30, ha="right")
    axes.set_yticks(range(len(rows)), rows)
    for (row, column), result in cells.items():
        share = result["best"]
        color = "black" if share is None or share > 0.6 else "white"
        place = (columns.index(column), rows.index(row))
        axes.text(*place, percent(share), ha="center", va="center", color=color)
    figure.colorbar(image, label="accuracy, % (best seed)")
    figure.savefig(path, dpi=150)


def _shares(result: Result) -> dict[int, list[float]]:
    """By length, the accuracies of the seeds that have one; no length where none has."""
    found = {
        int(length): [share for share in shares if share is not None]
        for length, shares in result["lengths"].items()
    }
    return {length: shares for length, shares in found.items() if shares}


def length_plot(results: Sequence[Result], path: Path) -> None:
    """Accuracy over length as a PNG: the mean of the seeds that have one, shaded from the worst to
    the best."""
    figure = require("matplotlib.figure").Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    names = [f"{row_of(result)}, {result['task']}" for result in results]
    for (name, (colour, style)), result in zip(looks(names).items(), results, strict=True):
        lengths, seeds = zip(*_shares(result).items(), strict=True)
        means = [100 * sum(found) / len(found) for found in seeds]
        axes.plot(lengths, means, style, color=colour, marker="o", label=name)
        spread = [[100 * end(found) for found in seeds] for end in (min, max)]
        axes.fill_between(lengths, *spread, color=colour, alpha=0.2)
    devices = ", ".join(dict.fromkeys(result["device"] for result in results))
    title = f"mean of the seeds, shaded from the worst to the best; trained on {devices}"
    axes.set(xscale="log", xlabel="length", ylabel="accuracy, %", ylim=(0, 102))
    axes.set_title(title, fontsize="small")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)


def write_report(folder: Path) -> str:
    """The table of a folder's results, also written there as table.md, with heat.png and, where
    results have lengths, lengths.png. Returns the table."""
    results = read_results(folder)
    text = table(results)
    write_text(folder / "table.md", text + "\n")
    heat_map(results, folder / "heat.png")
    measured = [result for result in results if _shares(result)]
    if measured:
        length_plot(measured, folder / "lengths.png")
    return text
