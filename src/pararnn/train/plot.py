"""The loss curve as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from pararnn.atomic import write_whole
from pararnn.extras import require
from pararnn.train.loop import History, Record


def plot_history(history: History, baselines: Mapping[str, float], title: str, path: Path) -> None:
    """Write bits per byte over steps as a PNG, with a dashed line for each baseline.

    Raises MissingExtra without matplotlib.
    """
    figure = require("matplotlib.figure").Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for label, curve, style in (
        ("train", averaged(history.train), {"color": "tab:blue", "linewidth": 1}),
        ("validation", history.valid, {"color": "tab:orange", "marker": "o"}),
    ):
        axes.plot([r.step for r in curve], [r.bits for r in curve], label=label, **style)
    for (label, bits), color in zip(baselines.items(), ("grey", "black"), strict=False):
        axes.axhline(bits, linestyle="--", color=color, label=f"{label} ({bits:.2f})")
    axes.set(xlabel="optimizer steps", ylabel="bits per byte", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)


def averaged(curve: Sequence[Record], points: int = 200) -> list[Record]:
    """Return at most `points` records: the last of each equal part of the curve, with mean bits."""
    size = -(-len(curve) // points)
    parts = [curve[start : start + size] for start in range(0, len(curve), max(size, 1))]
    return [part[-1]._replace(bits=sum(r.bits for r in part) / len(part)) for part in parts]


def plot_rows(rows: Sequence[Mapping[str, str]], title: str, path: Path) -> None:
    """Write the losses of a run's log over its steps as a PNG, which is whole at any time.

    Raises MissingExtra without matplotlib.
    """
    figure = require("matplotlib.figure").Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for column, label, style in (
        ("loss", "train", {"color": "tab:blue", "linewidth": 1}),
        ("valid_loss", "validation", {"color": "tab:orange", "marker": "o"}),
    ):
        curve = [(int(row["step"]), float(row[column])) for row in rows if row[column]]
        axes.plot([step for step, _ in curve], [loss for _, loss in curve], label=label, **style)
    axes.set(xlabel="optimizer steps", ylabel="nats per token", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    with write_whole(path) as new:
        figure.savefig(new, dpi=150, format="png")
