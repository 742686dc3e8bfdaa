"""Common parts of all pictures of results: colours of models, axes, and sources of figures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from markdown_tables import Row

from pararnn.base.extras import require
from pararnn.lab.palette import looks

Curves = dict[str, list[tuple[int, float]]]
"""Points over what doubles, by the model's name."""


def new_figure(width: float, height: float) -> Any:
    """Return an empty figure of a size in inches."""
    return require("matplotlib.figure").Figure(figsize=(width, height), layout="constrained")


def draw(
    axes: Any,
    curves: Mapping[str, Sequence[tuple[int, float]]],
    x: str,
    y: str,
    styles: Mapping[str, str] | None = None,
    names: Iterable[str] | None = None,
) -> None:
    """Draw curves in their models' colours; x and y: what the axes are called.

    styles: the line styles of names, where they say something. names: those of all panels of the
    picture, if panels differ in them. Later curves are thinner, so that equal ones are seen.
    """
    by_name = looks(curves if names is None else names)
    for index, name in enumerate(curves):
        colour, style = by_name[name]
        width = max(3.0 - 0.5 * index, 1.2)
        look = {"color": colour, "linestyle": (styles or {}).get(name, style), "linewidth": width}
        axes.plot(*zip(*sorted(curves[name]), strict=True), marker=".", label=name, **look)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(require("matplotlib.ticker").FuncFormatter(thousands))
    axes.yaxis.set_major_formatter(require("matplotlib.ticker").FuncFormatter(thousands))
    axes.set_ylim(0, 1.06 * max(value for points in curves.values() for _, value in points))
    axes.set(xlabel=x, ylabel=y)
    axes.grid(alpha=0.3)
    if names is None:
        axes.legend(fontsize="small")


def legend_below(figure: Any, columns: int) -> None:
    """Put one legend of the curves of all panels below them, where it covers none."""
    by_label: dict[str, Any] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            by_label.setdefault(label, handle)
    figure.legend(by_label.values(), by_label.keys(), loc="outside lower center", ncols=columns)


def scale_ms(axes: Any) -> None:
    """Make the vertical axis logarithmic, with plain numbers."""
    axes.set_yscale("log")
    plain_numbers(axes.yaxis)


def plain_numbers(axis: Any) -> None:
    """Write plain numbers, 1, 2 and 5 of each decade, on a logarithmic axis."""
    ticker = require("matplotlib.ticker")
    axis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0), numticks=12))
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(ticker.NullFormatter())


def thousands(value: float, _: int | None = None) -> str:
    """Return an axis's number as prose has it: 131,072."""
    return f"{value:,.10g}"


def caption(figure: Any, rows: Sequence[Row], text: str) -> None:
    """Write above all panels on which device the rows were measured, and what sizes they are of."""
    devices = dict.fromkeys(f"{row['device']}, PyTorch {row['torch']}" for row in rows)
    figure.suptitle(f"{'; '.join(devices)}\n{text}", fontsize="medium")
