"""Curves of sets of runs as one picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pararnn.base.atomic import write_whole
from pararnn.base.extras import require
from pararnn.lab.compare.groups import Group, Set
from pararnn.lab.palette import looks

UNITS = {"tokens": 1e6, "seconds": 1.0}
NAMES = {"tokens": "million tokens", "seconds": "seconds of training"}
BEGINNING = 0.1
"""Share of the longest curve whose bits do not set the axis, which would show little else."""


def plot_sets(sets: Sequence[Set], path: Path) -> None:
    """Write a row of pictures a set as a PNG: means of the seeds, shaded from least to largest."""
    size = (11, 4.2 * len(sets) + 0.4)
    figure = require("matplotlib.figure").Figure(figsize=size, layout="constrained")
    grid = figure.subplots(len(sets), 2, squeeze=False, sharey="row")
    for index, (each, pair) in enumerate(zip(sets, grid, strict=True), 1):
        for name, axes in zip(UNITS, pair, strict=True):
            _draw(axes, each, name)
            axes.set(xlabel=NAMES[name], ylabel="bits per byte, held out")
            axes.grid(alpha=0.3)
        pair[0].legend(fontsize="small")
        if len(sets) > 1:
            pair[0].set_title(f"set {index}", fontsize="small")
        devices = ", ".join(sorted(each.devices))
        pair[1].set_title(f"seconds on {devices}", fontsize="small")
    figure.suptitle("Mean of the seeds, shaded from the least to the largest", fontsize="small")
    with write_whole(path) as new:
        figure.savefig(new, dpi=150, format="png")


def _draw(axes: Any, each: Set, name: str) -> None:
    low, high = np.inf, -np.inf
    begin = BEGINNING * max(getattr(run.points[-1], name) for run in each.runs)
    for group, (colour, style) in zip(
        each.groups, looks(group.label for group in each.groups).values(), strict=True
    ):
        across, bits = curves_of(group, name)
        if not len(across):
            continue
        label = group.label + ("" if group.is_finished else " (not finished)")
        marker = "." if len(across) < 30 else ""
        line = {"color": colour, "linestyle": style, "marker": marker, "label": label}
        axes.plot(across / UNITS[name], bits.mean(0), **line)
        axes.fill_between(
            across / UNITS[name], bits.min(0), bits.max(0), color=colour, alpha=0.2, linewidth=0
        )
        visible = bits[:, across >= begin] if (across >= begin).any() else bits
        low, high = min(low, visible.min()), max(high, visible.max())
    if low <= high:
        margin = 0.05 * (high - low) or 0.05
        axes.set_ylim(low - margin, high + margin)


def curves_of(group: Group, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return tokens or seconds (n,), where all runs of a group have bits, and the bits (runs, n).

    The points are those of the first run, within the range of all; the others' bits are linear
    between two of theirs.
    """
    across = [np.array([getattr(point, name) for point in run.points]) for run in group.runs]
    bits = [np.array([point.bits for point in run.points]) for run in group.runs]
    begin, end = max(each[0] for each in across), min(each[-1] for each in across)
    inner = across[0][(across[0] > begin) & (across[0] < end)]
    places = np.unique([begin, *inner, end] if begin <= end else [])
    values = [np.interp(places, own, each) for own, each in zip(across, bits, strict=True)]
    return places, np.stack(values)
