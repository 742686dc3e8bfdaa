"""Bits per byte against tokens and against seconds, from learn_CORPUS.csv: writes learn.png.

From learn_programs.csv it writes learn_programs.png: the same of each size of models, and the ends
of all sizes against compute, with the fits of learn_evidence.py.

    python benchmarks/learn_plot.py [--results FOLDER]
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from common import RESULTS, read_rows
from learn_evidence import (
    CURVES,
    Power,
    Trained,
    fits,
    longer_trainings,
    points_of,
    trainings,
)
from learn_models import SIZES
from learn_results import CORPORA, by_graph, final_rows, results, speeds
from markdown_tables import Row
from pictures import caption, legend_below, new_figure, plain_numbers

from pararnn.base.extras import require
from pararnn.lab.palette import COLOURS, OTHERS, looks

LEFT_OUT = 0.2
"""Of each training, at its beginning: the axis would show little else."""
HYBRID = "hybrid-"
FEWEST = 4
"""Mixers of a size that is drawn."""
UNITS = {"million tokens": 1e6, "seconds": 1.0}


def plot(corpora: Mapping[str, Sequence[Row]], path: Path) -> None:
    """Draw a row of pictures a corpus: means of the seeds, shaded from the least to the largest."""
    figure = new_figure(11, 4.2 * len(corpora) + 1.0)
    grid = figure.subplots(len(corpora), 2, squeeze=False, sharey="row")
    styles = looks(result.mixer for rows in corpora.values() for result in results(rows))
    for (corpus, rows), pair in zip(corpora.items(), grid, strict=True):
        for column, (axes, (label, unit)) in enumerate(zip(pair, UNITS.items(), strict=True)):
            every, finals = results(rows), final_rows(rows)
            if corpus == "code":
                every = by_graph(every, speeds())
            for result in every:
                own = [row for row in finals if row["mixer"] == result.mixer]
                points = [p for p in result.curve if p[0] > LEFT_OUT * result.curve[-1][0]]
                across = [point[column] / unit for point in points]
                seeds = [
                    [float(r["bits_per_byte"]) for r in own if int(r["tokens"]) == point[0]]
                    for point in points
                ]
                means, (color, style) = [p[2] for p in points], styles[result.mixer]
                axes.plot(
                    across, means, marker=".", label=result.mixer, color=color, linestyle=style
                )
                low, high = [min(bits) for bits in seeds], [max(bits) for bits in seeds]
                axes.fill_between(across, low, high, color=color, alpha=0.2)
            axes.set(title=corpus, xlabel=label, ylabel="bits per byte, held out")
            axes.grid(alpha=0.3)
    rows = [row for rows in corpora.values() for row in rows]
    text = f"models of 60M, steps of {rows[0]['B']} x {int(rows[0]['T']):,} tokens; a point a mean"
    caption(figure, rows, f"{text} of the seeds, shaded from the least to the largest")
    legend_below(figure, columns=5)
    figure.savefig(path, dpi=150)


def plot_programs(rows: Sequence[Row], path: Path, most: int = 8) -> None:
    """Draw curves of each size, of so many mixers, the best, and of those that have several sizes
    or lengths, and the ends of the longer trainings; and bits against compute."""
    found = fits(rows)
    of_size = {size: trainings(rows, size) for size in SIZES}
    longer = {size: longer_trainings(rows, size) for size in SIZES}
    best = {
        size: every[:most]
        + [t for t in every[most:] if t.mixer in found or t.mixer in mixers_of(longer[size])]
        for size, every in of_size.items()
        if len(every) >= FEWEST
    }
    height = len(best) + bool(found)
    figure = new_figure(11, 4.2 * height + 1.3)
    grid = figure.subplots(height, 2, squeeze=False)
    styles = looks_beside_attention(
        [*(m for every in best.values() for m in mixers_of(every)), *found]
    )
    for (size, every), pair in zip(best.items(), grid, strict=False):
        columns = (("tokens", "million tokens", 1e6), ("seconds", "seconds", 1.0))
        for axes, (column, label, unit) in zip(pair, columns, strict=True):
            for trained in every:
                color, style = styles[trained.mixer]
                curve = [row for row in trained.curves[0] if far_enough(row)]
                across = [float(row[column]) / unit for row in curve]
                bits = [float(row["bits_per_byte"]) for row in curve]
                axes.plot(
                    across, bits, marker=".", label=trained.mixer, color=color, linestyle=style
                )
            for trained in longer[size]:
                across = [float(end[column]) / unit for end in trained.ends]
                axes.scatter(across, trained.bits, color=styles[trained.mixer][0], marker="D", s=16)
            axes.set(title=size, xlabel=label, ylabel="bits per byte, held out")
            axes.grid(alpha=0.3)
    if found:
        plot_fits(grid[-1], found, styles)
    text = "the best rate of each mixer, first seed; dashed without attention"
    ends = "; diamonds are ends of longer trainings" if any(longer.values()) else ""
    caption(figure, rows, text + ends)
    legend_below(figure, columns=4)
    figure.savefig(path, dpi=150)


def mixers_of(every: Iterable[Trained]) -> list[str]:
    """Return the mixers of trainings."""
    return [trained.mixer for trained in every]


def looks_beside_attention(mixers: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Return the colour of each mixer, alone and in a hybrid, and its line: dashed alone."""
    others = iter(OTHERS)
    kinds = dict.fromkeys(mixer.removeprefix(HYBRID) for mixer in mixers)
    colours = {kind: COLOURS.get(kind) or next(others) for kind in kinds}
    return {
        mixer: (colours[mixer.removeprefix(HYBRID)], "-" if mixer.startswith(HYBRID) else "--")
        for mixer in dict.fromkeys(mixers)
    }


def plot_fits(pair: Any, found: Mapping[str, tuple[list[Trained], Power]], styles: Any) -> None:
    """Draw bits against compute on the first of two axes, for mixers of several sizes."""
    whole, empty = pair
    empty.set_axis_off()
    for mixer, (every, power) in found.items():
        color, style = styles[mixer]
        points = points_of(every)
        whole.scatter(*zip(*points, strict=True), color=color, s=12, label=mixer)
        computes = [compute for compute, _ in points]
        across = np.geomspace(min(computes), max(computes), 50)
        line = [power.bits(compute) for compute in across]
        whole.plot(across, line, color=color, linestyle=style)
    whole.set(xscale="log", yscale="log", xlabel="floating-point operations of training")
    whole.set(title="all sizes", ylabel="bits per byte, held out")
    plain_numbers(whole.xaxis)
    plain_numbers(whole.yaxis)
    whole.yaxis.set_major_locator(require("matplotlib.ticker").MaxNLocator(6))
    whole.grid(alpha=0.3)


def far_enough(row: Row) -> bool:
    """Return whether a row is not of a training's beginning."""
    return int(row["step"]) > LEFT_OUT * int(row["steps"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    files = {corpus: args.results / f"learn_{corpus}.csv" for corpus in CORPORA}
    corpora = {corpus: read_rows(path) for corpus, path in files.items() if path.exists()}
    programs = args.results / CURVES
    if programs.exists():
        plot_programs(read_rows(programs), args.results / "learn_programs.png")
    if not corpora:
        parser.error(f"{args.results} has no learn_CORPUS.csv: benchmarks/learn.py writes it")
    plot(corpora, args.results / "learn.png")


if __name__ == "__main__":
    main()
