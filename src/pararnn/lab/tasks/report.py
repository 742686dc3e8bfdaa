"""Results of a folder as a Markdown table next to the paper's, and as pictures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from pararnn.base.atomic import write_text
from pararnn.base.extras import require
from pararnn.lab.palette import looks
from pararnn.lab.tasks.results import Result, percent, read_results, rows_of
from pararnn.lab.tasks.table import PAPER, TASKS

SPREAD_NOTE = (
    "Mean accuracy in percent over the seeds ({seeds}), in brackets the worst and the best where "
    "they differ."
)
NOTE = (
    "Accuracy in percent of the best seed, in brackets the paper's; + where training was capped: "
    "it ended before a seed was right throughout and before the paper's last step."
)


def table(results: Sequence[Result]) -> str:
    """Return Markdown: the best seed's accuracy in percent, the paper's, + for capped runs."""
    paper = dict(zip(list(TASKS)[:5], zip(*PAPER.values(), strict=True), strict=True))

    def cell(row: str, column: str, result: Result | None) -> str:
        text = ""
        if result is not None:
            best = result["best"]
            text = percent(best) + "+" * (result["capped"] and best is not None)
        if row in PAPER and column in paper:
            text += f" ({paper[column][list(PAPER).index(row)]})"
        return text.strip()

    return f"{_markdown(results, cell)}\n\n{NOTE}"


def spread_table(results: Sequence[Result]) -> str:
    """Return Markdown: the mean of the seeds, the worst and the best, and seeds that diverged."""

    def cell(row: str, column: str, result: Result | None) -> str:
        if result is None:
            return ""
        seeds = result["accuracies"]
        finite = [accuracy for accuracy in seeds if accuracy is not None]
        text = percent(sum(finite) / len(finite)) if finite else ""
        if finite and min(finite) < max(finite):
            text += f" ({percent(min(finite))} to {percent(max(finite))})"
        missing = len(seeds) - len(finite)
        texts = [text, f"{missing} of {len(seeds)} diverged" * (missing > 0)]
        return ", ".join(filter(None, texts))

    counts = sorted({len(result["accuracies"]) for result in rows_of(results)})
    seeds = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return f"{_markdown(results, cell)}\n\n{SPREAD_NOTE.format(seeds=seeds)}"


def _markdown(results: Sequence[Result], cell: Callable[[str, str, Result | None], str]) -> str:
    """Return a table of rows by tasks, and below it the accuracies of guessing."""
    rows, columns, cells = _grid(results)
    chances = {result["task"]: percent(result["chance"]) for result in results}
    lines = [
        ["", *columns],
        *([row, *(cell(row, task, cells.get((row, task))) for task in columns)] for row in rows),
        ["chance", *(chances[task] for task in columns)],
    ]
    head, *body = ("| " + " | ".join(line) + " |" for line in lines)
    head = head.replace("|  |", "| |", 1)
    return "\n".join([head, "|---" * (len(columns) + 1) + "|", *body])


def _grid(results: Sequence[Result]) -> tuple[list[str], list[str], dict[tuple[str, str], Result]]:
    """Return rows and columns in the order of the paper and of `TASKS`, and results by both."""
    cells = {(result["row"], result["task"]): result for result in rows_of(results)}
    order = {name: index for index, name in enumerate([*PAPER, *TASKS])}
    mixers = {row: result["mixer"] for (row, _), result in cells.items()}

    def key(name: str) -> tuple[int, str]:
        return order.get(name, len(order)), name

    rows = sorted(mixers, key=lambda row: (key(mixers[row]), row))
    return rows, sorted({column for _, column in cells}, key=key), cells


def heat_map(results: Sequence[Result], path: Path) -> None:
    """Write best accuracies as a PNG, tasks by mixers; MissingExtra without matplotlib."""
    rows, columns, cells = _grid(results)
    size = (3.5 + 1.1 * len(columns), 1.5 + 0.5 * len(rows))
    figure = require("matplotlib.figure").Figure(figsize=size, layout="constrained")
    axes = figure.add_subplot()
    grid = [[float("nan")] * len(columns) for _ in rows]
    for (row, column), result in cells.items():
        best, x, y = result["best"], columns.index(column), rows.index(row)
        color = "black" if best is None or best > 0.6 else "white"
        axes.text(x, y, percent(best), ha="center", va="center", color=color)
        if best is not None:
            grid[y][x] = 100 * best
    image = axes.imshow(grid, vmin=0, vmax=100, cmap="viridis", aspect="auto")
    axes.set_xticks(range(len(columns)), columns, rotation=30, ha="right")
    axes.set_yticks(range(len(rows)), rows)
    figure.colorbar(image, label="accuracy, % (best seed)")
    figure.savefig(path, dpi=150)


def accuracies_by_length(result: Result) -> dict[int, list[float]]:
    """Return by length the accuracies of the seeds that have one; no length where none has."""
    by_length = {
        int(length): [accuracy for accuracy in accuracies if accuracy is not None]
        for length, accuracies in result["lengths"].items()
    }
    return {length: accuracies for length, accuracies in by_length.items() if accuracies}


def length_plot(results: Sequence[Result], path: Path) -> None:
    """Write accuracy over length as a PNG: the mean of the seeds, shaded from worst to best."""
    figure = require("matplotlib.figure").Figure(
        figsize=(7, 4.5 + 0.15 * len(results)), layout="constrained"
    )
    axes = figure.add_subplot()
    results = rows_of(results)
    names = [f"{result['row']}, {result['task']}" for result in results]
    curves = zip(looks(names).items(), results, strict=True)
    for index, ((name, (colour, style)), result) in enumerate(curves):
        lengths, seeds = zip(*accuracies_by_length(result).items(), strict=True)
        means = [100 * sum(of_length) / len(of_length) for of_length in seeds]
        rank = 1 - index / len(names)  # later curves are thinner, so that equal ones are seen
        width, size = 1.5 + 3 * rank, 4 + 6 * rank
        look = {"color": colour, "linestyle": style, "linewidth": width, "markersize": size}
        axes.plot(lengths, means, marker="o", label=name, **look)
        ends = [[100 * end(of_length) for of_length in seeds] for end in (min, max)]
        axes.fill_between(lengths, *ends, color=colour, alpha=0.2)
    devices = ", ".join(dict.fromkeys(result["device"] for result in results))
    title = f"mean of the seeds, shaded from the worst to the best; trained on {devices}"
    axes.set(xscale="log", xlabel="length", ylabel="accuracy, %", ylim=(0, 102))
    axes.set_title(title, fontsize="small")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=2)
    figure.savefig(path, dpi=150)


def write_report(folder: Path) -> str:
    """Write table.md, heat.png and, where results have lengths, lengths.png into their folder.

    Returns the table. Raises ValueError for a folder without results.
    """
    results = read_results(folder)
    text = f"{table(results)}\n\n{spread_table(results)}"
    write_text(folder / "table.md", text + "\n")
    heat_map(results, folder / "heat.png")
    if several := [result for result in results if accuracies_by_length(result)]:
        length_plot(several, folder / "lengths.png")
    return text
