"""Loss curves as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pararnn.base.atomic import write_whole
from pararnn.base.extras import require

STYLES: dict[str, dict[str, Any]] = {
    "train": {"color": "tab:blue", "linewidth": 1},
    "validation": {"color": "tab:orange", "marker": "o"},
}


def plot_curves(
    curves: Mapping[str, Sequence[tuple[int, float]]],
    unit: str,
    title: str,
    path: Path,
    baselines: Mapping[str, float] | None = None,
) -> None:
    """Write curves of (step, loss) as a PNG, which is whole at any time.

    curves: by their names in STYLES. unit: of the losses. baselines: losses to mark by dashed
    lines, two at most. Raises MissingExtra without matplotlib.
    """
    figure = require("matplotlib.figure").Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for label, curve in curves.items():
        steps, losses = [step for step, _ in curve], [loss for _, loss in curve]
        axes.plot(steps, losses, label=label, **STYLES[label])
    for (label, loss), color in zip((baselines or {}).items(), ("grey", "black"), strict=False):
        axes.axhline(loss, linestyle="--", color=color, label=f"{label} ({loss:.2f})")
    axes.set(xlabel="optimizer steps", ylabel=unit, title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    with write_whole(path) as new:
        figure.savefig(new, dpi=150, format="png")


def plot_rows(rows: Sequence[Mapping[str, str]], title: str, path: Path) -> None:
    """Write the losses of a run's log as a PNG, see `plot_curves`."""
    curves = {
        label: [(int(row["step"]), float(row[column])) for row in rows if row[column]]
        for label, column in (("train", "loss"), ("validation", "valid_loss"))
    }
    plot_curves(curves, "nats per token", title, path)
